"""A token's attention to blocks in slots and to the growing one, in plain Triton: splits, then a merge.

The query heads of a KV head are the rows of a product; a split walks its share of the placed blocks in their order. So
the result depends on what is placed and not on where: with other slots, or all blocks resident, it is the same to the
last bit.

Alphabet: W blocks of a row, EACH of them a split, S splits, GH query heads of a KV head, BM the same padded, BN tokens
of a block, padded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tamis.kernels.triton.blocks_score import precision_of
from tamis.kernels.triton.paged_prefill import LOG2E, MASKED
from tamis.kernels.triton.selfindex_attend import combine_kernel

PROGRAMS = 396  # that fill a GPU: three on each of 132 multiprocessors


@triton.jit
def _block(
    b_q,
    base,
    keep,
    m,
    d,
    acc,
    scale,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A block [2, BLOCK, D] at base, of whose tokens `keep` [BN] count."""
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, DP)
    cell = o_n[:, None] * D + o_d[None, :]
    mask = keep[:, None] & (o_d < D)[None, :]
    b_k = tl.load(base + cell, mask=mask, other=0.0)
    b_v = tl.load(base + BLOCK * D + cell, mask=mask, other=0.0)
    s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    s = tl.where(keep[None, :], s, MASKED)
    best = tl.maximum(m, tl.max(s, 1))
    p = tl.where(keep[None, :], tl.math.exp2(s - best[:, None]), 0.0)
    alpha = tl.math.exp2(m - best)
    d = d * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(b_v.dtype), b_v, acc * alpha[:, None], input_precision=PRECISION)
    return best, d, acc


@triton.jit
def slots_kernel(
    q,
    slots,
    places,
    tail,
    positions,
    part,
    part_top,
    part_den,
    scale,
    HKV,
    W,
    SLOTS,
    EACH,
    S,
    q_batch,
    q_head,
    GH: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_s = tl.program_id(0)
    row = tl.program_id(1)
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, DP)
    o_n = tl.arange(0, BN)
    inside = (o_m < GH)[:, None] & (o_d < D)[None, :]
    at = (row // HKV).to(tl.int64) * q_batch + ((row % HKV) * GH + o_m).to(tl.int64)[:, None] * q_head + o_d[None, :]
    b_q = tl.load(q + at, mask=inside, other=0.0)
    m = tl.full([BM], MASKED, tl.float32)
    d = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    end = tl.minimum(i_s * EACH + EACH, W)
    for i in tl.range(i_s * EACH, end, num_stages=STAGES):
        slot = tl.load(places + row * W + i)
        keep = (o_n < BLOCK) & (slot >= 0)
        base = slots + (row.to(tl.int64) * SLOTS + tl.maximum(slot, 0)) * (2 * BLOCK * D)
        m, d, acc = _block(b_q, base, keep, m, d, acc, scale, BLOCK, D, DP, BN, PRECISION)
    if i_s == S - 1:
        last = tl.load(positions + row // HKV).to(tl.int32) % BLOCK
        m, d, acc = _block(
            b_q, tail + row.to(tl.int64) * (2 * BLOCK * D), o_n <= last, m, d, acc, scale, BLOCK, D, DP, BN, PRECISION
        )
    to = (row.to(tl.int64) * GH + o_m) * S + i_s
    tl.store(part + to[:, None] * D + o_d[None, :], acc, mask=inside)
    tl.store(part_top + to, m, mask=o_m < GH)
    tl.store(part_den + to, d, mask=o_m < GH)


def splits_of(rows: int, width: int) -> tuple[int, int]:
    """Splits of a row and blocks of each, so that all rows' fill a GPU; the last split has the growing block too."""
    each = max(1, -(-width // max(1, -(-PROGRAMS // rows))))
    return -(-width // each), each


def attend(
    q: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    tail: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """See `kernels.reference.offload.attend`; D contiguous."""
    batch, heads, dim = q.shape
    rows, width = places.shape
    hkv, group, block = rows // batch, heads * batch // rows, slots.shape[3]
    splits, each = splits_of(rows, width)
    part = torch.empty((batch * heads, splits, dim), dtype=torch.float32, device=q.device)
    top, den = torch.empty((2, batch * heads, splits), dtype=torch.float32, device=q.device)
    padded = triton.next_power_of_2(dim)
    slots_kernel[(splits, rows)](
        q, slots, places, tail, positions, part, top, den, scale * LOG2E, hkv, width, slots.shape[1], each, splits,
        q.stride(0), q.stride(1),
        GH=group, BM=max(16, triton.next_power_of_2(group)), D=dim, DP=padded, BLOCK=block,
        BN=max(16, triton.next_power_of_2(block)), STAGES=3, PRECISION=precision_of(q), num_warps=4,
    )  # fmt: skip
    out = torch.empty((batch, heads, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty(batch * heads, dtype=torch.float32, device=q.device)
    combine_kernel[(batch * heads,)](
        part, top, den, out, lse, heads, splits, out.stride(0), out.stride(1), D=dim,
        BS=min(64, max(2, triton.next_power_of_2(splits))), num_warps=4,
    )  # fmt: skip
    return out
