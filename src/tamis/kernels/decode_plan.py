"""Which program of a paged decode step reads which pages: splits whose borders are the borders of documents.

Knows tables of key tiles, not models, pools or who sends the requests. A split has one document, so its program turns
the query once, before its loop; long documents get several splits. All tensors keep their place and size, so a
captured CUDA graph goes on using them after `write` or `advance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.lists import TILE
from tamis.kernels.paged import DOCUMENT, LENGTH, PAGE, POSITION, KeyTiles, repeated, sent
from tamis.kernels.paged_packed import joined_tiles

MOST_PAGES = 16  # of a split: short enough to even out many programs, long enough that partial results stay < 1 %
PROGRAMS_PER_SM = 3  # what fits an SM of sm_90 at once


class Room(NamedTuple):
    """What a plan can hold, fixed for its life: requests of `tokens` query rows each, key tiles, splits, documents
    (offsets) of all requests together; keys of a page, rotary dims (0: nothing is rotated), and whether tiles may have
    holes."""

    requests: int
    tiles: int
    splits: int
    documents: int = 0
    tokens: int = 1
    page: int = TILE
    rotary_dims: int = 0
    holes: bool = False


@dataclass(frozen=True)
class DecodePlan:
    """The tensors of one decode step. Int32 on one device; updated in place.

    tiles       the key tiles of all requests, in the order they are visited; one row more than there is room for
    splits      [S, 4]: request, first row of the table, rows, of these the first so many whole and visible to every
                query row. Unused splits have 0 rows
    ranges      [B, 2]: a request's first split, its splits
    growing     int64 [B]: the row of the tile at a request's end
    q_position  [B, Tq]: absolute positions of the query rows
    programs    programs to aim at, over all splits and KV heads
    split_pages a split's pages at most, whatever else is in the plan; None: as many as even out the programs. With a
                fixed number, and room for a split for each tile, no request's result depends on the others
    scratch     what a kernel worked out from the rest for all layers of a step; `write` and `advance` empty it
    """

    tiles: KeyTiles
    splits: torch.Tensor
    ranges: torch.Tensor
    growing: torch.Tensor
    q_position: torch.Tensor
    room: Room
    programs: int
    split_pages: int | None = None
    scratch: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def reserve(
        cls,
        room: Room,
        device: torch.device | str = "cpu",
        *,
        slopes: torch.Tensor | None = None,
        split_pages: int | None = None,
    ) -> DecodePlan:
        """An empty plan: every request has no keys until `write`."""
        device = torch.device(device)
        programs = 8
        if device.type == "cuda":
            programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        half = room.rotary_dims // 2
        turned = bool(half and room.documents)
        tiles = KeyTiles(
            zeros(room.tiles + 1, 4),
            room.page,
            zeros(room.documents, half, dtype=torch.float32) if turned else None,
            zeros(room.documents, half, dtype=torch.float32) if turned else None,
            zeros(room.tiles + 1, room.page, dtype=torch.uint8) if room.holes else None,
            slopes,
        )
        growing = torch.full((room.requests,), room.tiles, dtype=torch.int64, device=device)
        positions = zeros(room.requests, room.tokens)
        splits, ranges = zeros(room.splits, 4), zeros(room.requests, 2)
        return cls(tiles, splits, ranges, growing, positions, room, programs, split_pages)

    def part(self, requests: int, splits: int) -> DecodePlan:
        """The plan of so many requests and splits that lies in the first places of this one's tensors: what is written
        into one is in the other, too. For captured CUDA graphs of several sizes."""
        room = self.room._replace(requests=min(requests, self.room.requests), splits=min(splits, self.room.splits))
        n = room.requests
        return replace(
            self, splits=self.splits[: room.splits], ranges=self.ranges[:n], growing=self.growing[:n],
            q_position=self.q_position[:n], room=room, scratch={},
        )  # fmt: skip

    def write(
        self,
        requests: Sequence[KeyTiles],
        q_position: torch.Tensor,
        *,
        kv_heads: int,
        spare: Sequence[int] | None = None,
    ) -> int:
        """Put these requests into the plan's first places (the others get no keys); returns the splits in use.

        requests: tables on the CPU, none empty; q_position: integers [len(requests), Tq], increasing in a request.
        spare: of each, how many of its last tiles have no keys yet and wait for `next_tile`; none, if not given.
        Copies to a GPU are queued on the current stream, which is not waited for. Raises InvalidInput for what the
        plan has no room for; the plan is then unchanged.
        """
        self._check(requests, q_position)
        self.scratch.clear()
        counts = torch.tensor([r.table.shape[0] for r in requests])
        waiting = torch.tensor(spare or [0] * len(requests))
        last = counts.cumsum(0) - 1 - waiting
        request = repeated(counts)
        joined = joined_tiles(requests)
        table, holes = joined.table, joined.holes
        if holes is None and self.tiles.holes is not None:
            holes = torch.zeros((len(table), self.room.page), dtype=torch.uint8)
        rows = torch.arange(len(table))
        full = table[:, LENGTH] == self.room.page
        if holes is not None:
            full &= (holes == 0).all(-1)
        whole = full & (table[:, POSITION] + self.room.page - 1 <= q_position[:, 0].cpu()[request])
        whole[last[waiting > 0]] = False  # one that goes on in the next tile has to lie before it, though it is full
        run_key = request * (self.room.documents + 1) + table[:, DOCUMENT] + 1
        order = run_key.argsort(stable=True)
        split = self._split_numbers(run_key[order], len(table) * kv_heads)
        inner = (split * 2 + ~whole[order]).argsort(stable=True)  # whole tiles first inside a split
        order = order[inner]
        size = torch.bincount(split)
        made = torch.zeros((self.room.splits, 4), dtype=torch.int32)
        first = size.cumsum(0) - size
        made[: len(size)] = torch.stack(
            [request[order][first], first, size, torch.bincount(split, whole[order].double()).long()], 1
        ).int()
        ranges = torch.zeros_like(self.ranges, device="cpu")
        each = torch.bincount(made[: len(size), 0], minlength=len(requests))
        ranges[: len(requests)] = torch.stack([each.cumsum(0) - each, each], 1).int()
        place = torch.empty_like(rows)
        place[order] = rows
        growing = torch.full_like(self.growing, self.room.tiles, device="cpu")
        growing[: len(requests)] = place[last]
        put(self.tiles.table, table[order])
        if holes is not None and self.tiles.holes is not None:
            put(self.tiles.holes, holes[order])
        for kept, new in ((self.tiles.cos, joined.cos), (self.tiles.sin, joined.sin)):
            if kept is not None and new is not None:
                put(kept, new)
        put(self.q_position, q_position.to(torch.int32))
        for kept, new in ((self.splits, made), (self.ranges, ranges), (self.growing, growing)):
            put(kept, new)
        return len(size)

    def advance(self, tokens: int = 1) -> None:
        """Every request has `tokens` more keys in its last page and asks that much later; on the device alone.

        The last page must have room: when one is full, `write` again.
        """
        self.scratch.clear()
        lengths = self.tiles.table[:, LENGTH]
        lengths.index_add_(0, self.growing, torch.full_like(self.growing, tokens, dtype=torch.int32))
        self.q_position.add_(tokens)

    def next_tile(self, requests: Sequence[int], pages: Sequence[int]) -> None:
        """These requests go on in their next spare tile, which lies in that page and has no keys yet."""
        of, number = sent(torch.tensor([list(requests), list(pages)]), self.growing.device)
        self.growing.index_add_(0, of, torch.ones_like(of))
        self.tiles.table.view(-1).index_copy_(0, self.growing[of] * 4 + PAGE, number.int())

    def _check(self, requests: Sequence[KeyTiles], q_position: torch.Tensor) -> None:
        room = self.room
        needs = {
            "requests": len(requests),
            "tiles": sum(r.table.shape[0] for r in requests),
            "documents": sum(0 if r.cos is None else r.cos.shape[0] for r in requests),
        }
        for name, n in needs.items():
            if n > getattr(room, name):
                raise InvalidInput(f"{n} {name} for a plan with room for {getattr(room, name)}; reserve a larger one.")
        if not requests or any(not r.table.shape[0] or r.table.device.type != "cpu" for r in requests):
            raise InvalidInput("a plan is made from 1 or more requests with 1 or more key tiles each, on the CPU.")
        if q_position.shape != (len(requests), room.tokens):
            raise InvalidInput(
                f"q_position is {tuple(q_position.shape)}; expected ({len(requests)}, {room.tokens}): requests, "
                "query rows of each."
            )
        for r in requests:
            if r.page != room.page or (r.rotary_dims and r.rotary_dims != room.rotary_dims):
                raise InvalidInput(
                    f"a request has pages of {r.page} and {r.rotary_dims} rotary dims, the plan pages of {room.page} "
                    f"and {room.rotary_dims}; reserve a plan of that kind."
                )
            if r.holes is not None and not room.holes:
                raise InvalidInput("a request has holes and the plan was reserved without; reserve it with holes=True.")

    def _split_numbers(self, run_key: torch.Tensor, units: int) -> torch.Tensor:
        """int64 [N]: the split of each tile, for tiles sorted by run: even pieces of at most so many pages of a run."""
        run: torch.Tensor
        size: torch.Tensor
        _, run, size = torch.unique_consecutive(run_key, return_inverse=True, return_counts=True)
        within = torch.arange(len(run)) - (size.cumsum(0) - size)[run]
        pages = self.split_pages or min(max(1, -(-units // self.programs)), MOST_PAGES)
        while int((pieces := -(-size // pages)).sum()) > self.room.splits:
            if pages >= int(size.max()):
                raise InvalidInput(
                    f"{len(size)} documents of all requests for a plan with room for {self.room.splits} splits; "
                    "each needs one. Reserve a larger plan."
                )
            pages *= 2
        # every piece has floor or ceil of size / pieces pages
        split: torch.Tensor = (pieces.cumsum(0) - pieces)[run] + within * pieces[run] // size[run]
        return split


def put(kept: torch.Tensor, new: torch.Tensor) -> None:
    """Overwrite the first rows of `kept`, without waiting where it is on a GPU."""
    if kept.device.type == "cuda":
        new = new.pin_memory()  # its memory is not reused before the copy is done: the allocator keeps an event
    kept[: len(new)].copy_(new, non_blocking=True)
