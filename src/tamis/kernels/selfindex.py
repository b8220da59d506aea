"""The self-indexing form of keys and values: its record to the byte, its tables, and packing. Plain tensors.

Knows channels and tokens, not caches, documents or models. From arXiv 2603.14224 (4-bit codes of groups of 4 channels
that are both index and compressed key; 2-bit payload); how this form differs, and what that is worth on real keys, is
in `eval.selfindex_study`: channels are ordered so that each group has one strong channel, the centroids are refined by
a few weighted steps (signs alone are the start), the 2 bits hold what the centroid leaves over, and scales are one byte
without zero-points because keys and values are centred per channel.

A record of one token and KV head lies in five planes, each contiguous over tokens, so that a pass reads whole 32-byte
sectors of what it needs and nothing else. Head_dim D, G = D / 4 groups, S channels to a scale; D = 128, S = 32:

    codes     uint8 [.., T, D/8]  16 B  byte b: group b in bits 0-3, group b + G/2 in bits 4-7  (all that scoring reads)
    residuals uint8 [.., T, D/4]  32 B  byte b: stored channel b + j D/4 in bits 2j, 2j + 1     (one sector a token)
    values    uint8 [.., T, D/4]  32 B  byte b: channel b + j D/4 in bits 2j, 2j + 1            (one sector a token)
    key_scales, value_scales uint8 [.., T, D/S] 4 + 4 B  2 ** ((byte - 160) / 16), 0 is 0       (eight tokens a sector)

Stored channel j of a key is its channel `order[j]`; group g is stored channels g, g + G, g + 2G, g + 3G. So plane j of
the residuals (bits 2j of all bytes) has exactly the j-th channel of every group: a kernel unpacks the codes of a token
once, and for plane j = 0..3 adds centroid[g, code, j] to (2-bit code - 1.5) * scale and never interleaves bits; with
S = D/4 a plane has one scale. The query is brought to that order once and multiplied by the channel scales.

    key[order[j]] = mean + centroid[g, code, j // G] + (r - 1.5) * key_scale * residual_scale[j]
    value[d]      = value_mean[d] + (c - 1.5) * value_scale * value_channel_scale[d]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch

from tamis.core.errors import InvalidInput

GROUP = 4  # channels whose codes are one 4-bit number
CELLS = 16
SCALE_STEPS, SCALE_ZERO = 16, 160  # a scale byte counts sixteenths of an octave; SCALE_ZERO is 1.0
HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Layout:
    """Sizes of the form for one head_dim. `scale_channels` share a scale byte: D/4, D/2 or D, by default D/4 or 32."""

    head_dim: int
    scale_channels: int = 32

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise InvalidInput(f"head_dim is {self.head_dim}; the self-indexing form has {HEAD_DIMS}.")
        allowed = [self.head_dim // n for n in (4, 2, 1)]
        if self.scale_channels not in allowed:
            raise InvalidInput(
                f"{self.scale_channels} channels share a scale; allowed for head_dim {self.head_dim} are {allowed}."
            )

    @property
    def groups(self) -> int:
        """Groups of 4 channels, one 4-bit code each."""
        return self.head_dim // GROUP

    @property
    def plane_bytes(self) -> dict[str, int]:
        """Bytes of a token and KV head in each plane of `Records`."""
        d, scales = self.head_dim, self.head_dim // self.scale_channels
        return {
            "codes": d // 8,
            "residuals": d // 4,
            "values": d // 4,
            "key_scales": scales,
            "value_scales": scales,
        }

    @property
    def record_bytes(self) -> int:
        """Bytes of a token and KV head, key and value: 88 at head_dim 128, 44 at 64; bfloat16 takes 4 * head_dim."""
        return sum(self.plane_bytes.values())

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables of one KV head: an order of bytes and 21 bfloat16 numbers a channel."""
        return self.head_dim * (1 + 2 * (CELLS + 5))

    def total_bytes(self, n_tokens: int, *, exact_tokens: int = 0, tables: int = 1) -> int:
        """Bytes of one KV head: n_tokens records, exact_tokens bfloat16 copies, and `tables` sets of tables."""
        return n_tokens * self.record_bytes + exact_tokens * 4 * self.head_dim + tables * self.table_bytes

    def ratio(self, n_tokens: int, *, exact_tokens: int = 0, tables: int = 1) -> float:
        """How many times smaller than bfloat16 all of that is."""
        return n_tokens * 4 * self.head_dim / self.total_bytes(n_tokens, exact_tokens=exact_tokens, tables=tables)


