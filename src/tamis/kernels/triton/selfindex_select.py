"""Exactly the `count` highest keys of every row, in order of position, in plain Triton: two launches for all rows.

The scores' pass has left counters of the keys' high parts. `refine_kernel` counts the low parts of those keys whose
high part is the bar's; `compact_kernel` knows the bar from both, counts what its own chunk has above it and on it, and
waits for the counts of the chunks before it (not for their work: a count depends on nothing but the keys, and programs
start in order, so none can wait for ever). Of keys on the bar the earlier slots are taken.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tamis.kernels.triton.selfindex_score import HIGHS, KEY_LOW, LOWS

THERE = tl.constexpr(1 << 30)  # set in a chunk's count; below it 15 bits of keys on the bar, 15 of keys above


@triton.jit
def _bar(counters, need, SIZE: tl.constexpr):
    """The highest counter with `need` keys in it and above (-1 if there are not so many), and how many of its own."""
    o_b = tl.arange(0, SIZE)
    n = tl.load(counters + o_b)
    upward = tl.cumsum(n, 0, reverse=True)
    at = tl.max(tl.where(upward >= need, o_b, -1), 0)
    return at, need - tl.sum(tl.where(o_b > at, n, 0), 0)


@triton.jit
def refine_kernel(keys, tally, slots, count, HKV, N, TALLY, BN: tl.constexpr):
    row = tl.program_id(1)
    begin = tl.program_id(0) * BN
    used = tl.load(slots + row // HKV)
    if begin < used:
        high, _ = _bar(tally + row * TALLY, tl.load(count + row // HKV), HIGHS)
        if high > 0:
            i = begin + tl.arange(0, BN)
            key = tl.load(keys + row.to(tl.int64) * N + i, mask=i < used, other=0).to(tl.int32) & 0xFFFF
            tl.atomic_add(tally + row * TALLY + HIGHS + key % LOWS, 1, mask=key // LOWS == high, sem="relaxed")


@triton.jit
def compact_kernel(
    keys, tally, slots, count, chosen, n_chosen, HKV, N, TALLY, MOST, BN: tl.constexpr, CP: tl.constexpr
):
    c = tl.program_id(0)
    row = tl.program_id(1)
    p_tally = tally + row * TALLY
    used = tl.load(slots + row // HKV)
    need = tl.minimum(tl.load(count + row // HKV), MOST)
    high, left = _bar(p_tally, need, HIGHS)
    bar = KEY_LOW - 1
    ties = 0
    if high > 0:
        low, left = _bar(p_tally + HIGHS, left, LOWS)
        bar = high * LOWS + low
        ties = left
    if c == 0:
        o_b = tl.arange(0, HIGHS)
        tl.store(n_chosen + row, tl.minimum(need, tl.sum(tl.load(p_tally + o_b), 0)))
    if c * BN < used:
        i = c * BN + tl.arange(0, BN)
        key = tl.load(keys + row.to(tl.int64) * N + i, mask=i < used, other=0).to(tl.int32) & 0xFFFF
        over = (key > bar).to(tl.int32)
        on = (key == bar).to(tl.int32)
        upto = tl.cumsum(over + (on << 15), 0)
        tl.atomic_xchg(p_tally + HIGHS + LOWS + c, tl.sum(over + (on << 15), 0) | THERE)
        o_c = tl.arange(0, CP)
        before = tl.full([CP], 0, tl.int32)
        waiting = 1
        while waiting == 1:
            before = tl.load(p_tally + HIGHS + LOWS + o_c, mask=o_c < c, other=THERE, volatile=True)
            waiting = 1 - tl.min((before >> 30) & 1, 0)
        above = tl.sum(before & 0x7FFF, 0) + (upto & 0x7FFF) - over
        equal = tl.sum((before >> 15) & 0x7FFF, 0) + (upto >> 15) - on
        take = (over == 1) | ((on == 1) & (equal < ties))
        to = above + tl.minimum(equal, ties)
        tl.store(chosen + row.to(tl.int64) * MOST + to, i, mask=take & (to < MOST))
