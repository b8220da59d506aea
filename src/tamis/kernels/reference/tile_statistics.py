"""How much attention each tile of scores holds, in plain PyTorch, without a full score matrix of any head.

A second pass over queries and keys with the saved log-sum-exp: p = exp(s - lse), reduced tile by tile.
SIFT's offline pass (arXiv 2606.09441, section 4), the oracle selector and measured recall all read it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tamis.kernels.lists import Tiling

STRIP_TILES = 4  # query tiles whose scores are held at once, for the query heads of one KV head


@dataclass(frozen=True)
class TileStatistics:
    """Post-softmax statistics of causal attention. float32, on q's device.

    mass [Hq, Nq, Nk]  probability in the tile, mean over its query rows: a row of tiles sums to 1
    peak [Hq, Nq, Nk]  largest probability in the tile
    later_high [Hq, Tk] int32 or None: query rows outside the key's own tile that give the key more than beta
    """

    mass: torch.Tensor
    peak: torch.Tensor
    later_high: torch.Tensor | None


def tile_statistics(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    queries: Tiling,
    keys: Tiling,
    *,
    scale: float,
    q_offset: int = 0,
    beta: float | None = None,
) -> TileStatistics:
    """Statistics of q [Hq, Tq, D] over k [Hkv, Tk, D] whose log-sum-exp is lse [Hq, Tq] (natural, float32).

    With `beta`, `later_high` [Hq, Tk] int32 counts for each key the query rows outside the key's own tile that give
    it a probability above beta. Rows see keys up to position row + q_offset.
    """
    heads, group = q.shape[0], q.shape[0] // k.shape[0]
    paged = PagedKeys(k, keys)
    mass = q.new_zeros(heads, len(queries), len(keys), dtype=torch.float32)
    peak = torch.zeros_like(mass)
    later_high = torch.zeros(heads, k.shape[1], dtype=torch.int32, device=q.device) if beta is not None else None
    row_tile = torch.repeat_interleave(torch.arange(len(queries)), torch.tensor(queries.lengths)).to(q.device)
    for first in range(0, len(queries), STRIP_TILES):
        last = min(first + STRIP_TILES, len(queries))
        rows = slice(queries.starts[first], queries.starts[last])
        position = torch.arange(rows.start, rows.stop, device=q.device) + q_offset
        tile_of_row = row_tile[rows] - first
        n = torch.tensor(queries.lengths[first:last], device=q.device)[:, None]
        for kv in range(k.shape[0]):
            own = slice(kv * group, (kv + 1) * group)
            p = paged.scores(q[own, rows], kv, position, scale)
            p = p.sub_(lse[own, rows, None, None]).exp_()  # [G, rows, tiles, tile]
            seen = p.shape[2]
            index = tile_of_row[None, :, None].expand(group, -1, seen)
            strip = p.new_zeros(group, last - first, seen)
            mass[own, first:last, :seen] = strip.scatter_add(1, index, p.sum(-1)) / n
            peak[own, first:last, :seen] = strip.scatter_reduce(1, index, p.amax(-1), "amax")
            if later_high is not None and beta is not None:
                high = p > beta
                own_tile = paged.tile_of(position)[:, None] == torch.arange(seen, device=q.device)
                high &= ~own_tile[None, :, :, None]
                later_high[own] += paged.unpaged(high.sum(1, dtype=torch.int32), k.shape[1])
    return TileStatistics(mass, peak, later_high)


@functools.lru_cache(maxsize=4)  # the layers of a model ask for the same one
def page_index(tiling: Tiling, device: torch.device) -> torch.Tensor:
    """int64 [tiles, tile]: the token in each place when every tile fills a whole page; -1 is padding. Only to read."""
    within = torch.arange(tiling.tile)
    start, length = torch.tensor(tiling.starts[:-1])[:, None], torch.tensor(tiling.lengths)[:, None]
    return torch.where(within < length, start + within, -1).to(device)


class PagedKeys:
    """Keys laid out so that every tile fills a whole page, the rest of a short tile scoring -inf."""

    def __init__(self, k: torch.Tensor, keys: Tiling) -> None:
        self.keys, self.index = keys, page_index(keys, k.device)
        self.k = k[:, self.index.clamp(min=0)].float()  # [Hkv, tiles, tile, D]
        self.starts = torch.tensor(keys.starts[:-1], device=k.device)

    def tile_of(self, position: torch.Tensor) -> torch.Tensor:
        """The key tile that holds each position."""
        return torch.searchsorted(self.starts, position, right=True) - 1

    def scores(self, q: torch.Tensor, kv_head: int, position: torch.Tensor, scale: float) -> torch.Tensor:
        """Masked scores [G, rows, tiles, tile] of q [G, rows, D] at increasing positions, up to the last row's tile.

        Only tiles that hold a position or padding are masked element by element.
        """
        seen = int(self.tile_of(position[-1:])) + 1
        k = self.k[kv_head, :seen].flatten(0, 1)
        s = torch.matmul(q.float() * scale, k.T).view(*q.shape[:2], seen, self.keys.tile)
        near = int(self.tile_of(position[:1]))  # tiles before the first row's own are seen whole by every row
        s[:, :, near:].masked_fill_(self.index[near:seen] > position[:, None, None], float("-inf"))
        short = [i for i, n in enumerate(self.keys.lengths[:seen]) if n < self.keys.tile]
        for i in short:
            s[:, :, i, self.keys.lengths[i] :] = float("-inf")
        return s

    def unpaged(self, per_key: torch.Tensor, n_tokens: int) -> torch.Tensor:
        """[G, tiles, tile] back to [G, n_tokens], tokens that lie in later tiles getting zero."""
        seen = per_key.shape[1]
        out = per_key.new_zeros(per_key.shape[0], n_tokens)
        real = self.index[:seen] >= 0
        out[:, self.index[:seen][real]] = per_key[:, real]
        return out
