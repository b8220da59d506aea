"""Steps in which every request gets one token, as CUDA graphs of the whole model: documents without launches.

vLLM's own graphs hold its own attention. Here are others beside them, whose attention layers compute vLLM's rows with
vLLM's kernel and Tamis's with Tamis's, over tensors that stay where they are: row i of the batch is request i of a
plan, and a bool says whose row it is. Seats know rows and pages, not vLLM; graphs know its model runner by `compat`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tamis.integrations.vllm import compat
from tamis.integrations.vllm.reuse import one_thread, segments_of
from tamis.integrations.vllm.step import Row
from tamis.kernels.decode_plan import DecodePlan, Room, put
from tamis.kernels.paged import ABSOLUTE, LENGTH, PAGE, POSITION, Angles, KeyTiles
from tamis.kernels.paged_dispatch import paged_decode

AHEAD = 8  # pages of a text that a plan has room for, counted from its start: a new one is due every 8th page
NARROW, WIDE = 16, 128  # splits for each request, and six requests' more, of the two graphs of a size
MOST_SPLITS = 8192  # programs of unused splits leave at once, but are started
MOST_TILES = 1 << 16  # of all requests: 4 million keys in pages of 64


class Seats:
    """What captured graphs read, for at most `most` requests; `part` is the plan of one graph."""

    def __init__(
        self, most: int, angles: Angles, *, page: int, kv_heads: int, rotary_dims: int, device: torch.device | str
    ) -> None:
        splits = splits_of(most, WIDE)
        room = Room(most, MOST_TILES, splits, splits, 1, page, rotary_dims, holes=True)
        self.plan = DecodePlan.reserve(room, device)
        self.ours = torch.zeros(most, dtype=torch.bool, device=device)
        self._angles, self._page, self._kv_heads = angles, page, kv_heads
        self._parts: dict[tuple[int, int], DecodePlan] = {}
        self._last: tuple[DecodePlan | None, tuple[Row | None, ...]] = (None, ())
        self._kept: dict[str, Kept] = {}

    def part(self, requests: int, each: int) -> DecodePlan:
        """The plan for so many requests, with NARROW or WIDE splits for each of them."""
        key = (requests, each)
        if key not in self._parts:
            self._parts[key] = self.plan.part(requests, splits_of(requests, each))
        return self._parts[key]

    def width(self, requests: int, rows: Sequence[Row]) -> int | None:
        """NARROW or WIDE, whichever first has room for these rows among so many requests; None: neither has."""
        tiles = sum(-(-row.end // self._page) + len(row.asked.spans) + AHEAD for row in rows)
        # a document is one run of tiles or more, all that is not shared together one
        runs = sum(len(row.asked.units) + 1 for row in rows) + requests - len(rows)
        if tiles + requests - len(rows) > self.plan.room.tiles:
            return None
        return next((each for each in (NARROW, WIDE) if runs <= splits_of(requests, each)), None)

    def seat(self, plan: DecodePlan, rows: Sequence[Row | None]) -> None:
        """Make `plan` the one of these rows of the batch, None where a row is vLLM's own. Where they are the last
        ones, each a token further, it only moves on, where it lies. Nothing waits for the device."""
        if plan is self._last[0] and self._moved_on(plan, rows):
            return
        with one_thread(plan.splits.device):
            tiles, spare = zip(*(self._tiles(row) for row in rows), strict=True)
            positions = [[0 if row is None else row.asked.position(row.computed)] for row in rows]
            plan.write(tiles, torch.tensor(positions), kv_heads=self._kv_heads, spare=spare)
            ours = torch.zeros(len(self.ours), dtype=torch.bool)
            ours[: len(rows)] = torch.tensor([row is not None for row in rows])
        put(self.ours, ours)
        self._last = plan, tuple(rows)
        self._kept = {row.request: self._kept[row.request] for row in rows if row is not None}

    def _moved_on(self, plan: DecodePlan, rows: Sequence[Row | None]) -> bool:
        _, before = self._last
        if len(rows) != len(before):
            return False
        turned: list[tuple[int, int]] = []
        for seat, (old, row) in enumerate(zip(before, rows, strict=True)):
            if old is None and row is None:
                continue
            if old is None or row is None or row.computed != old.computed + 1 or not _same(old, row):
                return False
            if row.computed % self._page == 0:
                kept, page = self._kept[row.request], row.computed // self._page  # the row as the plan was written
                if page - kept.row.computed // self._page > kept.spare:
                    return False
                turned.append((seat, row.blocks[page]))
        if turned:
            plan.next_tile(*zip(*turned, strict=True))
        plan.advance()
        self._last = plan, tuple(rows)
        return True

    def _tiles(self, row: Row | None) -> tuple[KeyTiles, int]:
        """The tiles of a row, and how many of them are still to be filled."""
        if row is None:  # one key of any page: a request has keys, and nobody looks at what it gives
            return KeyTiles(torch.tensor([[0, 1, 0, ABSOLUTE]], dtype=torch.int32), self._page), 0
        kept = self._kept.get(row.request)
        if kept is None or not kept.goes_on_to(row):
            kept = self._kept[row.request] = Kept.of(row, self._angles, self._page)
        return kept.tiles, kept.spare


@dataclass
class Kept:
    """The tiles of a request's row, those that wait for keys last; moved on with it, so that rows which come and go
    beside it cost little."""

    row: Row
    tiles: KeyTiles
    spare: int

    @classmethod
    def of(cls, row: Row, angles: Angles, page: int) -> Kept:
        """Made anew, with room up to the next AHEAD pages of its last text."""
        made = KeyTiles.of(segments_of(row, page), angles, page=page)
        begun = (row.end - 1) // page - row.asked.spans[-1].start // page + 1
        spare = -begun % AHEAD
        more = made.table[-1:].repeat(spare, 1)
        more[:, PAGE], more[:, LENGTH] = 0, 0
        more[:, POSITION] += page * torch.arange(1, spare + 1, dtype=torch.int32)
        holes = None if made.holes is None else torch.nn.functional.pad(made.holes, (0, 0, 0, spare))
        return cls(row, KeyTiles(torch.cat([made.table, more]), page, made.cos, made.sin, holes), spare)

    def goes_on_to(self, row: Row) -> bool:
        """Whether these are that row's tiles, which they are from then on: some tokens further, in the same blocks."""
        page, before = self.tiles.page, self.row
        first, last = before.computed // page, row.computed // page
        same = before.computed <= row.computed and last - first <= self.spare and _same(before, row)
        if same:
            growing = len(self.tiles.table) - 1 - self.spare
            for number in range(first, last + 1):
                tile = self.tiles.table[growing + number - first]
                tile[PAGE], tile[LENGTH] = row.blocks[number], min(page, row.end - number * page)
            self.row, self.spare = row, self.spare - (last - first)
        return same


