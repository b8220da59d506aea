"""What a model's layers read in a forward pass, by hooks that undo themselves. Knows modules, not what it is for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tamis.attention.hook import attention_layers
from tamis.core.errors import ModelUnsupported


@dataclass
class LayerInputs:
    """Of a pass over one prompt, of layers that have run: `normed` [T, hidden] is what the query projection read,
    `residual` [T, hidden] what its norm did (only where asked for). The last `keep` layers are held. `first` is the
    position of the pass's first token."""

    keep: int = 2
    first: int = 0
    normed: dict[int, torch.Tensor] = field(default_factory=dict)
    residual: dict[int, torch.Tensor] = field(default_factory=dict)
    _paused: bool = False

    def normed_at(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """[Q, hidden] of tokens at `positions` int64 [Q] of this pass."""
        return self.normed[layer][positions - self.first]

    def residual_at(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """[Q, hidden] of tokens at `positions` int64 [Q] of this pass."""
        return self.residual[layer][positions - self.first]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Notes nothing meanwhile: for calls of the same modules that are not the pass's own."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _put(self, where: dict[int, torch.Tensor], layer: int, x: torch.Tensor) -> None:
        if self._paused:
            return
        where[layer] = x[0].detach()
        for old in [number for number in where if not layer - self.keep < number <= layer]:
            del where[old]


def decoder_layers(model: Any) -> list[Any]:
    """The decoder layers in order, each with an `input_layernorm` and a `self_attn.q_proj`. Raises ModelUnsupported."""
    layers = list(getattr(getattr(model, "model", None), "layers", ()))
    attention = attention_layers(model)
    if [getattr(layer, "self_attn", None) for layer in layers] != attention:
        raise ModelUnsupported(f"{type(model).__name__} does not hold its attention in decoder layers of one list.")
    if any(not hasattr(layer, "input_layernorm") for layer in layers):
        raise ModelUnsupported(f"{type(model).__name__} has layers without a norm before their attention.")
    return layers


@contextmanager
def watching(model: Any, *, residual: bool = False) -> Iterator[LayerInputs]:
    """Keeps what the layers read in the passes that are made inside, of the first prompt of a batch."""
    seen = LayerInputs()
    handles = []
    try:
        for number, layer in enumerate(decoder_layers(model)):

            def note(module: Any, args: tuple[Any, ...], number: int = number) -> None:
                seen._put(seen.normed, number, args[0])

            def note_residual(module: Any, args: tuple[Any, ...], number: int = number) -> None:
                seen._put(seen.residual, number, args[0])

            handles.append(layer.self_attn.q_proj.register_forward_pre_hook(note))
            if residual:
                handles.append(layer.input_layernorm.register_forward_pre_hook(note_residual))
        yield seen
    finally:
        for handle in handles:
            handle.remove()
