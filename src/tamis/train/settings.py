"""How an adapter or a forecast is trained: everything that changes what comes out, frozen and checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tamis.core.checks import check_fields
from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown
from tamis.kernels.blocks import BlockRule

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {"attention": ATTENTION, "all": (*ATTENTION, "gate_proj", "up_proj", "down_proj")}
ANSWERS = ("gold", "teacher", "both")
STARTS = ("query", "uniform")
ROUTES = ("dense", "teacher")
TEACHERS = ("fine", "own")
OUTCOMES = ("chosen", "free")
SCHEDULES = ("linear", "constant")
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
        check_fields(self)
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
        return rise_and_fall(self.lr, done)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self) | {"documents": list(self.documents)}


@dataclass(frozen=True)
class ForecastSettings:
    """steps      optimiser steps, each over `accumulate` sequences of `tokens` tokens
    rows       query rows of a sequence that are learnt from, drawn anew for each; None: all of them
    rule       the selection that the forecast is for
    teacher    "fine": the layer's attention on windows of two tokens, as published; "own": on its pooled keys
    outcomes   what the divergence tells apart, see `forecast.teacher.divergence`: "chosen", as published, or "free"
    route      what the frozen model's attention reads meanwhile: "dense", or the blocks that the "teacher" takes, in
               sequences above the rule's dense_tokens
    start      weights to begin with, see `forecast.heads.first_weights`: "query" or "uniform"
    lr, schedule   of AdamW: "constant", or "linear", with a rise at the start and a fall to 0
    betas, eps, weight_decay, clip   of AdamW, and the largest norm of the gradient; as published
    save_every steps after which the state is saved (and once a minute)
    """

    steps: int = 600
    tokens: int = 8192
    accumulate: int = 1
    rows: int | None = 2048
    rule: BlockRule = field(default_factory=BlockRule)
    teacher: str = "fine"
    outcomes: str = "chosen"
    route: str = "dense"
    start: str = "query"
    lr: float = 5e-4
    schedule: str = "linear"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-6
    weight_decay: float = 0.01
    clip: float = 0.5
    seed: int = 0
    save_every: int = 50

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("steps", "tokens", "accumulate", "save_every", "rows"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; give 1 or more.")
        for name in ("lr", "clip", "eps"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} is {getattr(self, name)}; give more than 0.")
        if not self.weight_decay >= 0:
            raise InvalidInput(f"weight_decay is {self.weight_decay}; give 0 or more.")
        named = {"teacher": TEACHERS, "outcomes": OUTCOMES, "route": ROUTES, "start": STARTS, "schedule": SCHEDULES}
        for name, allowed in named.items():
            if getattr(self, name) not in allowed:
                raise InvalidInput(unknown(name, getattr(self, name), [*allowed]))
        if self.rule.n_blocks(self.tokens) <= self.rule.forced or not self.rule.chosen:
            raise InvalidInput(
                f"sequences of {self.tokens} tokens are {self.rule.n_blocks(self.tokens)} blocks, of which "
                f"{self.rule.forced} are read in any case, and {self.rule.chosen} are chosen: there is nothing to "
                "learn. Give longer sequences, fewer local blocks, or a larger top."
            )

    def rate(self, done: float) -> float:
        """The learning rate when the share `done` (0..1) of the run lies behind."""
        return self.lr if self.schedule == "constant" else rise_and_fall(self.lr, done)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self) | {"betas": list(self.betas)}


def rise_and_fall(most: float, done: float) -> float:
    """A rate that rises to `most` over the share WARM_UP of a run and falls to 0 at its end; `done` is 0..1."""
    rise = (done + WARM_UP / 10) / WARM_UP  # the first step learns too
    fall = (1 - done) / (1 - WARM_UP)
    return most * max(0.0, min(1.0, rise, fall))
