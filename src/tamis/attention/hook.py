"""Puts Tamis's attention into a transformers model, through transformers' own door, and takes it out again.

Everything but a planned prefill goes on to the stock implementation, so an installed model behaves like the stock
one until a job is set. Nothing is registered at import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tamis.core.errors import InvalidInput, ModelUnsupported

NAME = "tamis"


class Job(Protocol):
    """What one forward pass does instead of stock attention."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q [Hq, T, D], k and v [Hkv, T, D], rotated → out [Hq, T, D] and anything."""


@dataclass
class Switch:
    """Shared by all attention layers of one model: the job of the running forward pass, if there is one.

    `n_tokens` is the length the job was planned for. A pass of another shape is answered by the stock path and
    counted in `refused` with the reason, never by a guess.
    """

    job: Job | None = None
    n_tokens: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def running(self, job: Job, n_tokens: int) -> Iterator[None]:
        """Use `job` for the forward pass over exactly `n_tokens` new tokens that is made inside."""
        if self.job is not None:
            raise InvalidInput("another prefill of this model is still running; Tamis prefills one prompt at a time.")
        self.job, self.n_tokens = job, n_tokens
        try:
            yield
        finally:
            self.job = None

    def takes(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None = None) -> bool:
        """Whether the job is for these tensors ([B, H, T, D]); a mask is only given where tokens are hidden."""
        decoding = query.shape[2] == 1 and key.shape[2] > 1
        if self.job is None or decoding:
            return False
        reason = None
        if query.shape[0] != 1:
            reason = f"batch of {query.shape[0]}: a sparse prefill takes one prompt"
        elif query.shape[2] != key.shape[2]:
            reason = "chunked prefill: rows of a chunk are computed dense"
        elif query.shape[2] != self.n_tokens:
            reason = f"{query.shape[2]} tokens where the plan has {self.n_tokens}"
        elif mask is not None:
            reason = "an attention mask hides tokens (padding): a sparse prefill attends to all before a row"
        if reason is not None:
            self.refused[reason] = self.refused.get(reason, 0) + 1
        return reason is None


def attention_layers(model: Any) -> list[Any]:
    """The modules that call the attention interface, in layer order. Raises ModelUnsupported if there are none."""
    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "q_proj") and hasattr(m, "scaling")]
    if not layers:
        raise ModelUnsupported(f"{type(model).__name__} has no attention layers that transformers' interface reaches.")
    return sorted(layers, key=lambda m: m.layer_idx)


def install(model: Any) -> tuple[Switch, Callable[[], None]]:
    """Route `model`'s attention through Tamis. Returns the switch and the function that undoes all of it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    layers = attention_layers(model)
    before = model.config._attn_implementation
    if before == NAME:
        raise InvalidInput("this model is attached to Tamis already; detach it first.")
    switch = Switch()
    for layer in layers:
        layer.tamis_switch = switch
    model.set_attn_implementation(NAME)

    def uninstall() -> None:
        model.set_attn_implementation(before)
        for layer in layers:
            del layer.tamis_switch

    return switch, uninstall


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query [B, Hq, T, D], key and value [B, Hkv, T', D] → [B, T, Hq, D]."""
    switch: Switch = module.tamis_switch
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if switch.takes(query, key, attention_mask):
        assert switch.job is not None, "takes() checked it"
        out, _ = switch.job.attend(module.layer_idx, query[0], key[0], value[0], scale)
        return out.transpose(0, 1)[None], None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale, **kwargs)
    return out, None
