"""`kvpress:NAME`: presses of the package kvpress, which drop keys and values of a prompt once after its prefill.

A press scores a layer from the attention module, its hidden states and its keys; that needs no cache of transformers.
Only presses that a compression ratio alone describes, and that keep as many tokens in every head, can be compared here.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from tamis.core.errors import InvalidInput, Unavailable
from tamis.core.registry import unknown
from tamis.eval.decoders.base import Growing, LayerPrompt, LayerState, Size, shares_of
from tamis.eval.decoders.full import full_bytes

PREFIX = "kvpress:"


class Press:
    """budgets: shares of the prompt's tokens that are kept. Raises Unavailable without kvpress."""

    wants_module = True

    def __init__(self, name: str, budgets: Sequence[float]) -> None:
        self.name = name
        self.budgets: tuple[float | None, ...] = shares_of(name, budgets)
        self.presses = [press(name.removeprefix(PREFIX), 1 - b) for b in budgets]

    def prefill(self, x: LayerPrompt) -> LayerState:
        """See `Method`."""
        assert x.call is not None, "methods that want the module get it"
        given = (x.module, x.call["hidden_states"], x.keys[None], x.values[None])
        states = []
        for made, budget in zip(self.presses, self.budgets, strict=True):
            keys, values = given[2:] if budget == 1 else made.compress(*given, None, x.call)
            states.append(Growing(keys[0], values[0], x.scale, batch=1))
        return Each(states)

    def sizes(self, n_tokens: int, head_dim: int, n_layers: int) -> list[Size]:
        """See `Method`."""
        return [Size(*(full_bytes(head_dim) * b,) * 2) for b in self.budgets if b is not None]


class Each:
    """One layer, a state for each budget: they keep different numbers of tokens."""

    def __init__(self, states: Sequence[LayerState]) -> None:
        self.states, self.batch = list(states), len(states)

    def branch(self) -> Each:
        """See `LayerState`."""
        return Each([s.branch() for s in self.states])

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `LayerState`."""
        return torch.cat([s.attend(*(t[i : i + 1] for t in (q, k, v))) for i, s in enumerate(self.states)])


def press(name: str, ratio: float) -> Any:
    """A press that drops `ratio` of the tokens. Raises Unavailable without kvpress, InvalidInput for another name."""
    kvpress = _kvpress(name)
    names = [n for n in kvpress.__all__ if n.endswith("Press")]
    if name not in names:
        raise InvalidInput(unknown("press", name, names))
    try:
        made = getattr(kvpress, name)(compression_ratio=ratio)
    except TypeError as e:
        raise InvalidInput(f"{name} takes more than a compression ratio ({e}); give another press.") from e
    if not callable(getattr(made, "compress", None)):
        raise InvalidInput(f"{name} does not compress layer by layer; give another press.")
    return made


def _kvpress(name: str) -> Any:
    """The package, without what its import does to transformers: it wraps every attention function for all models."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    try:
        return importlib.import_module("kvpress")
    except ImportError as e:
        raise Unavailable(f"{PREFIX}{name} needs the package kvpress ({e}). Install it: pip install kvpress.") from e
    finally:
        for key, function in before.items():
            ALL_ATTENTION_FUNCTIONS[key] = function
