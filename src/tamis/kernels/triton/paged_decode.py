"""A decode step over pages, in plain Triton: every split of the keys by a program of its own, then a merge.

A split's keys are of one document (`tamis.kernels.decode_plan`), so its query is turned back once, before the loop,
and the loop costs what it costs without rotation. All query heads of a KV head, and all rows of a request, share a
program: they are the rows of its products, padded to 16. The grid is fixed by the plan's room: programs of unused
splits leave at once, so a captured CUDA graph serves any plan written into the same tensors.

Alphabet: see `paged_prefill`; R rows (G heads x TQ rows) padded to BM, S splits, ROWS = HKV * R rows of a split's
partial results.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tamis.kernels.decode_plan import DecodePlan
from tamis.kernels.triton.paged_prefill import (
    LN2,
    LOG2E,
    MASKED,
    NOTHING,
    copyable,
    descriptor,
    page_rows,
    turned_query,
)


@triton.jit
def _step(
    b_q, b_k, b_v, m, d, acc, bias, visible, scale, BIAS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr
):
    """One step of keys through the online softmax."""
    s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if BIAS:
        s += bias
    if MASK:
        s = tl.where(visible, s, MASKED)
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.math.exp2(s * scale - m_new[:, None])
    alpha = tl.math.exp2(m - m_new)
    d = d * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(b_v.dtype), b_v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, d, acc


@triton.jit
def split_kernel(
    q, k, v, k_desc, v_desc, part, part_lse, splits, table, holes, cos, sin, slopes, q_position, scale, HKV,
    q_batch, q_head, q_row, k_page, k_head, k_row, v_page, v_head, v_row,
    G: tl.constexpr, TQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, RH: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr, HOLES: tl.constexpr, ALIBI: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr
):
    SPLIT: tl.constexpr = PAGE // BN
    pid = tl.program_id(0)
    i_s = pid // HKV
    kv = pid % HKV
    n = tl.load(splits + i_s * 4 + 2)
    if n > 0:
        b = tl.load(splits + i_s * 4)
        first = tl.load(splits + i_s * 4 + 1)
        whole = tl.load(splits + i_s * 4 + 3)
        o_m = tl.arange(0, BM)
        o_n = tl.arange(0, BN)
        o_d = tl.arange(0, DP)
        inside = o_m < G * TQ
        h = kv * G + o_m // TQ
        p_row = q + b.to(tl.int64) * q_batch + h.to(tl.int64)[:, None] * q_head + (o_m % TQ)[:, None] * q_row
        b_q = turned_query(p_row, inside, tl.load(table + first * 4 + 3), cos, sin, BM, D, DP, RH)
        p_q = tl.load(q_position + b * TQ + o_m % TQ)
        slope = tl.zeros([BM], tl.float32)
        if ALIBI:
            slope = tl.load(slopes + h, mask=inside, other=0.0)  # already over the scale of the scores
        m = tl.full([BM], MASKED, tl.float32)
        d = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
        every = o_n >= 0
        # a page's number is loaded a step ahead: a load that waits for another one in its own step would halve how far
        # ahead pages are fetched
        ahead = tl.load(table + first * 4)
        for i in tl.range(first * SPLIT, (first + whole) * SPLIT, num_stages=STAGES):
            at = i // SPLIT * 4
            skip = (i % SPLIT) * BN
            page = ahead
            ahead = tl.load(table + (i + 1) // SPLIT * 4)
            if TMA:
                b_k = k_desc.load([(page * HKV + kv) * PAGE + skip, 0])
                b_v = v_desc.load([(page * HKV + kv) * PAGE + skip, 0])
            else:
                b_k = page_rows(k + page.to(tl.int64) * k_page + kv * k_head, skip, every, k_row, D, DP, BN, False)
                b_v = page_rows(v + page.to(tl.int64) * v_page + kv * v_head, skip, every, v_row, D, DP, BN, False)
            bias = slope[:, None]
            if ALIBI:
                bias *= ((tl.load(table + at + 2) + skip + o_n)[None, :] - p_q[:, None]).to(tl.float32)
            m, d, acc = _step(b_q, b_k, b_v, m, d, acc, bias, inside, scale, ALIBI, False, PRECISION)
        for i in tl.range((first + whole) * SPLIT, (first + n) * SPLIT, num_stages=1):
            at = i // SPLIT * 4
            skip = (i % SPLIT) * BN
            page = tl.load(table + at)
            keep = skip + o_n < tl.load(table + at + 1)
            if HOLES:
                keep = keep & (tl.load(holes + tl.cast(i // SPLIT, tl.int64) * PAGE + skip + o_n) == 0)
            b_k = page_rows(k + page.to(tl.int64) * k_page + kv * k_head, skip, keep, k_row, D, DP, BN, True)
            b_v = page_rows(v + page.to(tl.int64) * v_page + kv * v_head, skip, keep, v_row, D, DP, BN, True)
            away = (tl.load(table + at + 2) + skip + o_n)[None, :] - p_q[:, None]
            visible = keep[None, :] & (away <= 0)
            bias = slope[:, None] * away.to(tl.float32)
            m, d, acc = _step(b_q, b_k, b_v, m, d, acc, bias, visible, scale, ALIBI, True, PRECISION)
        seen = m > NOTHING
        made = tl.where(seen[:, None], acc / d[:, None], 0.0)
        r = i_s.to(tl.int64) * (HKV * G * TQ) + kv * (G * TQ) + o_m
        tl.store(part + r[:, None] * D + o_d[None, :], made, mask=inside[:, None] & (o_d < D)[None, :])
        tl.store(part_lse + r, tl.where(seen, m + tl.math.log2(d), float("-inf")), mask=inside)


@triton.jit
def merge_kernel(
    part, part_lse, ranges, out, lse, ROWS, o_batch, o_head, o_row,
    TQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr
):
    pid = tl.program_id(0)
    b = pid // ROWS
    r = pid % ROWS
    first = tl.load(ranges + b * 2)
    n = tl.load(ranges + b * 2 + 1)
    o_s = tl.arange(0, BS)
    o_d = tl.arange(0, DP)
    m = tl.full([1], MASKED, tl.float32)
    d = tl.zeros([1], tl.float32)
    acc = tl.zeros([DP], tl.float32)
    for i in range(0, n, BS):
        at = (first + i + o_s).to(tl.int64) * ROWS + r
        real = i + o_s < n
        l = tl.load(part_lse + at, mask=real, other=float("-inf"))
        # [BS, DP]
        b_o = tl.load(part + at[:, None] * D + o_d[None, :], mask=real[:, None] & (o_d < D)[None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(l, 0))
        w = tl.math.exp2(l - m_new)
        alpha = tl.math.exp2(m - m_new)
        d = d * alpha + tl.sum(w, 0)
        acc = acc * alpha + tl.sum(w[:, None] * b_o, 0)
        m = m_new
    seen = d > 0
    made = tl.where(seen, acc / d, 0.0)
    p_o = out + b.to(tl.int64) * o_batch + (r // TQ).to(tl.int64) * o_head + (r % TQ) * o_row + o_d
    tl.store(p_o, made.to(out.dtype.element_ty), mask=o_d < D)
    o_1 = tl.arange(0, 1)
    tl.store(lse + b * ROWS + r + o_1, tl.where(seen, (m + tl.math.log2(d)) * LN2, float("-inf")))


class Cut(NamedTuple):
    """How a launch is cut: keys of a step, warps, pipeline stages, and whether pages come by the copy engine."""

    keys: int
    warps: int
    stages: int
    tma: bool


def cut_for(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Cut:
    """The cut for these tensors: two steps of 32 KB in flight a program, three programs on an SM of sm_90."""
    dim, wide, page = q.shape[-1], q.element_size() > 2, keys.shape[2]
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Cut(page, 4, 1, False)
    hopper = torch.cuda.get_device_capability(q.device)[0] >= 9
    step = (128 if dim <= 64 else 64 if dim <= 128 else 32) // (2 if wide else 1)
    tma = hopper and not wide and all(map(copyable, (keys, values)))
    return Cut(min(step, page), 4, 3, tma)


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    cut: Cut | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tamis.kernels.reference.paged.paged_decode`; bf16, fp16 or fp32, D at most 256 and contiguous.

    At most 128 rows (query heads of a KV head x rows of a request). `out` is written if given; `cut` overrides
    `cut_for`. `tamis.kernels.paged_dispatch` checks arguments; here they are taken as given.
    """
    batch, heads, tokens, dim = q.shape
    kv_heads, page = keys.shape[1:3]
    padded = max(16, triton.next_power_of_2(dim))
    rows = max(16, triton.next_power_of_2(heads // kv_heads * tokens))
    cut = cut_for(q, keys, values) if cut is None else cut
    n_splits, tiles = plan.splits.shape[0], plan.tiles
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    part = torch.empty((n_splits, heads * tokens, dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((n_splits, heads * tokens), dtype=torch.float32, device=q.device)
    k_desc, v_desc = (descriptor(t, cut.keys, padded) if cut.tma else t for t in (keys, values))
    cos, sin, holes = (tiles.table if t is None else t for t in (tiles.cos, tiles.sin, tiles.holes))
    slopes = tiles.table if tiles.slopes is None else tiles.slopes / scale
    split_kernel[(n_splits * kv_heads,)](
        q, keys, values, k_desc, v_desc, part, part_lse, plan.splits, tiles.table, holes, cos, sin, slopes,
        plan.q_position, scale * LOG2E, kv_heads, *q.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        heads // kv_heads, tokens, dim, padded, tiles.rotary_dims // 2, rows, cut.keys, page, cut.stages,
        tiles.holes is not None, tiles.slopes is not None, cut.tma,
        "ieee" if q.dtype == torch.float32 else "tf32", num_warps=cut.warps, num_stages=cut.stages,
    )
    merge_kernel[(batch * heads * tokens,)](
        part, part_lse, plan.ranges, out, lse, heads * tokens, *out.stride()[:3], tokens, dim, padded, 16, num_warps=2,
    )
    return out, lse
