"""Attention mass of tiles from chosen rows, for all heads at once: the estimates behind the research selectors.

Plain PyTorch without a look at device values, so that a GPU is kept busy. Strips bound the memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.lists import Tiling
from tamis.kernels.reference.tile_statistics import page_index
from tamis.select.sampled import sample_rows
from tamis.select.scene import Scene

STRIP_SCORES = {"cuda": 1 << 28, "cpu": 1 << 23}  # scores held at once: 1 GiB and 32 MiB
SPREADS = ("even", "ends", "last")
REDUCTIONS = ("mean", "max")


class Pages:
    """Rows laid out so that every tile fills a whole page; the rest of a short tile is zero and not `real`."""

    def __init__(self, tiling: Tiling, device: torch.device) -> None:
        self.index = page_index(tiling, device)
        self.real = self.index >= 0

    def lay(self, x: torch.Tensor) -> torch.Tensor:
        """[H, T, D] to float32 [H, N, tile, D]."""
        return x[:, self.index.clamp(min=0)].float() * self.real[:, :, None]


def strips(scene: Scene, scores_per_tile_pair: int, device: torch.device) -> Iterator[slice]:
    """Consecutive query tiles whose scores over all tiles up to the last of them fit the memory set aside."""
    most = STRIP_SCORES.get(device.type, STRIP_SCORES["cuda"])
    first, n = 0, len(scene.queries)
    while first < n:
        last = first + 1
        while last < n and (last + 1 - first) * (scene.first + last + 1) * scores_per_tile_pair <= most:
            last += 1
        yield slice(first, last)
        first = last


def row_mass(
    q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene, position: torch.Tensor, reduce: str = "mean"
) -> torch.Tensor:
    """float32 [Hq, n, N]: mass that the chosen rows of each query tile give each key tile, mean or max over the rows.

    position  int64 [n, R]: places in the prompt of each query tile's rows, in any order; -1 where a tile has fewer
    q [Hq, C, D], k [Hkv, T, D], rotated. A row of tiles sums to 1 with "mean" and to 1 or more with "max".
    """
    heads, kv_heads, rows = q.shape[0], k.shape[0], position.shape[1]
    pages = Pages(scene.tiling, q.device)
    keys = pages.lay(k)
    weight = (position >= 0).float()
    weight = weight / weight.sum(1, keepdim=True)
    at = position.clamp(min=scene.q_offset)
    mass = torch.zeros(heads, len(position), len(scene), device=q.device)
    for strip in strips(scene, heads * rows * scene.tiling.tile, q.device):
        seen, n = scene.first + strip.stop, strip.stop - strip.start
        picked = (q[:, (at[strip] - scene.q_offset).flatten()].float() * scale).view(kv_heads, -1, q.shape[2])
        s = torch.matmul(picked, keys[:, :seen].flatten(1, 2).mT).view(heads, n, rows, seen * scene.tiling.tile)
        index = pages.index[:seen].flatten()
        s.masked_fill_((index > at[strip][:, :, None]) | (index < 0), float("-inf"))
        s = s.sub_(s.amax(-1, keepdim=True)).exp_().view(heads, n, rows, seen, -1).sum(-1)
        p = s / s.sum(-1, keepdim=True)
        share = weight[strip, :, None]
        mass[:, strip, :seen] = (p * share).sum(2) if reduce == "mean" else (p * (share > 0)).amax(2)
    return mass


def spread_rows(scene: Scene, rows: int, spread: str = "even") -> torch.Tensor:
    """int64 [n, rows]: places in the prompt of rows of each query tile; one shorter than `rows` has some of them twice.

    spread  "even": in the middle of `rows` equal parts, "ends": half of them first and half last in the tile, "last":
            the last ones. Raises InvalidInput for another name or rows outside 1..tile.
    """
    if not 1 <= rows <= scene.tiling.tile:
        raise InvalidInput(f"rows is {rows}; allowed are 1 to {scene.tiling.tile} sampled rows per query tile.")
    if spread not in SPREADS:
        raise InvalidInput(f"spread is {spread!r}; allowed are {', '.join(SPREADS)}.")
    device = scene.document.device
    if spread == "even":
        return sample_rows(scene, torch.arange(len(scene.queries), device=device), rows)
    start = torch.tensor(scene.queries.starts[:-1], device=device)[:, None] + scene.q_offset
    length = torch.tensor(scene.queries.lengths, device=device)[:, None]
    n = torch.arange(rows, device=device)
    from_end = length - rows + n
    if spread == "ends":
        from_end = torch.where(n < rows // 2, n, from_end)
    return start + from_end.clamp(min=0).minimum(length - 1)