class _Bundle:
    """Tensors with common leading dims."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, as they lie in memory."""
        return sum(getattr(self, f.name).nbytes for f in fields(self))  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> Self:
        """A copy there."""
        return type(self)(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Records(_Bundle):
    """Records of T tokens: uint8 planes [.., T, bytes], leading dims as the keys had them ([Hkv] or [B, Hkv])."""

    codes: torch.Tensor
    residuals: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor

    @property
    def n_tokens(self) -> int:
        """T."""
        return self.codes.shape[-2]

    def span(self, begin: int, end: int) -> Records:
        """Records of tokens [begin, end), as views."""
        return Records(*(getattr(self, f.name)[..., begin:end, :] for f in fields(self)))

    def take(self, index: torch.Tensor) -> Records:
        """Records of tokens `index` int64 [.., K] with the same leading dims."""

        def rows(plane: torch.Tensor) -> torch.Tensor:
            return plane.gather(-2, index[..., None].expand(*index.shape, plane.shape[-1]))

        return Records(*(rows(getattr(self, f.name)) for f in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Records]) -> Records:
        """One after the other along the tokens."""
        return cls(*(torch.cat([getattr(p, f.name) for p in parts], -2) for f in fields(cls)))


@dataclass(frozen=True)
class Tables(_Bundle):
    """What the records of one KV head were made against. Leading dims [..] as the keys', or any that broadcast to them.

    mean           bfloat16 [.., D]        per channel, subtracted from keys; its dot product with a query is the bias
    order          uint8 [.., D]           stored channel j is channel order[j]
    centroids      bfloat16 [.., G, 16, 4] of centred keys, component i of group g is stored channel g + i G
    weight         bfloat16 [.., D]        per stored channel: what a squared difference counts when a code is chosen
    residual_scale bfloat16 [.., D]        per stored channel: spread of what the centroids leave over
    value_mean     bfloat16 [.., D]        subtracted from values, added to the output
    value_scale    bfloat16 [.., D]        per channel

    Records are made against the rounded numbers, so their rounding costs nothing.
    """

    mean: torch.Tensor
    order: torch.Tensor
    centroids: torch.Tensor
    weight: torch.Tensor
    residual_scale: torch.Tensor
    value_mean: torch.Tensor
    value_scale: torch.Tensor

    @property
    def head_dim(self) -> int:
        """D."""
        return self.mean.shape[-1]

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., T, D] in float32 with its channels in stored order."""
        return x.float().gather(-1, self.order.long()[..., None, :].expand(x.shape))

    def unstored(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `stored`."""
        return torch.empty_like(x).scatter_(-1, self.order.long()[..., None, :].expand(x.shape), x)

    def bias(self, q: torch.Tensor) -> torch.Tensor:
        """float32 [.., T]: q [.., T, D] times the mean, the same for every key of the tables."""
        return (q.float() @ self.mean.float()[..., None])[..., 0]


