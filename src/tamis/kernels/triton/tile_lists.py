"""Tile lists made on the device, in plain Triton: one launch a layer, nothing read back.

Joins what every prompt has (which tile is whose), what documents bring (stored bits) and what sampled rows saw.

Alphabet: N key tiles, NQ query tiles (the last of them), NP key tiles padded to a power of two, NS sampled query
tiles, S sampled rows of a tile, U of them at a time, T tokens of a whole tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tamis.kernels.selection import BAR_TILES as ROW_TILES
from tamis.kernels.selection import Bars, Bits, Choice, Places
from tamis.kernels.triton.tiles import list_places

ALL = tl.constexpr(Choice.ALL)
STORED = tl.constexpr(Choice.STORED)
SAMPLED = tl.constexpr(Choice.SAMPLED)
BAR_TILES = tl.constexpr(float(ROW_TILES))
NOTHING = tl.constexpr(-60000.0)
NO_BARS = Bars()
# quarterings of the range of a float's bits: the last of the tiles taken may be 2**-14 lighter than it must be
STEPS = tl.constexpr(11)


@triton.jit
def _mass(base, o, seen, stride, S: tl.constexpr, U: tl.constexpr, NP: tl.constexpr):
    """[NP] share of the sampled rows' attention that each key tile holds; U rows are in flight at once."""
    mass = tl.zeros([NP], tl.float32)
    for at in range(0, S, U):
        for u in tl.static_range(U):
            there = seen & (at + u < S)
            l = tl.load(base + (at + u) * stride + o, mask=there, other=NOTHING).to(tl.float32)
            p = tl.where(there, tl.math.exp2(l - tl.max(l, 0)), 0.0)
            # the heaviest tile counts 1 here, so the sum is at least that, unless there is nothing to see
            mass += p * (1.0 / (S * tl.maximum(tl.sum(p, 0), 1.0)))
    return mass


@triton.jit
def _heaviest(free, missing):
    """Which of the `free` masses [NP] >= 0 make up `missing`, the fewest of them: all that reach a threshold."""
    bits = free.to(tl.int32, bitcast=True)  # floats >= 0 sort like their bits
    low = 1
    step = (tl.max(bits, 0) + 4) >> 2
    # the threshold lies in [low, low + 4 * step): three sums at a time cost hardly more time than one
    for _ in range(STEPS):
        one = tl.sum(tl.where(bits >= low + step, free, 0.0), 0) >= missing
        two = tl.sum(tl.where(bits >= low + 2 * step, free, 0.0), 0) >= missing
        three = tl.sum(tl.where(bits >= low + 3 * step, free, 0.0), 0) >= missing
        low += step * (one.to(tl.int32) + two.to(tl.int32) + three.to(tl.int32))
        step = tl.maximum(1, (step + 3) >> 2)
    return bits >= tl.where(missing > 0, low, 0x7FFFFFFF)


