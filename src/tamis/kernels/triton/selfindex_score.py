"""Scores of all self-indexed records by look-ups, in plain Triton: tables of a step's query, then 16-bit keys.

`prepare_kernel` turns the query back by each part's offset, brings it to the stored order of channels and makes the
table of what every code adds to a score. `score_kernel` sums 8 look-ups a 32-bit word of codes; the 16 entries of a
group lie in half a cache line, so that the lanes of a warp, each with another token's code, are served at once. A
score becomes a 16-bit number, linear between the lowest and the highest that any codes could have: finer than float16
where it matters, and its high bits cut the range evenly, so that 128 counters say roughly where the bar lies.

Alphabet: rows are KV heads of all sequences (row = b HKV + h); P parts, N slots of a sequence, D head dim, G = D / 4
groups, RH half of the rotary dims, GH query heads of a KV head, PER slots of a block with one part.
"""

from __future__ import annotations

import triton
import triton.language as tl

HIGHS, LOWS = tl.constexpr(128), tl.constexpr(512)  # a key's high and low part: counters of the first and second count
KEY_LOW = tl.constexpr(512)  # lowest key of a record that may be chosen: high part 0 is for those that may not
KEY_SPAN = tl.constexpr(65023.0)  # keys above it


@triton.jit
def _turned(q, o, cos, sin, RH: tl.constexpr):
    """Channels o of the query at `q`, turned back by one angle, in the query's dtype."""
    rotary = o < 2 * RH
    x = tl.load(q + o).to(tl.float32)
    if RH == 0:
        return x.to(q.dtype.element_ty)
    first = o < RH
    other = tl.where(rotary, tl.where(first, o + RH, o - RH), o)
    at = tl.where(rotary, tl.where(first, o, o - RH), 0)
    c = tl.where(rotary, tl.load(cos + at), 1.0)
    s = tl.where(rotary, tl.where(first, tl.load(sin + at), -tl.load(sin + at)), 0.0)
    return (x * c + tl.load(q + other).to(tl.float32) * s).to(q.dtype.element_ty)


@triton.jit
def prepare_kernel(
    q, order, mean, centroids, spreads, cos, sin, n_parts, lut, span, turned, spread, bias, tally, HKV, P, TALLY,
    q_batch, q_head,
    GH: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, G: tl.constexpr, RH: tl.constexpr, TP: tl.constexpr,
):
    b = tl.program_id(0) // HKV
    h = tl.program_id(0) % HKV
    p = tl.program_id(1)
    if p == 0:
        o_t = tl.arange(0, TP)
        tl.store(tally + tl.program_id(0) * TALLY + o_t, tl.zeros([TP], tl.int32), mask=o_t < TALLY)
    if p < tl.load(n_parts + b):
        part = b * P + p
        table = (part * HKV + h).to(tl.int64)
        o_g = tl.arange(0, G)
        o_c = tl.arange(0, 16)
        o_i = tl.arange(0, GP)
        l = tl.zeros([G, 16], tl.float32)
        b_bias = tl.zeros([GP], tl.float32)
        p_cos = cos + part * RH
        p_sin = sin + part * RH
        for j in tl.static_range(4):
            o = tl.load(order + table * D + j * G + o_g).to(tl.int32)
            m = tl.load(mean + table * D + o).to(tl.float32)
            r = tl.load(spreads + table * D + j * G + o_g).to(tl.float32)
            total = tl.zeros([G], tl.float32)
            for i in tl.static_range(GH):
                head = h * GH + i
                x = _turned(q + b.to(tl.int64) * q_batch + head.to(tl.int64) * q_head, o, p_cos, p_sin, RH)
                at = (part * HKV * GH + head).to(tl.int64)
                tl.store(turned + at * D + j * G + o_g, x)
                x = x.to(tl.float32)
                tl.store(spread + at * D + j * G + o_g, (x * r).to(spread.dtype.element_ty))
                b_bias += tl.where(o_i == i, tl.sum(x * m, 0), 0.0)
                total += x
            total = total / GH
            c = tl.load(centroids + table * (G * 64) + o_g[:, None] * 64 + o_c[None, :] * 4 + j).to(tl.float32)
            l += c * total[:, None] + tl.where(o_g[:, None] == 0, tl.sum(total * m, 0), 0.0)
        tl.store(bias + (part * HKV + h) * GH + o_i, b_bias, mask=o_i < GH)
        tl.store(lut + table * (G * 16) + o_g[:, None] * 16 + o_c[None, :], l)
        tl.store(span + table * 2, tl.sum(tl.min(l, 1), 0))
        tl.store(span + table * 2 + 1, tl.sum(tl.max(l, 1), 0))


