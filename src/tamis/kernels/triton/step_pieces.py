"""What lies between the products of a decode step, each in one launch: norm, rotation, gate.

Alphabet: D numbers of a row, DP the same padded, RH half a head's numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def add_norm_kernel(
    x,
    y,
    weight,
    total,
    out,
    D,
    eps,
    DP: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    a = tl.load(x + row * D + d, mask=d < D, other=0.0)
    if ADD:
        a = a + tl.load(y + row * D + d, mask=d < D, other=0.0)
        tl.store(total + row * D + d, a, mask=d < D)
    f = a.to(tl.float32)
    f = f * tl.rsqrt(tl.sum(f * f, 0) / D + eps)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    tl.store(out + row * D + d, w * f.to(w.dtype), mask=d < D)


@triton.jit
def swiglu_kernel(x, out, D, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * D + d, mask=d < D, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * D + D + d, mask=d < D, other=0.0)
    tl.store(out + row * D + d, (gate * tl.sigmoid(gate)).to(up.dtype) * up, mask=d < D)


@triton.jit
def rotate_kernel(x, cos, sin, heads, first, RH: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = x + (row * heads + first + tl.program_id(0)) * 2 * RH + tl.arange(0, RH)
    c = tl.load(cos + tl.arange(0, RH))
    s = tl.load(sin + tl.arange(0, RH))
    a = tl.load(at)
    b = tl.load(at + RH)
    f = a.to(tl.float32)
    g = b.to(tl.float32)
    tl.store(at, (f * c - g * s).to(a.dtype))
    tl.store(at + RH, (g * c + f * s).to(a.dtype))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [B, D] over its root mean square, times weight [D]."""
    out = torch.empty_like(x)
    add_norm_kernel[(x.shape[0],)](
        x, x, weight, out, out, x.shape[1], eps, DP=triton.next_power_of_2(x.shape[1]), ADD=False, num_warps=8
    )
    return out


def add_norm(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x + y [B, D] and its norm."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    add_norm_kernel[(x.shape[0],)](
        x, y, weight, total, out, x.shape[1], eps, DP=triton.next_power_of_2(x.shape[1]), ADD=True, num_warps=8
    )
    return total, out


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """x [B, 2 n], gate beside up → silu(gate) * up [B, n]."""
    n = x.shape[1] // 2
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    swiglu_kernel[(triton.cdiv(n, 1024), x.shape[0])](x, out, n, BLOCK=1024, num_warps=4)
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, first: int) -> torch.Tensor:
    """Turn the heads from `first` on of x [B, heads, D] in place by cos and sin [D / 2], D a power of two."""
    rotate_kernel[(x.shape[1] - first, x.shape[0])](x, cos, sin, x.shape[1], first, RH=x.shape[2] // 2, num_warps=1)
    return x


@triton.jit(do_not_specialize=["i"])
def stamp_kernel(out, i):
    tl.store(out + i, globaltimer().to(tl.int64))


def stamp(out: torch.Tensor, i: int) -> None:
    """Write the device's time in nanoseconds to out [n] int64, at place i, when the stream comes to it."""
    stamp_kernel[(1,)](out, i, num_warps=1)
