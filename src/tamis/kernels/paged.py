"""Key tiles and lists for attention over pages: where a request's keys lie, at which positions, and who visits them.

Knows pages, positions and rotations by an offset, not models, pools or requests' states.

A document's keys are kept once, rotated at positions counted from its own start, and read in place at any offset: if
the document starts at position S of a prompt, scoring its keys with the query turned back by S gives what scoring
keys re-rotated into place would give. One offset is one row of `cos` and `sin` ("document" below); tiles of rows with
the same offset share it. Ranges are half-open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.lists import TILE

PAGE, LENGTH, POSITION, DOCUMENT = range(4)  # columns of a table
ABSOLUTE = -1  # document of keys that are rotated at their absolute positions
MOST_POSITIONS = 1 << 30  # positions and sums of two of them are int32
Angles = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # `Rotary.angles`: offsets → cos, sin


class Segment(NamedTuple):
    """Consecutive keys of one prompt in pages of a pool: `length` keys from absolute position `position` on.

    pages     page numbers; each holds the pool's page size of keys, the last one what is left
    local     position at which the first key was rotated, or None: the keys are rotated at absolute positions
    holes     bool [length], True where the key is not to be read; None: all are
    """

    pages: tuple[int, ...]
    length: int
    position: int
    local: int | None = None
    holes: torch.Tensor | None = None

    @property
    def offset(self) -> int:
        """Positions from where the keys were rotated to where they are."""
        return 0 if self.local is None else self.position - self.local


@dataclass(frozen=True)
class KeyTiles:
    """The pages that a request can see, a row each, in order of absolute position.

    table     int32 [NT, 4]: page, keys in it, absolute position of its first key, document (row of cos and sin, or -1)
    page      keys a page has room for: 16, 32, 64 or 128 for the Triton kernels
    cos, sin  float32 [ND, R/2] of the angle of each document's offset, R rotary dims; None where nothing is rotated
    holes     uint8 [NT, page]: slots not to be read though inside the page's length; None: there are none
    slopes    float32 [Hq]: ALiBi, adds slope * (key position - query position) to a score; None: no bias
    """

    table: torch.Tensor
    page: int = TILE
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    holes: torch.Tensor | None = None
    slopes: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        segments: Sequence[Segment],
        angles: Angles | None = None,
        *,
        page: int = TILE,
        slopes: torch.Tensor | None = None,
    ) -> KeyTiles:
        """Tiles of `segments` (any order) on the CPU; `angles` is needed if one is rotated at local positions.

        Raises InvalidInput for segments whose pages do not hold their keys, or that lie outside the positions.
        """
        offsets = sorted({s.offset for s in segments} - {0})
        if offsets and angles is None:
            raise InvalidInput(f"segments are moved by {offsets[:4]} positions and no angles are given; pass `angles`.")
        for segment in segments:
            _check_segment(segment, page)
        place = {offset: i for i, offset in enumerate(offsets)} | {0: ABSOLUTE}
        own = torch.tensor([(s.length, s.position, place[s.offset]) for s in segments]).view(-1, 3)
        counts = torch.tensor([len(s.pages) for s in segments], dtype=torch.int64)
        of = repeated(counts)
        before = (torch.arange(len(of)) - (counts.cumsum(0) - counts)[of]) * page
        length, position, document = own[of].unbind(1)
        numbers = torch.tensor([number for s in segments for number in s.pages], dtype=torch.int64)
        table = torch.stack([numbers, (length - before).clamp(max=page), position + before, document], 1).int()
        order = table[:, POSITION].argsort(stable=True)
        cos, sin = angles(torch.tensor(offsets)) if offsets and angles is not None else (None, None)
        holes = _holes(segments, page)
        kept = None if holes is None else holes[order]
        return cls(table[order].contiguous(), page, cos, sin, kept, slopes)

    @property
    def rotary_dims(self) -> int:
        """R, the leading dims of a head that are rotated; 0 where nothing is."""
        return 0 if self.cos is None else 2 * self.cos.shape[1]

    def to(self, device: torch.device | str) -> KeyTiles:
        """The same on `device`, without waiting for it."""
        return replace(self, **_moved(self, ("table", "cos", "sin", "holes", "slopes"), device))

    def readable(self) -> torch.Tensor:
        """bool [NT, page]: the slots that hold keys to be read."""
        inside = torch.arange(self.page, device=self.table.device) < self.table[:, LENGTH, None]
        return inside if self.holes is None else inside & (self.holes == 0)


@dataclass(frozen=True)
class PagedLists:
    """The key tiles that each (query head, query tile) visits. int32 tensors on one device.

    H1 is 1 (all heads alike) or Hq.
    q_start    [Nq]         first query row of each query tile, as a row of q
    q_len      [Nq]         rows in it, 1..rows
    q_position [Tq]         absolute position of each query row, strictly increasing inside a query tile
    entries    [H1, Nq, M]  rows of `KeyTiles.table`; only the first `count` are read
    count      [H1, Nq]     entries to visit
    masked     [H1, Nq]     the first `masked` entries need the element mask (short, holes, or not wholly before the
                            query tile's first row); the rest are whole and visible to every row
    runs       [H1, Nq, K, 2]  neighbours of one kind and document: entry behind the last one, document
    run_count  [H1, Nq, 2]  runs that need the element mask (they come first), all runs
    rows       rows of a query tile, at most
    """

    q_start: torch.Tensor
    q_len: torch.Tensor
    q_position: torch.Tensor
    entries: torch.Tensor
    count: torch.Tensor
    masked: torch.Tensor
    runs: torch.Tensor
    run_count: torch.Tensor
    rows: int = TILE

    def to(self, device: torch.device | str) -> PagedLists:
        """The same on `device`, without waiting for it."""
        names = ("q_start", "q_len", "q_position", "entries", "count", "masked", "runs", "run_count")
        return replace(self, **_moved(self, names, device))


def paged_lists(
    tiles: KeyTiles,
    q_position: torch.Tensor,
    *,
    rows: int = TILE,
    mask: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> PagedLists:
    """Lists of every tile that a query row can see, or of those chosen by `mask` bool [1 or Hq, Nq, NT].

    q_position: integers [Tq], strictly increasing, any gaps; cut into query tiles of `rows`, or where `starts` says:
    integers [Nq] on the CPU, the first row of each query tile, none longer than `rows`. Runs where the tiles lie (make
    them on the CPU, then `to(device)`). Raises InvalidInput for positions, starts or masks that do not fit.
    """
    _check_positions(q_position)
    n_rows, device = q_position.numel(), tiles.table.device
    q_position = q_position.to(device=device, dtype=torch.int32)
    cut = torch.arange(0, n_rows, rows) if starts is None else starts
    lengths = torch.cat([cut[1:], torch.tensor([n_rows])]) - cut
    if int(cut[0]) or not 0 < int(lengths.min()) <= int(lengths.max()) <= rows:
        raise InvalidInput(
            f"query tiles start at rows {cut.tolist()[:8]}…, of {n_rows}; the first is 0, each has 1 to {rows} rows."
        )
    q_start, q_len = (x.to(device=device, dtype=torch.int32) for x in (cut, lengths))
    n_q, n_tiles = q_start.numel(), tiles.table.shape[0]
    if mask is None:
        mask = torch.ones((1, n_q, n_tiles), dtype=torch.bool, device=device)
    if mask.dtype != torch.bool or mask.dim() != 3 or mask.shape[1:] != (n_q, n_tiles):
        raise InvalidInput(
            f"mask is {mask.dtype} {tuple(mask.shape)}; expected bool [1 or query heads, {n_q}, {n_tiles}]: "
            f"{n_q} query tiles of {rows} rows, {n_tiles} key tiles."
        )
    first, last = q_position[q_start], q_position[q_start + q_len - 1]
    position, document = tiles.table[:, POSITION], tiles.table[:, DOCUMENT]
    full = tiles.readable().all(-1)
    whole = full & (position + tiles.page - 1 <= first[:, None])
    chosen = mask & (position <= last[:, None])
    # masked first; inside each kind by document, then by position
    n_documents = int(document.max()) + 2 if n_tiles else 1
    place = document.long() * n_tiles + torch.arange(n_tiles, device=device) + n_tiles
    key = place + whole * (n_documents * n_tiles)
    key = torch.where(chosen, key, 2 * n_documents * n_tiles)
    count = chosen.sum(-1, dtype=torch.int32)
    most = int(count.max())
    entries = key.argsort(-1)[..., : max(1, most)].to(torch.int32).contiguous()
    if not n_tiles:
        entries = torch.zeros((mask.shape[0], n_q, 1), dtype=torch.int32, device=device)
    masked = (chosen & ~whole).sum(-1, dtype=torch.int32)
    runs, run_count = runs_of(entries, count, masked, tiles.table)
    return PagedLists(q_start, q_len, q_position, entries, count, masked, runs, run_count, rows)


def runs_of(
    entries: torch.Tensor, count: torch.Tensor, masked: torch.Tensor, table: torch.Tensor, *, most: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`PagedLists.runs` and `.run_count` of lists; `most` bounds the runs of a cell, so that no device is waited for.

    A `most` that is too small loses runs: twice the documents plus two always suffices.
    """
    if not table.shape[0]:
        return entries.new_zeros((*count.shape, 1, 2)), entries.new_zeros((*count.shape, 2))
    index = torch.arange(entries.shape[-1], device=entries.device)
    valid = index < count[..., None]
    document = table[:, DOCUMENT][torch.where(valid, entries, 0)]
    new = torch.ones_like(valid)
    new[..., 1:] = document[..., 1:] != document[..., :-1]
    new = (new | (index == masked[..., None])) & valid
    run = (new.cumsum(-1) - 1).clamp(min=0)
    total = new.sum(-1, dtype=torch.int32)
    near = (new & (index < masked[..., None])).sum(-1, dtype=torch.int32)
    room = max(1, int(total.max())) if most is None else most
    size = torch.zeros((*count.shape, room), dtype=torch.int32, device=entries.device)
    size.scatter_add_(-1, run, valid.to(torch.int32))
    of = torch.full_like(size, ABSOLUTE)
    of.scatter_reduce_(-1, run, torch.where(valid, document, ABSOLUTE), "amax")
    return torch.stack([size.cumsum(-1, dtype=torch.int32), of], -1), torch.stack([near, total], -1)


def sent(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor on `device`, without waiting for it: from page-locked memory, which the allocator does not give to
    others before the copy is done."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def repeated(counts: torch.Tensor) -> torch.Tensor:
    """int64 [sum]: i as often as `counts` [n] says, in order. On a CPU; `torch.repeat_interleave` would wake every
    thread for a handful of numbers, which takes milliseconds where there are many."""
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts.numpy()))


