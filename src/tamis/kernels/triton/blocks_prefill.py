"""Attention of a prefill's rows to the blocks that they chose, in plain Triton: sm_80 on, and Triton's interpreter.

Few query heads share a KV head, so a program takes a tile of consecutive tokens with all of them: rows enough for the
tensor cores, which read each key once. It goes over all blocks that one of its tokens chose. A word for each says which
tokens did, and blocks that need a mask (some token did not choose them, or they lie on the diagonal) come first.

Alphabet: D head dim, DP the same padded to a power of two, GH query heads of a KV head, BT tokens of a tile and BM rows
of its products, BN keys of a step, SPLIT steps of a block, R tokens that choose together, N blocks and NP the same
padded, NG choices and NT tiles of the rows, M blocks a list has room for, TQ rows and TK keys.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tamis.kernels.blocks import BlockRule
from tamis.kernels.triton.paged_prefill import LOG2E, MASKED
from tamis.kernels.triton.tiles import add_tile, copyable, key_tile, list_places

MOST_TOKENS = 32  # of a tile: the bits of a word


@triton.jit(do_not_specialize=["N", "NG", "NT", "M", "first"])
def union_kernel(
    chosen, entries, words, count, masked, N, NG, NT, M, first,
    R: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr, NP: tl.constexpr, WORDS: tl.constexpr
):
    i_t = tl.program_id(0)
    kv = tl.program_id(1)
    begin = (first // BT + i_t) * BT
    o_n = tl.arange(0, NP)
    p = chosen + kv.to(tl.int64) * NG * N + o_n
    if WORDS:
        word = tl.zeros([NP], tl.int32)
        full = tl.zeros([1], tl.int32)
        ones = tl.full([1], (1 << R) - 1, tl.int32)
        for u in tl.static_range(BT // R):
            g = begin // R + u - first // R
            there = (g >= 0) & (g < NG)
            bits = tl.where(there, ones << (u * R), 0)
            full |= bits
            mine = tl.load(p + g.to(tl.int64) * N, mask=there & (o_n < N), other=0) != 0
            word |= tl.where(mine, bits, 0)
        taken = word != 0
        near = taken & ((word != full) | (o_n * BLOCK + BLOCK - 1 > begin))
    else:
        g = begin // R - first // R
        taken = tl.load(p + g.to(tl.int64) * N, mask=o_n < N, other=0) != 0
        near = taken & (o_n * BLOCK + BLOCK - 1 > begin)
    at, n, n_near = list_places(near, taken)
    cell = kv * NT + i_t
    to = cell.to(tl.int64) * M + at
    tl.store(entries + to, o_n, mask=taken)
    if WORDS:
        tl.store(words + to, word, mask=taken)
    tl.store(count + cell, n)
    tl.store(masked + cell, n_near)


@triton.jit(do_not_specialize=["first", "TQ", "TK", "NT", "M"])  # sizes of a prompt: one build for all of them
def attend_kernel(
    q, k, v, out, entries, words, count, masked, scale, first, TQ, TK, NT, M,
    q_head, q_row, k_head, k_row, v_head, v_row, o_head, o_row,
    GH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, WORDS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr
):
    # KV heads in order (the keys of one stay in the L2 while they are needed), inside one the late, long tiles first
    pid = tl.program_id(0)
    kv = pid // NT
    i_t = NT - 1 - pid % NT
    cell = kv * NT + i_t
    n = tl.load(count + cell)
    near = tl.load(masked + cell)
    visits = entries + cell.to(tl.int64) * M
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, DP)
    token = o_m // GH
    head = kv * GH + o_m % GH
    position = (first // BT + i_t) * BT + token
    row = position - first
    inside = ((token < BT) & (row >= 0) & (row < TQ))[:, None] & (o_d < D)[None, :]
    # [BM, DP]
    b_q = tl.load(
        q + head.to(tl.int64)[:, None] * q_head + row.to(tl.int64)[:, None] * q_row + o_d[None, :],
        mask=inside, other=0.0
    )
    m = tl.full([BM], MASKED, tl.float32)
    d = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    for i in tl.range(0, n * SPLIT, num_stages=STAGES):
        start = tl.load(visits + i // SPLIT) * (BN * SPLIT) + (i % SPLIT) * BN
        b_k = key_tile(k, kv, start, TK, k_head, k_row, D, DP, BN, TMA)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if i < near * SPLIT:
            seen = o_n[None, :] <= (position - start)[:, None]
            if WORDS:
                word = tl.load(words + cell.to(tl.int64) * M + i // SPLIT)
                seen = seen & (((word >> token) & 1) != 0)[:, None]
            s = tl.where(seen, s, MASKED)
        m, d, acc = add_tile(m, d, acc, s, scale, v, kv, start, TK, v_head, v_row, D, DP, BN, TMA, PRECISION)
    p_o = out + head.to(tl.int64)[:, None] * o_head + row.to(tl.int64)[:, None] * o_row + o_d[None, :]
    tl.store(p_o, (acc / d[:, None]).to(out.dtype.element_ty), mask=inside)


class Cut(NamedTuple):
    """How a launch is cut: tokens of a tile, rows of its products, keys of a step, warps, stages, the copy engine."""

    tokens: int
    rows: int
    keys: int
    warps: int
    stages: int
    tma: bool


def cut_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int) -> Cut:
    """The cut for these tensors; that of head dim 128 is the one of `triton.block_sparse`, measured on an H200."""
    group, dim, wide = q.shape[0] // k.shape[0], q.shape[2], q.element_size() > 2
    most = 128 if dim <= 128 else 64
    tokens = 1
    while tokens < MOST_TOKENS and 2 * tokens * group <= most:
        tokens *= 2
    rows = max(16, triton.next_power_of_2(tokens * group))
    keys = min(64 if dim <= 128 and not wide else 32, block)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Cut(tokens, rows, block, 4, 1, False)
    tma = torch.cuda.get_device_capability(q.device)[0] >= 9 and not wide and all(map(copyable, (k, v)))
    warps = 4 if rows < 128 or (tma and dim <= 128) or dim <= 64 else 8
    return Cut(tokens, rows, keys, warps, 3 if dim <= 64 else 2, tma)


def prefill_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, first: int, rule: BlockRule, *,
    scale: float, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `kernels.reference.offload`; D is contiguous."""
    heads, n_rows, dim = q.shape
    kv_heads, n_groups, n_blocks = chosen.shape
    cut = cut_for(q, k, v, rule.block)
    out = torch.empty_like(q) if out is None else out
    n_tiles = (first + n_rows - 1) // cut.tokens - first // cut.tokens + 1
    per = max(1, cut.tokens // rule.together)  # choices of a tile
    room = min(n_blocks, per * rule.top)
    entries = torch.empty((kv_heads, n_tiles, room), dtype=torch.int32, device=q.device)
    words = torch.empty_like(entries) if per > 1 else entries
    count, masked = (torch.empty((kv_heads, n_tiles), dtype=torch.int32, device=q.device) for _ in range(2))
    padded_blocks = max(16, triton.next_power_of_2(n_blocks))
    union_kernel[(n_tiles, kv_heads)](
        chosen.contiguous().view(torch.uint8), entries, words, count, masked, n_blocks, n_groups, n_tiles, room, first,
        R=rule.together, BT=cut.tokens, BLOCK=rule.block, NP=padded_blocks, WORDS=per > 1,
        num_warps=max(1, min(8, padded_blocks // 256)),
    )  # fmt: skip
    padded = max(16, triton.next_power_of_2(dim))
    keys, values = k, v
    if cut.tma:
        keys, values = (TensorDescriptor.from_tensor(t, [1, cut.keys, padded]) for t in (k, v))
    attend_kernel[(kv_heads * n_tiles,)](
        q, keys, values, out, entries, words, count, masked, scale * LOG2E, first, n_rows, k.shape[1], n_tiles, room,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        GH=heads // kv_heads, D=dim, DP=padded, BT=cut.tokens, BM=cut.rows, BN=cut.keys, SPLIT=rule.block // cut.keys,
        STAGES=cut.stages, WORDS=per > 1, TMA=cut.tma, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return out
