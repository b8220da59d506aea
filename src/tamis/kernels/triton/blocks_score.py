"""Scores of blocks by their pooled keys, in plain Triton: of a decode step's rows, and of tiles of a prefill.

A block's score is the best of the pooled keys that touch it: those that begin in it and those that begin before and
reach into it. A decode step scores the latter again, so that a program needs nothing of its neighbours; a prefill hands
them over.
The softmax of `own` scores is taken over a query head's pooled keys and summed over its group before the best is taken.

Alphabet: C pooled keys and C2 wide ones a row has room for, N blocks, NB blocks of a program, J pooled keys that begin
in a block, OV that reach into it from before, STRIDE and WINDOW tokens of a pooled key, GH query heads of a KV head,
BM rows of a product, D head dim, SP splits of a normaliser.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tamis.kernels.block_pool import PoolLayer
from tamis.kernels.blocks import COARSE, BlockRule
from tamis.kernels.triton.paged_prefill import LOG2E, MASKED, NOTHING

BLOCKS = 64  # of a program of a decode step
TILE = 64  # rows of a program of a prefill
SPLITS = 8
NEVER = 1 << 30  # a window that no row sees


@triton.jit
def _sums(
    q,
    keys,
    begin,
    end,
    seen,
    scale,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Maximum and sum [BM] of exp2(scores) of rows q [BM, DP] with keys begin .. end of those `seen` [BM]."""
    m = tl.full([BM], MASKED, tl.float32)
    d = tl.zeros([BM], tl.float32)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, DP)
    for i in range(begin, end, BN):
        c = i + o_n
        k = tl.load(
            keys + c.to(tl.int64)[:, None] * D + o_d[None, :], mask=(c < end)[:, None] & (o_d < D)[None, :], other=0.0
        )
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        keep = (c < end)[None, :] & (c[None, :] < seen[:, None])
        s = tl.where(keep, s, MASKED)
        best = tl.maximum(m, tl.max(s, 1))
        d = d * tl.math.exp2(m - best) + tl.sum(tl.where(keep, tl.math.exp2(s - best[:, None]), 0.0), 1)
        m = best
    return m, d


