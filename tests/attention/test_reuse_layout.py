"""Where tokens lie: spans, holes, own pages and how they grow; CPU only, no model."""

from __future__ import annotations

import pytest
import torch

from tamis.attention.reuse_layout import Layout, OwnPages, Piece
from tamis.core.errors import InvalidInput
from tamis.kernels.paged import KeyTiles

PAGE = 4


def mask(n: int, *true: int) -> torch.Tensor:
    made = torch.zeros(n, dtype=torch.bool)
    made[list(true)] = True
    return made


@pytest.fixture
def layout() -> Layout:
    """3 fresh tokens, a document of 6, 2 and 1 fresh ones, a document of 4, 5 fresh ones."""
    pieces = [Piece(0, 3), Piece(3, 6, (7, 8), 0), Piece(9, 2), Piece(11, 1), Piece(12, 4, (9,), 0), Piece(16, 5)]
    return Layout.of(pieces, PAGE)


def seen(layout: Layout, pages: OwnPages, own: torch.Tensor) -> list[int]:
    """The positions of all keys that the tiles show, sorted: each should be there once."""
    segments = layout.stored_segments(own) + pages.segments(own)
    tiles = KeyTiles.of(segments, lambda o: (torch.ones(len(o), 1), torch.ones(len(o), 1)), page=PAGE)
    at = tiles.table[:, 2, None] + torch.arange(PAGE)
    return sorted(at[tiles.readable()].tolist())


def test_computed_neighbours_share_pages(layout: Layout) -> None:
    assert [(p.start, p.length) for p in layout.pieces] == [(0, 3), (3, 6), (9, 3), (12, 4), (16, 5)]
    assert layout.spans(layout.fresh) == ((0, 3), (9, 3), (16, 4), (20, 1))
    assert layout.n_tokens == 21 and int(layout.fresh.sum()) == 11


@pytest.mark.parametrize(
    "chosen", [(), (3,), (4, 8), (3, 4, 5, 6), tuple(range(3, 9)), (*range(3, 9), *range(12, 16))], ids=str
)
def test_every_key_is_read_once_wherever_it_lies(layout: Layout, chosen: tuple[int, ...]) -> None:
    own = layout.fresh | mask(21, *chosen)
    pages = OwnPages.of(layout.spans(layout.fresh), range(100, 120), PAGE)
    pages.cover(layout.spans(own))
    assert pages.spans == sorted(pages.spans) and len(set(pages.pages)) == len(pages.pages)
    assert seen(layout, pages, own) == list(range(21))
    rows = own.nonzero()[:, 0]
    page, slot = pages.slots(rows)
    starts = {number: start for (start, _), number in zip(pages.spans, pages.pages, strict=True)}
    assert [starts[int(p)] + int(s) for p, s in zip(page, slot, strict=True)] == rows.tolist()


def test_a_recomputed_key_is_not_read_where_it_is_stored(layout: Layout) -> None:
    own = layout.fresh | mask(21, 4)
    first, second = layout.stored_segments(own)[:2]
    assert first.holes is not None and first.holes.tolist() == [False, True, False, False]
    assert second.holes is None and (first.offset, second.offset) == (3, 3)
    whole = layout.stored_segments(layout.fresh | mask(21, *range(3, 7)))
    assert [s.pages for s in whole] == [(8,), (9,)], "a page of holes alone is left out"


def test_own_pages_grow_token_by_token(layout: Layout) -> None:
    pages = OwnPages.of(layout.spans(layout.fresh), range(50, 55), PAGE)
    grown = []
    while not pages.full:
        grown.append(pages.grow())
    assert grown == [False] * 3 + [True] + [False] * 3
    assert pages.spans[-2:] == [(20, 4), (24, 4)] and pages.pages[-1] == 54
    assert seen(layout, pages, layout.fresh) == list(range(28))


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([Piece(0, 3), Piece(4, 2)], "starts at 3"),
        ([Piece(0, 0)], "0 tokens"),
        ([Piece(0, 2), Piece(2, 4, (1,), 0)], "must be computed"),
        ([], "must be computed"),
    ],
)
def test_a_broken_layout_is_refused(pieces: list[Piece], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Layout(tuple(pieces), PAGE)
