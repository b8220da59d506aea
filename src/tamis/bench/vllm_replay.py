"""Lists of a real model's density in the engine of this process, where random weights would show a selector nothing.

The selector works in full on the model's queries and keys; then its lists make way for prepared ones. They are made
when a length is first seen, which is the warm-up's matter, and kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tamis.attention.prefill import SparsePrefill
from tamis.bench.densities import load, nearest
from tamis.kernels.lists import TileLists, lists_from_mask, tile_areas
from tamis.select.scene import Scene


def replay_densities(path: str, variant: str, layers: int) -> None:
    """From now on every sparse prefill of this process gets lists of `variant`'s recorded densities in the file.

    layers: of the model that runs. Raises NothingFound if the file has none of that variant.
    """
    recorded = load(path)
    nearest(recorded, variant, 1)
    chosen, kept = SparsePrefill.lists, dict[tuple[int, int, int, int], TileLists]()
    draw: dict[torch.device, torch.Generator] = {}
    measured: dict[int, Areas] = {}

    def lists(self: SparsePrefill, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float) -> TileLists:
        chosen(self, layer, q, k, scale)
        key = (self.scene.tiling.n_tokens, layer, q.shape[1], k.shape[1])
        if key not in kept:
            if q.device not in draw:
                draw[q.device] = torch.Generator(device=q.device).manual_seed(2)
            tokens = key[0]
            if tokens not in measured:
                measured[tokens] = Areas.of(self.scene)
            density = nearest(recorded, variant, tokens).of(layer, layers, q.shape[0])
            share = measured[tokens].share(density).to(q.device)
            kept[key] = lists_of_chunk(self.window(q.shape[1], k.shape[1]), share, draw[q.device])
        return kept[key]

    SparsePrefill.lists = lists  # type: ignore[method-assign]


class Areas(NamedTuple):
    """Score elements of a whole prompt: all, those of tiles that are kept in any case, and those that are chosen."""

    total: float
    fixed: float
    cross: float

    @classmethod
    def of(cls, scene: Scene) -> Areas:
        """Of a prompt's tiles."""
        areas = tile_areas(scene.tiling, scene.tiling).to(scene.document.device).double()
        return cls(
            float(areas.sum()),
            float((areas * (scene.always | scene.local)).sum()),
            max(float((areas * scene.cross).sum()), 1.0),
        )

    def share(self, density: torch.Tensor) -> torch.Tensor:
        """Of the tiles that are chosen, [heads], for these shares of the causal area, as `densities.lists_of_density`
        has it."""
        return ((density * self.total - self.fixed) / self.cross).clamp(0, 1)


def lists_of_chunk(chunk: Scene, share: torch.Tensor, generator: torch.Generator) -> TileLists:
    """Lists of one chunk of a prompt, with that share [heads] of the tiles that a selector chooses, at random."""
    random = torch.rand(len(share), *chunk.cross.shape, device=share.device, generator=generator)
    mask = chunk.always | chunk.local | (chunk.cross & (random < share[:, None, None]))
    return lists_from_mask(mask, chunk.queries, chunk.tiling, chunk.q_offset)