@triton.jit
def _entry(base, word, SHIFT: tl.constexpr):
    """Address of the entry that the code at bits SHIFT.. of `word` names; a table of 64 bytes never carries over."""
    if SHIFT >= 2:
        offset = (word >> (SHIFT - 2)) & 60
    else:
        offset = (word << 2) & 60
    return (base | offset.to(tl.uint32).to(tl.uint64)).to(tl.pointer_type(tl.float32))


@triton.jit
def _looked_up(word, base, FIRST: tl.constexpr, G: tl.constexpr):
    """Sum over the 8 codes of words [BN]: byte FIRST of the token's codes and the three behind it."""
    total = tl.zeros(word.shape, tl.float32)
    for i in tl.static_range(4):
        total += tl.load(_entry(base, word, 8 * i) + (FIRST + i) * 16)
        total += tl.load(_entry(base, word, 8 * i + 4) + (FIRST + i + G // 2) * 16)
    return total


@triton.jit
def _keys_of(codes, live, at, base, low, unit, G: tl.constexpr, BN: tl.constexpr):
    """Keys int32 [BN] of the records at `at`."""
    WORDS: tl.constexpr = G // 8
    # [BN, WORDS], 16 (or 8) bytes a thread
    w = tl.load(codes + at[:, None] * WORDS + tl.arange(0, WORDS)[None, :])
    alive = (tl.load(live + at // 32) >> (at % 32).to(tl.int32)) & 1
    if WORDS == 4:
        even, odd = tl.split(tl.reshape(w, [BN, 2, 2]))  # words 0, 2 and 1, 3
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        s = _looked_up(w0, base, 0, G) + _looked_up(w1, base, 4, G)
        s += _looked_up(w2, base, 8, G) + _looked_up(w3, base, 12, G)
    else:
        w0, w1 = tl.split(w)
        s = _looked_up(w0, base, 0, G) + _looked_up(w1, base, 4, G)
    far = tl.minimum(tl.maximum((s - low) * unit, 0.0), KEY_SPAN)
    far = tl.where(far == far, far, 0.0)
    return tl.where(alive == 1, far.to(tl.int32) + KEY_LOW, 0)


@triton.jit
def row_span(span, n_parts, b, h, HKV, P, PP: tl.constexpr):
    """Lowest score and keys a unit of score, over all parts of a row."""
    o_p = tl.arange(0, PP)
    real = o_p < n_parts
    at = span + ((b * P + o_p) * HKV + h) * 2
    low = tl.min(tl.load(at, mask=real, other=float("inf")), 0)
    high = tl.max(tl.load(at + 1, mask=real, other=float("-inf")), 0)
    wide = high - low
    # not-a-number and infinities make all keys alike rather than any of them out of bounds
    usable = (wide > 1e-30) & (wide < 1e30)
    return tl.where(usable, low, 0.0), tl.where(usable, KEY_SPAN / wide, 0.0)


@triton.jit
def score_kernel(
    codes, live, lut, span, part_of, slots, n_parts, keys, tally, HKV, P, N, TALLY,
    G: tl.constexpr, BN: tl.constexpr, PER: tl.constexpr, ITERS: tl.constexpr, PP: tl.constexpr,
):
    """4 BN slots a step; with BN the threads of a program, no look-up moves between them."""
    row = tl.program_id(1)
    b = row // HKV
    h = row % HKV
    used = tl.load(slots + b)
    begin = tl.program_id(0) * (4 * BN * ITERS)
    if begin < used:
        low, unit = row_span(span, tl.load(n_parts + b), b, h, HKV, P, PP)
        o_n = tl.arange(0, BN)
        counts = tl.zeros([HIGHS], tl.int32)
        for it in range(0, ITERS):
            first = begin + it * (4 * BN)
            if first < used:
                p = tl.load(part_of + b * (N // PER) + first // PER)
                base = (lut + ((b * P + p) * HKV + h) * (G * 16)).to(tl.uint64)
                at = row.to(tl.int64) * N + first + o_n
                k0 = _keys_of(codes, live, at, base, low, unit, G, BN)
                k1 = _keys_of(codes, live, at + BN, base, low, unit, G, BN)
                k2 = _keys_of(codes, live, at + 2 * BN, base, low, unit, G, BN)
                k3 = _keys_of(codes, live, at + 3 * BN, base, low, unit, G, BN)
                tl.store(keys + at, k0.to(tl.int16))
                tl.store(keys + at + BN, k1.to(tl.int16))
                tl.store(keys + at + 2 * BN, k2.to(tl.int16))
                tl.store(keys + at + 3 * BN, k3.to(tl.int16))
                every = tl.reshape(tl.join(tl.join(k0, k1), tl.join(k2, k3)), [4 * BN])
                counts += tl.histogram(every // LOWS, HIGHS)
        o_b = tl.arange(0, HIGHS)
        tl.atomic_add(tally + row * TALLY + o_b, counts, mask=(counts > 0) & (o_b > 0), sem="relaxed")
