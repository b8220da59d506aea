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
from tamis.select.scene import Scene, Selector, window_of

log = logging.getLogger(__name__)


@functools.cache
def _say_once(message: str) -> None:
    log.info(message)


@dataclass
class LayerTrace:
    """What one layer computed, summed over the chunks of a prompt.

    `area` counts score elements over all heads, as `TileLists.area` does; `recall` is the mean over the `rows`, None
    unless measured.
    """

    area: int | torch.Tensor
    causal_area: int
    select_s: float
    attend_s: float
    recall: float | None = None
    rows: int = 0
    chunks: int = 1

    @property
    def density(self) -> float:
        """Share of the causal area that was computed."""
        return counted(self.area) / self.causal_area

    def __add__(self, later: LayerTrace) -> LayerTrace:
        """Both together, without waiting for a device."""
        rows = self.rows + later.rows
        kept = None
        if self.recall is not None and later.recall is not None:
            kept = (self.recall * self.rows + later.recall * later.rows) / rows
        return LayerTrace(
            _summed(self.area) + _summed(later.area),
            self.causal_area + later.causal_area,
            self.select_s + later.select_s,
            self.attend_s + later.attend_s,
            kept,
            rows,
            self.chunks + later.chunks,
        )


def _summed(area: int | torch.Tensor) -> int | torch.Tensor:
    return area.sum(dtype=torch.int64) if isinstance(area, torch.Tensor) else area


@dataclass
class SparsePrefill:
    """Runs every layer of one prompt, at once or in chunks, with the tiles that `selector` chooses.

    scene: of the whole prompt. Chunks begin and end on borders of its tiles and run from the first to the last. Where
    tiles are chosen row of tiles by row of tiles, as all but the peers' selectors do, chunks change nothing.
    kernel: a name in `kernels.dispatch` or "auto". With `measure_recall` the true attention mass of the chosen tiles
    is computed too (slower than dense: for evaluation). Times are only read on a CPU, where they need no waiting.
    """

    scene: Scene
    selector: Selector
    kernel: str = "auto"
    measure_recall: bool = False
    layers: dict[int, LayerTrace] = field(default_factory=dict)
    used_kernel: str = ""
    _heads: int = field(default=0, init=False, repr=False)
    _window: Scene | None = field(default=None, init=False, repr=False)  # the chunk that is running
    _device_scene: on_device.DeviceScene | None = field(default=None, init=False, repr=False)
    _device_window: on_device.DeviceScene | None = field(default=None, init=False, repr=False)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [Hq, C, D] of a chunk, k and v [Hkv, T, D] of all T tokens up to its end, rotated → out [Hq, C, D] and
        log-sum-exp [Hq, C]. C = T is the whole prompt, or its first chunk."""
        begin = time.perf_counter()
        lists = self.lists(layer, q, k, scale)
        chosen = time.perf_counter()
        self.used_kernel = (
            dispatch.choose(q.device, q.dtype, head_dim=q.shape[2], tile=self.scene.tiling.tile)
            if self.kernel == "auto"
            else self.kernel
        )
        # on a GPU laid out as the output product reads it, which saves a copy
        out = q.new_empty(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1) if q.is_cuda else None
        out, lse = dispatch.block_sparse_attention(
            q, k, v, lists, scale, kernel=self.used_kernel, out=out, need_lse=False
        )
        done = time.perf_counter()
        kept = None
        if self.measure_recall:
            scene = self.window(q.shape[1], k.shape[1])
            kept = recall(on_device.mask_of(lists, scene), q, k, scale, scene)
        trace = LayerTrace(lists.area, lists.causal_area, chosen - begin, done - chosen, kept, q.shape[1])
        self._heads, before = q.shape[0], self.layers.get(layer)
        self.layers[layer] = trace if before is None or lists.q_offset == 0 else before + trace
        return out, lse

    def window(self, n_rows: int, n_keys: int) -> Scene:
        """`window_of` the prompt, kept for the other layers of the chunk."""
        held = self._window
        if held is None or (held.q_offset, held.tiling.n_tokens) != (n_keys - n_rows, n_keys):
            self._window = held = window_of(self.scene, n_rows, n_keys)
        return held

    def lists(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float) -> TileLists:
        """By a kernel where the tensors are on a GPU and the selector has one, else through PyTorch."""
        scene = self.window(q.shape[1], k.shape[1])
        if not q.is_cuda or (why := on_device.why_not(self.selector, q, scene)) is not None:
            if q.is_cuda:
                _say_once(f"tiles are selected by PyTorch, which waits for the device at every layer: {why}")
            mask = self.selector.select(layer, q, k, scale, scene)
            return lists_from_mask(mask, scene.queries, scene.tiling, scene.q_offset)
        return self._on_device(scene).lists(self.selector, layer, q, k, scale)

    def _on_device(self, scene: Scene) -> on_device.DeviceScene:
        """The window's tensors; what the whole prompt has in common was brought there by the first one."""
        if self._device_scene is None:
            self._device_scene = on_device.DeviceScene.of(self.scene)
        window, held = (scene.first, len(scene)), self._device_window
        if held is None or (held.scene.first, len(held.scene)) != window:
            whole = window == (0, len(self.scene))
            self._device_window = held = self._device_scene if whole else self._device_scene.chunk(*window)
        return held

    @property
    def densities(self) -> tuple[float, ...]:
        """Share of the prompt's causal area computed in each layer that ran here; rows that did not are dense."""
        whole = self._causal_area
        return tuple((counted(t.area) + whole - t.causal_area) / whole for _, t in sorted(self.layers.items()))

    @property
    def density(self) -> float:
        """The same over all layers and heads."""
        traces, whole = self.layers.values(), self._causal_area * len(self.layers)
        return (sum(counted(t.area) for t in traces) + whole - sum(t.causal_area for t in traces)) / whole

    @property
    def recall(self) -> float | None:
        """Attention mass kept, mean over layers, heads and rows; None unless measured in every layer."""
        n, found = self.scene.tiling.n_tokens, [(t.recall, t.rows) for t in self.layers.values()]
        kept = [(r * rows + n - rows) / n for r, rows in found if r is not None]
        return sum(kept) / len(kept) if kept and len(kept) == len(found) else None

    @property
    def _causal_area(self) -> int:
        n = self.scene.tiling.n_tokens
        return n * (n + 1) // 2 * self._heads


def recall(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> float:
    """Share of the true attention mass that lies in the chosen tiles, mean over heads and the scene's query rows."""
    kept = (true_mass(q, k, scale, scene) * mask).sum(-1)  # [Hq, n], mean over each tile's rows
    rows = torch.tensor(scene.queries.lengths, dtype=torch.float32, device=kept.device)
    return float((kept * rows).sum() / (rows.sum() * kept.shape[0]))
