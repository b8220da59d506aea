"""Steps over chosen blocks by kernels: the same order of work as `cache.offload.Prefetcher` has, and the choice beside
the layer before.

Knows layers of a cache, queues and kernels; not models. Nothing in a step waits for the device: what it changes lies
there (`kernels.block_pool`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tamis.cache.block_layer import BlockLayer
from tamis.cache.block_view import KernelView, Shared
from tamis.cache.offload import LayerBlocks
from tamis.cache.streams import Queue, Queues
from tamis.kernels.blocks import BlockRule
from tamis.kernels.blocks_dispatch import block_steps


class KernelSteps:
    """Of one cache, whose layers have their prompt. group: query heads of a KV head.

    A layer's blocks are placed and copied as soon as they are chosen. What is chosen one layer ahead is chosen beside
    the layer that runs, whose attention needs none of it.
    """

    def __init__(self, layers: Sequence[BlockLayer], queues: Queues, *, group: int) -> None:
        self.layers, self.queues = list(layers), queues
        first = layers[0]
        assert first.pooled is not None, "a step comes behind a prompt"
        keys = first.pooled.pooled
        positions = torch.zeros(first.batch, dtype=torch.int32, device=keys.device)
        self._shared = Shared(block_steps(keys, group), positions, keys.shape[0] // first.batch)
        self._count = torch.zeros(len(layers), dtype=torch.int32, device=keys.device)
        self._totals = torch.zeros((len(layers), 2), dtype=torch.int64, device=keys.device)
        for total, layer in zip(self._totals, layers, strict=True):
            if isinstance(layer.blocks, LayerBlocks):
                total.copy_(layer.blocks.counts)
                layer.blocks.counts = total
        self._views: list[KernelView] = []
        self._rule, self._asked = first.form.rule, 0
        self._arrived: dict[int, Any] = {}
        self._kept: dict[int, Any] = {}  # what another queue reads must not be given away before it has

    def begin(self, n_tokens: int, rule: BlockRule) -> None:
        """The step over so many tokens, its own among them, by this rule. Waits for the device where memory grows."""
        self._rule = rule
        self._shared.positions.fill_(n_tokens - 1)
        self._count.zero_()
        self._views = [
            layer.ready(n_tokens, self._shared, self._count[i : i + 1]) for i, layer in enumerate(self.layers)
        ]
        wanted = min((n_tokens - 1) // rule.block, rule.top - 1)
        self._asked = wanted * self._views[0].rows

    def end(self) -> None:
        """The step is over: count it."""
        self._totals[:, 0] += self._count
        self._totals[:, 1] += self._asked
        self._arrived.clear()
        self._kept.clear()

    def choose(
        self, layer: int, q: torch.Tensor, *, scale: float | None, lag: int, beside: bool, forget: bool = False
    ) -> None:
        """Score, select and place the blocks of a layer: q [B, Hq, D], or with scale None a forecast [B, Hkv, D].

        lag: tokens that the layer has not been given yet. beside: not where the layers compute.
        """
        view, shared, rule = self._views[layer], self._shared, self._rule

        def work() -> None:
            pool = view.pool if scale is None else view.scored()
            values = shared.ops.scores(q, pool, shared.positions, scale=scale, lag=lag)
            shared.ops.select(values, shared.positions, rule, view.wanted, view.pool.last)
            if view.resident:
                return
            if forget:
                view.pool.forget()
            shared.ops.place(view.pool, view.wanted)

        queue = self._queue(beside)
        if queue is not self.queues.compute:
            queue.wait(self.queues.compute.record())
            self._kept[layer] = q
        queue.run(work)
        self._arrived[layer] = queue.record()

    def fetch(self, layer: int) -> None:
        """Hand in the copies of what was chosen."""
        view = self._views[layer]
        if view.resident:
            return
        copy = self.queues.copy
        copy.wait(self._arrived[layer])
        copy.run(lambda: self._shared.ops.fetch(view.pool))
        self._arrived[layer] = copy.record()

    def attend(self, layer: int, q: torch.Tensor, *, scale: float) -> torch.Tensor:
        """The layer's attention, behind its copies: q [B, Hq, D] → the same shape."""
        self.queues.compute.wait(self._arrived.pop(layer))
        self._kept.pop(layer, None)
        out: list[torch.Tensor] = []
        self.queues.compute.run(lambda: out.append(self._views[layer].attend(q, scale=scale)))
        self.queues.settle()
        return out[0]

    def wanted(self, layer: int) -> torch.Tensor:
        """The blocks chosen for a layer, int32 [R, W], ascending, -1 behind the last."""
        return self._views[layer].wanted

    def own_choice(self, layer: int, q: torch.Tensor, *, scale: float) -> torch.Tensor:
        """What the layer would choose by itself, placed nowhere: as `wanted`."""
        view, shared = self._views[layer], self._shared
        values = shared.ops.scores(q, view.scored(), shared.positions, scale=scale, lag=0)
        made: torch.Tensor = shared.ops.select(values, shared.positions, self._rule, torch.empty_like(view.wanted))
        return made

    def _queue(self, beside: bool) -> Queue:
        return self.queues.choose if beside and self.queues.choose is not None else self.queues.compute
