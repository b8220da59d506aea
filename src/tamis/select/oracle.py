"""The best possible choice of tiles for a given attention mass, from the true attention. For evaluation only."""

from __future__ import annotations

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels import dispatch
from tamis.kernels.statistics import tile_statistics
from tamis.select.scene import Scene, keep_mass


class Oracle:
    """Keeps the tiles with the largest true mass until `mass` of every row of tiles is kept. Costs more than dense."""

    needs_records = False

    def __init__(self, mass: float = 0.9) -> None:
        if not 0 < mass <= 1:
            raise InvalidInput(f"mass is {mass}; allowed are shares of the attention in (0, 1].")
        self.mass = mass

    def select(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
        """See `Selector.select`."""
        return keep_mass(true_mass(q, k, scale, scene), scene.always, scene.causal, self.mass)


def true_mass(
    q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene, lse: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [Hq, n, N]: attention mass of each tile, mean over its rows, of dense attention on q and k.

    lse  natural log-sum-exp [Hq, C] of that attention, where it was computed anyway
    """
    if lse is None:
        # attention gives it sooner than a second pass over the scores; its values are of no interest
        lse = dispatch.causal_attention(q, k, k, scale)[1]
    return tile_statistics(q, k, lse, scene.queries, scene.tiling, scale=scale, q_offset=scene.q_offset).mass
