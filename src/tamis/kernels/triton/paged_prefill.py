"""Attention of many query rows over pages, in plain Triton: sm_80 on, and Triton's interpreter on a CPU.

Keys lie where they were put, turned at their document's own positions; the query is turned back by the document's
offset instead (position-free caching). A run of tiles of one document is an inner loop of its own, so its query is a
loop invariant, as in a kernel that rotates nothing; between runs it is turned anew from the ORIGINAL query.
Runs that need the element mask come first and read only what may be read; the rest reads whole pages, on sm_90 on
through the copy engine.

Alphabet: D head dim, DP the same padded to a power of two, RH half the rotary dims, BM query rows and BN keys of a
step, PAGE keys of a page, NQ query tiles, TQ query rows, M entries and K runs a list has room for, G query heads of a
KV head, HKV KV heads, NC 1 where each head has lists of its own, else 0.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tamis.kernels.paged import KeyTiles, PagedLists

LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)
# a power of two: its product with `scale` is exact, so a row with nothing visible yet gets exp2(0), never exp2(inf)
MASKED = tl.constexpr(-(2.0**80))
NOTHING = tl.constexpr(-(2.0**40))  # a maximum below this is that of a row that saw no key


@triton.jit
def turned_query(
    p_row, inside, document, cos, sin, BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, RH: tl.constexpr
):
    """[BM, DP] rows at the pointers p_row [BM, 1], turned back by the document's offset (-1: as they are)."""
    o_d = tl.arange(0, DP)
    mask = inside[:, None] & (o_d < D)[None, :]
    if RH == 0:
        return tl.load(p_row + o_d[None, :], mask=mask, other=0.0)
    elif 2 * RH == DP and BM >= 64:
        # by halves: every element is loaded once, and turned in half the registers. A few rows have registers to spare,
        # and stay there more easily if they are made in one piece
        o_h = tl.arange(0, RH)
        b_1 = tl.load(p_row + o_h[None, :], mask=inside[:, None], other=0.0)
        b_2 = tl.load(p_row + RH + o_h[None, :], mask=inside[:, None], other=0.0)
        at = document.to(tl.int64) * RH + o_h
        c = tl.load(cos + at, mask=(o_h >= 0) & (document >= 0), other=1.0)[None, :]
        s = tl.load(sin + at, mask=(o_h >= 0) & (document >= 0), other=0.0)[None, :]
        turned = (b_1.to(tl.float32) * c + b_2.to(tl.float32) * s).to(b_1.dtype)
        b_2 = (b_2.to(tl.float32) * c - b_1.to(tl.float32) * s).to(b_1.dtype)
        return tl.join(turned, b_2).permute(0, 2, 1).reshape(BM, DP)
    else:
        b_q = tl.load(p_row + o_d[None, :], mask=mask, other=0.0)
        low = o_d < RH
        turns = o_d < 2 * RH
        partner = tl.where(low, o_d + RH, tl.where(turns, o_d - RH, o_d))
        b_p = tl.load(p_row + partner[None, :], mask=mask, other=0.0)
        at = document.to(tl.int64) * RH + tl.where(low, o_d, o_d - RH)
        c = tl.load(cos + at, mask=turns & (document >= 0), other=1.0)
        s = tl.load(sin + at, mask=turns & (document >= 0), other=0.0)
        s = tl.where(low, s, -s)
        return (b_q.to(tl.float32) * c[None, :] + b_p.to(tl.float32) * s[None, :]).to(b_q.dtype)


@triton.jit
def _turned(
    p_row, inside, p_run, r, n_runs, cos, sin, BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, RH: tl.constexpr
):
    """The query of run r, zeros where there is no such run."""
    b_q = tl.zeros([BM, DP], p_row.dtype.element_ty)
    if r < n_runs:
        b_q = turned_query(p_row, inside, tl.load(p_run + r * 2 + 1), cos, sin, BM, D, DP, RH)
    return b_q


