"""Several requests over one pool in one call: their key tiles below each other, their query rows one behind another.

A list names only tiles of its own request, so requests packed together never see each other, and no kernel has to
know that there are several. Nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.paged import DOCUMENT, KeyTiles, PagedLists


def concat_paged(requests: Sequence[tuple[KeyTiles, PagedLists]]) -> tuple[KeyTiles, PagedLists]:
    """Tiles and lists for one `paged_attention` call of all requests: q [Hq, sum Tq, D], rows in the same order.

    Tables, angles and holes are joined (`joined_tiles`); entries and runs are padded to the longest list and refer to
    the joined rows. The joined table is in order of position inside a request only: make lists before joining, not
    from it. Raises InvalidInput unless all have one page size, rotary dims, ALiBi slopes, rows of a query tile, list
    heads and device.
    """
    _check(requests)
    lists = [own for _, own in requests]
    width, room = (max(t.shape[2] for t in each) for each in ([p.entries for p in lists], [p.runs for p in lists]))
    starts, entries, runs = [], [], []
    row = tile = document = 0
    for tiles, own in requests:
        starts.append(own.q_start + row)
        entries.append(torch.nn.functional.pad(own.entries + tile, (0, width - own.entries.shape[2])))
        end, of = own.runs.unbind(-1)
        moved = torch.stack([end, torch.where(of < 0, of, of + document)], -1)
        runs.append(torch.nn.functional.pad(moved, (0, 0, 0, room - moved.shape[2])))
        row += own.q_position.numel()
        tile += tiles.table.shape[0]
        document += _documents(tiles)
    joined = PagedLists(
        q_start=torch.cat(starts),
        q_len=torch.cat([p.q_len for p in lists]),
        q_position=torch.cat([p.q_position for p in lists]),
        entries=torch.cat(entries, 1),
        count=torch.cat([p.count for p in lists], 1),
        masked=torch.cat([p.masked for p in lists], 1),
        runs=torch.cat(runs, 1),
        run_count=torch.cat([p.run_count for p in lists], 1),
        rows=lists[0].rows,
    )
    return joined_tiles([tiles for tiles, _ in requests]), joined


def joined_tiles(requests: Sequence[KeyTiles]) -> KeyTiles:
    """The tables of one or more requests below each other, documents numbered through, with their angles and holes."""
    tables, document = [], 0
    for tiles in requests:
        table = tiles.table.clone()
        table[:, DOCUMENT] += (table[:, DOCUMENT] >= 0).int() * document
        tables.append(table)
        document += _documents(tiles)
    cos, sin = ([t for t in parts if t is not None] for parts in ([r.cos for r in requests], [r.sin for r in requests]))
    holes = None
    if any(tiles.holes is not None for tiles in requests):
        none = [torch.zeros((len(t.table), t.page), dtype=torch.uint8, device=t.table.device) for t in requests]
        holes = torch.cat([n if t.holes is None else t.holes for n, t in zip(none, requests, strict=True)])
    return replace(
        requests[0],
        table=torch.cat(tables),
        cos=torch.cat(cos) if cos else None,
        sin=torch.cat(sin) if sin else None,
        holes=holes,
    )


def _documents(tiles: KeyTiles) -> int:
    return 0 if tiles.cos is None else tiles.cos.shape[0]


def _check(requests: Sequence[tuple[KeyTiles, PagedLists]]) -> None:
    if not requests:
        raise InvalidInput("there are no requests to join; give one or more.")
    tiles, lists = [t for t, _ in requests], [p for _, p in requests]
    kinds: dict[str, set[Any]] = {
        "page sizes": {t.page for t in tiles},
        "rotary dims": {t.rotary_dims for t in tiles if t.rotary_dims},
        "rows of a query tile": {p.rows for p in lists},
        "list heads": {p.count.shape[0] for p in lists},
        "devices": {str(t.device) for t in [*(x.table for x in tiles), *(p.entries for p in lists)]},
    }
    for name, found in kinds.items():
        if len(found) > 1:
            raise InvalidInput(f"requests have {name} {sorted(found)}; those of one call must agree. Call each apart.")
    slopes = tiles[0].slopes
    for other in (t.slopes for t in tiles[1:]):
        same = other is slopes or (other is not None and slopes is not None and other.shape == slopes.shape)
        # what is on a GPU cannot be compared without waiting
        if same and other is not slopes and other is not None and slopes is not None and not other.is_cuda:
            same = torch.equal(other, slopes)
        if not same:
            raise InvalidInput("requests have different ALiBi slopes; those of one call must agree. Call each apart.")
