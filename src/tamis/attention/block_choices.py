"""Choices of blocks one layer ahead, from what the layer before has read: by a forecast, and as InfiniGen does.

For use while a pass is watched (`layer_inputs.watching`), but for `FusedChoice`, which needs the forecast in the model.
Knows tensors, not who asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tamis.attention.block_prefill import PooledChoice
from tamis.attention.fused import FusedForecast
from tamis.attention.layer_inputs import LayerInputs
from tamis.forecast.heads import Forecast
from tamis.model.rope import Rotary


@dataclass(frozen=True)
class ForecastChoice(PooledChoice):
    """Raw products of the forecast of the layer's query with its pooled keys (SparDA, arXiv 2606.04511). The layer's
    own query is not looked at."""

    forecast: Forecast
    seen: LayerInputs
    rotary: Rotary

    def vectors(
        self, layer: int, q: torch.Tensor, positions: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, float | None]:
        """See `PooledChoice`."""
        x = self.seen.normed_at(Forecast.source(layer), positions)
        return self.forecast.query(layer, x, positions, self.rotary), None


@dataclass(frozen=True)
class FusedChoice(PooledChoice):
    """The same, of a forecast that was made with the layer's queries and keys: of one token of each sequence of a batch
    (pooled keys are then those of the sequences side by side, as `cache.block_layer` has them), or of all tokens of a
    pass over one prompt.
    """

    fused: FusedForecast

    def vectors(
        self, layer: int, q: torch.Tensor, positions: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, float | None]:
        """See `PooledChoice`."""
        return self.fused.query(layer, positions), None


@dataclass(frozen=True)
class StaleChoice(PooledChoice):
    """The layer's own query projection on the hidden states that the layer before it read, with all channels, where
    InfiniGen (arXiv 2406.19707) takes some. Watch with `residual=True`.

    layers: the model's decoder layers. Layer 0 has none before it and chooses by itself.
    """

    layers: list[Any]
    seen: LayerInputs
    rotary: Rotary

    def vectors(
        self, layer: int, q: torch.Tensor, positions: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, float | None]:
        """See `PooledChoice`."""
        return self._query(layer, positions) if layer else q, scale

    def _query(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        module = self.layers[layer]
        with self.seen.paused():
            x = module.input_layernorm(self.seen.residual_at(layer - 1, positions))
            q = torch.unflatten(module.self_attn.q_proj(x), -1, (-1, self.rotary.head_dim))
        norm = getattr(module.self_attn, "q_norm", None)
        q = q if norm is None else norm(q)
        return self.rotary.place(q.transpose(0, 1), positions)
