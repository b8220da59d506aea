"""Block-sparse causal attention in plain Triton: any NVIDIA GPU from sm_80 on, and Triton's interpreter on a CPU.

Keys and values come through the copy engine where there is one (sm_90 on), else through plain pointers.

Alphabet: D head dim, DP the same padded to a power of two, BM query rows and BN keys of a step, SPLIT steps of a
key tile, NQ query tiles, TQ and TK tokens, M entries a list has room for, G query heads of a KV head.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tamis.kernels.lists import TileLists
from tamis.kernels.triton.tiles import add_tile, copyable, key_tile

LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)
# a power of two: its product with `scale` is exact, so a row with nothing visible yet gets exp2(0), never exp2(inf)
MASKED = tl.constexpr(-(2.0**80))


@triton.jit(do_not_specialize=["q_offset", "TQ", "TK", "NQ", "M"])  # sizes of a prompt: one build for all of them
def kernel(
    q, k, v, out, lse, entries, count, n_masked, q_start, q_len, scale, q_offset, TQ, TK, NQ, M, G,
    q_head, q_row, k_head, k_row, v_head, v_row, o_head, o_row,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr
):
    # KV heads in order (the keys of one stay in the L2 while they are needed), inside one the late, long tiles first
    # (so that no long tile is left for the end), the heads of its group side by side
    pid = tl.program_id(0)
    kv = pid // (NQ * G)
    rest = pid % (NQ * G)
    i_q = NQ - 1 - rest // G
    h = kv * G + rest % G
    cell = h * NQ + i_q
    n = tl.load(count + cell)
    near = tl.load(n_masked + cell)
    row = tl.load(q_start + i_q)
    rows = tl.load(q_len + i_q)
    visits = entries + cell.to(tl.int64) * M
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, DP)
    inside = (o_m < rows)[:, None] & (o_d < D)[None, :]
    # [BM, DP]
    b_q = tl.load(
        q + h.to(tl.int64) * q_head + (row + o_m).to(tl.int64)[:, None] * q_row + o_d[None, :], mask=inside, other=0.0
    )
    position = row + o_m + q_offset
    m = tl.full([BM], MASKED, tl.float32)
    d = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    for i in tl.range(0, n * SPLIT, num_stages=STAGES):
        entry = tl.load(visits + i // SPLIT)
        part = (i % SPLIT) * BN
        start = (entry >> 8) + part
        b_k = key_tile(k, kv, start, TK, k_head, k_row, D, DP, BN, TMA)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if i < near * SPLIT:
            last = tl.minimum(position - start, (entry & 255) - part - 1)
            s = tl.where(o_n[None, :] <= last[:, None], s, MASKED)
        m, d, acc = add_tile(m, d, acc, s, scale, v, kv, start, TK, v_head, v_row, D, DP, BN, TMA, PRECISION)
    p_o = out + h.to(tl.int64) * o_head + (row + o_m).to(tl.int64)[:, None] * o_row + o_d[None, :]
    tl.store(p_o, (acc / d[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + h.to(tl.int64) * TQ + row + o_m, (m + tl.math.log2(d)) * LN2, mask=o_m < rows)


class Blocks(NamedTuple):
    """How a launch is cut: keys of a step, warps, pipeline stages, and whether tiles come by the copy engine."""

    keys: int
    warps: int
    stages: int
    tma: bool


def blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: int) -> Blocks:
    """The cut for these tensors; measured on an H200 for head dims 64 and 128, sized to fit elsewhere."""
    dim, wide = q.shape[2], q.element_size() > 2
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Blocks(tile, 4, 1, False)
    tma = torch.cuda.get_device_capability(q.device)[0] >= 9 and not wide and all(map(copyable, (k, v)))
    if dim <= 64:
        keys, warps, stages = 64, 4, 3
    elif dim <= 128:
        keys, warps, stages = (64, 4, 2) if tma else (64, 8, 2)
    else:
        keys, warps, stages = 32, 8, 2
    return Blocks(min(keys // 2 if wide else keys, tile), warps, stages, tma)


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: TileLists,
    scale: float,
    *,
    out: torch.Tensor | None = None,
    cut: Blocks | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query row over the tiles listed for its head and tile, causal inside them.

    q [Hq, Tq, D], k and v [Hkv, Tk, D] in bf16, fp16 or fp32, D contiguous and at most 256, strides as they come;
    lists.tile 16, 32, 64 or 128. `scale` > 0 multiplies the scores. `out` [Hq, Tq, D] is written if given; `cut`
    overrides `blocks`. Returns out and the natural-log log-sum-exp [Hq, Tq] in float32.
    `tamis.kernels.dispatch` checks all of this; here it is taken as given.
    """
    heads, n_rows, dim = q.shape
    padded = max(16, triton.next_power_of_2(dim))
    cut = blocks(q, k, v, lists.tile) if cut is None else cut
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty((heads, n_rows), dtype=torch.float32, device=q.device)
    n_q = lists.q_start.numel()
    keys, values = k, v
    if cut.tma:
        keys, values = (TensorDescriptor.from_tensor(t, [1, cut.keys, padded]) for t in (k, v))
    kernel[(heads * n_q,)](
        q, keys, values, out, lse, lists.entries, lists.count, lists.masked, lists.q_start, lists.q_len,
        scale * LOG2E, lists.q_offset, n_rows, k.shape[1], n_q, lists.entries.shape[-1], heads // k.shape[0],
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        dim, padded, lists.tile, cut.keys, lists.tile // cut.keys, cut.stages, cut.tma,
        "ieee" if q.dtype == torch.float32 else "tf32", num_warps=cut.warps, num_stages=cut.stages,
    )
    return out, lse
