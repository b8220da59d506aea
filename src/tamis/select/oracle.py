"""The best possible choice of tiles for a given attention mass, from the true attention. For evaluation only."""

from __future__ import annotations

from itertools import pairwise

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels import dispatch
from tamis.kernels.reference.tile_statistics import PagedKeys
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


def true_mass(q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
    """float32 [Hq, N, N]: attention mass of each tile, mean over its rows, of dense attention on q and k."""
    # on a GPU attention gives it sooner than a second pass over the scores; its values are of no interest
    lse = dispatch.causal_attention(q, k, k, scale)[1] if q.is_cuda else _log_sum_exp(q, k, scale, scene)
    return tile_statistics(q, k, lse, scene.tiling, scene.tiling, scale=scale).mass


def _log_sum_exp(q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
    """Natural log-sum-exp [Hq, T] of the causal scores, one query tile at a time."""
    group, starts = q.shape[0] // k.shape[0], scene.tiling.starts
    paged = PagedKeys(k, scene.tiling)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for a, b in pairwise(starts):
        position = torch.arange(a, b, device=q.device)
        for kv in range(k.shape[0]):
            own = slice(kv * group, (kv + 1) * group)
            lse[own, a:b] = paged.scores(q[own, a:b], kv, position, scale).flatten(2).logsumexp(-1)
    return lse