def turned_back(q: torch.Tensor, tiles: KeyTiles, document: int) -> torch.Tensor:
    """q [.., D] as the keys of `document` must be scored with: turned back by its offset (-1: q itself)."""
    if document < 0 or tiles.cos is None or tiles.sin is None:
        return q
    cos, sin = tiles.cos[document].to(q.dtype), tiles.sin[document].to(q.dtype)
    half = cos.numel()
    a, b = q[..., :half], q[..., half : 2 * half]
    return torch.cat([a * cos + b * sin, b * cos - a * sin, q[..., 2 * half :]], -1)


def check_pages(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tiles: KeyTiles) -> None:
    """Refuse tensors that no implementation may be given: q [.., D], keys and values [pages, Hkv, page, D].

    Query heads are q's third dim from the end.
    """
    if keys.dim() != 4 or keys.shape != values.shape or q.shape[-1] != keys.shape[3] or keys.shape[2] != tiles.page:
        raise InvalidInput(
            f"q {tuple(q.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)} for pages of {tiles.page}; "
            "expected keys and values [pages, KV heads, page, D], and q with the same D last."
        )
    heads = q.shape[-3]
    if heads % keys.shape[1]:
        raise InvalidInput(f"{heads} query heads over {keys.shape[1]} KV heads; the first must be a multiple.")
    if tiles.rotary_dims > q.shape[-1]:
        raise InvalidInput(f"angles are for {tiles.rotary_dims} rotary dims, heads have {q.shape[-1]}; give fewer.")
    if tiles.slopes is not None and tiles.slopes.shape != (heads,):
        raise InvalidInput(f"slopes are {tuple(tiles.slopes.shape)}; expected one for each of {heads} query heads.")
    if tiles.table.device != q.device:
        raise InvalidInput(f"tiles are on {tiles.table.device}, q on {q.device}; move them with tiles.to(q.device).")
    if tiles.table.device.type == "cpu" and tiles.table.numel():
        low, high = map(int, tiles.table[:, PAGE].aminmax())
        if low < 0 or high >= keys.shape[0]:
            raise InvalidInput(f"tiles name pages {low} to {high}; the pool has pages 0 to {keys.shape[0] - 1}.")


