"""XAttention (arXiv 2503.16428) at Tamis's tiles: sums along antidiagonals of the scores stand for a tile's worth.

As published, the choice is made over the whole causal area, local and cross-document tiles alike, and the diagonal and
the first tile are always kept. Rows outside documents are dense, as for every selector here, so that the comparison is
about the documents' rows; what lies outside documents is kept too, which in a usual prompt is that first tile. Each
query tile decides for itself, so a prompt in chunks gets the tiles of the whole prompt.
"""

from __future__ import annotations

import torch

from tamis.core.errors import InvalidInput
from tamis.select.rowmass import Pages, strips
from tamis.select.scene import Scene, keep_mass


class XAttention:
    """Keeps, per query head and tile, the fewest tiles that hold `threshold` of the estimated mass.

    stride      tokens of a group, 8 or 16 as published; must divide the tile
    threshold   share of the estimated mass, 0.9 as published
    """

    needs_records = False

    def __init__(self, stride: int = 8, threshold: float = 0.9) -> None:
        if stride < 1:
            raise InvalidInput(f"stride is {stride}; give 1 or more tokens, such as 8 or 16.")
        if not 0 < threshold <= 1:
            raise InvalidInput(f"threshold is {threshold}; allowed are shares of the attention in (0, 1].")
        self.stride, self.threshold = stride, threshold

    def select(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
        """See `Selector.select`. Raises InvalidInput if the stride does not divide the tile."""
        mask = scene.always.expand(q.shape[0], -1, -1).clone()
        tiles = scene.document_tiles
        if tiles.numel():
            mass = antidiagonal_mass(q, k, scale, scene, self.stride)[:, tiles]
            forced = scene.always[tiles].clone()
            forced[:, 0] = True
            mask[:, tiles] = keep_mass(mass, forced, scene.causal[tiles], self.threshold)
        return mask


def antidiagonal_mass(q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene, stride: int) -> torch.Tensor:
    """float32 [Hq, n, N]: softmax over mean antidiagonal scores of stride x stride groups, summed tile by tile.

    Rows of tiles outside documents are zero. Groups are counted from the start of a tile; one that a short tile cuts
    off is judged by the pairs that it has.
    """
    tile = scene.tiling.tile
    if tile % stride:
        raise InvalidInput(f"stride is {stride} and the tile {tile} tokens; give a stride that divides the tile.")
    pages, own_pages = Pages(scene.tiling, q.device), Pages(scene.queries, q.device)
    heads, kv_heads, per_tile = q.shape[0], k.shape[0], tile // stride
    real = pages.real.view(-1, stride).float()  # [groups, stride]
    keys = pages.lay(k).view(kv_heads, -1, stride * k.shape[2])
    rows = own_pages.lay(q).view(heads, -1, stride, q.shape[2]).flip(2).reshape(heads, -1, stride * q.shape[2])
    number = torch.arange(keys.shape[1], device=q.device)
    mass = torch.zeros(heads, len(scene.queries), len(scene), device=q.device)
    for strip in strips(scene, heads * per_tile * per_tile, q.device):
        tiles = scene.first + strip.stop
        seen = tiles * per_tile
        own = slice((scene.first + strip.start) * per_tile, seen)
        n = seen - own.start
        picked = rows[:, strip.start * per_tile : strip.stop * per_tile]
        s = torch.matmul(picked.reshape(kv_heads, -1, rows.shape[2]), keys[:, :seen].mT).view(heads, n, seen)
        pairs = real[own].flip(1) @ real[:seen].T
        s = s * (scale / pairs.clamp(min=1))
        hidden = (pairs == 0) | (number[:seen] > number[own, None])
        p = s.masked_fill_(hidden, float("-inf")).softmax(-1).nan_to_num_(0.0)  # NaN: a group that sees nothing
        sums = p.view(heads, n // per_tile, per_tile, tiles, per_tile).sum((2, 4))
        mass[:, strip, :tiles] = sums
    return mass
