"""Block-sparse causal attention for Hopper, in Gluon.

Needs sm_90 and Triton 3.6 (Gluon changes with every minor version): import this module only when it is to run.
One persistent block per multiprocessor with a producer warp, which feeds tiles to shared memory with the copy
engine, and two consumer warpgroups of 64 query rows each. As in FlashAttention-3 (Shah et al., 2024) the scores of
one tile are multiplied before the values of the tile before it, so that the softmax always has company.

Alphabet: D head dim, DP the same padded to 64 or 128, BN keys of a tile, ST stages of the K and V rings (a power of
two, LOG its logarithm), HQ query heads, NQ query tiles, M entries a list has room for, G query heads of a KV head.
A work record is the query tile that a block is at: [entries to visit, masked ones, first row, rows, head, list].
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tamis.kernels.lists import TileLists

LOG2E = 1.4426950408889634
LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
# a power of two: its product with `scale` is exact, so a row with nothing visible yet gets exp2(0), never exp2(inf)
MASKED: gl.constexpr = gl.constexpr(-(2.0**80))
BN: gl.constexpr = gl.constexpr(128)
HALF: gl.constexpr = gl.constexpr(64)  # query rows of one warpgroup
FIELDS: gl.constexpr = gl.constexpr(8)  # room in a work record
SCORES: gl.constexpr = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
)
ROWS: gl.constexpr = gl.constexpr(gl.SliceLayout(1, SCORES.value))


@gluon.jit
def _claim(counter, lists, sizes):
    """Take the next query tile: KV heads in order (the keys of one stay in the L2 while they are needed), inside one
    the late, long tiles first (so that no long tile is left for the end), the heads of its group side by side."""
    count, n_masked, q_start, q_len = lists
    HQ, NQ, G = sizes
    item = gl.atomic_add(counter, 1)
    ok = item < HQ * NQ
    kv = item // (NQ * G)
    rest = item - kv * (NQ * G)
    i_q = NQ - 1 - rest // G
    h = kv * G + rest % G
    cell = h * NQ + i_q
    n = gl.load(count + cell, mask=ok, other=0)
    near = gl.load(n_masked + cell, mask=ok, other=0)
    row = gl.load(q_start + i_q, mask=ok, other=0)
    rows = gl.load(q_len + i_q, mask=ok, other=0)
    return n, near, row, rows, h, cell, kv


@gluon.jit
def _feed(k_desc, v_desc, ring, kv, entry, t, ST: gl.constexpr, LOG: gl.constexpr):
    """Copy key tile number `t` of this block and its values into the rings as soon as there is room."""
    k_sm, v_sm, k_full, k_empty, v_full, v_empty = ring
    s = t & (ST - 1)
    phase = ((t >> LOG) & 1) ^ 1
    start = entry >> 8
    mbarrier.wait(k_empty.index(s), phase)
    mbarrier.expect(k_full.index(s), k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [kv, start, 0], k_full.index(s), k_sm.index(s))
    mbarrier.wait(v_empty.index(s), phase)
    mbarrier.expect(v_full.index(s), v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, [kv, start, 0], v_full.index(s), v_sm.index(s))


@gluon.jit
def _producer(
    descs, q_sm, work, ring, q_full, q_empty, counter, entries, lists, sizes, M, ST: gl.constexpr, LOG: gl.constexpr
):
    q_desc, k_desc, v_desc = descs
    record_l: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    field = gl.arange(0, FIELDS, layout=record_l)
    n, near, row, rows, h, cell, kv = _claim(counter, lists, sizes)
    t = 0
    j = 0
    while n > 0:
        b = j & 1
        mbarrier.wait(q_empty.index(b), ((j >> 1) & 1) ^ 1)
        record = gl.where(field == 0, n, gl.where(field == 1, near, gl.where(field == 2, row, rows)))
        record = gl.where(field == 4, h, gl.where(field == 5, cell, record))
        work.index(b).store(record)
        mbarrier.expect(q_full.index(b), 2 * q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [h, row, 0], q_full.index(b), q_sm.index(2 * b))
        tma.async_copy_global_to_shared(q_desc, [h, row + HALF, 0], q_full.index(b), q_sm.index(2 * b + 1))
        visits = entries + cell.to(gl.int64) * M
        _feed(k_desc, v_desc, ring, kv, gl.load(visits), t, ST, LOG)
        left = n - 1
        kv_now = kv
        now = gl.load(visits + 1, mask=left > 0, other=0)
        # fetched a whole list ahead of its use
        n, near, row, rows, h, cell, kv = _claim(counter, lists, sizes)
        for i in range(left):
            following = gl.load(visits + i + 2, mask=i + 1 < left, other=0)
            _feed(k_desc, v_desc, ring, kv_now, now, t + 1 + i, ST, LOG)
            now = following
        t += left + 1
        j += 1
    b = j & 1
    mbarrier.wait(q_empty.index(b), ((j >> 1) & 1) ^ 1)
    work.index(b).store(gl.zeros([FIELDS], gl.int32, record_l))
    mbarrier.arrive(q_full.index(b), count=1)


@gluon.jit
def _field(record, i: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, FIELDS, layout=record.type.layout) == i, record, 0), 0)


@gluon.jit
def _score(q, k_sm, s, DP: gl.constexpr):
    zero = gl.zeros([HALF, BN], gl.float32, SCORES)
    return warpgroup_mma(q, k_sm.index(s).reshape([BN, DP]).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _soften(s, m, scale, entry, position, masked: gl.constexpr):
    """Weights exp2(s - max) of one tile, the new row maxima, and per-thread row sums [HALF, 4] (no shuffles)."""
    if masked:
        cols = (entry >> 8) + gl.arange(0, BN, layout=gl.SliceLayout(0, SCORES))
        last = gl.minimum(position, (entry >> 8) + (entry & 255) - 1)
        s = gl.where(cols[None, :] <= last[:, None], s, MASKED)
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - m_new[:, None])
    return p, m_new, gl.sum(gl.sum(p.reshape([HALF, BN // 8, 4, 2]), 3), 1)


@gluon.jit
def _step(
    q, ring, entry, t, position, scale, state, masked: gl.constexpr,
    DP: gl.constexpr, ST: gl.constexpr, LOG: gl.constexpr, OUT: gl.constexpr
):
    """Scores and weights of tile `t`, while the values of tile `t` - 1 are multiplied with their weights `pb`."""
    k_sm, v_sm, k_full, k_empty, v_full, v_empty = ring
    acc, pb, m, d = state
    sk = t & (ST - 1)
    sv = (t - 1) & (ST - 1)
    mbarrier.wait(k_full.index(sk), (t >> LOG) & 1)
    st = _score(q, k_sm, sk, DP)
    mbarrier.wait(v_full.index(sv), ((t - 1) >> LOG) & 1)
    at = warpgroup_mma(pb, v_sm.index(sv).reshape([BN, DP]), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[st])
    mbarrier.arrive(k_empty.index(sk), count=1)
    p, m_new, sums = _soften(s, m, scale, entry, position, masked)
    alpha = gl.exp2(m - m_new)
    d = d * gl.convert_layout(alpha, gl.SliceLayout(1, d.type.layout), assert_trivial=True)[:, None] + sums
    pn = gl.convert_layout(p.to(q.dtype), pb.type.layout)
    # already passed once; ptxas would move the wait for the product below up to before the softmax, but not past this
    mbarrier.wait(v_full.index(sv), ((t - 1) >> LOG) & 1)
    acc, pb = warpgroup_mma_wait(0, deps=[at, pn])
    mbarrier.arrive(v_empty.index(sv), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
    return acc, pb, m_new, d


@gluon.jit
def _consumer(
    g: gl.constexpr, o_desc, q_sm, work, ring, q_full, q_empty, out, lse, entries, scale, q_offset, TQ, M,
    o_head, o_row,
    D: gl.constexpr, DP: gl.constexpr, ST: gl.constexpr, LOG: gl.constexpr
):
    k_sm, v_sm, k_full, k_empty, v_full, v_empty = ring
    dt: gl.constexpr = q_sm.dtype
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DP, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    record_l: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    r_s = g * HALF + gl.arange(0, HALF, layout=ROWS)
    r_o = g * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, OUT))
    t = 0
    j = 0
    mbarrier.wait(q_full.index(0), 0)
    record = work.index(0).load(record_l)
    n = _field(record, 0)
    while n > 0:
        b = j & 1
        near = gl.maximum(_field(record, 1), 1)
        row = _field(record, 2)
        rows = _field(record, 3)
        h = _field(record, 4)
        cell = _field(record, 5)
        visits = entries + cell.to(gl.int64) * M
        q = q_sm.index(2 * b + g).reshape([HALF, DP])
        position = row + q_offset + r_s
        entry = gl.load(visits)
        sk = t & (ST - 1)
        mbarrier.wait(k_full.index(sk), (t >> LOG) & 1)
        st = _score(q, k_sm, sk, DP)
        # the tile before this one has left its buffer by now: the producer may have it
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(b ^ 1), count=1, pred=j > 0)
        s = warpgroup_mma_wait(0, deps=[st])
        mbarrier.arrive(k_empty.index(sk), count=1)
        p, m, d = _soften(s, gl.full([HALF], MASKED, gl.float32, ROWS), scale, entry, position, True)
        state = (gl.zeros([HALF, DP], gl.float32, OUT), gl.convert_layout(p.to(dt), WEIGHTS), m, d)
        # two loops: a test inside one costs the tiles below the diagonal 3 % of their speed. The product above must
        # stay in front of both: ptxas 12.8 otherwise computes the address of q for one of them only
        for i in range(1, near):
            state = _step(
                q, ring, gl.load(visits + i), t + i, position, scale, state, True, DP, ST, LOG, OUT
            )
        for i in range(near, n):
            state = _step(q, ring, 0, t + i, position, scale, state, False, DP, ST, LOG, OUT)
        acc, pb, m, d = state
        t += n
        sv = (t - 1) & (ST - 1)
        mbarrier.wait(v_full.index(sv), ((t - 1) >> LOG) & 1)
        at = warpgroup_mma(pb, v_sm.index(sv).reshape([BN, DP]), acc, is_async=True)
        total = gl.convert_layout(gl.sum(d, 1), ROWS)
        gl.store(lse + h.to(gl.int64) * TQ + row + r_s, (m + gl.log2(total)) * LN2, mask=r_s < rows)
        acc = warpgroup_mma_wait(0, deps=[at])
        mbarrier.arrive(v_empty.index(sv), count=1)
        acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUT))[:, None]
        if rows >= (g + 1) * HALF:
            q.store(acc.to(dt))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [h, row + g * HALF, 0], q_sm.index(2 * b + g))
        else:
            # a short tile: the copy engine would write into the rows of the next one
            cols = gl.arange(0, DP, layout=gl.SliceLayout(0, OUT))
            at_row = out + h.to(gl.int64) * o_head + (row + r_o).to(gl.int64) * o_row
            gl.store(at_row[:, None] + cols[None, :], acc.to(dt), mask=(r_o < rows)[:, None] & (cols < D)[None, :])
        j += 1
        mbarrier.wait(q_full.index(j & 1), (j >> 1) & 1)
        record = work.index(j & 1).load(record_l)
        n = _field(record, 0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["q_offset", "TQ", "NQ", "M"])  # sizes of a prompt: one build for all of them
def kernel(
    q_desc, k_desc, v_desc, o_desc, out, lse, entries, count, n_masked, q_start, q_len, counter,
    scale, q_offset, TQ, HQ, NQ, M, G, o_head, o_row,
    D: gl.constexpr, DP: gl.constexpr, ST: gl.constexpr, LOG: gl.constexpr
):
    dt: gl.constexpr = q_desc.dtype
    q_sm = gl.allocate_shared_memory(dt, [4, 1, HALF, DP], q_desc.layout)
    k_sm = gl.allocate_shared_memory(dt, [ST, 1, BN, DP], k_desc.layout)
    v_sm = gl.allocate_shared_memory(dt, [ST, 1, BN, DP], v_desc.layout)
    work = gl.allocate_shared_memory(gl.int32, [2, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(ST):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    ring = (k_sm, v_sm, k_full, k_empty, v_full, v_empty)
    lists = (count, n_masked, q_start, q_len)
    gl.warp_specialize(
        [
            (_consumer, (0, o_desc, q_sm, work, ring, q_full, q_empty, out, lse, entries, scale, q_offset, TQ, M,
                         o_head, o_row, D, DP, ST, LOG)),
            (_consumer, (1, o_desc, q_sm, work, ring, q_full, q_empty, out, lse, entries, scale, q_offset, TQ, M,
                         o_head, o_row, D, DP, ST, LOG)),
            (_producer, ((q_desc, k_desc, v_desc), q_sm, work, ring, q_full, q_empty, counter, entries, lists,
                         (HQ, NQ, G), M, ST, LOG)),
        ],
        [4, 1],
        [232, 40],
    )


@functools.cache
def _tile_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: TileLists,
    scale: float,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query row over the tiles listed for its head and tile, causal inside them.

    q [Hq, Tq, D], k and v [Hkv, Tk, D] in bf16 or fp16 on one Hopper GPU, D a multiple of 8 and at most 128, D
    contiguous and all else as strided as it likes in steps of 16 bytes; lists.tile 128. `scale` > 0 multiplies the
    scores. `out` [Hq, Tq, D] is written if given. Returns out and the natural-log log-sum-exp [Hq, Tq] in float32.
    `tamis.kernels.dispatch` checks all of this; here it is taken as given.
    """
    heads, n_rows, dim = q.shape
    padded = 64 if dim <= 64 else 128
    stages = 4 if padded == 64 else 2
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty((heads, n_rows), dtype=torch.float32, device=q.device)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    layout = _tile_layout()
    half, whole = [1, HALF.value, padded], [1, BN.value, padded]
    grid = (min(_multiprocessors(q.device), lists.count.numel()),)
    with torch.cuda.device(q.device):
        kernel[grid](
            TensorDescriptor.from_tensor(q, half, layout),
            TensorDescriptor.from_tensor(k, whole, layout),
            TensorDescriptor.from_tensor(v, whole, layout),
            TensorDescriptor.from_tensor(out, half, layout),
            out, lse, lists.entries, lists.count, lists.masked, lists.q_start, lists.q_len, counter,
            scale * LOG2E, lists.q_offset, n_rows, heads, lists.q_start.numel(), lists.entries.shape[-1],
            heads // k.shape[0], out.stride(0), out.stride(1),
            dim, padded, stages, stages.bit_length() - 1, num_warps=4,
        )
    return out, lse