def check_rows(q: torch.Tensor, lists: PagedLists) -> None:
    """Refuse lists that are not for q [Hq, Tq, D]."""
    if q.dim() != 3 or q.shape[1] != lists.q_position.numel():
        raise InvalidInput(
            f"q is {tuple(q.shape)} and there are {lists.q_position.numel()} query positions; expected q [Hq, Tq, D] "
            "with one position for each of Tq rows."
        )
    if lists.count.shape[0] not in (1, q.shape[0]):
        raise InvalidInput(f"lists are for {lists.count.shape[0]} heads, q has {q.shape[0]}; give 1 or all.")


def _holes(segments: Sequence[Segment], page: int) -> torch.Tensor | None:
    """uint8 [all pages, page], or None where nothing is left out."""
    if not any(s.holes is not None and bool(s.holes.any()) for s in segments):
        return None
    made = torch.zeros((sum(len(s.pages) for s in segments), page), dtype=torch.uint8)
    flat, at = made.view(-1), 0
    for segment in segments:
        if segment.holes is not None:
            flat[at : at + segment.length] = segment.holes
        at += len(segment.pages) * page
    return made


def _check_segment(segment: Segment, page: int) -> None:
    needed = -(-segment.length // page)
    if segment.length < 1 or len(segment.pages) != needed:
        raise InvalidInput(
            f"a segment has {segment.length} keys in {len(segment.pages)} pages of {page}; "
            f"give 1 or more keys and exactly {max(1, needed)} pages."
        )
    end = segment.position + segment.length
    if segment.position < 0 or end > MOST_POSITIONS or min(segment.pages) < 0:
        raise InvalidInput(
            f"a segment lies at positions [{segment.position}, {end}) in pages from {min(segment.pages)}; "
            f"positions are 0 to {MOST_POSITIONS}, pages 0 or more."
        )
    if segment.holes is not None and segment.holes.shape != (segment.length,):
        raise InvalidInput(f"holes are {tuple(segment.holes.shape)} for {segment.length} keys; give one bool a key.")


def _check_positions(q_position: torch.Tensor) -> None:
    if q_position.dim() != 1 or not q_position.numel() or q_position.is_floating_point():
        raise InvalidInput(f"q_position is {q_position.dtype} {tuple(q_position.shape)}; expected 1 or more integers.")
    steps = q_position.diff()
    if bool((steps <= 0).any()) or int(q_position[0]) < 0 or int(q_position[-1]) >= MOST_POSITIONS:
        raise InvalidInput(
            f"q_position runs from {int(q_position[0])} to {int(q_position[-1])}; it must increase strictly, "
            f"between 0 and {MOST_POSITIONS}."
        )


def _moved(owner: object, names: Sequence[str], device: torch.device | str) -> dict[str, Any]:
    """The tensors of those names on `device`; what is not there stays None."""
    made: dict[str, Any] = {}
    for name in names:
        tensor = getattr(owner, name)
        made[name] = None if tensor is None else sent(tensor, device)
    return made
