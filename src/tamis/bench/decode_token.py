"""A whole decode step through layers of a real shape with random weights, and what compression adds to a prefill.

Both attentions run through the same layers: one product for q, k and v, rotation, the new token's keys and values
written to the cache, attention, output product, gated MLP; norms and gates fused as `bench.fuse` has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tamis.bench.dense import Attention
from tamis.bench.fuse import add_norm, rms_norm, swiglu
from tamis.bench.machine import check_memory
from tamis.bench.shapes import Shape
from tamis.core.errors import InvalidInput
from tamis.kernels.selfindex import Layout
from tamis.kernels.selfindex_dispatch import fit_sampled, selfindex_compress

EPS = 1e-5
FIT_LAYERS = 8  # whose tables are fitted in one go

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Pieces:
    """What lies between the products, perhaps compiled."""

    norm: Callable[..., torch.Tensor]
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    swiglu: Callable[..., torch.Tensor]
    heads: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    @classmethod
    def on(cls, device: torch.device) -> Pieces:
        """Compiled on a GPU."""
        if device.type != "cuda":
            return cls(rms_norm, add_norm, swiglu, split_heads)
        torch.compiler.reset()  # it keeps a function for a few shapes only, then runs it uncompiled
        made: Callable[[Any], Any] = functools.partial(torch.compile, dynamic=False)
        return cls(made(rms_norm), made(add_norm), made(swiglu), made(split_heads))


def split_heads(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv [B, (Hq + 2 Hkv) D] as q [B, Hq, 1, D], k and v [B, Hkv, 1, D]; q and k turned by cos and sin [D / 2]."""
    x = qkv.view(qkv.shape[0], heads + 2 * kv_heads, 1, -1)
    both, v = x[:, : heads + kv_heads], x[:, heads + kv_heads :]
    a, b = both.float().chunk(2, -1)
    both = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(qkv.dtype)
    return both[:, :heads], both[:, heads:], v


class Layers:
    """Random weights of `layers` decoder layers of a shape without experts."""

    def __init__(self, shape: Shape, layers: int, device: torch.device, dtype: torch.dtype) -> None:
        if shape.experts:
            raise InvalidInput(f"a shape with {shape.experts} experts; whole decode steps are timed on dense ones.")
        self.shape, self.layers, self.pieces = shape, layers, Pieces.on(device)
        inner, wide = shape.heads * shape.head_dim, (shape.heads + 2 * shape.kv_heads) * shape.head_dim

        each = wide * shape.hidden + shape.hidden * inner + 3 * shape.intermediate * shape.hidden
        n_bytes = (layers * each + shape.vocabulary * shape.hidden) * dtype.itemsize
        check_memory(n_bytes, device, f"{layers} layers' weights")

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.empty(layers, rows, columns, dtype=dtype, device=device).normal_(std=0.02)

        self.qkv, self.o = weight(wide, shape.hidden), weight(shape.hidden, inner)
        self.up, self.down = weight(2 * shape.intermediate, shape.hidden), weight(shape.hidden, shape.intermediate)
        self.head = torch.empty(shape.vocabulary, shape.hidden, dtype=dtype, device=device).normal_(std=0.02)
        self.scale = torch.ones(shape.hidden, dtype=dtype, device=device)
        angle = torch.arange(shape.head_dim // 2, device=device) * 0.1
        self.cos, self.sin = angle.cos(), angle.sin()

    def step(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [B, hidden] → logits [B, vocabulary]; `attend` takes a layer's number, q, k, v, gives [B, Hq, 1, D]."""
        p, shape, linear = self.pieces, self.shape, torch.nn.functional.linear
        y = p.norm(x, self.scale, EPS)
        for i in range(self.layers):
            q, k, v = p.heads(linear(y, self.qkv[i]), self.cos, self.sin, shape.heads, shape.kv_heads)
            attended = attend(i, q, k, v).reshape(x.shape[0], -1)
            x, y = p.add_norm(x, linear(attended, self.o[i]), self.scale, EPS)
            out = linear(p.swiglu(linear(y, self.up[i])), self.down[i])
            x, y = p.add_norm(x, out, self.scale, EPS)
        return linear(y, self.head)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(t.nbytes for t in (self.qkv, self.o, self.up, self.down, self.head))


def dense_prefill_layer(layers: Layers, x: torch.Tensor, attention: Attention) -> torch.Tensor:
    """One layer of a prefill of x [T, hidden] with causal attention, to be timed: the first layer's weights."""
    p, shape, linear = layers.pieces, layers.shape, torch.nn.functional.linear
    y = p.norm(x, layers.scale, EPS)
    qkv = linear(y, layers.qkv[0]).view(x.shape[0], -1, shape.head_dim).transpose(0, 1)
    q, k, v = torch.split(qkv, [shape.heads, shape.kv_heads, shape.kv_heads])
    attended = attention(q.contiguous(), k.contiguous(), v.contiguous(), shape.head_dim**-0.5)
    out = linear(attended.transpose(0, 1).reshape(x.shape[0], -1), layers.o[0])
    x, y = p.add_norm(x, out, layers.scale, EPS)
    return x + linear(p.swiglu(linear(y, layers.up[0])), layers.down[0])


def fit_and_compress(keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> None:
    """What a prefill adds for keys and values [layers, Hkv, T, D] of some layers."""
    tables = fit_sampled(keys, values, layout)
    selfindex_compress(keys, values, tables, layout)
