"""Texts that see themselves alone, planned together, against the general way for each of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tamis.core.errors import InvalidInput
from tamis.kernels.paged import KeyTiles, Segment, paged_lists
from tamis.kernels.paged_causal import Alone, causal_paged
from tamis.kernels.paged_packed import concat_paged

texts = st.lists(st.tuples(st.integers(1, 700), st.floats(0, 1)), min_size=1, max_size=6)


@given(texts, st.sampled_from([16, 64, 128]), st.sampled_from([64, 128]))
def test_the_same_as_each_for_itself(drawn: list[tuple[int, float]], page: int, rows: int) -> None:
    numbers = torch.randperm(2000).tolist()
    alone, each = [], []
    for n, share in drawn:
        pages = tuple(numbers.pop() for _ in range(-(-n // page)))
        first = min(int(share * n), n - 1)
        alone.append(Alone(pages, n, first))
        tiles = KeyTiles.of([Segment(pages, n, 0)], page=page)
        each.append((tiles, paged_lists(tiles, torch.arange(first, n), rows=rows)))
    (tiles, lists), (want_tiles, want) = causal_paged(alone, page=page, rows=rows), concat_paged(each)
    assert torch.equal(tiles.table, want_tiles.table) and tiles.page == page and tiles.cos is tiles.holes is None
    for name in ("q_start", "q_len", "q_position", "count", "masked", "run_count"):
        found, expected = getattr(lists, name), getattr(want, name)
        assert torch.equal(found, expected) and found.dtype == expected.dtype, name
    for cell in range(len(want.q_start)):
        n, runs = int(want.count[0, cell]), int(want.run_count[0, cell, 1])
        assert torch.equal(lists.entries[0, cell, :n], want.entries[0, cell, :n])
        assert torch.equal(lists.runs[0, cell, :runs], want.runs[0, cell, :runs])
    assert lists.entries.dtype == lists.runs.dtype == torch.int32 and lists.rows == rows
    assert bool(((lists.entries >= 0) & (lists.entries < len(tiles.table))).all())


@pytest.mark.parametrize("text", [Alone((1,), 17, 0), Alone((1, 2), 16, 0), Alone((1,), 5, 5), Alone((), 0, 0)])
def test_what_does_not_fit_is_refused(text: Alone) -> None:
    with pytest.raises(InvalidInput, match="pages"):
        causal_paged([text], page=16)
    with pytest.raises(InvalidInput, match="no texts"):
        causal_paged([])
