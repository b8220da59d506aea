"""SIFT as published (arXiv 2606.09441, section 5): lists from stored bits alone, the same for every question."""

from __future__ import annotations

import torch

from tamis.select.scene import Scene


class Stored:
    """Local tiles whose LA bit is set, and for every later document's rows the pages whose CA bit is set.

    alpha, beta and gamma were applied when the bits were made (`index.spec.Thresholds`).
    """

    needs_records = True

    def select(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
        """See `Selector.select`."""
        heads = q.shape[0]
        cross = scene.cross & scene.stored_pages(layer, heads)[:, None, :]
        return scene.always | scene.stored_local(layer, heads) | cross
