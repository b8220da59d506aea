"""How an adapter is trained: everything that changes what comes out, frozen and checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {"attention": ATTENTION, "all": (*ATTENTION, "gate_proj", "up_proj", "down_proj")}
ANSWERS = ("gold", "teacher", "both")
WARM_UP = 0.05  # share of the run in which the learning rate rises


@dataclass(frozen=True)
class TrainSettings:
    """steps      optimiser steps, each over `accumulate` prompts
    tokens     of a prompt at most; `documents` the fewest and the most in it
    rank, alpha, targets   of LoRA (arXiv 2106.09685): "attention" (q, k, v, o) or "all" (the MLP's projections too)
    lr         highest learning rate of AdamW, after a linear rise and before a linear fall to 0
    clip       largest norm of the gradient
    answers    forced behind the question: "gold", the "teacher"'s own greedy ones, or "both" in turn by chance
    question_weight   weight of the question's rows beside the answer's
    ce         weight of the cross entropy on the forced answers
    checkpointing   recompute activations in the backward pass; None: on a GPU
    save_every steps after which the state is saved (and once a minute)
    """

    steps: int = 600
    tokens: int = 4096
    documents: tuple[int, int] = (4, 20)
    accumulate: int = 4
    rank: int = 16
    alpha: int = 32
    targets: str = "attention"
    lr: float = 2e-4
    clip: float = 1.0
    answers: str = "both"
    question_weight: float = 0.3
    ce: float = 0.0
    seed: int = 0
    checkpointing: bool | None = None
    save_every: int = 50

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "accumulate", "rank", "alpha", "save_every"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; give 1 or more.")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} is {getattr(self, name)}; give more than 0.")
        for name in ("question_weight", "ce"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(f"{name} is {getattr(self, name)}; give 0 or more.")
        for name, allowed in (("targets", [*TARGETS]), ("answers", [*ANSWERS])):
            if getattr(self, name) not in allowed:
                raise InvalidInput(unknown(name, getattr(self, name), allowed))

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the linear layers that get an adapter."""
        return TARGETS[self.targets]

    def rate(self, done: float) -> float:
        """The learning rate when the share `done` (0..1) of the run lies behind."""
        rise = (done + WARM_UP / 10) / WARM_UP  # the first step learns too
        fall = (1 - done) / (1 - WARM_UP)
        return self.lr * max(0.0, min(1.0, rise, fall))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self) | {"documents": list(self.documents)}
