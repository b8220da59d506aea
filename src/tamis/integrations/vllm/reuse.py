"""Rows of "reuse" requests: documents that see themselves alone, everything else that sees all, over vLLM's pages.

A document's tokens are given positions from 0 on before the model runs, so its keys come out as they are stored and
nothing has to be turned when they are written; a query is turned back by each document's place when it reads them. Pads
take no position and are never read. Knows pages and positions, not models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from tamis.integrations.vllm.request import PAD, Asked
from tamis.integrations.vllm.step import Row
from tamis.kernels.decode_plan import DecodePlan, Room
from tamis.kernels.paged import Angles, KeyTiles, PagedLists, Segment, paged_lists
from tamis.kernels.paged_dispatch import paged_attention, paged_decode
from tamis.kernels.paged_packed import concat_paged


class Piece(NamedTuple):
    """Consecutive tokens of a request that see the same segments, `rows` of them: `at` is the first one's row in the
    batch, `position` its position."""

    at: int
    rows: int
    position: int
    segments: tuple[Segment, ...]


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
            picked = q[self.index].transpose(0, 1)
            made, _ = paged_attention(picked, keys, values, self.tiles, self.lists, scale=scale)
            out[self.index] = made.transpose(0, 1)
        if self.single is not None and self.plan is not None:
            one, _ = paged_decode(q[self.single][:, :, None], keys, values, self.plan, scale=scale)
            out[self.single] = one[:, :, 0]
        if self.pads is not None:
            out[self.pads] = 0


def plan_rows(
    rows: Sequence[tuple[int, Row]], angles: Angles, *, page: int, kv_heads: int, device: torch.device
) -> ReuseRows:
    """Plan the rows (first row in the batch, what it is) of a step on the CPU and bring the plan to `device`, without
    waiting for it."""
    pieces: list[Piece] = []
    pads: list[int] = []
    places: list[int] = []
    positions: list[int] = []
    for at, row in rows:
        for start, end in _runs(row.asked, row.computed, row.end):
            number = row.asked.number(start)
            first = at + start - row.computed
            if row.asked.spans[number].kind == PAD:
                pads += range(first, first + end - start)
                continue
            piece = _piece(row, number, start, end, first, page)
            pieces.append(piece)
            places += range(first, first + end - start)
            positions += range(piece.position, piece.position + piece.rows)
    many = [p for p in pieces if p.rows > 1]
    single = [p for p in pieces if p.rows == 1]
    tiles: KeyTiles | None = None
    lists: PagedLists | None = None
    plan: DecodePlan | None = None
    if many:
        made = []
        for piece in many:
            own = KeyTiles.of(piece.segments, angles, page=page)
            where = torch.arange(piece.position, piece.position + piece.rows)
            made.append((own, paged_lists(own, where)))
        joined = concat_paged(made)
        tiles, lists = joined[0].to(device), joined[1].to(device)
    if single:
        plan = _decode_plan(single, angles, page, kv_heads, device)
    return ReuseRows(
        _rows([r for p in many for r in range(p.at, p.at + p.rows)], device),
        tiles,
        lists,
        _rows([p.at for p in single], device),
        plan,
        _rows(pads, device),
        (_moved(places, device), _moved(positions, device)),
    )


def _runs(asked: Asked, start: int, end: int) -> list[tuple[int, int]]:
    """[start, end) cut where spans begin; what lies behind the last span goes with it."""
    cuts = [start, *(s.start for s in asked.spans if start < s.start < end), end]
    return list(pairwise(cuts))


def _piece(row: Row, number: int, start: int, end: int, at: int, page: int) -> Piece:
    asked = row.asked
    if asked.alone(number):
        span = asked.spans[number]
        own = Segment(_pages(row, span.start, end, page), end - span.start, 0)
        return Piece(at, end - start, start - span.start, (own,))
    segments = [
        Segment(_pages(row, u.start, u.end, page), u.end - u.start, u.position, 0)
        for u in asked.units
        if u.end <= start
    ]
    for i, span in enumerate(asked.spans):
        if asked.alone(i) or span.kind == PAD or span.start >= end:
            continue
        last = end if i == len(asked.spans) - 1 else min(span.end, end)
        segments.append(_text(row, span.start, last, page))
    return Piece(at, end - start, asked.position(start), tuple(segments))


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


def _rows(rows: Sequence[int], device: torch.device) -> torch.Tensor | None:
    return _moved(rows, device) if rows else None


def _moved(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    made = torch.tensor(numbers, dtype=torch.int64)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