@triton.jit
def normaliser_kernel(
    q,
    pooled,
    wide,
    positions,
    part_top,
    part_sum,
    scale,
    HKV,
    C,
    C2,
    lag,
    q_batch,
    q_head,
    GH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    WSTRIDE: tl.constexpr,
    WWINDOW: tl.constexpr,
    SP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Partial sums of a split: of the wide keys where the row sees one, else of the pooled ones."""
    i_s = tl.program_id(0)
    row = tl.program_id(1)
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, DP)
    inside = o_m < GH
    n = tl.load(positions + row // HKV).to(tl.int32) + 1 - lag
    at = (row // HKV).to(tl.int64) * q_batch + ((row % HKV) * GH + o_m).to(tl.int64)[:, None] * q_head + o_d[None, :]
    b_q = tl.load(q + at, mask=inside[:, None] & (o_d < D)[None, :], other=0.0)
    if n >= WWINDOW:
        count = tl.minimum((n - WWINDOW) // WSTRIDE + 1, C2)
        each = tl.cdiv(tl.cdiv(count, SP), BN) * BN
        seen = tl.zeros([BM], tl.int32) + count
        m, d = _sums(
            b_q,
            wide + row.to(tl.int64) * C2 * D,
            i_s * each,
            tl.minimum(i_s * each + each, count),
            seen,
            scale,
            BM,
            BN,
            D,
            DP,
            PRECISION,
        )
        d = d * (WSTRIDE // STRIDE)
    else:
        count = tl.minimum((n - WINDOW + STRIDE) // STRIDE, C)
        each = tl.cdiv(tl.cdiv(count, SP), BN) * BN
        seen = tl.zeros([BM], tl.int32) + count
        m, d = _sums(
            b_q,
            pooled + row.to(tl.int64) * C * D,
            i_s * each,
            tl.minimum(i_s * each + each, count),
            seen,
            scale,
            BM,
            BN,
            D,
            DP,
            PRECISION,
        )
    to = (row.to(tl.int64) * SP + i_s) * GH + o_m
    tl.store(part_top + to, m, mask=inside)
    tl.store(part_sum + to, d, mask=inside)


@triton.jit
def decode_scores_kernel(
    q,
    pooled,
    positions,
    part_top,
    part_sum,
    out,
    scale,
    HKV,
    C,
    N,
    lag,
    q_batch,
    q_head,
    GH: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    NB: tl.constexpr,
    J: tl.constexpr,
    OV: tl.constexpr,
    STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SP: tl.constexpr,
    OWN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(1)
    o_n = tl.program_id(0) * NB + tl.arange(0, NB)
    o_d = tl.arange(0, DP)
    real = o_d < D
    n = tl.load(positions + row // HKV).to(tl.int32) + 1 - lag
    p_q = q + (row // HKV).to(tl.int64) * q_batch
    if OWN:
        o_m = tl.arange(0, BM)
        inside = o_m < GH
        at = ((row % HKV) * GH + o_m).to(tl.int64)[:, None] * q_head + o_d[None, :]
        b_q = tl.load(p_q + at, mask=inside[:, None] & real[None, :], other=0.0)
        o_s = tl.arange(0, SP)
        parts = (row.to(tl.int64) * SP + o_s)[:, None] * GH + o_m[None, :]
        top = tl.load(part_top + parts, mask=inside[None, :], other=MASKED)
        m = tl.max(top, 0)
        some = tl.load(part_sum + parts, mask=inside[None, :], other=0.0)
        d = tl.sum(tl.where(top > NOTHING, some * tl.math.exp2(top - m[None, :]), 0.0), 0)
        base = m + tl.math.log2(tl.where(d > 0, d, 1.0))
    else:
        b_f = tl.load(p_q + (row % HKV).to(tl.int64) * q_head + o_d, mask=real, other=0.0).to(tl.float32)
    best = tl.full([NB], float("-inf"), tl.float32)
    for j in tl.static_range(-OV, J):
        c = o_n * J + j
        seen = (c >= 0) & (c < C) & (c * STRIDE + WINDOW <= n)
        k = tl.load(
            pooled + (row.to(tl.int64) * C + c)[:, None] * D + o_d[None, :],
            mask=seen[:, None] & real[None, :],
            other=0.0,
        )
        if OWN:
            s = tl.dot(b_q, tl.trans(k), input_precision=PRECISION) * scale - base[:, None]
            value = tl.sum(tl.where(inside[:, None], tl.math.exp2(s), 0.0), 0)
        else:
            value = tl.sum(k.to(tl.float32) * b_f[None, :], 1)
        best = tl.maximum(best, tl.where(seen, value, float("-inf")))
    tl.store(out + row.to(tl.int64) * N + o_n, best, mask=o_n < N)


@triton.jit
def prefill_normaliser_kernel(
    q,
    pooled,
    wide,
    out,
    scale,
    Q,
    C,
    C2,
    first,
    q_head,
    q_row,
    GH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    WSTRIDE: tl.constexpr,
    WWINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """log2 of the softmax's denominator of every row of a query head: out [Hq, Q]."""
    head = tl.program_id(1)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    o_d = tl.arange(0, DP)
    b_q = tl.load(
        q + head.to(tl.int64) * q_head + r.to(tl.int64)[:, None] * q_row + o_d[None, :],
        mask=(r < Q)[:, None] & (o_d < D)[None, :],
        other=0.0,
    )
    n = first + r + 1
    last = first + tl.minimum(tl.program_id(0) * BM + BM, Q)
    kv = (head // GH).to(tl.int64)
    seen = tl.maximum((n - WWINDOW + WSTRIDE) // WSTRIDE, 0)
    m, d = _sums(
        b_q,
        wide + kv * C2 * D,
        0,
        tl.minimum(tl.maximum((last - WWINDOW + WSTRIDE) // WSTRIDE, 0), C2),
        seen,
        scale,
        BM,
        BN,
        D,
        DP,
        PRECISION,
    )
    d = d * (WSTRIDE // STRIDE)
    if first + tl.program_id(0) * BM + 1 < WWINDOW:  # some row sees no wide key
        seen = tl.maximum((n - WINDOW + STRIDE) // STRIDE, 0)
        m1, d1 = _sums(
            b_q,
            pooled + kv * C * D,
            0,
            tl.minimum(tl.maximum((last - WINDOW + STRIDE) // STRIDE, 0), C),
            seen,
            scale,
            BM,
            BN,
            D,
            DP,
            PRECISION,
        )
        exact = n < WWINDOW
        m = tl.where(exact, m1, m)
        d = tl.where(exact, d1, d)
    tl.store(out + head.to(tl.int64) * Q + r, m + tl.math.log2(tl.where(d > 0, d, 1.0)), mask=r < Q)


@triton.jit
def prefill_scores_kernel(
    q,
    pooled,
    base,
    out,
    reach,
    scale,
    Q,
    C,
    N,
    NG,
    first,
    q_head,
    q_row,
    GH: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    NB: tl.constexpr,
    J: tl.constexpr,
    OV: tl.constexpr,
    R: tl.constexpr,
    STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    OWN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of the NG choices of Q rows (R rows each, the first and last ones perhaps fewer): the best of the pooled keys
    that begin in a block, and the best of those that reach into the next one."""
    kv = tl.program_id(2)
    begin = tl.program_id(1) * BM - first % R
    r = begin + tl.arange(0, BM)
    real_row = (r >= 0) & (r < Q)
    o_n = tl.program_id(0) * NB + tl.arange(0, NB)
    o_d = tl.arange(0, DP)
    real = o_d < D
    n = first + r + 1
    best = tl.full([BM // R, NB], float("-inf"), tl.float32)
    last = best
    # a tile whose first pooled key ends behind the last row is left at once
    if tl.program_id(0) * NB * J * STRIDE + WINDOW <= first + tl.minimum(begin + BM, Q):
        p_row = q + r.to(tl.int64)[:, None] * q_row + o_d[None, :]
        inside = real_row[:, None] & real[None, :]
        if not OWN:
            b_f = tl.load(p_row + kv.to(tl.int64) * q_head, mask=inside, other=0.0)
        for j in range(J):
            c = o_n * J + j
            k = tl.load(
                pooled + (kv.to(tl.int64) * C + c)[:, None] * D + o_d[None, :],
                mask=(c < C)[:, None] & real[None, :],
                other=0.0,
            )
            if OWN:
                value = tl.zeros([BM, NB], tl.float32)
                for g in range(GH):
                    head = (kv * GH + g).to(tl.int64)
                    b_q = tl.load(p_row + head * q_head, mask=inside, other=0.0)
                    b = tl.load(base + head * Q + r, mask=real_row, other=0.0)
                    value += tl.math.exp2(tl.dot(b_q, tl.trans(k), input_precision=PRECISION) * scale - b[:, None])
            else:
                value = tl.dot(b_f, tl.trans(k), input_precision=PRECISION)
            seen = (c < C)[None, :] & ((c * STRIDE + WINDOW)[None, :] <= n[:, None])
            if R > 1:
                value = tl.sum(tl.reshape(tl.where(seen & real_row[:, None], value, 0.0), [BM // R, R, NB]), 1)
                # the last row of a choice sees what any of it sees
                end = tl.minimum(first + begin + (tl.arange(0, BM // R) + 1) * R, first + Q)
                seen = (c < C)[None, :] & ((c * STRIDE + WINDOW)[None, :] <= end[:, None])
            value = tl.where(seen, value, float("-inf"))
            best = tl.maximum(best, value)
            if OV > 0:
                last = tl.where(j >= J - OV, tl.maximum(last, value), last)
    i_g = tl.program_id(1) * (BM // R) + tl.arange(0, BM // R)
    to = (kv.to(tl.int64) * NG + i_g)[:, None] * N + o_n[None, :]
    there = (i_g < NG)[:, None] & (o_n < N)[None, :]
    tl.store(out + to, best, mask=there)
    if OV > 0:
        tl.store(reach + to, last, mask=there)


def precision_of(x: torch.Tensor) -> str:
    """How products of these numbers are made: exactly, where they are float32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _cells(rule: BlockRule) -> dict[str, int]:
    return {"J": rule.cells, "OV": rule.overlap, "STRIDE": rule.stride, "WINDOW": rule.window}


def _windows(rule: BlockRule, wide: torch.Tensor | None) -> dict[str, int]:
    times = 1 if wide is None else COARSE
    return {"STRIDE": rule.stride, "WINDOW": rule.window, "WSTRIDE": rule.stride * times,
            "WWINDOW": NEVER if wide is None else rule.window * times}  # fmt: skip


def scores(
    q: torch.Tensor, pool: PoolLayer, positions: torch.Tensor, *, scale: float | None, lag: int = 0
) -> torch.Tensor:
    """See `kernels.reference.offload.scores`."""
    rule, hkv, n_blocks = pool.rule, pool.kv_heads, pool.host.shape[1]
    batch, heads, dim = q.shape
    rows, room, own = batch * hkv, pool.pooled.shape[1], scale is not None
    group = heads // hkv if own else 1
    padded = triton.next_power_of_2(dim)
    out = torch.empty((rows, n_blocks), dtype=torch.float32, device=q.device)
    top, total = out, out
    shared = {"GH": group, "BM": max(16, triton.next_power_of_2(group)), "D": dim, "DP": padded,
              "PRECISION": precision_of(q)}  # fmt: skip
    exponent = (scale or 1.0) * LOG2E
    if own:
        top, total = torch.empty((2, rows, SPLITS, group), dtype=torch.float32, device=q.device)
        wide = pool.wide
        normaliser_kernel[(SPLITS, rows)](
            q, pool.pooled, pool.pooled if wide is None else wide, positions, top, total, exponent, hkv, room,
            room if wide is None else wide.shape[1], lag, q.stride(0), q.stride(1),
            **shared, **_windows(rule, wide), BN=64, SP=SPLITS, num_warps=4,
        )  # fmt: skip
    blocks = min(BLOCKS, max(16, triton.next_power_of_2(n_blocks)))
    decode_scores_kernel[(triton.cdiv(n_blocks, blocks), rows)](
        q, pool.pooled, positions, top, total, out, exponent, hkv, room, n_blocks, lag, q.stride(0), q.stride(1),
        **shared, **_cells(rule), NB=blocks, SP=SPLITS, OWN=own, num_warps=4,
    )  # fmt: skip
    return out


def prefill_scores(
    q: torch.Tensor, pooled: torch.Tensor, first: int, rule: BlockRule, *, scale: float | None,
    wide: torch.Tensor | None = None, n_blocks: int,
) -> torch.Tensor:  # fmt: skip
    """See `kernels.reference.offload.prefill_scores`."""
    heads, n, dim = q.shape
    hkv, count, _ = pooled.shape
    q, pooled = q if q.stride(2) == 1 else q.contiguous(), pooled.contiguous()
    group, padded = heads // hkv, triton.next_power_of_2(dim)
    choices = rule.n_choices(first, n)
    out = torch.empty((hkv, choices, n_blocks), dtype=torch.float32, device=q.device)
    base = out
    tile = min(TILE, max(16, 2 * rule.together, triton.next_power_of_2(n)))
    shared = {"GH": group, "BM": tile, "D": dim, "DP": padded, "PRECISION": precision_of(q)}
    exponent = (scale or 1.0) * LOG2E
    if scale is not None:
        base = torch.empty((heads, n), dtype=torch.float32, device=q.device)
        none = wide is None or not wide.shape[1]
        far = pooled if wide is None or none else wide.contiguous()
        prefill_normaliser_kernel[(triton.cdiv(n, tile), heads)](
            q, pooled, far, base, exponent, n, count, far.shape[1], first, q.stride(0), q.stride(1),
            **shared, **_windows(rule, None if none else wide), BN=64, num_warps=4,
        )  # fmt: skip
    reach = torch.empty_like(out) if rule.overlap else out
    most = 64 if rule.together == 1 else 128  # blocks of a program; measured on an H200
    blocks = min(most, max(16, triton.next_power_of_2(n_blocks)))
    rows = n + first % rule.together
    prefill_scores_kernel[(triton.cdiv(n_blocks, blocks), triton.cdiv(rows, tile), hkv)](
        q, pooled, base, out, reach, exponent, n, count, n_blocks, choices, first, q.stride(0), q.stride(1),
        **shared, **_cells(rule), NB=blocks, R=rule.together, OWN=scale is not None, num_warps=4,
    )  # fmt: skip
    if rule.overlap:
        torch.maximum(out[:, :, 1:], reach[:, :, :-1], out=out[:, :, 1:])
    return out
