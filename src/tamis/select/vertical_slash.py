"""MInference's vertical-slash pattern (arXiv 2407.02490) at Tamis's tiles: columns and diagonals from the last rows.

As published, one estimate from the prompt's last 64 rows serves all rows; the first 30 columns and the last 100
diagonals are always kept. There each line is a token wide; here lines are pooled into tile-wide columns and bands of
the same total width, and ranked by their mass. The published budget is found per head by an offline search, which is
not repeated here: every head gets the same one. Rows outside documents are dense, and what lies outside documents is
kept, as for every selector here. In chunks each chunk decides from its own last rows, which is closer to them.
"""

from __future__ import annotations

import torch

from tamis.core.errors import InvalidInput
from tamis.select.scene import Scene

SINK_TOKENS, WINDOW_TOKENS = 30, 100
LEAST_VERTICAL, LEAST_SLASH = 30, 50
VERTICAL_SHARE = 0.2  # of a relative budget; the other four fifths are diagonals


class VerticalSlash:
    """Keeps the columns and the diagonals with the largest mass in the last rows, for every row.

    vertical, slash   tokens of columns and of diagonals, 1000 and 6096 as commonly run at any prompt length
    budget            instead of these two a share of the prompt in (0, 1], one fifth of it columns
    rows              last rows of the prompt that are scored, 64 as published
    """

    needs_records = False

    def __init__(self, vertical: int = 1000, slash: int = 6096, budget: float | None = None, rows: int = 64) -> None:
        if vertical < 0 or slash < 0 or rows < 1:
            raise InvalidInput(f"vertical {vertical}, slash {slash}, rows {rows}; give tokens, and 1 row or more.")
        if budget is not None and not 0 < budget <= 1:
            raise InvalidInput(f"budget is {budget}; allowed are shares of the prompt in (0, 1], or None.")
        self.vertical, self.slash, self.budget, self.rows = vertical, slash, budget, rows

    def select(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
        """See `Selector.select`."""
        p = last_rows(q, k, scale, self.rows)
        columns, bands = per_tile(p.mean(1), scene), per_band(diagonals(p), scene)
        vertical, slash = self.widths(k.shape[1])
        tile = scene.tiling.tile
        mask = top(columns, -(-vertical // tile))[:, None, :] | on_bands(top(bands, -(-slash // tile)), scene)
        start = torch.tensor(scene.tiling.starts, device=q.device)
        sink = start[:-1] < SINK_TOKENS
        window = start[scene.first : -1, None] - start[None, 1:] + 1 < WINDOW_TOKENS
        return ((mask | sink | window) & scene.causal) | scene.always

    def widths(self, n_tokens: int) -> tuple[int, int]:
        """Tokens of columns and of diagonals for a prompt of that length."""
        vertical, slash = self.vertical, self.slash
        if self.budget is not None:
            vertical = int(n_tokens * self.budget * VERTICAL_SHARE)
            slash = int(n_tokens * self.budget) - vertical
        return min(n_tokens, max(vertical, LEAST_VERTICAL)), min(n_tokens, max(slash, LEAST_SLASH))


def last_rows(q: torch.Tensor, k: torch.Tensor, scale: float, rows: int) -> torch.Tensor:
    """float32 [Hq, R, T]: causal attention probabilities of the last R = min(rows, C) rows of q [Hq, C, D], whose last
    one is at the place of the last key of k [Hkv, T, D]."""
    n = k.shape[1]
    rows = min(rows, q.shape[1])
    picked = (q[:, q.shape[1] - rows :].float() * scale).reshape(k.shape[0], -1, q.shape[2])
    s = torch.matmul(picked, k.float().mT).view(q.shape[0], rows, n)
    position = torch.arange(n, device=q.device)
    return s.masked_fill_(position > position[n - rows :, None], float("-inf")).softmax(-1)


def diagonals(p: torch.Tensor) -> torch.Tensor:
    """[H, T]: sum along each diagonal of p [H, R, T], by distance from key to row (0 = itself), over R."""
    heads, rows, n = p.shape
    position = torch.arange(n, device=p.device)
    distance = (position[n - rows :, None] - position).clamp(min=0)  # p is 0 where it would be negative
    return p.new_zeros(heads, n).index_add_(1, distance.flatten(), p.flatten(1)) / rows


def per_tile(per_token: torch.Tensor, scene: Scene) -> torch.Tensor:
    """[H, T] summed over the tokens of each tile: [H, N]."""
    length = torch.tensor(scene.tiling.lengths, device=per_token.device)
    number = torch.arange(len(scene), device=per_token.device)
    tile_of = number.repeat_interleave(length, output_size=scene.tiling.n_tokens)
    return per_token.new_zeros(per_token.shape[0], len(scene)).index_add_(1, tile_of, per_token)


def per_band(per_distance: torch.Tensor, scene: Scene) -> torch.Tensor:
    """[H, T] by distance, summed over bands of one tile's width: [H, ceil(T / tile)]."""
    heads, n = per_distance.shape
    tile = scene.tiling.tile
    return torch.nn.functional.pad(per_distance, (0, -n % tile)).view(heads, -1, tile).sum(-1)


def on_bands(chosen: torch.Tensor, scene: Scene) -> torch.Tensor:
    """bool [H, n, N]: the middle of the tile, at the distance of the two starts, lies on a chosen band [H, bands]."""
    start = torch.tensor(scene.tiling.starts[:-1], device=chosen.device)
    band = (start[scene.first :, None] - start).clamp(min=0) // scene.tiling.tile
    return chosen[:, band] & scene.causal


def top(values: torch.Tensor, count: int | torch.Tensor) -> torch.Tensor:
    """bool, shaped as values [H, n]: the `count` largest of each row (an int, or int64 [H] on its device)."""
    most = torch.as_tensor(count, device=values.device).view(-1, 1)
    chosen = torch.arange(values.shape[-1], device=values.device) < most
    order = values.argsort(-1, descending=True)
    return torch.zeros_like(values, dtype=torch.bool).scatter_(1, order, chosen.expand_as(order))