# sizes of a prompt: one build for all of them of about a length (NP)
@triton.jit(do_not_specialize=["N", "NQ", "NS", "la_head", "ca_head"])
def kernel(
    sums,
    la,
    ca,
    la_row,
    entry,
    document,
    slot,
    pair,
    entries,
    count,
    masked,
    area,
    share,
    theta,
    power,
    N,
    NQ,
    NS,
    stride,
    la_head,
    ca_head,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    PAIRED: tl.constexpr,
    NP: tl.constexpr,
    T: tl.constexpr,
    S: tl.constexpr,
    U: tl.constexpr,
):
    pid = tl.program_id(0)
    h = pid // NQ
    i = N - 1 - pid % NQ
    cell = h * NQ + i - (N - NQ)
    o = tl.arange(0, NP)
    causal = o <= i
    e = tl.load(entry + o, mask=causal, other=0)
    length = e & 255
    rows = tl.load(entry + i) & 255
    own = tl.load(document + i)
    theirs = tl.load(document + o, mask=causal, other=-1)
    chosen = causal
    if MODE != ALL:
        inside = causal & (theirs >= 0) & (own >= 0)
        local = inside & (theirs == own)
        cross = inside & (theirs != own)
        chosen = causal & ((o == i) | (theirs < 0) | (own < 0))
        if BITS:
            local = local & (tl.load(la + h.to(tl.int64) * la_head + tl.load(la_row + i) + o, mask=local, other=0) != 0)
        chosen = chosen | local
        if MODE == STORED:
            if BITS:
                cross = cross & (tl.load(ca + h * ca_head + o, mask=cross, other=0) != 0)
            chosen = chosen | cross
        if MODE == SAMPLED:
            base = sums + (h * NS + tl.load(slot + i)).to(tl.int64) * S * stride
            mass = _mass(base, o, causal & (own >= 0), stride, S, U, NP)
            if PAIRED:
                other = tl.load(pair + i)
                base = sums + (h * NS + tl.load(slot + other)).to(tl.int64) * S * stride
                theirs_too = tl.where(causal, _mass(base, o, (o <= other) & (own >= 0), stride, S, U, NP), 0.0)
                mass = 0.5 * (mass + theirs_too / tl.maximum(tl.sum(theirs_too, 0), 1e-30))
            # a share of 1 is asked for as 2: everything that holds any mass, whatever the sums' rounding
            missing = share * tl.sum(mass, 0) - tl.sum(tl.where(chosen, mass, 0.0), 0)
            # a bar of 1 at most, but a theta above it, which no tile reaches, stays
            bar = theta * tl.math.exp2(power * tl.math.log2(BAR_TILES / (i + 1)))
            bar = tl.minimum(bar, tl.maximum(theta, 1.0))
            worth = cross & (mass >= bar * length.to(tl.float32) / T)
            chosen = chosen | worth | _heaviest(tl.where(cross, mass, 0.0), missing)
    # tiles that need the element mask come first
    near = chosen & ((o == i) | (length < T))
    at, n, n_near = list_places(near, chosen)
    tl.store(entries + cell.to(tl.int64) * N + at, e, mask=chosen)
    tl.store(count + cell, n)
    tl.store(masked + cell, n_near)
    below = tl.sum(tl.where(chosen & (o < i), length, 0), 0)
    tl.store(area + cell, rows * below + rows * (rows + 1) // 2)


def tile_lists(
    places: Places,
    heads: int,
    choice: Choice,
    *,
    bits: Bits | None = None,
    sums: torch.Tensor | None = None,
    bars: Bars = NO_BARS,
    warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """entries [Hq, NQ, N], count, masked and area [Hq, NQ] as `TileLists` holds them, int32, for `heads` query heads.

    The NQ query tiles are those from `places.first` on.
    sums [Hq, NS, S, N] is what `tile_scores` gives for those that lie in documents, and `bars` says which of the
    tiles they see are kept (`Choice.SAMPLED` alone); with `places.pair` a tile's mass is the mean of its own and of its
    partner's, over the tiles it sees. Without `bits` every tile of a document's own attention is local
    and every page is offered. At most `selection.MAX_TILES` tiles.
    """
    n = places.entry.numel()
    n_q = n - places.first
    made = [torch.empty((heads, n_q), dtype=torch.int32, device=places.entry.device) for _ in range(3)]
    entries = torch.empty((heads, n_q, n), dtype=torch.int32, device=places.entry.device)
    padded = max(16, triton.next_power_of_2(n))
    samples = 1 if sums is None else sums.shape[2]
    warps = warps or (max(1, padded // 1024) if choice is Choice.SAMPLED else max(1, min(4, padded // 128)))
    nothing = places.entry
    kernel[(heads * n_q,)](
        nothing if sums is None else sums,
        *((nothing,) * 3 if bits is None else (bits.la, bits.ca, bits.row)),
        places.entry,
        places.owner,
        places.slot,
        nothing if places.pair is None else places.pair,
        entries,
        *made,
        2.0 if bars.share >= 1 else bars.share,
        float(bars.theta),
        float(bars.power),
        n,
        n_q,
        *((0, 0) if sums is None else (sums.shape[1], sums.stride(2))),
        *((0, 0) if bits is None else (bits.la.stride(0), bits.ca.stride(0))),
        int(choice),
        bits is not None,
        places.pair is not None,
        padded,
        places.tile,
        samples,
        min(samples, 4),
        num_warps=warps,
    )
    return entries, made[0], made[1], made[2]
