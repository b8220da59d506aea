"""A training run on disk: weights, optimiser and history in one safetensors file that is replaced whole.

Knows parameters by name and files; not models or data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tamis.core.errors import StoreDamaged, StoreMismatch

FILE = "training.safetensors"
SCRATCH = ".training.safetensors"


@dataclass(frozen=True)
class Point:
    """One optimiser step of the loss curve. `loss` is what was minimised; `kl` is an adapter's answer rows' part of it,
    a forecast's mean over the layers, in nats. `skipped`: its gradient was not finite, and nothing was changed."""

    step: int
    loss: float
    kl: float
    lr: float
    seconds: float
    skipped: bool = False


@dataclass
class State:
    """Where a run stands. `key` says which run it is: settings, data and base model.

    before  held-out metrics before the first step
    elapsed_s  seconds of all sittings
    """

    key: str
    step: int = 0
    elapsed_s: float = 0.0
    before: dict[str, float] = field(default_factory=dict)
    history: list[Point] = field(default_factory=list)


def save_state(
    folder: Path, state: State, named: Iterable[tuple[str, torch.nn.Parameter]], optimiser: torch.optim.Optimizer
) -> None:
    """Write the state, the trained parameters and the optimiser's moments; a kill leaves the old file or the new."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in named:
        tensors[f"weight:{name}"] = parameter.detach().cpu().contiguous()
        for key, value in optimiser.state.get(parameter, {}).items():
            tensors[f"{key}:{name}"] = torch.as_tensor(value).detach().cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / SCRATCH
    save_file(tensors, scratch, metadata={"state": json.dumps(asdict(state))})
    os.replace(scratch, folder / FILE)


def load_state(
    folder: Path, key: str, named: Iterable[tuple[str, torch.nn.Parameter]], optimiser: torch.optim.Optimizer
) -> State:
    """Take up the run of `folder`, or begin one where there is none.

    Raises StoreMismatch if it is another run's, StoreDamaged if it cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        return State(key)
    state, tensors = _read(path)
    if state.key != key:
        raise StoreMismatch(
            f"{path} belongs to a run with other settings, texts or another model. "
            "Repeat its command, give another --out, or remove the folder."
        )
    for name, parameter in named:
        with torch.no_grad():
            parameter.copy_(tensors[f"weight:{name}"])
        moments: dict[str, Any] = {
            kind: value.to(parameter.device if value.dim() else "cpu")
            for entry, value in tensors.items()
            for kind, _, of in [entry.partition(":")]
            if of == name and kind != "weight"
        }
        if moments:
            optimiser.state[parameter] = moments
    return state


def _read(path: Path) -> tuple[State, dict[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            values = json.loads(file.metadata()["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        state = State(**values | {"history": [Point(**p) for p in values["history"]]})
    except (SafetensorError, ValueError, TypeError, KeyError) as e:
        raise StoreDamaged(f"{path} cannot be read ({e}). Remove it; training begins anew.") from e
    return state, tensors
