"""How much attention each tile of scores holds, in plain Triton, without a score matrix.

The same numbers as `kernels.reference.tile_statistics`: p = exp(s - lse), reduced where it is made. One block per head
and key tile walks the query tiles that see it, so what a key receives is counted in registers, in a fixed order.

Alphabet: D head dim, DP the same padded to a power of two, BM query rows and BN keys of a tile, NQ and NK their tiles,
TQ and TK tokens, G query heads of a KV head.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(base, i_head, start, n, s_head, s_row, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr):
    """[BM, DP] rows of one head from token `start` on; those past the first `n` and columns past D are zero."""
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, DP)
    p = base + i_head.to(tl.int64) * s_head + (start + o_m).to(tl.int64)[:, None] * s_row + o_d[None, :]
    return tl.load(p, mask=(o_m < n)[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["q_offset", "TQ", "TK", "NQ", "NK"])  # sizes of a prompt: one build for all of them
def kernel(
    q, k, lse, mass, peak, later_high, q_start, q_len, k_start, k_len, first, scale, beta, q_offset, TQ, TK, NQ, NK, G,
    q_head, q_row, k_head, k_row,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, COUNT: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr
):
    # the early key tiles, which most rows see, first; the heads of a group side by side
    pid = tl.program_id(0)
    HQ = tl.num_programs(0) // NK
    j = pid // HQ
    h = pid % HQ
    key = tl.load(k_start + j)
    keys = tl.load(k_len + j)
    # [BN, DP]
    b_k = _rows(k, h // G, key, keys, k_head, k_row, D, DP, BN)
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    high = tl.zeros([BN], tl.int32)
    for i in tl.range(tl.load(first + j), NQ, num_stages=STAGES):
        row = tl.load(q_start + i)
        rows = tl.load(q_len + i)
        b_q = _rows(q, h, row, rows, q_head, q_row, D, DP, BM)
        norm = tl.load(lse + h.to(tl.int64) * TQ + row + o_m, mask=o_m < rows, other=0.0) * LOG2E
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
        position = row + o_m + q_offset
        p = tl.math.exp2(s - norm[:, None])
        if (row + q_offset < key + keys - 1) | (keys < BN) | (rows < BM):
            last = tl.where(o_m < rows, tl.minimum(position - key, keys - 1), -1)
            p = tl.where(o_n[None, :] <= last[:, None], p, 0.0)
        at = (h * NQ + i).to(tl.int64) * NK + j
        most = tl.max(tl.max(p, 1), 0)
        tl.store(mass + at, tl.sum(tl.sum(p, 1), 0) / rows)
        tl.store(peak + at, most)
        if COUNT:  # noqa: SIM102 - one is known when compiling, the other is not
            if most > beta:
                later = (position >= key + keys)[:, None]
                high += tl.sum(((p > beta) & later).to(tl.int32), 0)
    if COUNT:
        tl.store(later_high + h.to(tl.int64) * TK + key + o_n, high, mask=o_n < keys)


def tile_statistics(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    cuts: tuple[torch.Tensor, ...],
    *,
    scale: float,
    tile: int,
    q_offset: int = 0,
    beta: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(mass [Hq, NQ, NK], peak [Hq, NQ, NK], later_high [Hq, TK] int32 or None) of `reference.tile_statistics`.

    q [Hq, TQ, D], k [Hkv, TK, D] in bf16, fp16 or fp32, D contiguous and at most 256; lse float32 [Hq, TQ], contiguous;
    cuts: starts and lengths of the query tiles (as rows of q), then of the key tiles, and for each of
    these the first query tile with a row that sees it (their number where there is none), int32; tile 16 to 128.
    """
    heads, n_rows, dim = q.shape
    q_start, q_len, k_start, k_len, first = cuts
    n_q, n_k = q_start.numel(), k_start.numel()
    mass = torch.zeros((heads, n_q, n_k), dtype=torch.float32, device=q.device)
    peak = torch.zeros_like(mass)
    high = None if beta is None else torch.zeros((heads, k.shape[1]), dtype=torch.int32, device=q.device)
    padded = max(16, triton.next_power_of_2(dim))
    wide = q.element_size() > 2 or padded > 128
    stages = 1 if wide or os.environ.get("TRITON_INTERPRET") == "1" else 2
    kernel[(heads * n_k,)](
        q, k, lse, mass, peak, mass if high is None else high, q_start, q_len, k_start, k_len, first,
        scale * LOG2E.value, 0.0 if beta is None else beta, q_offset, n_rows, k.shape[1], n_q, n_k, heads // k.shape[0],
        q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        dim, padded, tile, tile, high is not None, stages,
        "ieee" if q.dtype == torch.float32 else "tf32", num_warps=8,
    )
    return mass, peak, high
