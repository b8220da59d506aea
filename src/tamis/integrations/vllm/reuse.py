"""Rows of "reuse" requests: documents that see themselves alone, everything else that sees all, over vLLM's pages.

A document's tokens are given positions from 0 on before the model runs, so its keys come out as they are stored and
nothing has to be turned when they are written; a query is turned back by each document's place when it reads them. Pads
take no position and are never read. Knows pages and positions, not models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from tamis.integrations.vllm.request import PAD, Asked
from tamis.integrations.vllm.step import Row
from tamis.kernels.decode_plan import DecodePlan, Room
from tamis.kernels.paged import Angles, KeyTiles, PagedLists, Segment, paged_lists, sent
from tamis.kernels.paged_causal import Alone, causal_paged
from tamis.kernels.paged_dispatch import paged_attention, paged_decode
from tamis.kernels.paged_packed import concat_paged


class Piece(NamedTuple):
    """Consecutive tokens of a request that see the same segments, `rows` of them: `at` is the first one's row in the
    batch, `position` its position. `alone`: of a document, whose one segment nobody else's rows are read with."""

    at: int
    rows: int
    position: int
    segments: tuple[Segment, ...]
    alone: bool


@dataclass
class Decodes:
    """The decode plan of the step before, and what it was for. While the same requests go on by a token each, it only
    has to be moved on, where it lies; a request that comes, goes or needs a page has it made anew."""

    rows: tuple[Row, ...] = ()
    plan: DecodePlan | None = None

    def moved_on(self, rows: Sequence[Row], page: int) -> DecodePlan | None:
        """The plan for these rows, or None if it cannot be had from the last one."""
        same = len(rows) == len(self.rows) and all(_goes_on(*both, page) for both in zip(self.rows, rows, strict=True))
        if self.plan is None or not same:
            return None
        self.plan.advance()
        self.rows = tuple(rows)
        return self.plan


