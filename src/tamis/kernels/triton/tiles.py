"""Pieces that the Triton kernels over lists of tiles share: reading one, attending to it, and listing tiles.

Alphabet: D head dim, DP the same padded to a power of two, BM rows, BN keys of a tile, TK tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def key_tile(
    base, i_head, start, TK, s_head, s_row,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr
):
    """[BN, DP] rows of one KV head from token `start` on; rows past the last token and columns past D are zero."""
    if TMA:
        return base.load([i_head, start, 0]).reshape(BN, DP)
    else:
        o_n = tl.arange(0, BN)
        o_d = tl.arange(0, DP)
        p = base + i_head.to(tl.int64) * s_head + (start + o_n).to(tl.int64)[:, None] * s_row + o_d[None, :]
        return tl.load(p, mask=(start + o_n < TK)[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def add_tile(
    m, d, acc, s, scale, v, i_head, start, TK, v_head, v_row,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr
):
    """The online softmax (maximum m and sum d [BM], in powers of two, and acc [BM, DP]) with one more tile of values,
    whose scores are s [BM, BN]."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.math.exp2(s * scale - m_new[:, None])
    alpha = tl.math.exp2(m - m_new)
    d = d * alpha + tl.sum(p, 1)
    b_v = key_tile(v, i_head, start, TK, v_head, v_row, D, DP, BN, TMA)
    return m_new, d, tl.dot(p.to(b_v.dtype), b_v, acc * alpha[:, None], input_precision=PRECISION)


@triton.jit
def list_places(near, chosen):
    """Places in a list of the chosen tiles (bool, of increasing keys), those that are near (masked) first and inside
    each kind from late to early keys; how many there are of both, and of near ones. `near` are chosen too."""
    kinds = tl.where(near, 65536, tl.where(chosen, 1, 0))
    upto = tl.cumsum(kinds, 0)  # both counted in one scan
    total = tl.sum(kinds, 0)
    n_near = total >> 16
    n = n_near + (total & 65535)
    return tl.where(near, n_near - (upto >> 16), n - (upto & 65535)), n, n_near


def copyable(t: torch.Tensor) -> bool:
    """Whether the copy engine can read it: base and strides in steps of 16 bytes."""
    step = 16 // t.element_size()
    return t.data_ptr() % 16 == 0 and t.stride(0) % step == 0 and t.stride(1) % step == 0
