"""How much a few sampled rows of each query tile attend to every key tile, in plain Triton.

One product of packed rows with all keys before them, reduced tile by tile to a log-sum: no score leaves the chip.
Knows rows, tiles and tokens, not documents.

Alphabet: D head dim, DP the same padded to a power of two, BM packed rows of a block, BN keys of a tile, S sampled rows
of a query tile, G query heads of a KV head, NS sampled query tiles, NB blocks of rows and NC chunks of
key tiles a KV head, CHUNK key tiles of a chunk, TK tokens.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tamis.kernels.selection import Places
from tamis.kernels.triton.tiles import copyable, key_tile

LOG2E = 1.4426950408889634
# a power of two: its product with `scale` is exact, so a row that sees nothing of a tile gets exp2(0), never exp2(inf)
MASKED = tl.constexpr(-(2.0**80))
NOTHING = tl.constexpr(-60000.0)  # stands for log2(0), and fits float16


@triton.jit
def _log_sum(b_q, b_k, position, entry, near, scale, BN: tl.constexpr, PRECISION: tl.constexpr):
    """[BM] log2 of the sum of exp2(score) over the keys of one tile that each row sees."""
    s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if near | ((entry & 255) < BN):
        last = tl.minimum(position - (entry >> 8), (entry & 255) - 1)
        s = tl.where(tl.arange(0, BN)[None, :] <= last[:, None], s, MASKED)
    m = tl.max(s, 1) * scale
    return m + tl.math.log2(tl.sum(tl.math.exp2(s * scale - m[:, None]), 1))


# sizes of a prompt: one build for all of them
@triton.jit(do_not_specialize=["q_offset", "TK", "NS", "NB", "NC"])
def kernel(
    q, k, out, tiles, rows, entries, scale, q_offset, TK, stride, NS, NB, NC, G, q_head, q_row, k_head, k_row,
    S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr
):
    # KV heads in order (the keys of one stay in the L2 while they are needed), inside one the late, long rows first
    pid = tl.program_id(0)
    kv = pid // (NB * NC)
    i_b = NB - 1 - pid % (NB * NC) // NC
    first = pid % NC * CHUNK
    # rows are packed as [sampled query tile, head of the group, sample]
    r = i_b * BM + tl.arange(0, BM)
    inside = r < NS * G * S
    t = r // (G * S)
    h = kv * G + r // S % G
    near = tl.load(tiles + i_b * BM // (G * S))
    last = tl.load(tiles + tl.minimum((i_b * BM + BM - 1) // (G * S), NS - 1))
    stop = tl.minimum(first + CHUNK, last + 1)
    if first < stop:
        position = tl.load(rows + t * S + r % S, mask=inside, other=0)
        o_d = tl.arange(0, DP)
        # [BM, DP]
        b_q = tl.load(
            q + h.to(tl.int64)[:, None] * q_head + (position - q_offset).to(tl.int64)[:, None] * q_row + o_d[None, :],
            mask=inside[:, None] & (o_d < D)[None, :], other=0.0
        )
        p_out = out + ((h * NS + t).to(tl.int64) * S + r % S) * stride
        # relative to the first key tile, where the attention sink is: near 0 a float16 is exact enough
        entry = tl.load(entries)
        base = _log_sum(
            b_q, key_tile(k, kv, entry >> 8, TK, k_head, k_row, D, DP, BN, TMA), position, entry, near == 0, scale,
            BN, PRECISION
        )
        for j in tl.range(first, stop, num_stages=STAGES):
            entry = tl.load(entries + j)
            b_k = key_tile(k, kv, entry >> 8, TK, k_head, k_row, D, DP, BN, TMA)
            l = _log_sum(b_q, b_k, position, entry, j >= near, scale, BN, PRECISION)
            tl.store(p_out + j, tl.maximum(l - base, NOTHING).to(out.dtype.element_ty), mask=inside)


class Cut(NamedTuple):
    """How a launch is cut: packed rows of a block, key tiles of a chunk, warps, pipeline stages, the copy engine."""

    rows: int
    chunk: int
    warps: int
    stages: int
    tma: bool


def cut_for(q: torch.Tensor, k: torch.Tensor) -> Cut:
    """The cut for these tensors; measured on an H200 for head dim 128."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Cut(16, 2, 4, 1, False)
    wide = q.element_size() > 2 or q.shape[2] > 128
    hopper = torch.cuda.get_device_capability(q.device)[0] >= 9
    return Cut(64, 32, 4, 1, False) if wide else Cut(128, 64, 8, 2, hopper and copyable(k))


def tile_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    tiles: torch.Tensor,
    rows: torch.Tensor,
    places: Places,
    *,
    scale: float,
    dtype: torch.dtype = torch.float16,
    cut: Cut | None = None,
) -> torch.Tensor:
    """Log-sums [Hq, NS, S, NK] of the scores between sampled rows and the key tiles that they see.

    q [Hq, C, D] and k [Hkv, T, D], D contiguous, in bf16, fp16, fp32 or one float8 kind (`scale` then includes what
    undoes their scaling); q's rows are the last C = T - places.q_offset tokens. tiles int32 [NS], increasing: the query
    tiles that are sampled, counted as key tiles; rows int32 [NS, S]: token positions in the prompt, each inside its
    tile; places: the NK key tiles, cut like the query tiles. Element [h, t, i, j] is log2
    of the sum over tile j's keys of exp(scale * score) of head h's row rows[t, i], less the same of tile 0, in `dtype`;
    -60000 or less stands for "sees nothing of it". Elements with j > tiles[t] are not to be read. Tiles of 16, 32, 64
    or 128 tokens; NS > 0.
    """
    heads, _, dim = q.shape
    group = heads // k.shape[0]
    n_sampled, samples = rows.shape
    n_keys, tile = places.entry.numel(), places.tile
    cut = cut_for(q, k) if cut is None else cut
    padded = max(16, triton.next_power_of_2(dim))
    # rows start at multiples of 16 elements, so that they are read 16 bytes at a time
    room = triton.cdiv(n_keys, 16) * 16
    out = torch.empty((heads, n_sampled, samples, room), dtype=dtype, device=q.device)
    blocks = triton.cdiv(n_sampled * group * samples, cut.rows)
    chunks = triton.cdiv(n_keys, cut.chunk)
    keys = TensorDescriptor.from_tensor(k, [1, tile, padded]) if cut.tma else k
    kernel[(k.shape[0] * blocks * chunks,)](
        q, keys, out, tiles, rows, places.entry, scale * LOG2E, places.q_offset, k.shape[1], room,
        n_sampled, blocks, chunks, group,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        samples, dim, padded, cut.rows, tile, cut.chunk, cut.stages, cut.tma,
        "ieee" if q.dtype == torch.float32 else "tf32", num_warps=cut.warps, num_stages=cut.stages,
    )
    return out[..., :n_keys]