def splits_of(requests: int, each: int) -> int:
    """Splits of a plan for so many requests."""
    return min(each * (requests + 6), MOST_SPLITS)


def _same(before: Row, row: Row) -> bool:
    """Whether a request has what it had, and perhaps more blocks."""
    same = row.request == before.request and row.asked == before.asked
    return same and row.blocks[: len(before.blocks)] == before.blocks


class Layer(NamedTuple):
    """The attention of a captured graph: stock metadata of all rows, the plan, and which rows are Tamis's."""

    metadata: Any
    plan: DecodePlan
    ours: torch.Tensor

    def run(
        self,
        stock: Callable[..., Any],
        layer: Any,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        scale: float,
    ) -> None:
        """As `rows.Plan.run`, for one row of each request."""
        query, key, value, cache = tensors
        stock(layer, query, key, value, cache, self.metadata, output)
        n = self.plan.room.requests
        keys, values = compat.pages(cache, query.shape[-1])
        made, _ = paged_decode(query[:n, :, None], keys, values, self.plan, scale=scale)
        shown = output[:n].view(n, *query.shape[1:])
        shown.copy_(torch.where(self.ours[:n, None, None], made[:, :, 0], shown))


class Replay(NamedTuple):
    """A graph that a step replays: whose it is in vLLM, its size there, and its plan."""

    manager: Any
    descriptor: Any
    plan: DecodePlan


class DecodeGraphs:
    """The graphs of a model runner, by their width. `capturing`: of the one that is being captured."""

    def __init__(self, seats: Seats, managers: dict[int, Any]) -> None:
        self.seats, self.managers = seats, managers
        self.capturing = 0

    def capture(self, runner: Any) -> int:
        """Capture all of them; bytes that they took."""
        taken = 0
        try:
            for each, manager in self.managers.items():
                self.capturing = each
                taken += compat.capture_decodes(runner, manager)
        finally:
            self.capturing = 0
        return taken

    def layer(self, metadata: Any, requests: int) -> Layer:
        """What attention layers do while a graph for so many requests is captured."""
        plan = self.seats.part(requests, self.capturing)
        plan.scratch.clear()  # of the warm-up: what is worked out once a step has to be in the graph
        return Layer(metadata, plan, self.seats.ours)

    def replay(self, rows: Sequence[Row], requests: int, loras: int = 0) -> Replay | None:
        """The graph for a step of so many requests with a token each, `rows` of them Tamis's; None: there is none."""
        if any(row.asked.mode != "reuse" or row.computed < row.asked.spans[-1].start for row in rows):
            return None
        for each, manager in self.managers.items():
            found = compat.dispatched(manager, requests, loras)
            if found is None:
                return None
            if self.seats.width(found.num_reqs, rows) == each:
                return Replay(manager, found, self.seats.part(found.num_reqs, each))
        return None
