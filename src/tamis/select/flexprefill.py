"""FlexPrefill (arXiv 2502.20766) at Tamis's tiles: per head either pooled query-aware tiles or vertical and slash.

A head whose pooled estimate agrees with the true attention of the last rows (square root of the Jensen-Shannon
divergence below tau) trusts the pooled map of all tiles; the others take columns and diagonals that hold gamma of the
last rows' attention. As published, the choice is made over the whole causal area and the first column and the main
diagonal are kept. Rows outside documents are dense, and what lies outside documents is kept, as in every selector here.
Pooled scores of short tiles are weighted by their tokens, which changes nothing where all tiles are equal.

In chunks it decides per chunk: the last rows are the chunk's, and the pooled budget is shared by the chunk's rows. Its
tiles then differ from those of the whole prompt.
"""

from __future__ import annotations

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.lists import Tiling
from tamis.select.rowmass import Pages
from tamis.select.scene import Scene
from tamis.select.vertical_slash import diagonals, last_rows, on_bands, per_band, per_tile, top


class FlexPrefill:
    """Published defaults: gamma 0.9 (0.95 for the careful setting), tau 0.1, min_budget 512 tokens of each pattern."""

    needs_records = False

    def __init__(self, gamma: float = 0.9, tau: float = 0.1, min_budget: int = 512) -> None:
        if not 0 < gamma <= 1:
            raise InvalidInput(f"gamma is {gamma}; allowed are shares of the attention in (0, 1].")
        if tau < 0 or min_budget < 1:
            raise InvalidInput(f"tau is {tau} and min_budget {min_budget}; give tau 0 or more and 1 token or more.")
        self.gamma, self.tau, self.min_budget = gamma, tau, min_budget

    def select(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
        """See `Selector.select`."""
        tile, n = scene.tiling.tile, len(scene.queries)
        least = -(-self.min_budget // tile)
        p = last_rows(q, k, scale, tile)
        column, slash = p.mean(1), diagonals(p)
        columns, bands = per_tile(column, scene), per_band(slash, scene)
        pooled = pooled_attention(q, k, scale, scene)
        aware = _js_distance(_pooled_last(q, k, scale, scene), columns) < self.tau
        verticals, slashes = ((_cover(x, self.gamma) // tile + 1).clamp(least) for x in (column, slash))
        verticals, slashes = verticals.masked_fill(aware, least), slashes.masked_fill(aware, least)
        columns[:, 0], bands[:, 0] = float("inf"), float("inf")
        mask = top(columns, verticals)[:, None, :] | on_bands(top(bands, slashes), scene)
        value, order = pooled.flatten(1).sort(-1, descending=True)
        kept = value.cumsum(-1) <= self.gamma * n
        mask |= torch.zeros_like(kept).scatter_(1, order, kept).view_as(pooled) & aware[:, None, None]
        return (mask & scene.causal) | scene.always


def pooled_attention(q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
    """float32 [Hq, n, N]: softmax over the scores of mean queries on mean keys; rows sum to 1, causal by tiles."""
    s = _pooled_scores(_tile_means(q, scene.queries), k, scale, scene)
    return s.masked_fill_(~scene.causal, float("-inf")).softmax(-1)


def _pooled_last(q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
    last = q[:, -scene.tiling.tile :].float().mean(1, keepdim=True)
    return _pooled_scores(last, k, scale, scene)[:, 0].softmax(-1)


def _pooled_scores(mean_q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
    heads, rows, dim = mean_q.shape
    weight = torch.tensor(scene.tiling.lengths, device=k.device).float().log()
    s = torch.matmul((mean_q * scale).reshape(k.shape[0], -1, dim), _tile_means(k, scene.tiling).mT)
    return s.view(heads, rows, -1) + weight


def _tile_means(x: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """[H, T, D] to float32 [H, N, D]."""
    return Pages(tiling, x.device).lay(x).sum(2) / torch.tensor(tiling.lengths, device=x.device)[:, None]


def _cover(x: torch.Tensor, share: float) -> torch.Tensor:
    """int64 [H]: how many of the largest entries of x [H, n] reach `share`."""
    value, _ = x.sort(-1, descending=True)
    needed: torch.Tensor = (value.cumsum(-1) <= share).sum(-1) + 1
    return needed


def _js_distance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[H]: square root of the Jensen-Shannon divergence (nats) of distributions [H, n]."""
    m = ((p + q) / 2).clamp(min=torch.finfo(p.dtype).tiny)
    terms = torch.special.xlogy(p, p / m) + torch.special.xlogy(q, q / m)
    distance: torch.Tensor = (terms.sum(-1) / 2).clamp(min=0).sqrt()
    return distance
