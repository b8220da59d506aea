"""Attention of many query rows over pages, for Hopper, in Gluon: `triton.paged_prefill` as warps with roles.

Needs sm_90 and Triton 3.6 (Gluon changes with every minor version): import this module only when it is to run.
One persistent block per multiprocessor. A planner (two warps) claims query tiles and fills a ring of query tiles,
each turned back by the offset of one document and ready before the first key of that document is needed; a producer
(one warp) feeds the pages of all documents back to back with the copy engine; two consumer warpgroups of 64 query
rows multiply. At the border of two documents a consumer only goes on to the next query of the ring, so nothing that
is on its way is waited for, and turning costs no product its turn. The ring has a third place for the border of two
query tiles: the last place of one becomes its result, and behind it are ready the query as it is, for keys of the
request's own, and that of the first document. The planner has few registers, so the copy engine brings the query to
its place, where it is turned in shared memory: loads of global memory would leave it waiting most of the time. The
order of products and softmax is that of `gluon.block_sparse`.

Runs are taken by document: those with the element mask and those without are merged, so that each document's query is
made once. Keys that may not be read are masked in the scores, and their values overwritten with zeros in shared
memory: what lies in a page behind its last key may be NaN.

Alphabet: D head dim, DP the same padded to 64 or 128, RH half the rotary dims, BN keys of a page, ST stages of the K
and V rings (a power of two, LOG its logarithm) and QS of the query ring, HQ query heads, NQ query tiles, M
entries and K runs a list has room for, G query heads of a KV head, NC 1 where each head has lists of its own, else 0.
Words: what the planner tells the consumers of a place of the query ring: [entry of the list that comes first, entries
with the mask, entries without, whether the query tile goes on with another document, first row, rows, head, list]; -1
as the first: the end. A work record is what it tells the producer of a query tile: [entries to visit, runs with the
mask, runs, KV head, list, pages of the first two entries]; none to visit: the end.
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

from tamis.kernels.paged import KeyTiles, PagedLists

LOG2E = 1.4426950408889634
LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
# a power of two: its product with `scale` is exact, so a row with nothing visible yet gets exp2(0), never exp2(inf)
MASKED: gl.constexpr = gl.constexpr(-(2.0**80))
NOTHING: gl.constexpr = gl.constexpr(-(2.0**40))  # a maximum below this is that of a row that saw no key
BEHIND: gl.constexpr = gl.constexpr(2**31 - 1)  # document of a run that is not there: behind all others
HALF: gl.constexpr = gl.constexpr(64)  # query rows of one warpgroup
PART: gl.constexpr = gl.constexpr(16)  # query rows that the planner turns at once in shared memory
FETCHED: gl.constexpr = gl.constexpr(8)  # the same where they come from global memory
FIELDS: gl.constexpr = gl.constexpr(16)  # room in a work record, and words of a place of the query ring
RECORDS: gl.constexpr = gl.constexpr(2)  # work records in flight


@gluon.jit
def _tell(words, s, i: gl.constexpr, value, warps: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    words.index(s * FIELDS + i).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def _word(words, s, i: gl.constexpr, warps: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    return gl.sum(words.index(s * FIELDS + i).load(layout), 0)


@gluon.jit
def _heads(p_run, a, b, near, n_runs):
    """Ends and documents of runs a (masked) and b."""
    end_a = gl.load(p_run + 2 * a, mask=a < near, other=0)
    of_a = gl.load(p_run + 2 * a + 1, mask=a < near, other=BEHIND)
    end_b = gl.load(p_run + 2 * b, mask=b < n_runs, other=0)
    of_b = gl.load(p_run + 2 * b + 1, mask=b < n_runs, other=BEHIND)
    return end_a, of_a, end_b, of_b


@gluon.jit
def _cursor(p_run, near, n_runs):
    """Before the first run: (next masked run, next other run, where each starts, their ends and documents)."""
    start_b = gl.load(p_run + 2 * near - 2, mask=near > 0, other=0)
    end_a, of_a, end_b, of_b = _heads(p_run, 0, near, near, n_runs)
    return near * 0, near, near * 0, start_b, end_a, of_a, end_b, of_b


@gluon.jit
def _take(cursor, p_run, near, n_runs):
    """The next run by document, a masked one before another of the same: first and last entry, cursor."""
    a, b, start_a, start_b, end_a, of_a, end_b, of_b = cursor
    masked = (a < near) & (of_a <= of_b)
    first = gl.where(masked, start_a, start_b)
    last = gl.where(masked, end_a, end_b)
    start_a = gl.where(masked, end_a, start_a)
    start_b = gl.where(masked, start_b, end_b)
    a += masked.to(gl.int32)
    b += 1 - masked.to(gl.int32)
    # used at the next border only
    end_a, of_a, end_b, of_b = _heads(p_run, a, b, near, n_runs)
    return first, last, (a, b, start_a, start_b, end_a, of_a, end_b, of_b)


@gluon.jit
def _group(cursor, p_run, near, n_runs):
    """All of the next document: (first entry, masked entries, other entries, document, 1 if one follows), cursor."""
    a, b, start_a, start_b, end_a, of_a, end_b, of_b = cursor
    of = gl.minimum(of_a, of_b)
    has_a = (of_a == of) & (a < near)
    has_b = (of_b == of) & (b < n_runs)
    at = gl.where(has_a, start_a, start_b)
    n_a = gl.where(has_a, end_a - start_a, 0)
    n_b = gl.where(has_b, end_b - start_b, 0)
    start_a += n_a
    start_b += n_b
    a += has_a.to(gl.int32)
    b += has_b.to(gl.int32)
    end_a, of_a, end_b, of_b = _heads(p_run, a, b, near, n_runs)
    more = ((a < near) | (b < n_runs)).to(gl.int32)
    return (at, n_a, n_b, of, more), (a, b, start_a, start_b, end_a, of_a, end_b, of_b)


@gluon.jit
def _claim(counter, entries, table, runs, lists, sizes, M, K, NC, RH: gl.constexpr):
    """Take the next query tile: KV heads in order (the pages of one stay in the L2 while they are needed), inside one
    the late, long tiles first (so that no long tile is left for the end), the heads of its group side by side."""
    count, run_count, q_start, q_len = lists
    HQ, NQ, G = sizes
    item = gl.atomic_add(counter, 1)
    ok = item < HQ * NQ
    kv = item // (NQ * G)
    rest = item - kv * (NQ * G)
    i_q = NQ - 1 - rest // G
    h = kv * G + rest % G
    cell = h * NC * NQ + i_q
    n = gl.load(count + cell, mask=ok, other=0)
    near = gl.load(run_count + 2 * cell, mask=ok, other=0)
    n_runs = gl.load(run_count + 2 * cell + 1, mask=ok, other=0)
    row = gl.load(q_start + i_q, mask=ok, other=0)
    rows = gl.load(q_len + i_q, mask=ok, other=0)
    # the pages of the first two entries, in the order that the producer takes them in
    visits = entries + cell.to(gl.int64) * M
    first = 0 * n
    second = first + 1
    if RH > 0:
        p_run = runs + cell.to(gl.int64) * (2 * K)
        cursor = _cursor(p_run, near, n_runs)
        first, last, cursor = _take(cursor, p_run, near, n_runs)
        second = first + 1
        if second >= last:
            second, last, cursor = _take(cursor, p_run, near, n_runs)
    page_0 = gl.load(table + 4 * gl.load(visits + first, mask=ok, other=0))
    page_1 = gl.load(table + 4 * gl.load(visits + second, mask=n > 1, other=0))
    # a tile that sees nothing visits one entry and keeps none of its keys
    n = gl.where(ok, gl.maximum(n, 1), 0)
    return n, near, n_runs, row, rows, h, cell, page_0, page_1


@gluon.jit
def _publish(tile, G, work, work_full, work_empty, j):
    n, near, n_runs, _row, _rows, h, cell, page_0, page_1 = tile
    b = j & (RECORDS - 1)
    mbarrier.wait(work_empty.index(b), ((j // RECORDS) & 1) ^ 1)
    _tell(work, b, 0, n, 2)
    _tell(work, b, 1, near, 2)
    _tell(work, b, 2, n_runs, 2)
    _tell(work, b, 3, h // G, 2)
    _tell(work, b, 4, cell, 2)
    _tell(work, b, 5, page_0, 2)
    _tell(work, b, 6, page_1, 2)
    mbarrier.arrive(work_full.index(b), count=1)


@gluon.jit
def _turn(
    q_desc, q, q_head, q_row, q_sm, raw, turned, s, h, row, rows, of, cos, sin,
    D: gl.constexpr, DP: gl.constexpr, RH: gl.constexpr
):
    """Write the rows of a query tile, turned back by the offset of document `of`, to place s of the ring."""
    dt: gl.constexpr = q_sm.dtype
    if RH == 64 and DP == 128:
        # in place, so that no load of the tile waits in registers, of which the planner has few
        mbarrier.expect(raw, 2 * q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [h, row, 0], raw, q_sm.index(2 * s))
        tma.async_copy_global_to_shared(q_desc, [h, row + HALF, 0], raw, q_sm.index(2 * s + 1))
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [2, 1], [1, 0])
        o_h = gl.arange(0, RH, layout=gl.SliceLayout(0, layout))
        c = gl.load(cos + of.to(gl.int64) * RH + o_h)[None, :]
        sn = gl.load(sin + of.to(gl.int64) * RH + o_h)[None, :]
        mbarrier.wait(raw, turned & 1)
        for g in range(2):
            half = q_sm.index(2 * s + g).reshape([HALF, DP])
            for i in gl.static_range(HALF // PART):
                own = half.slice(i * PART, PART, dim=0)
                low = own.slice(0, RH, dim=1)
                high = own.slice(RH, RH, dim=1)
                b_1 = low.load(layout).to(gl.float32)
                b_2 = high.load(layout).to(gl.float32)
                low.store((b_1 * c + b_2 * sn).to(dt))
                high.store((b_2 * c - b_1 * sn).to(dt))
    else:
        wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DP, DP // 8], [2, 1], [1, 0])
        o_d = gl.arange(0, DP, layout=gl.SliceLayout(0, wide))
        w_m = gl.arange(0, FETCHED, layout=gl.SliceLayout(1, wide))
        first = o_d < RH
        turns = o_d < 2 * RH
        away = gl.where(first, RH, gl.where(turns, -RH, 0))
        at = of.to(gl.int64) * RH + gl.where(first, o_d, o_d - RH)
        cw = gl.load(cos + at, mask=turns, other=1.0)
        sw = gl.load(sin + at, mask=turns, other=0.0)
        sw = gl.where(first, sw, -sw)
        for g in range(2):
            half = q_sm.index(2 * s + g).reshape([HALF, DP])
            for i in gl.static_range(HALF // FETCHED):
                r = g * HALF + i * FETCHED + w_m
                p = q + h.to(gl.int64) * q_head + (row + r).to(gl.int64)[:, None] * q_row + o_d[None, :]
                there = (r < rows)[:, None] & (o_d < D)[None, :]
                b_q = gl.load(p, mask=there, other=0.0).to(gl.float32)
                b_p = gl.load(p + away[None, :], mask=there, other=0.0).to(gl.float32)
                half.slice(i * FETCHED, FETCHED, dim=0).store((b_q * cw[None, :] + b_p * sw[None, :]).to(dt))
    fence_async_shared()


@gluon.jit
def _announce(words, q_empty, u, group, tile, QS: gl.constexpr):
    """Wait for place u of the query ring, and write its words."""
    at, n_a, n_b, _of, more = group
    _n, _near, _n_runs, row, rows, h, cell, _page_0, _page_1 = tile
    s = u % QS
    mbarrier.wait(q_empty.index(s), ((u // QS) & 1) ^ 1)
    _tell(words, s, 0, at, 2)
    _tell(words, s, 1, n_a, 2)
    _tell(words, s, 2, n_b, 2)
    _tell(words, s, 3, more, 2)
    _tell(words, s, 4, row, 2)
    _tell(words, s, 5, rows, 2)
    _tell(words, s, 6, h, 2)
    _tell(words, s, 7, cell, 2)
    _tell(words, s, 8, 2 * s, 2)
    return s


@gluon.jit
def _copy_query(q_desc, q_sm, q_full, s, h, row):
    mbarrier.expect(q_full.index(s), 2 * q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [h, row, 0], q_full.index(s), q_sm.index(2 * s))
    tma.async_copy_global_to_shared(q_desc, [h, row + HALF, 0], q_full.index(s), q_sm.index(2 * s + 1))


@gluon.jit
def _planner(
    q_desc, q, q_head, q_row, q_sm, words, work, queue, counter, entries, table, runs, lists, sizes, cos, sin, M, K, NC,
    D: gl.constexpr, DP: gl.constexpr, RH: gl.constexpr, QS: gl.constexpr
):
    q_full, q_empty, raw, work_full, work_empty = queue
    tile = _claim(counter, entries, table, runs, lists, sizes, M, K, NC, RH)
    _publish(tile, sizes[2], work, work_full, work_empty, 0)
    j = 1
    u = 0
    turned = 0
    while tile[0] > 0:
        n, near, n_runs, row, rows, h, cell, _page_0, _page_1 = tile
        p_run = runs + cell.to(gl.int64) * (2 * K)
        cursor = _cursor(p_run, near, n_runs)
        following = tile
        if RH > 0:
            done = n * 0
            more = done + 1
            while more > 0:
                group, cursor = _group(cursor, p_run, near, n_runs)
                more = group[4]
                s = _announce(words, q_empty, u, group, tile, QS)
                if (group[3] >= 0) & (n_runs > 0):
                    _turn(
                        q_desc, q, q_head, q_row, q_sm, raw, turned, s, h, row, rows, group[3], cos, sin, D, DP, RH
                    )
                    turned += 1
                    mbarrier.arrive(q_full.index(s), count=1)
                else:
                    _copy_query(q_desc, q_sm, q_full, s, h, row)
                u += 1
                # not before the first turned query: at the start of a block the consumers would wait for both
                if (done == 1) | ((done == 0) & (more == 0)):
                    following = _claim(counter, entries, table, runs, lists, sizes, M, K, NC, RH)
                    _publish(following, sizes[2], work, work_full, work_empty, j)
                done += 1
        else:
            # all documents are one: entries in the order of the list
            n_a = cursor[3]
            n_b = gl.where(n_runs > 0, n - n_a, 0)
            s = _announce(words, q_empty, u, (n * 0, n_a, n_b, n * 0, n * 0), tile, QS)
            _copy_query(q_desc, q_sm, q_full, s, h, row)
            u += 1
            following = _claim(counter, entries, table, runs, lists, sizes, M, K, NC, RH)
            _publish(following, sizes[2], work, work_full, work_empty, j)
        j += 1
        tile = following
    s = u % QS
    mbarrier.wait(q_empty.index(s), ((u // QS) & 1) ^ 1)
    _tell(words, s, 0, -1, 2)
    mbarrier.arrive(q_full.index(s), count=1)


@gluon.jit
def _feed(k_desc, v_desc, ring, kv, page, t, ST: gl.constexpr, LOG: gl.constexpr):
    """Copy a page, as number `t` of this block, and its values into the rings as soon as there is room."""
    k_sm, v_sm, k_full, k_empty, v_full, v_empty = ring
    s = t & (ST - 1)
    phase = ((t >> LOG) & 1) ^ 1
    mbarrier.wait(k_empty.index(s), phase)
    mbarrier.expect(k_full.index(s), k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [page, kv, 0, 0], k_full.index(s), k_sm.index(s))
    mbarrier.wait(v_empty.index(s), phase)
    mbarrier.expect(v_full.index(s), v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, [page, kv, 0, 0], v_full.index(s), v_sm.index(s))


@gluon.jit
def _producer(
    k_desc, v_desc, work, ring, queue, entries, table, runs, M, K, RH: gl.constexpr, ST: gl.constexpr, LOG: gl.constexpr
):
    work_full, work_empty = queue
    t = 0
    j = 0
    mbarrier.wait(work_full.index(0), 0)
    n = _word(work, 0, 0, 1)
    while n > 0:
        b = j & (RECORDS - 1)
        near = _word(work, b, 1, 1)
        n_runs = _word(work, b, 2, 1)
        kv = _word(work, b, 3, 1)
        cell = _word(work, b, 4, 1)
        page = _word(work, b, 5, 1)
        page_1 = _word(work, b, 6, 1)
        mbarrier.arrive(work_empty.index(b), count=1)
        p_run = runs + cell.to(gl.int64) * (2 * K)
        visits = entries + cell.to(gl.int64) * M
        cursor = _cursor(p_run, near, n_runs)
        _feed(k_desc, v_desc, ring, kv, page, t, ST, LOG)
        page = page_1
        # where a page lies is loaded steps ahead, so that no copy waits for a load: `at` is two entries ahead
        at = n * 0 + 2
        last = n
        if RH > 0:
            at, last, cursor = _take(cursor, p_run, near, n_runs)
            at += 1
            if at >= last:
                at, last, cursor = _take(cursor, p_run, near, n_runs)
            at += 1
            if at >= last:
                at, last, cursor = _take(cursor, p_run, near, n_runs)
        row_next = gl.load(visits + at, mask=n > 2, other=0)
        for i in range(1, n):
            now = page
            page = gl.load(table + 4 * row_next)
            at += 1
            if RH > 0:  # noqa: SIM102 - known to the compiler, the other is not
                if at >= last:
                    at, last, cursor = _take(cursor, p_run, near, n_runs)
            row_next = gl.load(visits + at, mask=i + 2 < n, other=0)
            _feed(k_desc, v_desc, ring, kv, now, t + i, ST, LOG)
        t += n
        j += 1
        b = j & (RECORDS - 1)
        mbarrier.wait(work_full.index(b), (j // RECORDS) & 1)
        n = _word(work, b, 0, 1)


@gluon.jit
def _score(q, k_sm, s, BN: gl.constexpr, DP: gl.constexpr, SCORES: gl.constexpr):
    zero = gl.zeros([HALF, BN], gl.float32, SCORES)
    return warpgroup_mma(q, k_sm.index(s).reshape([BN, DP]).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _soften(s, m, scale):
    """Weights exp2(s - max) of one tile, the new row maxima, and per-thread row sums [HALF, 4] (no shuffles)."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - m_new[:, None])
    return p, m_new, gl.sum(gl.sum(p.reshape([HALF, s.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _hide(s, row, keys, position, table, holes, HOLES: gl.constexpr):
    """Scores of row `row` of the table, MASKED where a query row may not see a key."""
    BN: gl.constexpr = s.shape[1]
    cols = gl.arange(0, BN, layout=gl.SliceLayout(0, s.type.layout))
    last = gl.minimum(position - gl.load(table + 4 * row + 2), keys - 1)
    keep = cols[None, :] <= last[:, None]
    if HOLES:
        keep = keep & (gl.load(holes + row.to(gl.int64) * BN + cols) == 0)[None, :]
    return gl.where(keep, s, MASKED)


@gluon.jit
def _clear(values, row, keys, holes, BN: gl.constexpr, DP: gl.constexpr, HOLES: gl.constexpr):
    """Zeros in the values [BN, DP] of keys that may not be read.

    Both warpgroups do this, each before it reads: the second one writes what is there already.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DP, DP // 8], [4, 1], [1, 0])
    o_n = gl.arange(0, 32, layout=gl.SliceLayout(1, layout))
    for i in gl.static_range(BN // 32):
        part = values.slice(i * 32, 32, dim=0)
        keep = i * 32 + o_n < keys
        if HOLES:
            keep = keep & (gl.load(holes + row.to(gl.int64) * BN + i * 32 + o_n) == 0)
        b_v = part.load(layout)
        part.store(gl.where(keep[:, None], b_v, gl.zeros([32, DP], b_v.dtype, layout)))
    fence_async_shared()


@gluon.jit
def _step(
    q, ring, visit, t, position, scale, table, holes, state, masked: gl.constexpr,
    BN: gl.constexpr, DP: gl.constexpr, ST: gl.constexpr, LOG: gl.constexpr, OUT: gl.constexpr, SCORES: gl.constexpr,
    HOLES: gl.constexpr
):
    """Scores and weights of page `t`, while the values of page `t` - 1 are multiplied with their weights `pb`."""
    k_sm, v_sm, k_full, k_empty, v_full, v_empty = ring
    acc, pb, m, d = state
    sk = t & (ST - 1)
    sv = (t - 1) & (ST - 1)
    mbarrier.wait(k_full.index(sk), (t >> LOG) & 1)
    st = _score(q, k_sm, sk, BN, DP, SCORES)
    mbarrier.wait(v_full.index(sv), ((t - 1) >> LOG) & 1)
    at = warpgroup_mma(pb, v_sm.index(sv).reshape([BN, DP]), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[st])
    mbarrier.arrive(k_empty.index(sk), count=1)
    if masked:
        row = gl.load(visit)
        keys = gl.load(table + 4 * row + 1)
        s = _hide(s, row, keys, position, table, holes, HOLES)
    p, m_new, sums = _soften(s, m, scale)
    alpha = gl.exp2(m - m_new)
    d = d * gl.convert_layout(alpha, gl.SliceLayout(1, d.type.layout), assert_trivial=True)[:, None] + sums
    pn = gl.convert_layout(p.to(q.dtype), pb.type.layout)
    # already passed once; ptxas would move the wait for the product below up to before the softmax, but not past this
    mbarrier.wait(v_full.index(sv), ((t - 1) >> LOG) & 1)
    acc, pb = warpgroup_mma_wait(0, deps=[at, pn])
    mbarrier.arrive(v_empty.index(sv), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
    if masked:  # noqa: SIM102 - known to the compiler, the other is not
        if HOLES or keys < BN:
            mbarrier.wait(v_full.index(sk), (t >> LOG) & 1)
            _clear(v_sm.index(sk).reshape([BN, DP]), row, keys, holes, BN, DP, HOLES)
    return acc, pb, m_new, d


@gluon.jit
def _consumer(
    g: gl.constexpr, o_desc, q_sm, words, ring, queue, out, lse, entries, table, holes, q_position, scale,
    TQ, M, o_head, o_row,
    D: gl.constexpr, DP: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, LOG: gl.constexpr,
    QS: gl.constexpr, HOLES: gl.constexpr
):
    k_sm, v_sm, k_full, k_empty, v_full, v_empty = ring
    q_full, q_empty = queue
    dt: gl.constexpr = q_sm.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DP, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    r_s = g * HALF + gl.arange(0, HALF, layout=ROWS)
    r_o = g * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, OUT))
    t = 0
    u = 0
    mbarrier.wait(q_full.index(0), 0)
    at = _word(words, 0, 0, 4)
    while at >= 0:
        s_q = u % QS
        n_a = _word(words, s_q, 1, 4)
        n_b = _word(words, s_q, 2, 4)
        row = _word(words, s_q, 4, 4)
        visits = entries + _word(words, s_q, 7, 4).to(gl.int64) * M + at
        position = gl.load(q_position + row + r_s, mask=r_s < _word(words, s_q, 5, 4), other=0)
        tile = gl.load(visits)
        keys = gl.load(table + 4 * tile + 1, mask=n_a + n_b > 0, other=0)
        q = q_sm.index(2 * s_q + g).reshape([HALF, DP])
        sk = t & (ST - 1)
        mbarrier.wait(k_full.index(sk), (t >> LOG) & 1)
        st = _score(q, k_sm, sk, BN, DP, SCORES)
        # the tile before this one has left its buffer by now: the planner may have it
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index((u + QS - 1) % QS), count=1, pred=u > 0)
        s = warpgroup_mma_wait(0, deps=[st])
        mbarrier.arrive(k_empty.index(sk), count=1)
        s = _hide(s, tile, keys, position, table, holes, HOLES)
        p, m, d = _soften(s, gl.full([HALF], MASKED, gl.float32, ROWS), scale)
        acc = gl.zeros([HALF, DP], gl.float32, OUT)
        pb = gl.convert_layout(p.to(dt), WEIGHTS)
        if HOLES or keys < BN:
            mbarrier.wait(v_full.index(sk), (t >> LOG) & 1)
            _clear(v_sm.index(sk).reshape([BN, DP]), tile, keys, holes, BN, DP, HOLES)
        at += 1
        n_b = gl.where(n_a > 0, n_b, gl.maximum(n_b - 1, 0))
        n_a = gl.maximum(n_a - 1, 0)
        t += 1
        going = at * 0 + 1
        while going > 0:
            s_q = u % QS
            going = _word(words, s_q, 3, 4)
            visits = entries + _word(words, s_q, 7, 4).to(gl.int64) * M + at
            state = (acc, pb, m, d)
            # two loops: a test inside one costs the pages without the mask 3 % of their speed. Each has the place of
            # the query from another source: what both share, ptxas 12.8 computes on the way into one of them only
            q = q_sm.index(2 * s_q + g).reshape([HALF, DP])
            for i in range(n_a):
                state = _step(
                    q, ring, visits + i, t + i, position, scale, table, holes, state, True,
                    BN, DP, ST, LOG, OUT, SCORES, HOLES
                )
            t += n_a
            q = q_sm.index(_word(words, s_q, 8, 4) + g).reshape([HALF, DP])
            for i in range(n_b):
                state = _step(
                    q, ring, visits, t + i, position, scale, table, holes, state, False,
                    BN, DP, ST, LOG, OUT, SCORES, HOLES
                )
            t += n_b
            acc, pb, m, d = state
            if going > 0:
                mbarrier.arrive(q_empty.index(s_q), count=1)
                u += 1
                s_q = u % QS
                mbarrier.wait(q_full.index(s_q), (u // QS) & 1)
                at = _word(words, s_q, 0, 4)
                n_a = _word(words, s_q, 1, 4)
                n_b = _word(words, s_q, 2, 4)
        s_q = u % QS
        row = _word(words, s_q, 4, 4)
        rows = _word(words, s_q, 5, 4)
        h = _word(words, s_q, 6, 4)
        q = q_sm.index(2 * s_q + g).reshape([HALF, DP])
        sv = (t - 1) & (ST - 1)
        mbarrier.wait(v_full.index(sv), ((t - 1) >> LOG) & 1)
        made = warpgroup_mma(pb, v_sm.index(sv).reshape([BN, DP]), acc, is_async=True)
        total = gl.convert_layout(gl.sum(d, 1), ROWS)
        seen = m > NOTHING
        own = gl.where(seen, (m + gl.log2(total)) * LN2, float("-inf"))
        gl.store(lse + h.to(gl.int64) * TQ + row + r_s, own, mask=r_s < rows)
        acc = warpgroup_mma_wait(0, deps=[made])
        mbarrier.arrive(v_empty.index(sv), count=1)
        share = gl.convert_layout(gl.where(seen, 1.0 / total, 0.0), gl.SliceLayout(1, OUT))[:, None]
        # not a product alone: values of a tile that sees nothing may be NaN
        acc = gl.where(share > 0.0, acc * share, 0.0)
        if rows >= (g + 1) * HALF:
            q.store(acc.to(dt))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [h, row + g * HALF, 0], q_sm.index(2 * s_q + g))
        else:
            # a short tile: the copy engine would write into the rows of the next one
            cols = gl.arange(0, DP, layout=gl.SliceLayout(0, OUT))
            at_row = out + h.to(gl.int64) * o_head + (row + r_o).to(gl.int64) * o_row
            gl.store(at_row[:, None] + cols[None, :], acc.to(dt), mask=(r_o < rows)[:, None] & (cols < D)[None, :])
        u += 1
        s_q = u % QS
        mbarrier.wait(q_full.index(s_q), (u // QS) & 1)
        at = _word(words, s_q, 0, 4)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["TQ", "NQ", "M", "K"])  # sizes of a request: one build for all of them
def kernel(
    q_desc, k_desc, v_desc, o_desc, q, out, lse, entries, count, runs, run_count, q_start, q_len, q_position,
    table, holes, cos, sin, counter, scale, TQ, HQ, NQ, M, K, G, NC, q_head, q_row, o_head, o_row,
    D: gl.constexpr, DP: gl.constexpr, RH: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, LOG: gl.constexpr,
    QS: gl.constexpr, HOLES: gl.constexpr
):
    dt: gl.constexpr = q_desc.dtype
    q_sm = gl.allocate_shared_memory(dt, [2 * QS, 1, HALF, DP], q_desc.layout)
    k_sm = gl.allocate_shared_memory(dt, [ST, 1, 1, BN, DP], k_desc.layout)
    v_sm = gl.allocate_shared_memory(dt, [ST, 1, 1, BN, DP], v_desc.layout)
    words = gl.allocate_shared_memory(gl.int32, [QS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work = gl.allocate_shared_memory(gl.int32, [RECORDS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    raw = gl.allocate_shared_memory(gl.int64, [1, 1], bar)
    work_full = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], bar)
    work_empty = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], bar)
    q_full = gl.allocate_shared_memory(gl.int64, [QS, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [QS, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], bar)
    mbarrier.init(raw.index(0), count=1)
    for i in gl.static_range(RECORDS):
        mbarrier.init(work_full.index(i), count=1)
        mbarrier.init(work_empty.index(i), count=1)
    for i in gl.static_range(QS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(ST):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    ring = (k_sm, v_sm, k_full, k_empty, v_full, v_empty)
    queue = (q_full, q_empty, raw.index(0), work_full, work_empty)
    lists = (count, run_count, q_start, q_len)
    gl.warp_specialize(
        [
            (_consumer, (0, o_desc, q_sm, words, ring, (q_full, q_empty), out, lse, entries, table, holes,
                         q_position, scale, TQ, M, o_head, o_row, D, DP, BN, ST, LOG, QS, HOLES)),
            (_consumer, (1, o_desc, q_sm, words, ring, (q_full, q_empty), out, lse, entries, table, holes,
                         q_position, scale, TQ, M, o_head, o_row, D, DP, BN, ST, LOG, QS, HOLES)),
            (_planner, (q_desc, q, q_head, q_row, q_sm, words, work, queue, counter, entries, table, runs, lists,
                        (HQ, NQ, G), cos, sin, M, K, NC, D, DP, RH, QS)),
            (_producer, (k_desc, v_desc, work, ring, (work_full, work_empty), entries, table, runs, M, K, RH, ST, LOG)),
        ],
        [4, 2, 1],
        [232, 40, 40],
    )


@functools.cache
def tile_layout(rank: int) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory, for a descriptor of `rank` dims."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def constants_of(dim: int, page: int, rotary_dims: int, holes: bool) -> dict[str, int]:
    """What a build is for, in the order of the kernel's parameters: rings as long as shared memory has room for."""
    padded = 64 if dim <= 64 else 128
    stages, places = 2 * (128 // padded) * (128 // page), 3 * (128 // padded)
    return {
        "D": dim, "DP": padded, "RH": rotary_dims // 2, "BN": page, "ST": stages, "LOG": stages.bit_length() - 1,
        "QS": places, "HOLES": holes,
    }


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: KeyTiles,
    lists: PagedLists,
    *,
    scale: float,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tamis.kernels.reference.paged.paged_attention`; bf16 or fp16 on one Hopper GPU, no ALiBi.

    D a multiple of 8 and at most 128, D contiguous and all else as strided as it likes in steps of 16 bytes; pages of
    64 or 128 keys, one or more tiles; query tiles of at most 128 rows. `out` [Hq, Tq, D] is written if given.
    `tamis.kernels.paged_dispatch` checks all of this; here it is taken as given.
    """
    heads, n_rows, dim = q.shape
    kv_heads, page = keys.shape[1:3]
    constants = constants_of(dim, page, tiles.rotary_dims, tiles.holes is not None)
    padded = constants["DP"]
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty((heads, n_rows), dtype=torch.float32, device=q.device)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    alone = lists.entries  # stands for tensors that are not there
    cos, sin, holes = (alone if t is None else t for t in (tiles.cos, tiles.sin, tiles.holes))
    half, whole = [1, HALF.value, padded], [1, 1, page, padded]
    n_q = lists.q_start.numel()
    with torch.cuda.device(q.device):
        kernel[(min(_multiprocessors(q.device), heads * n_q),)](
            TensorDescriptor.from_tensor(q, half, tile_layout(3)),
            TensorDescriptor.from_tensor(keys, whole, tile_layout(4)),
            TensorDescriptor.from_tensor(values, whole, tile_layout(4)),
            TensorDescriptor.from_tensor(out, half, tile_layout(3)),
            q, out, lse, lists.entries, lists.count, lists.runs, lists.run_count, lists.q_start, lists.q_len,
            lists.q_position, tiles.table, holes, cos, sin, counter, scale * LOG2E, n_rows, heads, n_q,
            lists.entries.shape[-1], lists.runs.shape[2], heads // kv_heads, int(lists.count.shape[0] > 1),
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), *constants.values(), num_warps=4,
        )
    return out, lse
