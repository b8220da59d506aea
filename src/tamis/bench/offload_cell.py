"""One shape, length and batch: what its steps need on both memories, and the times of every provider's steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from types import ModuleType
from typing import Any

import torch

from tamis.bench.clock import graphed, launched
from tamis.bench.locality import Locality, replay
from tamis.bench.offload_step import PROVIDERS, Provider, Step, Timeline, Weights
from tamis.core.errors import NothingFound
from tamis.kernels.block_pool import BlockPool, PoolRoom
from tamis.kernels.blocks import BlockRule

WARM = 6  # steps before any is timed: the first one finds an empty pool


@dataclass(frozen=True)
class CellPlan:
    """tokens of every sequence in the middle of the timed steps, and what a pool has; see `bench.offload`."""

    tokens: int
    batch: int
    slots: int
    rule: BlockRule
    rounds: int
    programs: int
    warps: int = 8

    @property
    def positions(self) -> list[int]:
        """Where the token of each step stands."""
        n = WARM + self.rounds
        return [self.tokens - n // 2 + i for i in range(n)]

    @property
    def n_blocks(self) -> int:
        """Blocks a sequence may grow to."""
        return self.rule.n_blocks(max(self.positions) + 1) + 1


@dataclass
class Timed:
    """Seconds and copied bytes of each timed step; seconds of steps that find all they want, and of copies alone."""

    provider: str
    seconds: list[float]
    moved: list[int] = field(default_factory=list)
    hit_rate: float = 1.0
    found_all: list[float] = field(default_factory=list)
    copies: float = 0.0

    @property
    def hidden(self) -> list[float]:
        """Share of the copies' time that a step does not take longer for, of each step; 1 where nothing is copied."""
        rest = median(self.found_all)
        return [1 - min(1.0, max(0.0, s - rest) / self.copies) if self.copies > 0 else 1.0 for s in self.seconds]


class Cell:
    """Makes the memory of a cell once; `run` times a provider. host: flat pinned memory that pools share."""

    def __init__(
        self,
        plan: CellPlan,
        weights: Weights,
        ops: ModuleType,
        locality: dict[str, Locality],
        host: torch.Tensor,
        *,
        wide: bool,
    ) -> None:
        self.plan, self.weights, self.ops = plan, weights, ops
        shape, dtype, self.device = weights.shape, weights.scale.dtype, weights.scale.device
        per = plan.n_blocks * 2 * plan.rule.block * shape.head_dim
        most = weights.layers * plan.batch * shape.kv_heads
        regions = min(most, host.view(dtype).numel() // per)
        self.room = PoolRoom(
            weights.layers, plan.batch, shape.kv_heads, shape.head_dim, plan.n_blocks, plan.slots, plan.rule,
            regions=regions, wide=wide,
        )  # fmt: skip
        body = (regions, plan.n_blocks, 2, plan.rule.block, shape.head_dim)
        self.shared = most / regions
        pinned = host.view(dtype)[: regions * per].view(body)
        self.pool = BlockPool(self.room, dtype=dtype, device=self.device, host=pinned)
        for t in (self.pool.slots, self.pool.tail, self.pool.ring, self.pool.pooled, self.pool.wide):
            if t is not None:
                t.normal_()
        rows = weights.layers * self.room.rows
        made: dict[int, torch.Tensor] = {}  # lists [steps, layers, R, W] by recording
        for one in locality.values():
            if id(one) not in made:
                lists = replay(one, plan.rule, rows, plan.positions, plan.n_blocks, slots=plan.slots,
                               device=self.device)  # fmt: skip
                made[id(one)] = lists.view(len(lists), weights.layers, self.room.rows, self.room.width)
        self.lists = {name: made[id(one)] for name, one in locality.items()}
        self.rules = {name: replace(plan.rule, stick=one.rule.stick, recent=one.rule.recent)
                      for name, one in locality.items()}  # fmt: skip
        self.x = torch.randn(plan.batch, shape.hidden, device=self.device).to(dtype)

    def step(self, provider: Provider, **more: Any) -> Step:
        """A step from the beginning of the lists."""
        positions = torch.full((self.plan.batch,), self.plan.positions[0], dtype=torch.int32, device=self.device)
        first = self.lists_of(provider)[0].clone()
        return Step(
            self.weights, self.pool, self.ops, provider, first, positions, self.x, programs=self.plan.programs,
            warps=self.plan.warps, rule=self.rules[provider.chooser], **more,
        )  # fmt: skip

    def lists_of(self, provider: Provider) -> torch.Tensor:
        """What a provider chooses, by the recording of what chooses as it does."""
        if provider.chooser not in self.lists:
            raise NothingFound(f"the locality has nothing of {provider.chooser!r}; record it again.")
        return self.lists[provider.chooser]

    def run(self, name: str, *, resident: list[torch.Tensor] | None = None) -> Timed:
        """Time a provider's steps, all of the lists in order."""
        provider = PROVIDERS[name]
        step = self.step(provider, resident=resident or [])
        replayed = self._graphed(step.run)
        made = Timed(name, *self._walk(step, replayed))
        if provider.resident:
            return made
        asked = int((self.lists_of(provider)[WARM:] >= 0).sum())
        made.hit_rate = 1 - sum(made.moved) / asked
        made.moved = [n * self.room.block_bytes(self.x.element_size()) for n in made.moved]
        if provider.prefetch:
            made.found_all = self._again(step, replayed)
            made.copies = self._copies(step) if any(made.moved) else 0.0
        return made

    def timeline(self, stamp: Callable[[torch.Tensor, int], None]) -> list[list[int]]:
        """Times in ns of the last step of the forecast, by layer: see `offload_step.Timeline`."""
        at = torch.zeros((self.weights.layers, 4), dtype=torch.int64, device=self.device)
        step = self.step(PROVIDERS["forecast"], timeline=Timeline(at, stamp))
        self._walk(step, self._graphed(step.run))
        found: list[list[int]] = (at - at[at > 0].min()).tolist()
        return found

    def _walk(self, step: Step, replayed: Callable[[], Any]) -> tuple[list[float], list[int]]:
        """Seconds and blocks copied of all steps but the first WARM."""
        self._rewind(step)
        timers, moved = [], []
        for wanted in self.lists_of(step.provider):
            step.wanted.copy_(wanted)
            timers.append(launched(replayed, self._cuda))
            moved.append(self.pool.counts.sum())
        seconds = [timer() for timer in timers]
        return seconds[WARM:], [int(n) for n in moved[WARM:]]

    def _again(self, step: Step, replayed: Callable[[], Any]) -> list[float]:
        """Seconds of steps that want what the step before wanted: nothing is copied."""
        step.positions.fill_(self.plan.positions[-1])
        timers = [launched(replayed, self._cuda) for _ in range(4 + max(1, self.plan.rounds // 2))]
        return [timer() for timer in timers][4:]

    def _copies(self, step: Step) -> float:
        """Median seconds of a step's copies with nothing beside them: placed and copied, less placed alone."""
        found = []
        for fetch in (True, False):
            replayed = self._graphed(functools.partial(step.copies, fetch=fetch))
            found.append(median(self._walk(step, replayed)[0]))
        return max(0.0, found[0] - found[1])

    def _rewind(self, step: Step) -> None:
        self.pool.forget()
        step.positions.fill_(self.plan.positions[0])

    def _graphed(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """As one CUDA graph; on a CPU, itself."""
        return graphed(run, warm=1) if self._cuda else run

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda"
