"""Linear layers whose products run in float8 (e4m3): weights scaled per output row, activations per token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tamis.bench.shapes import experts_of
from tamis.core.errors import InvalidInput

LARGEST = 448.0  # of float8_e4m3fn
WITH_EXPERTS = "float8 is for models without experts; bench this shape without --fp8."


class Fp8Linear(torch.nn.Module):
    """Stands in for a linear layer. Activations are quantised at every call, on a GPU by one kernel."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight, scale = quantise(linear.weight.data)
        self.weight: torch.Tensor
        self.scale: torch.Tensor
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.t().contiguous())
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out] in x's dtype."""
        flat = x.reshape(-1, x.shape[-1])
        quantised, scale = (_one_kernel() if x.is_cuda else quantise)(flat)
        out = torch._scaled_mm(
            quantised, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=x.dtype, use_fast_accum=True
        )
        return (out if self.bias is None else out + self.bias).view(*x.shape[:-1], -1)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, n] as float8_e4m3fn and its float32 scale [rows, 1]: x is about their product."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x / scale).to(torch.float8_e4m3fn), scale


@functools.cache
def _one_kernel() -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    made: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = torch.compile(quantise, dynamic=False)
    return made


def to_fp8(model: Any) -> None:
    """Replace every linear layer but the output head by `Fp8Linear`, in place. Raises InvalidInput for experts."""
    if experts_of(model):
        raise InvalidInput(WITH_EXPERTS)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(parent, name, Fp8Linear(child))
