"""What a forecast adds to models of real shapes: a count, nothing is run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tamis.bench.results import Row
from tamis.bench.shapes import SHAPES, random_model, shape_of
from tamis.forecast.heads import added_parameters


@dataclass(frozen=True)
class ForecastSize:
    """Numbers in a forecast and in the model of a shape."""

    shape: str
    added: int
    model: int

    @property
    def share(self) -> float:
        """Added for each of the model's own."""
        return self.added / self.model

    def rows(self) -> list[Row]:
        """Rows of the results file."""
        return [
            Row.of(self.shape, "forecast", "added_parameters", [float(self.added)], unit="1"),
            Row.of(self.shape, "forecast", "added_parameters_share", [self.share], unit="1"),
        ]


def forecast_size(name: str) -> ForecastSize:
    """Of a shape of `bench.shapes`. Raises InvalidInput for an unknown one, Unavailable where it cannot be built."""
    shape = shape_of(name)
    model = random_model(name, device="meta", dtype=torch.bfloat16)
    bias = model.model.layers[0].self_attn.q_proj.bias is not None
    added = added_parameters(shape.layers, shape.hidden, shape.kv_heads, shape.head_dim, bias=bias)
    return ForecastSize(name, added, sum(p.numel() for p in model.parameters()))


def forecast_sizes() -> list[ForecastSize]:
    """Of all shapes."""
    return [forecast_size(name) for name in SHAPES]
