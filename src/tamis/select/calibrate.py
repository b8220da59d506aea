"""A share of the attention per (layer, head), so that the least mass is lost for a given share of the area.

arXiv 2606.09441 and `sampled` use one share for all heads. Heads differ: for one the last percent costs a tile, for
another a third of the prompt. Lagrange's rule says where to stop: at the same price per mass lost everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.lists import tile_areas
from tamis.select.rules import PerHead, keep_shares
from tamis.select.scene import Scene

GRID = (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995)
_HALVINGS = 60


@dataclass
class Curves:
    """For each (layer, head) and share of the grid, summed over prompts: area computed and mass lost.

    area, lost float64 [L, H, len(grid)]; `rows` and `causal_area` are the totals they are shares of, per head.
    """

    grid: tuple[float, ...] = GRID
    area: torch.Tensor | None = None
    lost: torch.Tensor | None = None
    rows: float = 0.0
    causal_area: float = 0.0

    def add(self, scene: Scene, estimates: Sequence[torch.Tensor], truths: Sequence[torch.Tensor]) -> None:
        """Take in one prompt: per layer the mass that decides and the true mass, both float32 [H, n, N].

        Give the true mass twice to calibrate for the best that any estimate could do. Stored local bits that the scene
        holds are kept, as in `sampled`.
        """
        areas = tile_areas(scene.queries, scene.tiling, scene.q_offset)
        length = torch.tensor(scene.queries.lengths, dtype=torch.float64)
        tables = [
            self._layer(layer, estimate, truth, scene, areas.to(truth.device).double())
            for layer, (estimate, truth) in enumerate(zip(estimates, truths, strict=True))
        ]
        found = torch.stack(tables).cpu()  # [L, 2, H, grid]
        area, lost = found[:, 0], found[:, 1]
        self.area = area if self.area is None else self.area + area
        self.lost = lost if self.lost is None else self.lost + lost
        self.rows += float(length.sum())
        self.causal_area += float(areas.sum())

    def _layer(
        self, layer: int, estimate: torch.Tensor, truth: torch.Tensor, scene: Scene, areas: torch.Tensor
    ) -> torch.Tensor:
        heads, device = truth.shape[0], truth.device
        forced = (scene.always | scene.stored_local(layer, heads)).to(device)
        offered = scene.cross.to(device)
        length = torch.tensor(scene.queries.lengths, dtype=torch.float64, device=device)
        table = []
        for share in self.grid:
            mask = keep_shares(estimate.to(device), forced, offered, torch.tensor(share, device=device))
            lost = (truth * (scene.causal.to(device) & ~mask)).sum(-1).double() @ length
            table.append(torch.stack([(mask * areas).sum((1, 2)), lost]))
        return torch.stack(table, -1)


def calibrate(curves: Curves, density: float) -> PerHead:
    """The shares that lose the least mass in total while at most `density` of the causal area is computed.

    Raises InvalidInput if nothing was recorded, or if even the smallest shares of the grid compute more.
    """
    if curves.area is None or curves.lost is None:
        raise InvalidInput("nothing was recorded to calibrate from; give at least one prompt.")
    area = curves.area / curves.causal_area
    lost = curves.lost / curves.rows
    least = float(area[..., 0].mean())
    if not least <= density <= 1:
        raise InvalidInput(
            f"density is {density}; the smallest share, {curves.grid[0]}, computes {least:.3f} on these prompts. "
            "Give a density between that and 1."
        )

    def choice(price: float) -> torch.Tensor:
        return (lost + price * area).argmin(-1)

    def cost(index: torch.Tensor) -> float:
        return float(area.gather(-1, index[..., None]).mean())

    low, high = 0.0, 1.0
    while cost(choice(high)) > density and high < 1e12:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if cost(choice(middle)) <= density else (middle, high)
    grid = torch.tensor(curves.grid, dtype=torch.float64)
    shares: list[list[float]] = grid[choice(high)].tolist()
    return PerHead(tuple(tuple(row) for row in shares))
