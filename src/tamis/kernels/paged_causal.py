"""Tiles and lists of many short texts that see themselves alone, made at once: what `paged_lists` makes of each.

A prompt of a hundred documents would else pay a hundred times for some forty small tensor operations. Knows pages and
positions, not who keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.lists import TILE
from tamis.kernels.paged import ABSOLUTE, MOST_POSITIONS, KeyTiles, PagedLists, repeated


class Alone(NamedTuple):
    """`length` keys in `pages`, rotated where they are (from position 0 on), read by query rows at [first, length)."""

    pages: tuple[int, ...]
    length: int
    first: int


def causal_paged(texts: Sequence[Alone], *, page: int = TILE, rows: int = TILE) -> tuple[KeyTiles, PagedLists]:
    """Tiles and lists on the CPU for one `paged_attention` call: query rows of one text behind those of another.

    What is visited, in which order, is as `concat_paged` has it of each text's `KeyTiles.of` and `paged_lists`: no text
    sees another. Raises InvalidInput for texts without rows, or whose pages do not hold their keys.
    """
    for text in texts:
        if not 0 <= text.first < text.length <= MOST_POSITIONS or len(text.pages) != -(-text.length // page):
            raise InvalidInput(
                f"a text has {text.length} keys in {len(text.pages)} pages of {page} and rows from {text.first} on; "
                "give 1 row or more, and exactly the pages that the keys need."
            )
    if not texts:
        raise InvalidInput("there are no texts to see themselves; give one or more.")
    length, first = torch.tensor([(t.length, t.first) for t in texts]).unbind(1)
    n_pages, n_rows = _divided(length, page), length - first
    of, within = _spread(n_pages)
    numbers = torch.tensor([number for text in texts for number in text.pages])
    columns = [numbers, (length[of] - within * page).clamp(max=page), within * page, torch.full_like(of, ABSOLUTE)]
    table = torch.stack(columns, 1).int()

    of, within = _spread(_divided(n_rows, rows))  # query tiles from here on
    before = within * rows
    size = (n_rows[of] - before).clamp(max=rows)
    low = first[of] + before  # positions of a tile's first and last row
    seen, whole = (low + size - 1) // page + 1, (low + 1) // page
    masked = seen - whole
    place = torch.arange(int(seen.max()))
    near = place < masked[:, None]
    entries = torch.where(near, place + whole[:, None], place - masked[:, None]) + _firsts(n_pages)[of][:, None]
    entries = torch.where(place < seen[:, None], entries, 0)
    ends = torch.stack([torch.where(masked > 0, masked, seen), seen], 1)
    row_of, row = _spread(n_rows)
    lists = PagedLists(
        q_start=(_firsts(n_rows)[of] + before).int(),
        q_len=size.int(),
        q_position=(first[row_of] + row).int(),
        entries=entries[None].int(),
        count=seen[None].int(),
        masked=masked[None].int(),
        runs=torch.stack([ends, torch.full_like(ends, ABSOLUTE)], -1)[None].int(),
        run_count=torch.stack([(masked > 0).int(), (masked > 0).int() + (whole > 0).int()], 1)[None].int(),
        rows=rows,
    )
    return KeyTiles(table, page), lists


def _divided(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Rounded up."""
    return (numbers + by - 1) // by


def _firsts(counts: torch.Tensor) -> torch.Tensor:
    """Where each one's things begin if all lie one behind another."""
    return counts.cumsum(0) - counts


def _spread(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For all things, whose they are and which of that one's."""
    of = repeated(counts)
    return of, torch.arange(len(of)) - _firsts(counts)[of]
