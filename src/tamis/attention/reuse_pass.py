"""One forward pass over rows of a prompt whose other tokens lie in pages: writes the rows' keys, attends to all.

Knows one layer's tensors at a time, pages and lists; not prompts, caches or policies. Both passes are jobs
(`hook.Job`): the model hands over the rotated queries, keys and values of the rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tamis.attention.hook import Switch
from tamis.attention.reuse_layout import Layout, OwnPages, tiles_of
from tamis.cache.pool import PagePool
from tamis.kernels.decode_plan import DecodePlan, Room
from tamis.kernels.paged import Angles, KeyTiles, PagedLists, Segment, paged_lists
from tamis.kernels.paged_dispatch import paged_attention, paged_decode
from tamis.model.rope import Rotary

SPARE_TILES = 16  # of a decode plan: so many pages may be filled before it is reserved anew


@dataclass(frozen=True)
class Ground:
    """Where a request reads and writes: the pool of stored pages, the pool of its own (often the same one), angles."""

    stored: PagePool
    own: PagePool
    angles: Angles

    @property
    def device(self) -> torch.device:
        """Of both pools."""
        return self.own.keys.device

    def tiles(self, layout: Layout, pages: OwnPages, own: torch.Tensor) -> list[tuple[PagePool, KeyTiles]]:
        """Key tiles, on the CPU, of each pool that holds some; the own ones last. `own`: see `Layout.spans`."""
        stored, mine = layout.stored_segments(own), pages.segments(own)
        groups: list[tuple[PagePool, list[Segment]]] = [(self.stored, stored), (self.own, mine)]
        if self.stored is self.own:
            groups = [(self.own, stored + mine)]
        made = [(pool, tiles_of(segments, self.angles, layout.page)) for pool, segments in groups]
        return [(pool, tiles) for pool, tiles in made if tiles is not None]


class Read(NamedTuple):
    """The pages of one pool that a pass's rows see."""

    pool: PagePool
    tiles: KeyTiles
    lists: PagedLists


@dataclass(frozen=True)
class Stage:
    """What a pass does from layer `first` on: rows int64 [n] (absolute positions), where their keys go, what they see.

    page, slot: int64 [w] on the pools' device, of the rows that are written: those in `written` int64 [w], None: all.
    own: bool [n_tokens], the prompt's tokens that are read from own pages from this layer on.
    """

    first: int
    rows: torch.Tensor
    page: torch.Tensor
    slot: torch.Tensor
    reads: tuple[Read, ...]
    own: torch.Tensor
    written: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        ground: Ground,
        layout: Layout,
        pages: OwnPages,
        *,
        rows: torch.Tensor,
        own: torch.Tensor,
        first: int = 0,
        written: torch.Tensor | None = None,
    ) -> Stage:
        """Plan a stage on the CPU and bring it to the pools' device, without waiting for it.

        Rows outside `written` bool [n_tokens] (None: `own`) are computed, but their keys are not written: what is there
        of them is as good, or is to stay.
        """
        mine, device = (own if written is None else written)[rows], ground.device
        page, slot = pages.slots(rows[mine])
        among = None if bool(mine.all()) else mine.nonzero()[:, 0].to(device, non_blocking=True)
        reads = tuple(
            Read(pool, tiles.to(device), paged_lists(tiles, rows).to(device))
            for pool, tiles in ground.tiles(layout, pages, own)
        )
        moved = (page.to(device, non_blocking=True), slot.to(device, non_blocking=True))
        return cls(first, rows, *moved, reads, own, among)

    def among(self, other: Stage) -> torch.Tensor:
        """int64 [n]: which rows of `other`, which has all of them, are this stage's; on the pools' device."""
        return torch.searchsorted(other.rows, self.rows).to(self.page.device, non_blocking=True)


