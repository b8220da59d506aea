"""Attention over the chosen self-indexed records and the whole tokens, in plain Triton: splits, then a merge.

A split's records lie in order, so it meets few parts, most often one; for each it has the query in stored order and
works plane by plane, so that no bits are ever interleaved. Centroids are 8 bytes a group and code, one gather for the
4 planes. The 2-bit codes are not turned into numbers: put into a mantissa they are 1 + code / 4, exactly, in any float
format, so that (code - 1.5) = 4 x - 5.5 is left to a sum over the query, or over the weights of the values. A record's
scales then cost a product with the scores (keys) or with the weights (values) of each plane, and the values' channel
scales and mean are applied once a part.

Alphabet: see `selfindex_score`; BM rows (query heads of a KV head, padded to 16), BN records of a step, RW = G / 4
words of 4 groups, SB scale bytes of a record, W whole tokens, E of them exact copies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tamis.kernels.triton.paged_prefill import LN2, MASKED, NOTHING


@triton.jit
def _quarters(bits, DTYPE: tl.constexpr):
    """Codes 0..3 as 1 + code / 4: the top two bits of a mantissa."""
    if tl.bfloat16 == DTYPE:
        x = ((bits << 5) | 0x3F80).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif tl.float16 == DTYPE:
        x = ((bits << 8) | 0x3C00).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        x = ((bits << 21) | 0x3F800000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _spread_words(w, RW: tl.constexpr, BN: tl.constexpr):
    """Words [RW, BN] of 4 bytes → bytes [4 RW, BN] (with the higher ones above them)."""
    shift = tl.arange(0, 4)[None, :, None] * 8
    return tl.reshape(w[:, None, :] >> shift, [4 * RW, BN])


@triton.jit
def _scale_of(w, J: tl.constexpr):
    """Byte J of scale words [BN] as the scale it stands for."""
    byte = (w >> (8 * J)) & 255
    return tl.where(byte == 0, 0.0, tl.math.exp2((byte.to(tl.float32) - 160.0) * 0.0625))


@triton.jit
def _plane(centroid, J: tl.constexpr, DTYPE: tl.constexpr):
    """Component J of centroids of 4 bfloat16 numbers in 64 bits."""
    bits = ((centroid >> (16 * J)) & 0xFFFF).to(tl.int32)
    if tl.bfloat16 == DTYPE:
        x = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        x = (bits << 16).to(tl.float32, bitcast=True).to(DTYPE)
    return x


@triton.jit
def _gathered(slot, real, codes, residuals, values, key_scales, value_scales, RW: tl.constexpr):
    """The words of the records in `slot` [BN]: codes [RW / 2, BN], residuals and values [RW, BN], scales [BN]."""
    o_w = tl.arange(0, RW)
    w_c = tl.load(codes + slot[None, :] * (RW // 2) + tl.arange(0, RW // 2)[:, None], mask=real[None, :], other=0)
    w_r = tl.load(residuals + slot[None, :] * RW + o_w[:, None], mask=real[None, :], other=0)
    w_v = tl.load(values + slot[None, :] * RW + o_w[:, None], mask=real[None, :], other=0)
    w_ks = tl.load(key_scales + slot, mask=real, other=0)
    w_vs = tl.load(value_scales + slot, mask=real, other=0)
    return w_c, w_r, w_v, w_ks, w_vs


@triton.jit
def _records(
    keep, w_c, w_r, w_v, w_ks, w_vs, p_cent, q0, q1, q2, q3, r0, r1, r2, r3, offset, scale, m, d, a0, a1, a2, a3, e0,
    e1, e2, e3,
    G: tl.constexpr, RW: tl.constexpr, SB: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):
    """One step of records through the online softmax. `offset` [BM]: bias, and what 5.5 times the spread query is."""
    DTYPE: tl.constexpr = q0.dtype
    w_ks = w_ks.to(tl.int32)
    w_vs = w_vs.to(tl.int32)
    half = tl.arange(0, 2)[:, None, None] * 4
    code = _spread_words(tl.reshape(w_c[None, :, :] >> half, [RW, BN]), RW, BN) & 15
    c = tl.load(p_cent + tl.arange(0, G)[:, None] * 16 + code)
    x = _spread_words(w_r, RW, BN)
    s = tl.dot(q0, _plane(c, 0, DTYPE), input_precision=PRECISION)
    s = tl.dot(q1, _plane(c, 1, DTYPE), s, input_precision=PRECISION)
    s = tl.dot(q2, _plane(c, 2, DTYPE), s, input_precision=PRECISION)
    s = tl.dot(q3, _plane(c, 3, DTYPE), s, input_precision=PRECISION)
    # scale j of 4 planes is byte j SB / 4
    o0, o1, o2, o3 = offset
    s += (tl.dot(r0, _quarters(x & 3, DTYPE), input_precision=PRECISION) * 4.0 - o0[:, None]) * _scale_of(w_ks, 0)[
        None, :
    ]
    s += (tl.dot(r1, _quarters((x >> 2) & 3, DTYPE), input_precision=PRECISION) * 4.0 - o1[:, None]) * _scale_of(
        w_ks, SB // 4
    )[None, :]
    s += (tl.dot(r2, _quarters((x >> 4) & 3, DTYPE), input_precision=PRECISION) * 4.0 - o2[:, None]) * _scale_of(
        w_ks, SB // 2
    )[None, :]
    s += (tl.dot(r3, _quarters((x >> 6) & 3, DTYPE), input_precision=PRECISION) * 4.0 - o3[:, None]) * _scale_of(
        w_ks, 3 * SB // 4
    )[None, :]
    s = tl.where(keep[None, :], s * scale, MASKED)
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.where(keep[None, :], tl.math.exp2(s - m_new[:, None]), 0.0)
    alpha = tl.math.exp2(m - m_new)
    d = d * alpha + tl.sum(p, 1)
    y = _spread_words(w_v, RW, BN)
    p0 = (p * _scale_of(w_vs, 0)[None, :]).to(DTYPE)
    p1 = (p * _scale_of(w_vs, SB // 4)[None, :]).to(DTYPE)
    p2 = (p * _scale_of(w_vs, SB // 2)[None, :]).to(DTYPE)
    p3 = (p * _scale_of(w_vs, 3 * SB // 4)[None, :]).to(DTYPE)
    z = alpha[:, None]
    a0 = tl.dot(p0, tl.trans(_quarters(y & 3, DTYPE)), a0 * z, input_precision=PRECISION)
    a1 = tl.dot(p1, tl.trans(_quarters((y >> 2) & 3, DTYPE)), a1 * z, input_precision=PRECISION)
    a2 = tl.dot(p2, tl.trans(_quarters((y >> 4) & 3, DTYPE)), a2 * z, input_precision=PRECISION)
    a3 = tl.dot(p3, tl.trans(_quarters((y >> 6) & 3, DTYPE)), a3 * z, input_precision=PRECISION)
    e0 = e0 * alpha + tl.sum(p0.to(tl.float32), 1)
    e1 = e1 * alpha + tl.sum(p1.to(tl.float32), 1)
    e2 = e2 * alpha + tl.sum(p2.to(tl.float32), 1)
    e3 = e3 * alpha + tl.sum(p3.to(tl.float32), 1)
    return m_new, d, a0, a1, a2, a3, e0, e1, e2, e3


@triton.jit
def _fold(p_out, inside, acc, e, d, value_scale, value_mean, old, new, o_g, AGAIN: tl.constexpr):
    """Add a plane of a part's output, with its channels' scales and mean, to the split's, which lies in memory:

    in registers it would take from the loop over records, and a split seldom has a second part.
    """
    vs = tl.load(value_scale + o_g).to(tl.float32)
    vm = tl.load(value_mean + o_g).to(tl.float32)
    own = ((4.0 * acc - 5.5 * e[:, None]) * vs[None, :] + d[:, None] * vm[None, :]) * new[:, None]
    if AGAIN:
        own += tl.load(p_out + o_g[None, :], mask=inside[:, None], other=0.0) * old[:, None]
    tl.store(p_out + o_g[None, :], own, mask=inside[:, None])


@triton.jit
def _chosen_split(
    turned, spread, bias, codes, residuals, values, key_scales, value_scales, centroids, value_scale, value_mean,
    part_of, p_chosen, lo, hi, p_out, p_top, p_den, scale, b, h, row, HKV, P, N, S,
    GH: tl.constexpr, D: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PER: tl.constexpr,
    SB: tl.constexpr, PRECISION: tl.constexpr,
):
    RW: tl.constexpr = G // 4
    o_m = tl.arange(0, BM)
    o_g = tl.arange(0, G)
    o_n = tl.arange(0, BN)
    inside = o_m < GH
    first_slot = row.to(tl.int64) * N
    p_parts = part_of + b * (N // PER)
    first = tl.load(p_parts + tl.load(p_chosen + lo) // PER)
    last = tl.load(p_parts + tl.load(p_chosen + hi - 1) // PER)
    top = tl.full([BM], MASKED, tl.float32)
    den = tl.zeros([BM], tl.float32)
    p_o = p_out + o_m[:, None] * S * D
    for p in range(first, last + 1):
        at = ((b * P + p) * HKV + h).to(tl.int64)
        # [BM, G] each
        p_q = (at * GH + o_m)[:, None] * D + o_g[None, :]
        q0 = tl.load(turned + p_q, mask=inside[:, None], other=0.0)
        q1 = tl.load(turned + p_q + G, mask=inside[:, None], other=0.0)
        q2 = tl.load(turned + p_q + 2 * G, mask=inside[:, None], other=0.0)
        q3 = tl.load(turned + p_q + 3 * G, mask=inside[:, None], other=0.0)
        r0 = tl.load(spread + p_q, mask=inside[:, None], other=0.0)
        r1 = tl.load(spread + p_q + G, mask=inside[:, None], other=0.0)
        r2 = tl.load(spread + p_q + 2 * G, mask=inside[:, None], other=0.0)
        r3 = tl.load(spread + p_q + 3 * G, mask=inside[:, None], other=0.0)
        offset = (
            5.5 * tl.sum(r0.to(tl.float32), 1),
            5.5 * tl.sum(r1.to(tl.float32), 1),
            5.5 * tl.sum(r2.to(tl.float32), 1),
            5.5 * tl.sum(r3.to(tl.float32), 1),
        )
        m = tl.full([BM], MASKED, tl.float32)
        d = tl.zeros([BM], tl.float32)
        a0 = tl.zeros([BM, G], tl.float32)
        a1, a2, a3 = a0, a0, a0
        e0, e1, e2, e3 = d, d, d, d
        # words of the next step and slots of the one behind it are on their way while a step is worked on
        real = lo + o_n < hi
        slot = tl.load(p_chosen + lo + o_n, mask=real, other=0)
        w_c, w_r, w_v, w_ks, w_vs = _gathered(
            first_slot + slot, real, codes, residuals, values, key_scales, value_scales, RW
        )
        later = tl.load(p_chosen + lo + BN + o_n, mask=lo + BN + o_n < hi, other=0)
        for i in range(lo, hi, BN):
            n_c, n_r, n_v, n_ks, n_vs = _gathered(
                first_slot + later, i + BN + o_n < hi, codes, residuals, values, key_scales, value_scales, RW
            )
            after = tl.load(p_chosen + i + 2 * BN + o_n, mask=i + 2 * BN + o_n < hi, other=0)
            keep = i + o_n < hi
            met = 1
            if first != last:
                keep = keep & (tl.load(p_parts + slot // PER, mask=keep, other=-1) == p)
                met = tl.max(keep.to(tl.int32), 0)
            if met == 1:
                m, d, a0, a1, a2, a3, e0, e1, e2, e3 = _records(
                    keep, w_c, w_r, w_v, w_ks, w_vs, centroids + at * (G * 16), q0, q1, q2, q3, r0, r1, r2, r3, offset,
                    scale, m, d, a0, a1, a2, a3, e0, e1, e2, e3, G, RW, SB, BN, PRECISION,
                )
            slot, later = later, after
            w_c, w_r, w_v, w_ks, w_vs = n_c, n_r, n_v, n_ks, n_vs
        # the bias is the same for all keys of the part: it moves the maximum and nothing else
        lift = tl.load(bias + at * GH + o_m, mask=inside, other=0.0) * scale
        m = tl.where(m > NOTHING, m + lift, MASKED)
        m = tl.where(d == d, m, 0.0)  # a maximum passes over what is no number; the result must not
        best = tl.maximum(top, m)
        old = tl.math.exp2(top - best)
        new = tl.where(m > NOTHING, tl.math.exp2(m - best), 0.0)
        p_vs = value_scale + at * D
        p_vm = value_mean + at * D
        if p == first:
            _fold(p_o, inside, a0, e0, d, p_vs, p_vm, old, new, o_g, False)
            _fold(p_o + G, inside, a1, e1, d, p_vs + G, p_vm + G, old, new, o_g, False)
            _fold(p_o + 2 * G, inside, a2, e2, d, p_vs + 2 * G, p_vm + 2 * G, old, new, o_g, False)
            _fold(p_o + 3 * G, inside, a3, e3, d, p_vs + 3 * G, p_vm + 3 * G, old, new, o_g, False)
        else:
            tl.debug_barrier()  # what is read was perhaps written by another thread
            _fold(p_o, inside, a0, e0, d, p_vs, p_vm, old, new, o_g, True)
            _fold(p_o + G, inside, a1, e1, d, p_vs + G, p_vm + G, old, new, o_g, True)
            _fold(p_o + 2 * G, inside, a2, e2, d, p_vs + 2 * G, p_vm + 2 * G, old, new, o_g, True)
            _fold(p_o + 3 * G, inside, a3, e3, d, p_vs + 3 * G, p_vm + 3 * G, old, new, o_g, True)
        den = den * old + d * new
        top = best
    # the split's output is left times its denominator: the merge divides
    tl.store(p_den + o_m * S, den, mask=inside)
    tl.store(p_top + o_m * S, top, mask=inside)


@triton.jit
def _whole_split(
    p_q, keys, values, n_exact, open_end, begin, each, E, W, p_out, p_top, p_den, scale, row, S, q_head,
    GH: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, D)
    inside = o_m < GH
    b_q = tl.load(p_q + o_m.to(tl.int64)[:, None] * q_head + o_d[None, :], mask=inside[:, None], other=0.0)
    m = tl.full([BM], MASKED, tl.float32)
    d = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    base = row.to(tl.int64) * W
    for i in range(begin, tl.minimum(begin + each, open_end), BN):
        n = i + o_n
        keep = (n < n_exact) | ((n >= E) & (n < open_end))
        # [BN, D]
        at = (base + n)[:, None] * D + o_d[None, :]
        b_k = tl.load(keys + at, mask=keep[:, None], other=0.0).to(b_q.dtype)
        b_v = tl.load(values + at, mask=keep[:, None], other=0.0).to(b_q.dtype)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
        s = tl.where(keep[None, :], s, MASKED)
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.where(keep[None, :], tl.math.exp2(s - m_new[:, None]), 0.0)
        alpha = tl.math.exp2(m - m_new)
        d = d * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(b_v.dtype), b_v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    m = tl.where(d == d, m, 0.0)
    tl.store(p_out + o_m[:, None] * S * D + o_d[None, :], acc, mask=inside[:, None])
    tl.store(p_den + o_m * S, d, mask=inside)
    tl.store(p_top + o_m * S, m, mask=inside)


@triton.jit
def attend_kernel(
    q, turned, spread, bias, codes, residuals, values, key_scales, value_scales, centroids, value_scale, value_mean,
    part_of, chosen, n_chosen, whole_keys, whole_values, n_exact, open_end, part, part_top, part_den, scale, HKV, P, N,
    MOST, S, SPLIT, WHOLES, E, W, q_batch, q_head,
    GH: tl.constexpr, D: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    PER: tl.constexpr, SB: tl.constexpr, PRECISION: tl.constexpr,
):
    i_s = tl.program_id(0)
    row = tl.program_id(1)
    b = row // HKV
    h = row % HKV
    at = row.to(tl.int64) * GH * S + i_s
    if i_s >= S - WHOLES:
        each = tl.cdiv(tl.cdiv(W, WHOLES), BW) * BW
        _whole_split(
            q + b.to(tl.int64) * q_batch + (h * GH).to(tl.int64) * q_head, whole_keys, whole_values,
            tl.load(n_exact + b), tl.load(open_end + b).to(tl.int32), (i_s - (S - WHOLES)) * each, each, E, W,
            part + at * D, part_top + at, part_den + at, scale, row, S, q_head, GH, D, BM, BW, PRECISION,
        )
    else:
        lo = i_s * SPLIT
        hi = tl.minimum(lo + SPLIT, tl.load(n_chosen + row))
        if lo < hi:
            _chosen_split(
                turned, spread, bias, codes, residuals, values, key_scales, value_scales, centroids, value_scale,
                value_mean, part_of, chosen + row.to(tl.int64) * MOST, lo, hi, part + at * D, part_top + at,
                part_den + at, scale, b, h, row, HKV, P, N, S, GH, D, G, BM, BN, PER, SB, PRECISION,
            )
        else:
            o_m = tl.arange(0, BM)
            tl.store(part_top + at + o_m * S, tl.full([BM], MASKED, tl.float32), mask=o_m < GH)


@triton.jit
def combine_kernel(part, part_top, part_den, out, lse, HQ, S, o_batch, o_head, D: tl.constexpr, BS: tl.constexpr):
    r = tl.program_id(0)
    b = r // HQ
    o_s = tl.arange(0, BS)
    o_d = tl.arange(0, D)
    m = tl.full([1], MASKED, tl.float32)
    d = tl.zeros([1], tl.float32)
    acc = tl.zeros([D], tl.float32)
    for i in range(0, S, BS):
        at = r.to(tl.int64) * S + i + o_s
        top = tl.load(part_top + at, mask=i + o_s < S, other=MASKED)
        real = top > NOTHING
        # [BS, D], not yet divided
        b_o = tl.load(part + at[:, None] * D + o_d[None, :], mask=real[:, None], other=0.0)
        b_d = tl.load(part_den + at, mask=real, other=0.0)
        m_new = tl.maximum(m, tl.max(top, 0))
        w = tl.where(real, tl.math.exp2(top - m_new), 0.0)
        alpha = tl.math.exp2(m - m_new)
        d = d * alpha + tl.sum(w * b_d, 0)
        acc = acc * alpha + tl.sum(w[:, None] * b_o, 0)
        m = m_new
    seen = (d > 0) | (d != d)
    p_o = out + b.to(tl.int64) * o_batch + (r % HQ).to(tl.int64) * o_head + o_d
    tl.store(p_o, tl.where(seen, acc / tl.where(seen, d, 1.0), 0.0).to(out.dtype.element_ty))
    o_1 = tl.arange(0, 1)
    tl.store(lse + r + o_1, tl.where(seen, (m + tl.math.log2(d)) * LN2, float("-inf")))