@dataclass(frozen=True)
class Part:
    """Compressed tokens with the tables they were made against, and the few of them that are also kept whole.

    records  [.., Hkv, T, ..]
    tables   leading dims that broadcast to [.., Hkv]
    exact    int64 [.., Hkv, F]: distinct tokens of the part that are attended from their exact copies
    keys, values [.., Hkv, F, D]: the copies, any float dtype
    """

    records: Records
    tables: Tables
    exact: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 [.., G] → uint8 [.., G/2]; code b in the low half of byte b, code b + G/2 in the high half."""
    low, high = codes.to(torch.uint8).chunk(2, -1)
    return low | (high << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`: uint8 [.., G]."""
    return torch.cat([packed & 15, packed >> 4], -1)


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..3 [.., D] → uint8 [.., D/4]; code b + j D/4 in bits 2j and 2j + 1 of byte b."""
    a, b, c, d = codes.to(torch.uint8).chunk(4, -1)
    return a | (b << 2) | (c << 4) | (d << 6)


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_pairs`: uint8 [.., D]."""
    return torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], -1)


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales >= 0 → uint8 of the same shape, right to 2.2 %. Below 2 ** -10 they become 0; at most 2 ** (95 / 16)."""
    steps = (scales.float().clamp(min=2.0**-20).log2() * SCALE_STEPS).round() + SCALE_ZERO
    return steps.clamp(0, 255).to(torch.uint8)


def unpack_scales(packed: torch.Tensor) -> torch.Tensor:
    """The scales in float32; byte 0 is exactly 0."""
    scales = torch.exp2((packed.float() - SCALE_ZERO) / SCALE_STEPS)
    return torch.where(packed == 0, torch.zeros_like(scales), scales)


def check_pair(keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> None:
    """Refuse keys and values that are not both [.., T, D] of the layout's D."""
    if keys.shape != values.shape or keys.dim() < 2 or keys.shape[-1] != layout.head_dim:
        raise InvalidInput(
            f"keys {tuple(keys.shape)}, values {tuple(values.shape)}; expected both [.., T, {layout.head_dim}]."
        )


def group_mean(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """float32 [.., Hkv, T, D]: mean of the query heads q [.., Hq, T, D] that share a KV head."""
    return by_group(q, kv_heads).float().mean(-3)


def by_group(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """q [.., Hq, T, D] as [.., Hkv, Hq / Hkv, T, D]: query head h reads KV head h // (Hq / Hkv)."""
    if q.dim() < 3 or q.shape[-3] % kv_heads:
        raise InvalidInput(f"q is {tuple(q.shape)}; expected [.., Hq, T, D] with Hq a multiple of {kv_heads}.")
    return torch.unflatten(q, -3, (kv_heads, -1))


def hide(scores: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """scores [.., Hkv, R, T] with -inf at tokens `exact` [.., Hkv, F]; they are attended anyway."""
    index = exact[..., None, :].expand(*scores.shape[:-1], exact.shape[-1])
    return scores.scatter(-1, index, -math.inf)


def dequantised(records: Records, tables: Tables, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values float32 [.., T, D] of records, mean included."""
    keys, values = normal_form(records, tables, layout)
    keys = tables.unstored(keys) + tables.mean.float()[..., None, :]
    values = values * tables.value_scale.float()[..., None, :] + tables.value_mean.float()[..., None, :]
    return keys, values


def normal_form(records: Records, tables: Tables, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Centred keys in stored order, and values before channel scale and mean: float32 [.., T, D]."""
    codes = unpack_nibbles(records.codes).long()
    rest = (unpack_pairs(records.residuals) - 1.5) * _wide(records.key_scales, layout)
    keys = looked_up(tables.centroids, codes) + rest * tables.residual_scale.float()[..., None, :]
    return keys, (unpack_pairs(records.values) - 1.5) * _wide(records.value_scales, layout)


def _wide(scales: torch.Tensor, layout: Layout) -> torch.Tensor:
    return unpack_scales(scales).repeat_interleave(layout.scale_channels, -1)


def looked_up(centroids: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """float32 [.., T, D], stored order: the centroid of every group's code."""
    index = codes.transpose(-1, -2)[..., None].expand(*codes.shape[:-2], codes.shape[-1], codes.shape[-2], GROUP)
    found = centroids.float().expand(*index.shape[:-2], CELLS, GROUP).gather(-2, index)  # [.., G, T, 4]
    return found.movedim(-3, -1).flatten(-2)


def merged(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [.., R, D] and log-sum-exp [.., R] of scaled scores [.., R, T] and values [.., T, D]; -inf hides a key.

    A row that sees no key has 0 and -inf.
    """
    lse = scores.logsumexp(-1)
    share = torch.where(lse[..., None] > -math.inf, scores - lse[..., None], -math.inf).exp()
    return share @ values, lse
