"""Tilings and tile lists: which keys each tile of query rows visits, as plain tensors.

Knows token positions, not documents, models or why a tile was chosen.

A prompt is cut into tiles of at most `TILE` tokens, counted from the start of each segment, so a tile may start at
any token and may be short. Query rows and keys use the same cut. Ranges are half-open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tamis.core.errors import InvalidInput

TILE = 128
LENGTH_BITS = 8  # an entry is (token start << LENGTH_BITS) | length, so starts reach 2**23 tokens


@dataclass(frozen=True)
class Tiling:
    """A cut of tokens [0, n_tokens) into consecutive tiles.

    `starts` has one more element than there are tiles; tile i is [starts[i], starts[i + 1]) and holds 1..tile tokens.
    """

    starts: tuple[int, ...]
    tile: int = TILE

    @classmethod
    def of_segments(cls, lengths: Sequence[int], tile: int = TILE) -> Tiling:
        """Cut segments of the given token lengths (zero allowed) from the start of each."""
        if not 1 <= tile < 1 << LENGTH_BITS:
            raise InvalidInput(f"tile is {tile} tokens; allowed are 1 to {(1 << LENGTH_BITS) - 1}.")
        starts: list[int] = []
        at = 0
        for n in lengths:
            starts.extend(range(at, at + n, tile))
            at += n
        if at >= 1 << (31 - LENGTH_BITS):
            raise InvalidInput(f"{at} tokens; tile lists address at most {(1 << (31 - LENGTH_BITS)) - 1}.")
        return cls((*starts, at), tile)

    @property
    def n_tokens(self) -> int:
        """Tokens covered."""
        return self.starts[-1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> list[int]:
        """Tokens in each tile."""
        return [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)]

    @cached_property
    def aligned(self) -> bool:
        """Whether every tile starts at a multiple of `tile`, so that only the last one can be short."""
        return all(start % self.tile == 0 for start in self.starts[:-1])


@dataclass(frozen=True)
class TileLists:
    """The key tiles that each (query head, query tile) visits. int32 tensors on one device.

    q_start [Nq]        first query row of each query tile, as a row of q
    q_len   [Nq]        rows in it, 1..tile
    entries [Hq, Nq, M] (key token start << 8) | key tile length; only the first `count` are read
    count   [Hq, Nq]    entries to visit; the tile on the diagonal is always one of them
    masked  [Hq, Nq]    the first `masked` entries are short or cross the diagonal and need the element mask;
                        the rest are whole tiles that lie fully below it
    q_offset            position of q's row 0 among the keys (0, or the tokens before a chunk)
    tile                rows of a query tile and keys of a key tile, at most
    area                score elements listed and causally visible, summed over heads (a count, exact); an integer
                        tensor where the lists were made on a device: its sum is the count, waited for when read
    causal_area         the same if every tile were listed
    aligned             every tile of queries and of keys is known to start at a multiple of `tile` among the keys
    """

    q_start: torch.Tensor
    q_len: torch.Tensor
    entries: torch.Tensor
    count: torch.Tensor
    masked: torch.Tensor
    q_offset: int
    tile: int
    area: int | torch.Tensor
    causal_area: int
    aligned: bool = False

    @property
    def density(self) -> float:
        """Share of the causal area that is computed."""
        return counted(self.area) / self.causal_area


def counted(area: int | torch.Tensor) -> int:
    """`TileLists.area` as a number. Waits for the device if it is a tensor there."""
    return int(area.sum(dtype=torch.int64)) if isinstance(area, torch.Tensor) else area


def tile_areas(queries: Tiling, keys: Tiling, q_offset: int = 0) -> torch.Tensor:
    """int64 [Nq, Nk]: score elements of each tile on or below the diagonal."""
    qs = torch.tensor(queries.starts) + q_offset
    ks = torch.tensor(keys.starts)
    q0, q1, k0, k1 = qs[:-1, None], qs[1:, None], ks[None, :-1], ks[None, 1:]
    # rows p in [q0, q1) see keys [k0, min(p + 1, k1)): a trapezoid, summed in closed form
    first = torch.maximum(q0, k0)  # first row that sees anything of the tile
    full = torch.clamp(torch.minimum(torch.maximum(first, k1 - 1), q1), min=first)  # first row that sees all of it
    full = torch.maximum(full, first)
    rising = torch.clamp(full - first, min=0)
    partial = rising * (first + 1 - k0) + rising * (rising - 1) // 2
    return torch.where(q1 > k0, partial + torch.clamp(q1 - full, min=0) * (k1 - k0), torch.zeros_like(k1 - q0))


def lists_from_mask(mask: torch.Tensor, queries: Tiling, keys: Tiling, q_offset: int = 0) -> TileLists:
    """Turn a bool [Hq, Nq, Nk] choice of tiles into lists, the diagonal first, then from late keys to early ones.

    Tiles wholly above the diagonal are dropped. Every query row must be able to see itself: its own tile must be set.
    """
    if mask.dtype != torch.bool or mask.dim() != 3 or mask.shape[1:] != (len(queries), len(keys)):
        raise InvalidInput(
            f"mask is {mask.dtype} {tuple(mask.shape)}; expected bool [query heads, {len(queries)}, {len(keys)}]."
        )
    device = mask.device
    areas = tile_areas(queries, keys, q_offset)
    visible = (areas > 0).to(device)
    mask = mask & visible
    q_len = torch.tensor(queries.lengths, device=device)
    k_len = torch.tensor(keys.lengths, device=device)
    whole = (areas.to(device) == q_len[:, None] * k_len[None]) & (k_len == keys.tile)[None]
    # order: masked entries first, and inside each kind from late to early keys
    rank = torch.arange(len(keys), device=device)
    key = torch.where(mask, torch.where(whole[None], 0, len(keys)) + rank, -1)
    count = mask.sum(-1, dtype=torch.int32)
    order = key.argsort(-1, descending=True)[..., : max(1, int(count.max()))]
    packed = (torch.tensor(keys.starts[:-1], device=device) << LENGTH_BITS) | k_len
    return TileLists(
        q_start=torch.tensor(queries.starts[:-1], dtype=torch.int32, device=device),
        q_len=q_len.to(torch.int32),
        entries=packed.to(torch.int32)[order].contiguous(),
        count=count.contiguous(),
        masked=(mask & ~whole).sum(-1, dtype=torch.int32).contiguous(),
        q_offset=q_offset,
        tile=keys.tile,
        area=int((mask.to(areas.device) * areas).sum()),
        causal_area=int(areas.sum()) * mask.shape[0],
        aligned=queries.aligned and keys.aligned and queries.tile == keys.tile and q_offset % keys.tile == 0,
    )


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: TileLists) -> None:
    """Refuse tensors that no implementation of this op may be given."""
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise InvalidInput(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; expected q [Hq, Tq, D], k and v [Hkv, Tk, D]."
        )
    if q.shape[0] % k.shape[0]:
        raise InvalidInput(f"{q.shape[0]} query heads over {k.shape[0]} KV heads; the first must be a multiple.")
    if lists.count.shape[0] != q.shape[0]:
        raise InvalidInput(f"lists are for {lists.count.shape[0]} heads, q has {q.shape[0]}.")