@dataclass
class PrefillPass:
    """The rows of a prompt, through all layers. `stages` are in order of their first layers, the first from 0.

    A later stage may have fewer rows; `rows_of` takes the others out of the model's hidden states.
    """

    own: PagePool
    stages: list[Stage]
    layers: int = 0
    choose_reads: Callable[[Stage, int, torch.Tensor, float], Sequence[Read]] | None = None  # for a layer's queries

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Job.attend`: q [Hq, n, D], k and v [Hkv, n, D] of the stage's n rows."""
        self.layers += 1
        return self.run(self.stage(layer), layer, q, k, v, scale)

    def stage(self, layer: int) -> Stage:
        """The stage that a layer belongs to."""
        return next(stage for stage in reversed(self.stages) if stage.first <= layer)

    def run(
        self, stage: Stage, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows' keys and values, then attend."""
        if stage.written is not None:
            k, v = k[:, stage.written], v[:, stage.written]
        put(self.own, layer, stage.page, stage.slot, k, v)
        reads = stage.reads if self.choose_reads is None else self.choose_reads(stage, layer, q, scale)
        return read(reads, layer, q, scale)


@contextmanager
def rows_of(job: PrefillPass, model: Any, switch: Switch) -> Iterator[None]:
    """Inside, a forward pass of `model` goes on with a stage's rows alone from its first layer on."""
    current = job.stages[0]
    angles: dict[str, Any] = {}

    def before(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal current
        stage = job.stage(layer)
        if stage is job.stages[0]:
            return args, kwargs
        if stage is not current:
            args = (args[0][:, stage.among(current)], *args[1:])
            kept = stage.among(job.stages[0])
            angles["cos_sin"] = tuple(t[:, kept] for t in kwargs["position_embeddings"])
            angles["ids"] = kwargs["position_ids"][:, kept] if kwargs.get("position_ids") is not None else None
            switch.n_tokens, current = len(stage.rows), stage
        return args, kwargs | {"position_embeddings": angles["cos_sin"], "position_ids": angles["ids"]}

    def hook_of(layer: int) -> Callable[..., Any]:
        return lambda module, args, kwargs: before(layer, args, kwargs)

    layers = model.base_model.layers
    handles = [m.register_forward_pre_hook(hook_of(i), with_kwargs=True) for i, m in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def copied_into(ground: Ground, layout: Layout, pages: OwnPages, rotary: Rotary) -> int:
    """Copy the stored pieces into the request's own pages, keys turned to where they stand; how many tokens."""
    for piece in layout.reused:
        keys, values = ground.stored.read_tokens(piece.stored, piece.length)
        offset = 0 if piece.local is None else piece.start - piece.local
        page, slot = (t.to(ground.device) for t in pages.slots(torch.arange(piece.start, piece.end)))
        turned = rotary.rotate(keys, offset)
        for layer in range(ground.own.spec.n_layers):
            put(ground.own, layer, page, slot, turned[layer], values[layer])
    return sum(piece.length for piece in layout.reused)


def put(pool: PagePool, layer: int, page: torch.Tensor, slot: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Put k, v [Hkv, n, D] of one layer into slots of pages, int64 [n] each, without waiting for the device."""
    pool.keys[layer][page, :, slot] = k.transpose(0, 1).to(pool.dtype)
    pool.values[layer][page, :, slot] = v.transpose(0, 1).to(pool.dtype)


def read(reads: Sequence[Read], layer: int, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [Hq, n, D] over the pages of all pools: out [Hq, n, D] and log-sum-exp [Hq, n]."""
    parts = []
    for r in reads:
        # on a GPU laid out as the output product reads it, which saves a copy
        out = q.new_empty(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1) if q.is_cuda else None
        keys, values = r.pool.keys[layer], r.pool.values[layer]
        parts.append(paged_attention(q, keys, values, r.tiles, r.lists, scale=scale, out=out))
    return merged(parts)


def merged(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One result from (out [.., n, D], log-sum-exp [.., n]) over disjoint keys, of which every row saw at least one."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.logsumexp(torch.stack([one for _, one in parts]), 0)
    out = sum((o.float() * (one - lse).exp()[..., None] for o, one in parts), torch.zeros((), device=lse.device))
    return out.to(parts[0][0].dtype), lse


@dataclass
class DecodePass:
    """Steps of one token each. `begin` before a step's forward pass says where the token stands.

    Layers that read the same pages share a plan; a plan is only made anew when a page is full.
    """

    ground: Ground
    layout: Layout
    pages: OwnPages
    stages: Sequence[Stage]
    plans: list[list[tuple[PagePool, DecodePlan]]] = field(default_factory=list)
    layers: int = 0
    _slot: tuple[int, int] = (0, 0)

    def begin(self, position: int) -> None:
        """The next token, at `position`; its page must be there (`OwnPages.full` is False)."""
        new = self.pages.grow() or not self.plans
        start, length = self.pages.spans[-1]
        assert start + length - 1 == position, f"position {position} does not follow the pages up to {start + length}"
        self._slot = (self.pages.pages[-1], length - 1)
        if new:
            self._write(position)
            return
        for plans in self.plans:
            for pool, plan in plans:
                if pool is self.ground.own:
                    plan.advance()
                else:
                    plan.q_position.add_(1)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Job.attend`: q [Hq, 1, D], k and v [Hkv, 1, D]."""
        self.layers += 1
        page, slot = self._slot
        own = self.ground.own
        own.keys[layer, page, :, slot] = k[:, 0]
        own.values[layer, page, :, slot] = v[:, 0]
        number = sum(stage.first <= layer for stage in self.stages) - 1
        q = q[None]
        out, lse = merged(
            [
                paged_decode(q, pool.keys[layer], pool.values[layer], plan, scale=scale)
                for pool, plan in self.plans[number]
            ]
        )
        return out[0], lse[0]

    def _write(self, position: int) -> None:
        made = []
        for i, stage in enumerate(self.stages):
            plans = []
            for j, (pool, tiles) in enumerate(self.ground.tiles(self.layout, self.pages, stage.own)):
                held = self.plans[i][j][1] if self.plans else None
                n = tiles.table.shape[0]
                if held is None or held.room.tiles < n:
                    held = DecodePlan.reserve(_room(tiles), self.ground.device)
                held.write([tiles], torch.tensor([[position]]), kv_heads=pool.spec.n_kv_heads)
                plans.append((pool, held))
            made.append(plans)
        self.plans = made


def _room(tiles: KeyTiles) -> Room:
    documents = 0 if tiles.cos is None else tiles.cos.shape[0]
    n = tiles.table.shape[0] + SPARE_TILES
    return Room(1, n, n + documents, documents, 1, tiles.page, tiles.rotary_dims, tiles.holes is not None)
