"""What moves in a decode step over blocks in slots, in plain Triton: the new token, the slot map, the copies.

The copy kernel reads pinned host memory through its own address: Triton asks the driver for a tensor's device pointer,
and a pinned tensor has one. Few programs stay on and share the tasks, whose number is read on the device, so that a
graph holds the launch; each has the next piece on its way while it stores the last.

Alphabet: W blocks wanted and S slots of a row, WP and SP the same padded, R rows, N blocks of a host region, INTS words
of 4 bytes of a block, CHUNK words of a piece, PIECES pieces of a block, RING newest keys kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tamis.kernels.block_pool import PoolLayer
from tamis.kernels.blocks import COARSE

PROGRAMS = 8  # of the copy kernel: enough bytes in flight for PCIe 5, and few of a GPU's multiprocessors
WARPS = 8
WORDS = 1024  # of a warp in flight: 8 loads of 16 bytes a thread


@triton.jit
def _pool_mean(ring, key, p, d, real, RING: tl.constexpr, WINDOW: tl.constexpr, WP: tl.constexpr, D: tl.constexpr):
    """Mean [DP] of the last WINDOW keys (WP: padded), of which the newest is `key`."""
    o = tl.arange(0, WP)
    at = (p - o + RING) % RING
    k = tl.load(ring + at[:, None] * D + d[None, :], mask=((o > 0) & (o < WINDOW))[:, None] & real[None, :], other=0.0)
    return (tl.sum(k.to(tl.float32), 0) + key.to(tl.float32)) / WINDOW


@triton.jit
def append_kernel(
    k,
    v,
    positions,
    tail,
    ring,
    pooled,
    wide,
    host,
    region,
    HKV,
    C,
    C2,
    N,
    k_batch,
    k_head,
    v_batch,
    v_head,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    BP: tl.constexpr,
    RING: tl.constexpr,
    STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    WP: tl.constexpr,
    WSTRIDE: tl.constexpr,
    WWINDOW: tl.constexpr,
    WWP: tl.constexpr,
):
    row = tl.program_id(0)
    b = (row // HKV).to(tl.int64)
    h = (row % HKV).to(tl.int64)
    p = tl.load(positions + b).to(tl.int32)
    d = tl.arange(0, DP)
    real = d < D
    key = tl.load(k + b * k_batch + h * k_head + d, mask=real, other=0.0)
    value = tl.load(v + b * v_batch + h * v_head + d, mask=real, other=0.0)
    at = p % BLOCK
    p_tail = tail + row.to(tl.int64) * 2 * BLOCK * D
    p_ring = ring + row.to(tl.int64) * RING * D
    # what was there is read before it is written, and the newest is taken from registers: no barrier is needed
    if (p + 1 >= WINDOW) & ((p + 1 - WINDOW) % STRIDE == 0):
        mean = _pool_mean(p_ring, key, p, d, real, RING, WINDOW, WP, D)
        c = (p + 1 - WINDOW) // STRIDE
        tl.store(pooled + (row.to(tl.int64) * C + c) * D + d, mean.to(key.dtype), mask=real & (c < C))
    if WWINDOW > 0:  # noqa: SIM102 - the first is known when it is compiled
        if (p + 1 >= WWINDOW) & ((p + 1 - WWINDOW) % WSTRIDE == 0):
            mean = _pool_mean(p_ring, key, p, d, real, RING, WWINDOW, WWP, D)
            c = (p + 1 - WWINDOW) // WSTRIDE
            tl.store(wide + (row.to(tl.int64) * C2 + c) * D + d, mean.to(key.dtype), mask=real & (c < C2))
    if at == BLOCK - 1:
        o = tl.arange(0, BP)
        cell = o[:, None] * D + d[None, :]
        old = (o < BLOCK - 1)[:, None] & real[None, :]
        keep = (o < BLOCK)[:, None] & real[None, :]
        keys = tl.where(old, tl.load(p_tail + cell, mask=old, other=0.0), key[None, :])
        values = tl.where(old, tl.load(p_tail + BLOCK * D + cell, mask=old, other=0.0), value[None, :])
        to = host + (tl.load(region + row).to(tl.int64) * N + p // BLOCK) * 2 * BLOCK * D + cell
        tl.store(to, keys, mask=keep)
        tl.store(to + BLOCK * D, values, mask=keep)
    tl.store(p_tail + at * D + d, key, mask=real)
    tl.store(p_tail + (BLOCK + at) * D + d, value, mask=real)
    tl.debug_barrier()  # another thread may still read the ring's place
    tl.store(p_ring + (p % RING) * D + d, key, mask=real)


@triton.jit
def place_kernel(
    wanted,
    held,
    used,
    stamp,
    region,
    place,
    order,
    tasks,
    count,
    W,
    S,
    N,
    WP: tl.constexpr,
    SP: tl.constexpr,
    WB: tl.constexpr,
    SB: tl.constexpr,
):
    """Compares wanted blocks with slots, and slots with slots, WB and SB at once; what threads need of each other goes
    through memory that is theirs."""
    LAST: tl.constexpr = 2147483647
    row = tl.program_id(0)
    w = tl.arange(0, WP)
    s = tl.arange(0, SP)
    p_wanted = wanted + row * W
    p_place = place + row * W
    p_order = order + row * S
    has = tl.load(held + row * S + s, mask=s < S, other=-2)
    when = tl.load(used + row * S + s, mask=s < S, other=LAST)
    kept = tl.zeros([SP], tl.int32)
    for i in tl.range(0, WP, WB, loop_unroll_factor=4):
        some = i + tl.arange(0, WB)
        want = tl.load(p_wanted + some, mask=some < W, other=-1)
        same = (want[:, None] == has[None, :]) & (want >= 0)[:, None]
        kept = tl.maximum(kept, tl.max(same.to(tl.int32), 0))
        tl.store(p_place + some, tl.max(tl.where(same, s[None, :], -1), 1), mask=some < W)
    key = tl.where(kept > 0, LAST, when)
    tl.store(p_order + s, key, mask=s < S)
    tl.debug_barrier()
    # how many slots are given away before each: none is reached that a wanted block lies in
    rank = tl.zeros([SP], tl.int32)
    for i in tl.range(0, SP, SB, loop_unroll_factor=4):
        some = i + tl.arange(0, SB)
        other = tl.load(p_order + some, mask=some < S, other=LAST)
        before = (other[:, None] < key[None, :]) | ((other[:, None] == key[None, :]) & (some[:, None] < s[None, :]))
        rank += tl.sum(before.to(tl.int32), 0)
    hit = tl.load(p_place + w, mask=w < W, other=-1)
    want = tl.load(p_wanted + w, mask=w < W, other=-1)
    now = tl.load(stamp + row) + 1
    tl.debug_barrier()  # all have read before any writes
    tl.store(p_order + rank, s, mask=s < S)
    tl.debug_barrier()
    asked = want >= 0
    missing = asked & (hit < 0)
    turn = tl.cumsum(missing.to(tl.int32), 0) - 1
    slot = tl.where(asked, tl.where(missing, tl.load(p_order + turn, mask=missing, other=0), hit), -1)
    tl.store(stamp + row, now)
    tl.store(p_place + w, slot, mask=w < W)
    tl.store(held + row * S + slot, want, mask=asked)
    tl.store(used + row * S + slot, tl.zeros([WP], tl.int32) + now, mask=asked)
    n = tl.sum(missing.to(tl.int32), 0)
    if n > 0:
        first = tl.atomic_add(count, n)
        to = tasks + (first + turn) * 2
        tl.store(to, tl.load(region + row) * N + want, mask=missing)
        tl.store(to + 1, row * S + slot, mask=missing)


@triton.jit
def copy_kernel(
    host,
    slots,
    tasks,
    count,
    INTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    o = tl.arange(0, CHUNK)
    n = tl.load(count) * PIECES
    t = tl.program_id(0)
    if t < n:
        source = tl.load(tasks + t // PIECES * 2).to(tl.int64)
        target = tl.load(tasks + t // PIECES * 2 + 1).to(tl.int64)
        words = tl.load(host + source * INTS + (t % PIECES) * CHUNK + o, cache_modifier=".cg")
        while t < n:
            later = t + PROGRAMS
            more = later < n
            next_source = tl.load(tasks + later // PIECES * 2, mask=more, other=0).to(tl.int64)
            next_target = tl.load(tasks + later // PIECES * 2 + 1, mask=more, other=0).to(tl.int64)
            p_next = host + next_source * INTS + (later % PIECES) * CHUNK + o
            following = tl.load(p_next, mask=more, other=0, cache_modifier=".cg")
            tl.store(slots + target * INTS + (t % PIECES) * CHUNK + o, words)
            words, target, t = following, next_target, later


def append(pool: PoolLayer, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
    """See `kernels.reference.offload.append`; D contiguous."""
    rule, wide = pool.rule, pool.wide
    rows, dim = pool.tail.shape[0], pool.tail.shape[-1]
    times = 0 if wide is None else COARSE
    append_kernel[(rows,)](
        k, v, positions, pool.tail, pool.ring, pool.pooled, pool.pooled if wide is None else wide, pool.host,
        pool.region, pool.kv_heads, pool.pooled.shape[1], 0 if wide is None else wide.shape[1], pool.host.shape[1],
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        D=dim, DP=triton.next_power_of_2(dim), BLOCK=rule.block, BP=triton.next_power_of_2(rule.block),
        RING=pool.ring.shape[1], STRIDE=rule.stride, WINDOW=rule.window, WSTRIDE=max(1, rule.stride * times),
        WWINDOW=rule.window * times, WP=triton.next_power_of_2(rule.window),
        WWP=triton.next_power_of_2(max(1, rule.window * times)), num_warps=4,
    )  # fmt: skip


def place(pool: PoolLayer, wanted: torch.Tensor) -> None:
    """See `kernels.reference.offload.place`."""
    rows, width = wanted.shape
    slots = pool.held.shape[1]
    padded = max(16, triton.next_power_of_2(slots))
    place_kernel[(rows,)](
        wanted, pool.held, pool.used, pool.stamp, pool.region, pool.place, pool.order, pool.tasks, pool.count, width,
        slots, pool.host.shape[1], WP=max(16, triton.next_power_of_2(width)), SP=padded, WB=16, SB=16,
        num_warps=max(4, min(16, padded // 32)),
    )  # fmt: skip


def fetch(pool: PoolLayer, *, programs: int = PROGRAMS, warps: int = WARPS) -> None:
    """See `kernels.reference.offload.fetch`. programs: that share the copies, each on a multiprocessor at most."""
    host, slots = (t.flatten().view(torch.int32) for t in (pool.host, pool.slots))
    copy_blocks(
        host, slots, pool.tasks, pool.count, pool.host.stride(1) * pool.host.element_size() // 4,
        programs=programs, warps=warps,
    )  # fmt: skip


def copy_blocks(
    host: torch.Tensor,
    slots: torch.Tensor,
    tasks: torch.Tensor,
    count: torch.Tensor,
    words: int,
    *,
    programs: int = PROGRAMS,
    warps: int = WARPS,
    chunk: int | None = None,
) -> None:
    """Copy blocks of `words` int32 from host to slots, flat int32: count [1] of tasks [.., 2] (from, to).

    warps: of a program, each with WORDS in flight, or with its part of `chunk`, a power of two.
    """
    piece = min(chunk or warps * WORDS, words & -words)  # the latter is the largest power of two in a block
    copy_kernel[(programs,)](
        host, slots, tasks, count, INTS=words, CHUNK=piece, PIECES=words // piece, PROGRAMS=programs, num_warps=warps,
    )  # fmt: skip
