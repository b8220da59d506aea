"""One prompt's sparse prefill: which tiles each layer computes, and the record of what was done.

Knows tensors of one layer at a time and the scene of the prompt; not transformers, files or text.
"""

from __future__ import annotations

import functools
import logging
import time
from dataclasses import dataclass, field

import torch

from tamis.kernels import dispatch
from tamis.kernels.lists import TileLists, counted, lists_from_mask
from tamis.select import on_device
from tamis.select.oracle import true_mass
from tamis.select.scene import Scene, Selector

log = logging.getLogger(__name__)


@functools.cache
def _say_once(message: str) -> None:
    log.info(message)


@dataclass
class LayerTrace:
    """What one layer computed. `area` counts score elements over all heads, as `TileLists.area` does; recall is None
    unless measured."""

    area: int | torch.Tensor
    causal_area: int
    select_s: float
    attend_s: float
    recall: float | None = None

    @property
    def density(self) -> float:
        """Share of the causal area that was computed."""
        return counted(self.area) / self.causal_area


@dataclass
class SparsePrefill:
    """Runs every layer of one prompt with the tiles that `selector` chooses.

    kernel: a name in `kernels.dispatch` or "auto". With `measure_recall` the true attention mass of the chosen tiles
    is computed too (slower than dense: for evaluation). Times are only read on a CPU, where they need no waiting.
    """

    scene: Scene
    selector: Selector
    kernel: str = "auto"
    measure_recall: bool = False
    layers: dict[int, LayerTrace] = field(default_factory=dict)
    used_kernel: str = ""
    _device_scene: on_device.DeviceScene | None = field(default=None, init=False, repr=False)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [Hq, T, D], k and v [Hkv, T, D] of the whole prompt, rotated → out [Hq, T, D], log-sum-exp [Hq, T]."""
        begin = time.perf_counter()
        lists = self.lists(layer, q, k, scale)
        chosen = time.perf_counter()
        self.used_kernel = (
            dispatch.choose(q.device, q.dtype, head_dim=q.shape[2], tile=self.scene.tiling.tile)
            if self.kernel == "auto"
            else self.kernel
        )
        out, lse = dispatch.block_sparse_attention(q, k, v, lists, scale, kernel=self.used_kernel, need_lse=False)
        trace = LayerTrace(lists.area, lists.causal_area, chosen - begin, time.perf_counter() - chosen)
        if self.measure_recall:
            trace.recall = recall(on_device.mask_of(lists, self.scene), q, k, scale, self.scene)
        self.layers[layer] = trace
        return out, lse

    def lists(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float) -> TileLists:
        """By a kernel where the tensors are on a GPU and the selector has one, else through PyTorch."""
        if not q.is_cuda or (why := on_device.why_not(self.selector, q, self.scene)) is not None:
            if q.is_cuda:
                _say_once(f"tiles are selected by PyTorch, which waits for the device at every layer: {why}")
            mask = self.selector.select(layer, q, k, scale, self.scene)
            return lists_from_mask(mask, self.scene.tiling, self.scene.tiling)
        if self._device_scene is None:
            self._device_scene = on_device.DeviceScene.of(self.scene)
        return self._device_scene.lists(self.selector, layer, q, k, scale)

    @property
    def density(self) -> float:
        """Share of the causal area computed, over all layers and heads."""
        return sum(counted(t.area) for t in self.layers.values()) / sum(t.causal_area for t in self.layers.values())

    @property
    def recall(self) -> float | None:
        """Attention mass kept, mean over layers, heads and rows; None unless measured in every layer."""
        found = [t.recall for t in self.layers.values()]
        return sum(r for r in found if r is not None) / len(found) if found and None not in found else None


def recall(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> float:
    """Share of the true attention mass that lies in the chosen tiles, mean over heads and prompt rows."""
    kept = (true_mass(q, k, scale, scene) * mask).sum(-1)  # [Hq, N], mean over each tile's rows
    rows = torch.tensor(scene.tiling.lengths, dtype=torch.float32, device=kept.device)
    return float((kept * rows).sum() / (rows.sum() * kept.shape[0]))
