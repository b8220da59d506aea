"""The two ends of the scale: every tile (dense by lists), and no document-to-document tile at all."""

from __future__ import annotations

import torch

from tamis.select.scene import Scene


class AllTiles:
    """Dense attention through the sparse kernel: what every sparse result is compared with, bit for bit."""

    needs_records = False

    def select(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
        """See `Selector.select`."""
        return scene.causal.expand(q.shape[0], -1, -1)


class NoCrossTiles:
    """Documents do not see each other: the attention that reusing a document's stored KV gives on a stock model."""

    needs_records = False

    def select(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
        """See `Selector.select`."""
        return (scene.always | scene.local).expand(q.shape[0], -1, -1)
