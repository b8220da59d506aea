"""One decode step of many requests in one forward pass, each over its own pages and stored documents.

Knows members and one layer's tensors at a time; not who was chosen or why. Rows are padded to a few sizes. Matrix
products over a multiple of four rows give each row the same result whatever the others are (seen on CPUs in float32);
over fewer rows they take other paths, whose sums are in another order, and which are quicker for a lone request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tamis.attention.hook import Job, packed_pass
from tamis.attention.reuse import ReuseEngine
from tamis.attention.reuse_pass import put
from tamis.cache.pool import PagePool
from tamis.cache.store import RequestPages
from tamis.core.errors import CacheFull, PoolFull
from tamis.engine.graphs import MOST_ROWS, StepGraphs
from tamis.engine.member import Member
from tamis.engine.products import products_of
from tamis.kernels.decode_plan import MOST_PAGES, DecodePlan, Room
from tamis.kernels.paged import KeyTiles
from tamis.kernels.paged_dispatch import paged_decode

EXACT_ROWS = 4  # at least, where a request's logits must not depend on the others at all
SPARE_TILES = 2  # of each request: so many pages may be filled before a plan is reserved anew
LEAST_TILES, LEAST_DOCUMENTS = 64, 16  # of a recorded step's plan


def bucket(requests: int, least: int = 1) -> int:
    """So many requests (or 1 and more of anything), rounded up to a power of two, `least` or more."""
    return max(least, 1 << (requests - 1).bit_length())


def least_rows(engine: ReuseEngine, *, exact: bool) -> int:
    """Rows that a step has at least. exact: see `Batch`."""
    return EXACT_ROWS if exact and engine.store.pool.keys.device.type == "cpu" else 1


def forward_rows(engine: ReuseEngine, job: Job, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Logits [rows, vocabulary] of tokens at positions, both int64 [1, rows], of rows that only `job` brings together.

    Nothing in here may wait for a GPU or look at what it holds.
    """
    refused, rows = sum(engine.switch.refused.values()), tokens.shape[1]
    with engine.switch.running(job, rows), packed_pass(rows):
        logits: torch.Tensor = engine.model(tokens, position_ids=positions, use_cache=False).logits[0]
    assert sum(engine.switch.refused.values()) == refused, f"layers without a job: {engine.switch.refused}"
    return logits


