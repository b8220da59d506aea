"""Tiles chosen per query tile from a few of its rows: stored local bits, sampled cross-document tiles.

On real models the published rule computes three quarters of the attention, because one page list has to serve every
later row. A few sampled rows of each query tile, scored exactly, come close to the best possible choice at about 1/16
of one QK product. The stored bits still decide the document's own tiles.
"""

from __future__ import annotations

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.reference.tile_statistics import PagedKeys
from tamis.select.scene import Scene, keep_mass

STRIP_TILES = 8  # query tiles whose sampled scores are held at once


class Sampled:
    """Keeps, per query head and tile, the fewest tiles that hold `mass` of what `rows` sampled rows attend to.

    Tiles that are kept anyway (the diagonal, prefix, stored local bits) count towards the mass first.
    """

    needs_records = True

    def __init__(self, rows: int = 8, mass: float = 0.9) -> None:
        if not 1 <= rows <= 128:
            raise InvalidInput(f"rows is {rows}; allowed are 1 to 128 sampled rows per query tile.")
        if not 0 < mass <= 1:
            raise InvalidInput(f"mass is {mass}; allowed are shares of the attention in (0, 1].")
        self.rows, self.mass = rows, mass

    def select(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
        """See `Selector.select`."""
        mask = scene.always.expand(q.shape[0], -1, -1).clone()
        mask |= scene.stored_local(layer, q.shape[0])
        tiles = scene.document_tiles
        if tiles.numel():
            mass = sampled_mass(q, k, scale, scene, tiles, self.rows)
            mask[:, tiles] = keep_mass(mass, mask[:, tiles], scene.cross[tiles], self.mass)
        return mask


def sampled_mass(
    q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene, tiles: torch.Tensor, rows: int
) -> torch.Tensor:
    """float32 [Hq, len(tiles), N]: mean over the sampled rows of the mass that they give each key tile.

    Rows are spread evenly over each of the query `tiles` (increasing numbers, 0 is the window's first); a tile shorter
    than `rows` has some of them counted twice. q and k as in `Selector.select`.
    """
    group = q.shape[0] // k.shape[0]
    paged = PagedKeys(k, scene.tiling)
    position = sample_rows(scene, tiles, rows)
    mass = torch.zeros(q.shape[0], len(tiles), len(scene), device=q.device)
    for at in range(0, len(tiles), STRIP_TILES):
        strip = position[at : at + STRIP_TILES]
        picked = q[:, strip.flatten() - scene.q_offset]
        for kv in range(k.shape[0]):
            own = slice(kv * group, (kv + 1) * group)
            s = paged.scores(picked[own], kv, strip.flatten(), scale)  # [G, rows of the strip, tiles seen, tile]
            p = s.flatten(2).softmax(-1).view(s.shape).sum(-1)
            mass[own, at : at + len(strip), : p.shape[2]] = p.view(group, len(strip), rows, -1).mean(2)
    return mass


def sample_rows(scene: Scene, tiles: torch.Tensor, rows: int) -> torch.Tensor:
    """int64 [len(tiles), rows]: positions in the prompt spread evenly over each of the query `tiles`, increasing."""
    start = torch.tensor(scene.queries.starts, device=tiles.device)[tiles] + scene.q_offset
    length = torch.tensor(scene.queries.lengths, device=tiles.device)[tiles]
    return start[:, None] + (length[:, None] * (2 * torch.arange(rows, device=tiles.device) + 1)) // (2 * rows)