@dataclass(frozen=True)
class ReuseRows:
    """The rows of a step, packed. `index` int64: rows of the batch that `lists` is for; `single` those of `plan`, one
    token each; `pads` those that nobody reads. `moved`: rows and their positions, for the model."""

    index: torch.Tensor | None
    tiles: KeyTiles | None
    lists: PagedLists | None
    single: torch.Tensor | None
    plan: DecodePlan | None
    pads: torch.Tensor | None
    moved: tuple[torch.Tensor, torch.Tensor]

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        """q and out [batch rows, Hq, D]; keys and values [pages, Hkv, page, D]. Writes these rows of `out`."""
        if self.index is not None and self.tiles is not None and self.lists is not None:
            picked = q.index_select(0, self.index).transpose(0, 1)
            made, _ = paged_attention(picked, keys, values, self.tiles, self.lists, scale=scale)
            out.index_copy_(0, self.index, made.transpose(0, 1))
        if self.single is not None and self.plan is not None:
            one, _ = paged_decode(q.index_select(0, self.single)[:, :, None], keys, values, self.plan, scale=scale)
            out.index_copy_(0, self.single, one[:, :, 0])
        if self.pads is not None:
            out.index_fill_(0, self.pads, 0)  # an assignment would bring the 0 to a GPU, and wait for it


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Work for a GPU's plan by this thread alone: waking all others for a few thousand numbers takes milliseconds on a
    machine with many cores, each time."""
    before = torch.get_num_threads() if device.type == "cuda" else 1
    if before > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before > 1:
            torch.set_num_threads(before)


def segments_of(row: Row, page: int) -> tuple[Segment, ...]:
    """What a token behind all documents sees: its own keys last."""
    return _piece(row, len(row.asked.spans) - 1, row.computed, row.end, 0, page).segments


def plan_rows(
    rows: Sequence[tuple[int, Row]],
    angles: Angles,
    *,
    page: int,
    kv_heads: int,
    device: torch.device,
    kept: Decodes | None = None,
) -> ReuseRows:
    """Plan the rows (first row in the batch, what it is) of a step on the CPU and bring the plan to `device`, without
    waiting for it. kept: of the step before; it then is of this one."""
    with one_thread(device):
        return _planned(rows, angles, page=page, kv_heads=kv_heads, device=device, kept=kept)


def _planned(
    rows: Sequence[tuple[int, Row]],
    angles: Angles,
    *,
    page: int,
    kv_heads: int,
    device: torch.device,
    kept: Decodes | None,
) -> ReuseRows:
    decoding = [(at, row) for at, row in rows if _decodes(row)]
    pieces, pads = _pieces([both for both in rows if not _decodes(both[1])], page)
    # documents first: theirs are planned together
    many = sorted((p for p in pieces if p.rows > 1), key=lambda p: not p.alone)
    single = [p for p in pieces if p.rows == 1]
    made = _lists(many, angles, page) if many else None
    plan: DecodePlan | None = None
    if decoding or single:
        own = [row for _, row in decoding]
        plan = None if single or kept is None else kept.moved_on(own, page)
        if plan is None:
            every = [_piece(row, len(row.asked.spans) - 1, row.computed, row.end, at, page) for at, row in decoding]
            plan = _decode_plan([*every, *single], angles, page, kv_heads, device)
            if kept is not None:
                kept.rows, kept.plan = ((), None) if single else (tuple(own), plan)
    moved = [(p.at, p.position, p.rows) for p in pieces]
    moved += [(at, row.asked.position(row.computed), 1) for at, row in decoding]
    return ReuseRows(
        _rows([(p.at, p.rows) for p in many], device),
        None if made is None else made[0].to(device),
        None if made is None else made[1].to(device),
        _rows([(at, 1) for at, _ in decoding] + [(p.at, 1) for p in single], device),
        plan,
        _rows(pads, device),
        (
            _moved([(at, n) for at, _, n in moved], device),
            _moved([(position, n) for _, position, n in moved], device),
        ),
    )


def _decodes(row: Row) -> bool:
    """Whether it is one token behind all documents."""
    return row.scheduled == 1 and row.computed >= row.asked.spans[-1].start


def _goes_on(before: Row, row: Row, page: int) -> bool:
    """Whether a row is the next token in the same page. One that fills it counts as another: a page is then read
    whole, and what a request gets must not depend on when its plan was made."""
    inside = row.computed == before.computed + 1 and row.computed % page and row.end % page
    return bool(inside) and row.request == before.request and (row.blocks, row.asked) == (before.blocks, before.asked)


def _pieces(rows: Sequence[tuple[int, Row]], page: int) -> tuple[list[Piece], list[tuple[int, int]]]:
    """What the rows see; and (first row in the batch, how many) of pads."""
    pieces: list[Piece] = []
    pads: list[tuple[int, int]] = []
    for at, row in rows:
        for start, end in _runs(row.asked, row.computed, row.end):
            number = row.asked.number(start)
            first = at + start - row.computed
            if row.asked.spans[number].kind == PAD:
                pads.append((first, end - start))
            else:
                pieces.append(_piece(row, number, start, end, first, page))
    return pieces, pads


def _lists(pieces: Sequence[Piece], angles: Angles, page: int) -> tuple[KeyTiles, PagedLists]:
    """Of pieces of several rows, those that see themselves alone first."""
    made = []
    alone = [Alone(p.segments[0].pages, p.segments[0].length, p.position) for p in pieces if p.alone]
    if alone:
        made.append(causal_paged(alone, page=page))
    for piece in pieces[len(alone) :]:
        own = KeyTiles.of(piece.segments, angles, page=page)
        made.append((own, paged_lists(own, torch.arange(piece.position, piece.position + piece.rows))))
    return concat_paged(made)


def _runs(asked: Asked, start: int, end: int) -> list[tuple[int, int]]:
    """[start, end) cut where spans begin; what lies behind the last span goes with it."""
    cuts = [start, *(s.start for s in asked.spans if start < s.start < end), end]
    return list(pairwise(cuts))


def _piece(row: Row, number: int, start: int, end: int, at: int, page: int) -> Piece:
    asked = row.asked
    if asked.alone(number):
        span = asked.spans[number]
        own = Segment(_pages(row, span.start, end, page), end - span.start, 0)
        return Piece(at, end - start, start - span.start, (own,), alone=True)
    segments = [
        Segment(_pages(row, u.start, u.end, page), u.end - u.start, u.position, 0)
        for u in asked.units
        if u.end <= start
    ]
    for i in asked.texts:
        span = asked.spans[i]
        if span.start >= end:
            break
        last = end if i == len(asked.spans) - 1 else min(span.end, end)
        segments.append(_text(row, span.start, last, page))
    return Piece(at, end - start, asked.position(start), tuple(segments), alone=False)


def _text(row: Row, start: int, end: int, page: int) -> Segment:
    """Tokens that are not shared; they may begin inside a page, whose earlier slots are holes then."""
    before = start % page
    holes = None
    if before:
        holes = torch.zeros(end - start + before, dtype=torch.bool)
        holes[:before] = True
    pages = _pages(row, start - before, end, page)
    return Segment(pages, end - start + before, row.asked.position(start) - before, None, holes)


def _pages(row: Row, start: int, end: int, page: int) -> tuple[int, ...]:
    return row.blocks[start // page : -(-end // page)]


def _decode_plan(pieces: Sequence[Piece], angles: Angles, page: int, kv_heads: int, device: torch.device) -> DecodePlan:
    tiles = [KeyTiles.of(p.segments, angles, page=page) for p in pieces]
    n = sum(t.table.shape[0] for t in tiles)
    documents = sum(0 if t.cos is None else t.cos.shape[0] for t in tiles)
    dims = max(t.rotary_dims for t in tiles)
    holes = any(t.holes is not None for t in tiles)
    plan = DecodePlan.reserve(Room(len(tiles), n, n, documents, 1, page, dims, holes), device)
    plan.write(tiles, torch.tensor([[p.position] for p in pieces]), kv_heads=kv_heads)
    return plan


def _rows(rows: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor | None:
    return _moved(rows, device) if rows else None


def _moved(runs: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """The numbers of all runs (first, how many)."""
    made = torch.from_numpy(np.concatenate([np.arange(first, first + n) for first, n in runs] or [np.arange(0)]))
    return sent(made, device)