@dataclass
class BatchPass:
    """The job of one step: a new token of each request. `plans`: by the first layer that they hold for."""

    pool: PagePool
    plans: Sequence[tuple[int, DecodePlan]]
    places: Sequence[tuple[int, int]]
    page: torch.Tensor
    slot: torch.Tensor
    layers: int = 0

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Job.attend`: q [Hq, R, D], k and v [Hkv, R, D], of R rows of which the last may stand for nobody."""
        self.layers += 1
        n, pool = len(self.page), self.pool
        if n == 1 and not q.is_cuda:  # an assignment to one place costs a third of one to places in a tensor
            page, slot = self.places[0]
            pool.keys[layer, page, :, slot], pool.values[layer, page, :, slot] = k[:, 0], v[:, 0]
        else:
            put(pool, layer, self.page, self.slot, k[:, :n], v[:, :n])
        plan = next(plan for first, plan in reversed(self.plans) if first <= layer)
        rows = q.transpose(0, 1)[:, :, None]
        out, lse = paged_decode(rows, pool.keys[layer], pool.values[layer], plan, scale=scale)
        return out[:, :, 0].transpose(0, 1), lse[:, :, 0].transpose(0, 1)


class Batch:
    """Decodes members together. Plans are kept as long as the same ones go on inside their pages.

    exact   whether a request's logits are the same to the last bit whoever else is there, on a CPU in float32
    graphs  whether steps on a GPU are recorded and replayed, see `StepGraphs`
    """

    def __init__(self, engine: ReuseEngine, *, exact: bool = True, graphs: bool = True) -> None:
        self.engine = engine
        self._products = products_of(engine.model)
        self._least, device = least_rows(engine, exact=exact), engine.store.pool.keys.device
        self.graphs = StepGraphs(engine.model, device, use=graphs)
        self.scratch: RequestPages | None = None  # a page that rows of nobody are written to
        self._plans: list[tuple[int, DecodePlan]] = []
        self._reserved: dict[tuple[int, int], DecodePlan] = {}  # by rows and first layer
        self._inputs: dict[int, torch.Tensor] = {}
        self._made_for: tuple[Any, ...] = ()

    def close(self) -> None:
        """Let go of graphs and the page that is kept for them. Closing twice is harmless."""
        self.graphs.clear()
        self._reserved.clear()
        self._made_for = ()
        if self.scratch is not None:
            self.scratch.close()
            self.scratch = None

    def step(self, members: Sequence[Member]) -> torch.Tensor:
        """Logits [n, vocabulary] behind the last token of each member, whose page must be there.

        On a GPU they are only good until the next step.
        """
        engine = self.engine
        rows = bucket(len(members), self._least)
        with engine.store.lock, torch.inference_mode():
            self._ready(rows)
            places = [_next_slot(m) for m in members]
            positions = [m.position for m in members]
            self._plan(members, positions, rows)
            inputs = self._fill([m.new[-1] for m in members], positions, places, rows)
            written = rows if self.scratch is not None else len(members)
            job = BatchPass(engine.store.pool, self._plans, places, inputs[2, :written], inputs[3, :written])

            def forward() -> torch.Tensor:
                return forward_rows(engine, job, inputs[:1], inputs[1:2])

            one = self.graphs.used and self.scratch is not None and len(self._plans) == 1
            with self._products.running():
                logits = self.graphs.run((rows, id(self._plans[0][1])), rows, forward) if one else forward()
        return logits[: len(members)]

    def _ready(self, rows: int) -> None:
        """The page for rows of nobody, where a recorded step writes all its rows."""
        if self.scratch is None and self.graphs.used and rows <= MOST_ROWS:
            store = self.engine.store
            try:
                self.scratch = store.cache.own(store.pool.page)
            except (CacheFull, PoolFull):  # no graphs until a page is free
                return

    def _fill(self, tokens: list[int], positions: list[int], places: list[tuple[int, int]], rows: int) -> torch.Tensor:
        """int64 [4, rows] on the device, always the same tensor: tokens, positions, pages and slots."""
        nobody = 0 if self.scratch is None else self.scratch.pages[0]
        more = range(rows - len(tokens))
        page = self.engine.store.pool.page
        made = torch.tensor(
            [
                [*tokens, *(0 for _ in more)],
                [*positions, *(0 for _ in more)],
                [*(p for p, _ in places), *(nobody for _ in more)],
                [*(s for _, s in places), *(i % page for i in more)],
            ]
        )
        device = self.engine.store.pool.keys.device
        if rows not in self._inputs:
            self._inputs[rows] = torch.zeros((4, rows), dtype=torch.int64, device=device)
        inputs = self._inputs[rows]
        # pinned memory is not reused before the copy is done: the allocator keeps an event
        return inputs.copy_(made.pin_memory() if device.type == "cuda" else made, non_blocking=True)

    def _plan(self, members: Sequence[Member], positions: Sequence[int], rows: int) -> None:
        """Advance the plans by one token, or write them anew where someone came, left, moved or took a page."""
        key = (rows, *((m.serial, m.moved, len(_session(m).pages.pages)) for m in members))
        follows = tuple(p - 1 for p in positions)
        if self._made_for == (key, follows):
            for _, plan in self._plans:
                plan.advance()
        else:
            self._write(members, positions, rows)
        self._made_for = (key, tuple(positions))

    def _write(self, members: Sequence[Member], positions: Sequence[int], rows: int) -> None:
        firsts = sorted({stage.first for m in members for stage in _session(m).trace.stages})
        device, self._plans = self.engine.store.pool.keys.device, []
        for first in firsts:
            tiles = [_tiles(m, first) for m in members]
            plan = self._reserved.get((rows, first))
            need = room_for(tiles, rows)
            if plan is None or not _holds(plan.room, need):
                self.graphs.forget((rows, id(plan)))
                plan = DecodePlan.reserve(
                    grown_room(need, SPARE_TILES * len(members), even=self.graphs.used),
                    device,
                    split_pages=MOST_PAGES if device.type == "cpu" else None,
                )
                self._reserved[rows, first] = plan
            plan.write(tiles, torch.tensor(positions)[:, None], kv_heads=self.engine.store.pool.spec.n_kv_heads)
            self._plans.append((first, plan))


def grown_room(need: Room, spare: int, *, even: bool) -> Room:
    """A room for `need` and `spare` more tiles. even: in powers of two, so that few kinds of steps are recorded."""
    tiles, documents = need.tiles + spare, need.documents
    if even:
        tiles, documents = max(LEAST_TILES, bucket(tiles)), bucket(documents, LEAST_DOCUMENTS) if documents else 0
    return need._replace(tiles=tiles, splits=tiles + documents, documents=documents)


def room_for(tiles: Sequence[KeyTiles], rows: int) -> Room:
    """What a plan for these requests must hold."""
    n = sum(t.table.shape[0] for t in tiles)
    documents = sum(0 if t.cos is None else t.cos.shape[0] for t in tiles)
    rotary = max(t.rotary_dims for t in tiles)
    holes = any(t.holes is not None for t in tiles)
    return Room(rows, n, n + documents, documents, 1, tiles[0].page, rotary, holes)


def _holds(room: Room, need: Room) -> bool:
    same = (room.requests, room.page) == (need.requests, need.page)
    turned = not need.rotary_dims or room.rotary_dims == need.rotary_dims
    enough = room.tiles >= need.tiles and room.splits >= need.splits and room.documents >= need.documents
    return same and turned and enough and (room.holes or not need.holes)


def _session(member: Member) -> Any:
    assert member.session is not None, "its prompt was run"
    return member.session


def _next_slot(member: Member) -> tuple[int, int]:
    """(page, slot in it) of one more token."""
    pages = _session(member).pages
    pages.grow()
    return pages.pages[-1], pages.spans[-1][1] - 1


def _tiles(member: Member, layer: int) -> KeyTiles:
    session = _session(member)
    stage = [stage for stage in session.trace.stages if stage.first <= layer][-1]
    ((_, tiles),) = session.ground.tiles(session.layout, session.pages, stage.own)
    made: KeyTiles = tiles
    return made
