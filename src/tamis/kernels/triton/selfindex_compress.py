"""Compression into self-indexed records in one pass, in plain Triton: codes, residuals, values and scales, packed.

A program has BT tokens of one KV head. Channels are gathered in their stored order as 4 planes, plane i with the i-th
channel of every group, so that a group's nearest centroid is found without moving anything across lanes.

Alphabet: T tokens, D head dim, G = D / 4 groups, SB scale bytes of a record, H the half of a byte that a group is in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tamis.kernels.selfindex import Layout, Records, Tables

LARGEST = tl.constexpr(8.4e37)  # about a quarter of the largest bfloat16 number
LEAST = tl.constexpr(1e-6)
STEP = tl.constexpr(0.9957)


@triton.jit
def _finite(x, mean):
    away = tl.minimum(tl.maximum(x.to(tl.float32), -LARGEST), LARGEST) - mean
    return tl.where(x == x, away, 0.0)


@triton.jit
def _level(x, scale):
    """Levels -1.5, -0.5, 0.5, 1.5."""
    y = tl.floor(x / tl.maximum(scale, LEAST)[:, None])  # round(y - 0.5), but for y on a whole number
    return tl.minimum(tl.maximum(y, -2.0), 1.0) + 0.5


@triton.jit
def _packed_scale(scale):
    steps = tl.floor(tl.math.log2(tl.maximum(scale, 9.5367431640625e-07)) * 16.0 + 0.5) + 160.0
    return tl.minimum(tl.maximum(steps, 0.0), 255.0).to(tl.int32)


@triton.jit
def _scale(byte):
    return tl.where(byte == 0, 0.0, tl.math.exp2((byte.to(tl.float32) - 160.0) * 0.0625))


@triton.jit
def _shared(a0, a1, a2, a3, SB: tl.constexpr):
    """Sums [BT] of planes over the planes that share a scale, one for each plane."""
    if SB == 4:
        r = (a0, a1, a2, a3)
    elif SB == 2:
        r = (a0 + a1, a0 + a1, a2 + a3, a2 + a3)
    else:
        r = (a0 + a1 + a2 + a3, a0 + a1 + a2 + a3, a0 + a1 + a2 + a3, a0 + a1 + a2 + a3)
    return r


@triton.jit
def _two_bits(x0, x1, x2, x3, SB: tl.constexpr, G: tl.constexpr):
    """Planes [BT, G] as packed bytes int32 [BT, G], a scale byte [BT] for each plane; scales are refitted once."""
    N: tl.constexpr = 4 * G // SB
    q0, q1, q2, q3 = _shared(tl.sum(x0 * x0, 1), tl.sum(x1 * x1, 1), tl.sum(x2 * x2, 1), tl.sum(x3 * x3, 1), SB)
    l0 = _level(x0, tl.sqrt(q0 / N) * STEP)
    l1 = _level(x1, tl.sqrt(q1 / N) * STEP)
    l2 = _level(x2, tl.sqrt(q2 / N) * STEP)
    l3 = _level(x3, tl.sqrt(q3 / N) * STEP)
    n0, n1, n2, n3 = _shared(tl.sum(x0 * l0, 1), tl.sum(x1 * l1, 1), tl.sum(x2 * l2, 1), tl.sum(x3 * l3, 1), SB)
    d0, d1, d2, d3 = _shared(tl.sum(l0 * l0, 1), tl.sum(l1 * l1, 1), tl.sum(l2 * l2, 1), tl.sum(l3 * l3, 1), SB)
    s0 = _packed_scale(n0 / d0)
    s1 = _packed_scale(n1 / d1)
    s2 = _packed_scale(n2 / d2)
    s3 = _packed_scale(n3 / d3)
    packed = (_level(x0, _scale(s0)) + 1.5).to(tl.int32)
    packed |= (_level(x1, _scale(s1)) + 1.5).to(tl.int32) << 2
    packed |= (_level(x2, _scale(s2)) + 1.5).to(tl.int32) << 4
    packed |= (_level(x3, _scale(s3)) + 1.5).to(tl.int32) << 6
    return packed, s0, s1, s2, s3


@triton.jit
def _store_scales(p_scales, s0, s1, s2, s3, inside, SB: tl.constexpr):
    tl.store(p_scales, s0.to(tl.uint8), mask=inside)
    if SB == 4:
        tl.store(p_scales + 1, s1.to(tl.uint8), mask=inside)
        tl.store(p_scales + 2, s2.to(tl.uint8), mask=inside)
        tl.store(p_scales + 3, s3.to(tl.uint8), mask=inside)
    elif SB == 2:
        tl.store(p_scales + 1, s2.to(tl.uint8), mask=inside)


@triton.jit
def kernel(
    keys, values, mean, order, centroids, weight, spread, value_mean, value_scale, codes, residuals, coded, key_scales,
    value_scales, T, k_row, k_token, v_row, v_token,
    G: tl.constexpr, SB: tl.constexpr, BT: tl.constexpr,
):
    D: tl.constexpr = 4 * G
    row = tl.program_id(1).to(tl.int64)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_g = tl.arange(0, G)
    inside = o_t < T
    real = inside[:, None]
    p_k = keys + row * k_row + o_t.to(tl.int64)[:, None] * k_token
    table = row * D
    c0 = tl.load(order + table + o_g).to(tl.int32)
    c1 = tl.load(order + table + G + o_g).to(tl.int32)
    c2 = tl.load(order + table + 2 * G + o_g).to(tl.int32)
    c3 = tl.load(order + table + 3 * G + o_g).to(tl.int32)
    # [BT, G] each
    x0 = _finite(tl.load(p_k + c0[None, :], mask=real, other=0.0), tl.load(mean + table + c0).to(tl.float32)[None, :])
    x1 = _finite(tl.load(p_k + c1[None, :], mask=real, other=0.0), tl.load(mean + table + c1).to(tl.float32)[None, :])
    x2 = _finite(tl.load(p_k + c2[None, :], mask=real, other=0.0), tl.load(mean + table + c2).to(tl.float32)[None, :])
    x3 = _finite(tl.load(p_k + c3[None, :], mask=real, other=0.0), tl.load(mean + table + c3).to(tl.float32)[None, :])
    w0 = tl.load(weight + table + o_g).to(tl.float32)
    w1 = tl.load(weight + table + G + o_g).to(tl.float32)
    w2 = tl.load(weight + table + 2 * G + o_g).to(tl.float32)
    w3 = tl.load(weight + table + 3 * G + o_g).to(tl.float32)
    best = tl.full([BT, G], float("inf"), tl.float32)
    code = tl.zeros([BT, G], tl.int32)
    n0 = tl.zeros([BT, G], tl.float32)
    n1, n2, n3 = n0, n0, n0
    for c in range(16):
        p_c = centroids + table * 16 + o_g * 64 + c * 4
        m0 = tl.load(p_c).to(tl.float32)
        m1 = tl.load(p_c + 1).to(tl.float32)
        m2 = tl.load(p_c + 2).to(tl.float32)
        m3 = tl.load(p_c + 3).to(tl.float32)
        own = m0 * m0 * w0 + m1 * m1 * w1 + m2 * m2 * w2 + m3 * m3 * w3
        far = own[None, :] - 2.0 * (
            x0 * (m0 * w0)[None, :] + x1 * (m1 * w1)[None, :] + x2 * (m2 * w2)[None, :] + x3 * (m3 * w3)[None, :]
        )
        closer = far < best
        best = tl.where(closer, far, best)
        code = tl.where(closer, c, code)
        n0 = tl.where(closer, m0[None, :], n0)
        n1 = tl.where(closer, m1[None, :], n1)
        n2 = tl.where(closer, m2[None, :], n2)
        n3 = tl.where(closer, m3[None, :], n3)
    low, high = tl.split(tl.permute(tl.reshape(code, [BT, 2, G // 2]), [0, 2, 1]))
    o_h = tl.arange(0, G // 2)
    record = row * T + o_t
    tl.store(codes + record[:, None] * (G // 2) + o_h[None, :], (low | (high << 4)).to(tl.uint8), mask=real)
    x0 = (x0 - n0) / tl.load(spread + table + o_g).to(tl.float32)[None, :]
    x1 = (x1 - n1) / tl.load(spread + table + G + o_g).to(tl.float32)[None, :]
    x2 = (x2 - n2) / tl.load(spread + table + 2 * G + o_g).to(tl.float32)[None, :]
    x3 = (x3 - n3) / tl.load(spread + table + 3 * G + o_g).to(tl.float32)[None, :]
    packed, s0, s1, s2, s3 = _two_bits(x0, x1, x2, x3, SB, G)
    tl.store(residuals + record[:, None] * G + o_g[None, :], packed.to(tl.uint8), mask=real)
    _store_scales(key_scales + record * SB, s0, s1, s2, s3, inside, SB)
    p_v = values + row * v_row + o_t.to(tl.int64)[:, None] * v_token + o_g[None, :]
    p_m = value_mean + table + o_g
    p_s = value_scale + table + o_g
    y0 = _finite(tl.load(p_v, mask=real, other=0.0), tl.load(p_m).to(tl.float32)[None, :])
    y1 = _finite(tl.load(p_v + G, mask=real, other=0.0), tl.load(p_m + G).to(tl.float32)[None, :])
    y2 = _finite(tl.load(p_v + 2 * G, mask=real, other=0.0), tl.load(p_m + 2 * G).to(tl.float32)[None, :])
    y3 = _finite(tl.load(p_v + 3 * G, mask=real, other=0.0), tl.load(p_m + 3 * G).to(tl.float32)[None, :])
    y0 = y0 / tl.load(p_s).to(tl.float32)[None, :]
    y1 = y1 / tl.load(p_s + G).to(tl.float32)[None, :]
    y2 = y2 / tl.load(p_s + 2 * G).to(tl.float32)[None, :]
    y3 = y3 / tl.load(p_s + 3 * G).to(tl.float32)[None, :]
    packed, s0, s1, s2, s3 = _two_bits(y0, y1, y2, y3, SB, G)
    tl.store(coded + record[:, None] * G + o_g[None, :], packed.to(tl.uint8), mask=real)
    _store_scales(value_scales + record * SB, s0, s1, s2, s3, inside, SB)


def compress(
    keys: torch.Tensor, values: torch.Tensor, tables: Tables, layout: Layout, *, tokens: int = 32, warps: int = 4
) -> Records:
    """See `tamis.kernels.selfindex_dispatch.selfindex_compress`; D is contiguous. `tokens` of a program, its warps."""
    lead, n = keys.shape[:-2], keys.shape[-2]
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (keys, values))
    k, v = (t.reshape(-1, n, layout.head_dim) for t in (k, v))
    made = Records(
        *(torch.empty((*lead, n, w), dtype=torch.uint8, device=keys.device) for w in layout.plane_bytes.values())
    )
    if not n or not k.shape[0]:
        return made
    t = Tables(*(getattr(tables, f).contiguous() for f in Tables.__dataclass_fields__))
    kernel[(triton.cdiv(n, tokens), k.shape[0])](
        k, v, t.mean, t.order, t.centroids, t.weight, t.residual_scale, t.value_mean, t.value_scale, made.codes,
        made.residuals, made.values, made.key_scales, made.value_scales, n, *k.stride()[:2], *v.stride()[:2],
        layout.groups, layout.head_dim // layout.scale_channels, tokens, num_warps=warps,
    )
    return made
