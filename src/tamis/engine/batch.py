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

from tamis.attention.hook import packed_pass
from tamis.attention.reuse import ReuseEngine
from tamis.attention.reuse_pass import put
from tamis.cache.pool import PagePool
from tamis.engine.member import Member
from tamis.kernels.decode_plan import MOST_PAGES, DecodePlan, Room
from tamis.kernels.paged import KeyTiles
from tamis.kernels.paged_dispatch import paged_decode

EXACT_ROWS = 4  # at least, where a request's logits must not depend on the others at all
SPARE_TILES = 2  # of each request: so many pages may be filled before a plan is reserved anew


def bucket(requests: int, least: int = 1) -> int:
    """Rows of a pass for so many requests: a power of two, `least` or more."""
    return max(least, 1 << (requests - 1).bit_length())


@dataclass
class BatchPass:
    """The job of one step: a new token of each request. `plans`: by the first layer that they hold for."""

    pool: PagePool
    plans: Sequence[tuple[int, DecodePlan]]
    page: torch.Tensor
    slot: torch.Tensor
    layers: int = 0

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Job.attend`: q [Hq, R, D], k and v [Hkv, R, D], of R rows of which the last may stand for nobody."""
        self.layers += 1
        n, pool = len(self.page), self.pool
        put(pool, layer, self.page, self.slot, k[:, :n], v[:, :n])
        plan = next(plan for first, plan in reversed(self.plans) if first <= layer)
        rows = q.transpose(0, 1)[:, :, None]
        out, lse = paged_decode(rows, pool.keys[layer], pool.values[layer], plan, scale=scale)
        return out[:, :, 0].transpose(0, 1), lse[:, :, 0].transpose(0, 1)


class Batch:
    """Decodes members together. Plans are kept as long as the same ones go on inside their pages.

    exact: whether a request's logits are the same to the last bit whoever else is there, on a CPU in float32.
    """

    def __init__(self, engine: ReuseEngine, *, exact: bool = True) -> None:
        self.engine, self._least = engine, EXACT_ROWS if exact else 1
        self._plans: list[tuple[int, DecodePlan]] = []
        self._made_for: tuple[Any, ...] = ()

    def step(self, members: Sequence[Member]) -> torch.Tensor:
        """Logits [n, vocabulary] behind the last token of each member, whose page must be there."""
        engine, pool = self.engine, self.engine.store.pool
        rows, device = bucket(len(members), self._least), pool.keys.device
        with engine.store.lock, torch.inference_mode():
            places = [_next_slot(m) for m in members]
            positions = [m.position for m in members]
            self._plan(members, positions, rows)
            tokens = torch.zeros((1, rows), dtype=torch.int64)
            where = torch.zeros((1, rows), dtype=torch.int64)
            tokens[0, : len(members)] = torch.tensor([m.new[-1] for m in members])
            where[0, : len(members)] = torch.tensor(positions)
            page, slot = torch.tensor(places).T.contiguous().to(device)
            job = BatchPass(pool, self._plans, page, slot)
            refused = sum(engine.switch.refused.values())
            with engine.switch.running(job, rows), packed_pass(rows):
                logits: torch.Tensor = engine.model(
                    tokens.to(device), position_ids=where.to(device), use_cache=False
                ).logits[0]
            assert sum(engine.switch.refused.values()) == refused, f"layers without a job: {engine.switch.refused}"
        return logits[: len(members)]

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
        held, self._plans = dict(self._plans), []
        for first in firsts:
            tiles = [_tiles(m, first) for m in members]
            plan = held.get(first)
            need = room_for(tiles, rows)
            if plan is None or not _holds(plan.room, need):
                spare = SPARE_TILES * len(members)
                grown = need._replace(tiles=need.tiles + spare, splits=need.splits + spare)
                even = MOST_PAGES if self.engine.store.pool.keys.device.type == "cpu" else None
                plan = DecodePlan.reserve(grown, self.engine.store.pool.keys.device, split_pages=even)
            plan.write(tiles, torch.tensor(positions)[:, None], kv_heads=self.engine.store.pool.spec.n_kv_heads)
            self._plans.append((first, plan))


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