@triton.jit
def page_rows(p_base, part, keep, s_row, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr):
    """[BN, DP] slots of one page and head from slot `part` on; slots that are not kept are zero and not read."""
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, DP)
    p = p_base + (part + o_n)[:, None] * s_row + o_d[None, :]
    if MASK:
        return tl.load(p, mask=keep[:, None] & (o_d < D)[None, :], other=0.0)
    elif D == DP:
        return tl.load(p)
    else:
        return tl.load(p, mask=(o_n >= 0)[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def _run(
    b_q, m, d, acc, p_q, slope, kv, k, v, k_desc, v_desc, visits, table, holes, first, last, scale, HKV,
    k_page, k_head, k_row, v_page, v_head, v_row,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
    MASK: tl.constexpr, HOLES: tl.constexpr, ALIBI: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr
):
    """Entries [first, last) of a list, all of one document, through the online softmax (m, d, acc)."""
    SPLIT: tl.constexpr = PAGE // BN
    o_n = tl.arange(0, BN)
    # where a whole page lies is loaded steps ahead, so that no load of a step waits for another
    row_now = tl.load(visits + first)
    page_now = tl.load(table + row_now * 4)
    row_next = tl.load(visits + tl.minimum(first + 1 // SPLIT, last - 1))
    for i in tl.range(first * SPLIT, last * SPLIT, num_stages=STAGES):
        if MASK:
            row = tl.load(visits + i // SPLIT)
            page = tl.load(table + row * 4)
        else:
            row = row_now
            page = page_now
            row_now = row_next
            page_now = tl.load(table + row_next * 4)
            row_next = tl.load(visits + tl.minimum((i + 2) // SPLIT, last - 1))
        part = (i % SPLIT) * BN
        keep = o_n >= 0
        if MASK:
            keep = part + o_n < tl.load(table + row * 4 + 1)
            if HOLES:
                keep = keep & (tl.load(holes + row.to(tl.int64) * PAGE + part + o_n) == 0)
        if TMA and not MASK:
            b_k = k_desc.load([(page * HKV + kv) * PAGE + part, 0])
        else:
            b_k = page_rows(k + page.to(tl.int64) * k_page + kv * k_head, part, keep, k_row, D, DP, BN, MASK)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if ALIBI or MASK:
            away = (tl.load(table + row * 4 + 2) + part + o_n)[None, :] - p_q[:, None]
            if ALIBI:
                s += slope * away.to(tl.float32)
            if MASK:
                s = tl.where(keep[None, :] & (away <= 0), s, MASKED)
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        p = tl.math.exp2(s * scale - m_new[:, None])
        alpha = tl.math.exp2(m - m_new)
        d = d * alpha + tl.sum(p, 1)
        if TMA and not MASK:
            b_v = v_desc.load([(page * HKV + kv) * PAGE + part, 0])
        else:
            b_v = page_rows(v + page.to(tl.int64) * v_page + kv * v_head, part, keep, v_row, D, DP, BN, MASK)
        acc = tl.dot(p.to(b_v.dtype), b_v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return m, d, acc


@triton.jit(do_not_specialize=["TQ", "NQ", "M", "K"])  # sizes of a request: one build for all of them
def kernel(
    q, k, v, k_desc, v_desc, out, lse, entries, runs, run_count, q_start, q_len, q_position, table, holes, cos, sin,
    slopes, scale, TQ, NQ, M, K, G, HKV, NC,
    q_head, q_row, k_page, k_head, k_row, v_page, v_head, v_row, o_head, o_row,
    D: tl.constexpr, DP: tl.constexpr, RH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr,
    STAGES: tl.constexpr, HOLES: tl.constexpr, ALIBI: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr
):
    # KV heads in order (the pages of one stay in the L2 while they are needed), inside one the late, long tiles first
    # (so that no long tile is left for the end), the heads of its group side by side
    pid = tl.program_id(0)
    kv = pid // (NQ * G)
    rest = pid % (NQ * G)
    i_q = NQ - 1 - rest // G
    h = kv * G + rest % G
    cell = h * NC * NQ + i_q
    near = tl.load(run_count + cell * 2)
    n_runs = tl.load(run_count + cell * 2 + 1)
    row = tl.load(q_start + i_q)
    rows = tl.load(q_len + i_q)
    visits = entries + cell.to(tl.int64) * M
    p_run = runs + cell.to(tl.int64) * K * 2
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, DP)
    inside = o_m < rows
    p_row = q + h.to(tl.int64) * q_head + (row + o_m).to(tl.int64)[:, None] * q_row
    p_q = tl.load(q_position + row + o_m, mask=inside, other=0)
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + h)  # already over the scale of the scores
    m = tl.full([BM], MASKED, tl.float32)
    d = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    first = 0
    # carried into the loop of runs, not made in it: a product takes its left side from shared memory only if that is
    # loaded or carried, and from registers, one load a step, if it is computed
    b_q = _turned(p_row, inside, p_run, 0, n_runs, cos, sin, BM, D, DP, RH)
    for r in range(0, near):
        last = tl.load(p_run + r * 2)
        m, d, acc = _run(
            b_q, m, d, acc, p_q, slope, kv, k, v, k_desc, v_desc, visits, table, holes, first, last, scale, HKV,
            k_page, k_head, k_row, v_page, v_head, v_row,
            D, DP, BN, PAGE, STAGES, True, HOLES, ALIBI, TMA, PRECISION
        )
        first = last
        b_q = _turned(p_row, inside, p_run, r + 1, n_runs, cos, sin, BM, D, DP, RH)
    for r in range(near, n_runs):
        last = tl.load(p_run + r * 2)
        m, d, acc = _run(
            b_q, m, d, acc, p_q, slope, kv, k, v, k_desc, v_desc, visits, table, holes, first, last, scale, HKV,
            k_page, k_head, k_row, v_page, v_head, v_row,
            D, DP, BN, PAGE, STAGES, False, HOLES, ALIBI, TMA, PRECISION
        )
        first = last
        b_q = _turned(p_row, inside, p_run, r + 1, n_runs, cos, sin, BM, D, DP, RH)
    seen = m > NOTHING
    p_o = out + h.to(tl.int64) * o_head + (row + o_m).to(tl.int64)[:, None] * o_row + o_d[None, :]
    made = tl.where(seen[:, None], acc / d[:, None], 0.0)
    tl.store(p_o, made.to(out.dtype.element_ty), mask=inside[:, None] & (o_d < D)[None, :])
    l = tl.where(seen, (m + tl.math.log2(d)) * LN2, float("-inf"))
    tl.store(lse + h.to(tl.int64) * TQ + row + o_m, l, mask=inside)


class Cut(NamedTuple):
    """How a launch is cut: query rows and keys of a step, warps, pipeline stages, and whether pages come by the copy
    engine."""

    rows: int
    keys: int
    warps: int
    stages: int
    tma: bool


def cut_for(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: int) -> Cut:
    """The cut for these tensors, as `block_sparse.blocks` has it for the same step; sized to fit elsewhere."""
    dim, wide, page = q.shape[-1], q.element_size() > 2, keys.shape[2]
    padded = max(16, triton.next_power_of_2(rows))
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Cut(padded, page, 4, 1, False)
    hopper = torch.cuda.get_device_capability(q.device)[0] >= 9
    tma = hopper and not wide and all(map(copyable, (keys, values)))
    if dim <= 64:
        step, warps, stages = 64, 4, 3
    elif dim <= 128:
        step, warps, stages = (64, 4, 2) if tma else (64, 8, 2)
    else:
        step, warps, stages = 32, 8, 2
    warps = min(warps, 4) if padded <= 64 else warps
    return Cut(padded, min(step // 2 if wide else step, page), warps, stages, tma)


def copyable(pool: torch.Tensor) -> bool:
    """Whether the copy engine can read [pages, Hkv, page, D] as rows of D: all of it in one piece, in steps of 16."""
    return pool.is_contiguous() and pool.data_ptr() % 16 == 0 and pool.shape[3] * pool.element_size() % 16 == 0


def descriptor(pool: torch.Tensor, step: int, columns: int) -> TensorDescriptor:
    """A pool as the copy engine reads it: rows of D, `step` of them and so many columns at a time."""
    return TensorDescriptor.from_tensor(pool.view(-1, pool.shape[3]), [step, columns])


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: KeyTiles,
    lists: PagedLists,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    cut: Cut | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tamis.kernels.reference.paged.paged_attention`; bf16, fp16 or fp32, D at most 256 and contiguous.

    `out` [Hq, Tq, D] is written if given; `cut` overrides `cut_for`. `tamis.kernels.paged_dispatch` checks arguments;
    here they are taken as given.
    """
    heads, n_rows, dim = q.shape
    kv_heads, page = keys.shape[1:3]
    padded = max(16, triton.next_power_of_2(dim))
    cut = cut_for(q, keys, values, lists.rows) if cut is None else cut
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty((heads, n_rows), dtype=torch.float32, device=q.device)
    k_desc, v_desc = (descriptor(t, cut.keys, padded) if cut.tma else t for t in (keys, values))
    n_q, alone = lists.q_start.numel(), tiles.table  # stands for tensors that are not there
    cos, sin, holes = (alone if t is None else t for t in (tiles.cos, tiles.sin, tiles.holes))
    slopes = alone if tiles.slopes is None else tiles.slopes / scale
    kernel[(heads * n_q,)](
        q, keys, values, k_desc, v_desc, out, lse, lists.entries, lists.runs, lists.run_count, lists.q_start,
        lists.q_len, lists.q_position, tiles.table, holes, cos, sin, slopes, scale * LOG2E,
        n_rows, n_q, lists.entries.shape[-1], lists.runs.shape[2], heads // kv_heads, kv_heads,
        int(lists.count.shape[0] > 1), q.stride(0), q.stride(1), *keys.stride()[:3], *values.stride()[:3],
        out.stride(0), out.stride(1), dim, padded, tiles.rotary_dims // 2, cut.rows, cut.keys, page, cut.stages,
        tiles.holes is not None, tiles.slopes is not None, cut.tma,
        "ieee" if q.dtype == torch.float32 else "tf32", num_warps=cut.warps, num_stages=cut.stages,
    )
    return out, lse
