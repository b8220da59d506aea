"""One layer of a cache in blocks as kernels see it: the same memory, and beside it what a step changes on the device.

Knows memory and counts of tokens; not models, streams or what is wanted. While a view is open the layer's new tokens go
through it; `close` gives the layer its state back, to the token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from tamis.cache.offload import LayerBlocks
from tamis.cache.pooled import Pooled
from tamis.cache.resident import ResidentBlocks
from tamis.core.errors import PoolFull
from tamis.kernels.block_pool import NEVER, TASK, PoolLayer
from tamis.kernels.blocks import COARSE

if TYPE_CHECKING:
    from tamis.cache.block_layer import BlockForm


@dataclass(frozen=True)
class Shared:
    """What all layers' views have in common. ops: what `kernels.blocks_dispatch.block_steps` gives.

    positions  int32 [B]: where the running step's token stands in each sequence
    """

    ops: ModuleType
    positions: torch.Tensor
    kv_heads: int


class KernelView:
    """Of R rows, KV heads of all sequences side by side. count: int32 [1] for the number of copies.

    pool    what the kernels take
    wanted  int32 [R, W], the blocks that the running step reads beside its own
    last    as in `PoolLayer`, if the rule sticks
    """

    def __init__(
        self,
        form: BlockForm,
        blocks: LayerBlocks | ResidentBlocks,
        keys: Pooled,
        shared: Shared,
        count: torch.Tensor,
        last: torch.Tensor | None = None,
    ) -> None:
        self.form, self.blocks, self.keys, self.shared, self._count = form, blocks, keys, shared, count
        rule, n, device = form.rule, blocks.n_tokens, keys.pooled.device
        self.host = blocks.memory
        self.rows, dim = self.host.shape[0], self.host.shape[-1]
        self._ring = keys.pooled.new_empty((self.rows, COARSE * rule.window, dim))
        known = torch.arange(n - keys.last.shape[1], n, device=device) % self._ring.shape[1]
        self._ring[:, known] = keys.last
        if isinstance(blocks, LayerBlocks):
            self._tail = blocks.tail
        else:
            self._tail = blocks.store[:, (n - 1) // rule.block].clone()
        self._region = torch.arange(self.rows, dtype=torch.int32, device=device)
        self._stamp, self._steps = self._numbers(self.rows), 0
        self._held, self._used = (self._numbers(self.rows, self.n_slots) for _ in range(2))
        if isinstance(blocks, LayerBlocks):
            held, used, self._steps = blocks.map.state
            self._held, self._used = held.int(), used.int()
            self._stamp.fill_(self._steps)
        self.last = self._never(0) if last is None else last
        self._take_room(keys.pooled, keys.wide)
        self.pool, self.wanted = self._of_width(1)

    @property
    def n_slots(self) -> int:
        """Slots of a row; 1 that is not used where all blocks are on the device."""
        return self.blocks.shape.n_slots if isinstance(self.blocks, LayerBlocks) else 1

    @property
    def resident(self) -> bool:
        """Whether all blocks are on the device: then they are their own slots."""
        return not isinstance(self.blocks, LayerBlocks)

    @property
    def nbytes(self) -> int:
        """Bytes on the device beside those of the blocks."""
        made = [
            self._ring,
            self._pooled,
            self._wide,
            self._held,
            self._used,
            self.last,
            *([self._tail] if self.resident else []),
        ]
        return sum(t.nbytes for t in made)

    def fit(self, n_tokens: int) -> None:
        """Be ready for the step over so many tokens, its own among them. The blocks have room for them."""
        grown = self.blocks.memory is not self.host
        if grown:
            self.host = self.blocks.memory
            more = self.n_slots - self._held.shape[1]
            if more:
                empty = self._numbers(self.rows, more)
                self._held, self._used = (torch.cat([t, empty], 1) for t in (self._held, self._used))
            self._take_room(self._pooled, self._wide)
        width = max(1, self.form.width(n_tokens))
        if not self.resident and width > self.n_slots:
            raise PoolFull(f"{width} blocks are wanted at once and a head has {self.n_slots} slots; give it {width}.")
        if grown or width != self.wanted.shape[1]:
            self.pool, self.wanted = self._of_width(width)

    def scored(self) -> PoolLayer:
        """The layer without its wider keys, that would estimate the normaliser of own scores: so it is exact."""
        return replace(self.pool, wide=None)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put the step's k, v [B, Hkv, D] behind what there is."""
        self.shared.ops.append(self.pool, k, v, self.shared.positions)
        self.blocks.n_tokens += 1
        self._steps += 1

    def attend(self, q: torch.Tensor, *, scale: float) -> torch.Tensor:
        """The step's attention to what is wanted, which is in its slots, and to the growing block: q [B, Hq, D]."""
        slots, places = (self.host, self.wanted) if self.resident else (self.pool.slots, self.pool.place)
        return self.shared.ops.attend(q, slots, places, self._tail, self.shared.positions, scale=scale)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Give the blocks and the pooled keys what the steps made."""
        rule, n = self.form.rule, self.blocks.n_tokens
        if isinstance(self.blocks, LayerBlocks):
            self.blocks.map.state = self._held, self._used, self._steps
        else:
            self.blocks.store[:, (n - 1) // rule.block] = self._tail
        keys = self.keys
        keys.n_tokens = n
        keys.pooled, keys.wide = self._pooled[:, : rule.n_pooled(n)], self._wide[:, : rule.n_pooled(n, COARSE)]
        begin = min(keys.pooled.shape[1], COARSE * keys.wide.shape[1]) * rule.stride
        keys.last = self._ring[:, torch.arange(begin, n, device=self._ring.device) % self._ring.shape[1]]

    def _numbers(self, *size: int) -> torch.Tensor:
        return torch.full(size, -1, dtype=torch.int32, device=self.keys.pooled.device)

    def _never(self, n: int) -> torch.Tensor:
        return self._numbers(self.rows, n).fill_(NEVER)

    def _take_room(self, pooled: torch.Tensor, wide: torch.Tensor) -> None:
        """Memory for pooled keys of as many tokens as there is room for; those that there are stay."""
        rule, capacity, keys = self.form.rule, self.host.shape[1] * self.form.rule.block, self.keys
        self._pooled = _roomy(pooled, rule.n_pooled(capacity))
        self._wide = _roomy(wide, rule.n_pooled(capacity, COARSE))
        if rule.stick:
            more = self.host.shape[1] - self.last.shape[1]
            self.last = torch.cat([self.last, self._never(more)], 1)
        # so that nothing is held twice
        keys.pooled, keys.wide = self._pooled[:, : keys.pooled.shape[1]], self._wide[:, : keys.wide.shape[1]]

    def _of_width(self, width: int) -> tuple[PoolLayer, torch.Tensor]:
        place, tasks = self._numbers(self.rows, width), self._numbers(self.rows * width, TASK)
        slots = self.host if not isinstance(self.blocks, LayerBlocks) else self.blocks.slots
        pool = PoolLayer(
            self.form.rule, self.shared.kv_heads, self.host, self._region, slots, self._tail, self._ring, self._pooled,
            self._wide, self._held, self._used, self._stamp, place, torch.empty_like(self._held), tasks, self._count,
            self.last if self.form.rule.stick else None,
        )  # fmt: skip
        return pool, self._numbers(self.rows, width)


def _roomy(held: torch.Tensor, n: int) -> torch.Tensor:
    """held [R, C, D] with room for n, 1 at least."""
    made = held.new_empty((held.shape[0], max(1, n), held.shape[-1]))
    made[:, : held.shape[1]] = held
    return made
