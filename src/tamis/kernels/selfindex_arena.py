"""The self-indexing form of a batch of sequences, one layer, at fixed places on a device: what decode kernels read.

Knows parts, offsets and tokens, not caches or models. Records of a sequence lie in slots, part after part; a part
begins on a border of `block` slots, so that every block has one set of tables, and can grow into what is left of its
last block and beyond while it is the last. A bit a slot says whether a record may be chosen: not those of tokens that
are kept whole, nor slots without a token. Whole tokens lie apart, turned to their absolute positions, so that one
query serves them all: first the exact copies of all parts, then the open run, which `append` lengthens on the device.

Every count that a step needs is a tensor, and no tensor ever moves: a captured CUDA graph serves until something is
full. What a step scribbles on (`selfindex_workspace`) is shared by all layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.selfindex import CELLS, GROUP, Layout, Part, Records, Tables

Angles = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # offsets → cos, sin float32 [.., R/2]
PAIR = tuple[torch.Tensor, torch.Tensor]
Rows = int | slice  # one sequence, or several that are alike


class ArenaRoom(NamedTuple):
    """What an arena can hold, fixed for its life.

    requests, kv_heads  sequences, and KV heads of each
    slots       records of a sequence, parts rounded up to whole blocks; a multiple of `block`
    parts       of a sequence
    exact, open whole tokens of a sequence: copies of parts' tokens, and the open run
    rotary      dims of a head that offsets turn, 0 where nothing is turned
    block       slots that share a part: a multiple of 256 for the Triton kernels
    """

    requests: int
    kv_heads: int
    slots: int
    parts: int = 1
    exact: int = 64
    open: int = 128
    rotary: int = 0
    block: int = 512

    def check(self) -> None:
        """Raises InvalidInput for sizes that cannot be."""
        if self.slots % self.block or self.block % 32 or min(self[:4]) < 1 or min(self.exact, self.open) < 0:
            raise InvalidInput(
                f"{self}: give 1 or more of requests, heads, parts and slots, slots a multiple of block, which is a "
                "multiple of 32."
            )


class Held(NamedTuple):
    """One sequence as its cache holds it: parts with leading dims [Hkv] (or [1, Hkv]), their offsets, the open run.

    `open` are keys and values [Hkv, R, D] at absolute positions, or None.
    """

    parts: Sequence[Part]
    offsets: Sequence[int]
    open: PAIR | None = None


@dataclass
class _Placed:
    """Where a part lies: first slot, tokens, offset, exact tokens."""

    begin: int
    n: int
    offset: int
    exact: int


class Arena:
    """See the module. Tensors, B sequences, H KV heads, D head dim, N slots, W = exact + open whole tokens:

    records   planes uint8 [B, H, N, bytes]
    live      int32 [B, H, N / 32]: bit i of word w is slot 32 w + i; set where the record may be chosen
    tables    leading dims [B, parts, H]
    part_of   int32 [B, N / block]
    cos, sin  float32 [B, parts, R / 2] of the parts' offsets
    keys, values  [B, H, W, D], whole tokens: exact ones from 0, open ones from `room.exact`
    slots, n_parts, n_exact  int32 [B];  open_end  int64 [B]: behind the last open token, counted in W
    """

    def __init__(self, room: ArenaRoom, layout: Layout, *, dtype: torch.dtype, device: torch.device | str) -> None:
        room.check()
        self.room, self.layout, self.device = room, layout, torch.device(device)
        b, h, n, d, p = room.requests, room.kv_heads, room.slots, layout.head_dim, room.parts
        g, half = layout.groups, room.rotary // 2

        def make(*size: int, kind: torch.dtype = torch.int32, fill: float = 0) -> torch.Tensor:
            return torch.full(size, fill, dtype=kind, device=self.device)

        def empty(*size: int, kind: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=kind, device=self.device)

        self.records = Records(*(empty(b, h, n, w, kind=torch.uint8) for w in layout.plane_bytes.values()))
        self.live = make(b, h, n // 32)
        sizes = {"order": (d,), "centroids": (g, CELLS, GROUP)}
        kinds = {"order": torch.uint8}
        self.tables = Tables(
            **{
                f.name: make(b, p, h, *sizes.get(f.name, (d,)), kind=kinds.get(f.name, torch.bfloat16))
                for f in fields(Tables)
            }
        )
        self.part_of = make(b, n // room.block)
        self.cos, self.sin = (make(b, p, half, kind=torch.float32) for _ in range(2))
        self.keys, self.values = (empty(b, h, room.exact + room.open, d, kind=dtype) for _ in range(2))
        self.slots, self.n_parts, self.n_exact = (make(b) for _ in range(3))
        self.open_end = make(b, kind=torch.int64, fill=room.exact)
        self._placed: list[list[_Placed]] = [[] for _ in range(b)]

    @classmethod
    def of(
        cls,
        sequences: Sequence[Held],
        layout: Layout,
        angles: Angles | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        spare: int = 0,
        block: int = 512,
    ) -> Arena:
        """An arena that holds `sequences`, with room for `spare` more tokens of each in parts of their own."""
        if not sequences or not any(s.parts or s.open for s in sequences):
            raise InvalidInput("no sequence with tokens; an arena is made of 1 or more.")
        some = next(t for s in sequences for t in ([p.keys for p in s.parts] or list(s.open or ())))
        extra = -(-spare // block)
        room = ArenaRoom(
            len(sequences),
            some.shape[-3],
            max(1, extra + max(sum(-(-p.records.n_tokens // block) for p in s.parts) for s in sequences)) * block,
            max(1, extra + max(len(s.parts) for s in sequences)),
            max(sum(p.exact.shape[-1] for p in s.parts) for s in sequences) + spare // 32 + 2 * bool(spare),
            max(0 if s.open is None else s.open[0].shape[-2] for s in sequences) + 128,
            0 if angles is None else 2 * angles(torch.tensor([0]))[0].shape[-1],
            block,
        )
        made = cls(room, layout, dtype=dtype, device=device)
        for b, held in enumerate(sequences):
            made.update(b, held, angles)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated, full or not."""
        own = (self.live, self.part_of, self.cos, self.sin, self.keys, self.values)
        counts = (self.slots, self.n_parts, self.n_exact, self.open_end)
        return self.records.nbytes + self.tables.nbytes + sum(t.nbytes for t in (*own, *counts))

    def rows(self, begin: int, end: int) -> Arena:
        """Sequences [begin, end) as an arena of their own over the same tensors."""
        made = copy.copy(self)
        made.room = self.room._replace(requests=end - begin)
        for name, held in vars(self).items():
            if isinstance(held, torch.Tensor | list):
                setattr(made, name, held[begin:end])
            elif isinstance(held, Records | Tables):
                setattr(made, name, type(held)(*(getattr(held, f.name)[begin:end] for f in fields(held))))
        return made

    def update(self, b: Rows, held: Held, angles: Angles | None = None) -> None:
        """Bring sequence `b` to what `held` is: parts it has more, records its last part has more, its open run.

        b: a number, or a slice of sequences that have the same numbers of everything; what is given for them has their
        dim in front. Between steps, never inside a captured graph. Parts that are there already must not have changed:
        of those that are no longer than here only the number of records is looked at. Raises InvalidInput for what
        there is no room for.
        """
        placed = self._placed[self._numbers(b)[0]]
        if len(held.parts) < len(placed):
            raise InvalidInput(f"{len(held.parts)} parts for a sequence that has {len(placed)} here; clear it first.")
        for i, part in enumerate(held.parts):
            if i == len(placed):
                self.add_part(b, part, held.offsets[i], angles)
            elif part.records.n_tokens > placed[i].n:
                self.extend_part(b, part)
        self.set_open(b, *(held.open or (None, None)))

    def add_part(self, b: Rows, part: Part, offset: int = 0, angles: Angles | None = None) -> None:
        """Put a part behind the others of sequence `b`. `offset`: from its local positions to the absolute ones."""
        room, numbers = self.room, self._numbers(b)
        placed, rows = self._placed[numbers[0]], _rows(b)
        if len(placed) == room.parts:
            raise InvalidInput(f"a part more for a sequence with room for {room.parts}; reserve a larger arena.")
        if offset and (angles is None or not room.rotary):
            raise InvalidInput(f"a part is moved by {offset} positions and there are no angles; give them.")
        begin, p = self._end(placed), len(placed)
        if angles is not None and room.rotary:
            cos, sin = angles(torch.tensor([offset]))
            self.cos[rows, p], self.sin[rows, p] = cos[0].to(self.device), sin[0].to(self.device)
        for f in fields(Tables):
            kept = getattr(self.tables, f.name)[rows, p]
            kept.copy_(getattr(part.tables, f.name).expand_as(kept))
        assert part.records.codes.shape[-3:-2] == (room.kv_heads,), "a part of another number of KV heads"
        for number in numbers:
            self._placed[number].append(_Placed(begin, 0, offset, 0))
        try:
            self._write(b, p, part)
        except InvalidInput:
            for number in numbers:
                self._placed[number].pop()
            raise
        self.n_parts[rows] = len(placed)

    def extend_part(self, b: Rows, part: Part) -> None:
        """The last part of sequence `b`, now longer: what it has more is copied, tables stay."""
        placed = self._placed[self._numbers(b)[0]]
        if not placed:
            raise InvalidInput("no part to extend; add one first.")
        self._write(b, len(placed) - 1, part)

    def set_open(self, b: Rows, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        """Replace the open run of sequence `b` by keys and values [Hkv, R, D] at absolute positions."""
        n, rows = 0 if keys is None else keys.shape[-2], _rows(b)
        if n > self.room.open:
            raise InvalidInput(f"{n} open tokens for an arena with room for {self.room.open}; settle more often.")
        room_end = self.room.exact + n
        at = slice(self.room.exact, room_end)
        if keys is not None and values is not None:
            for kept, new in ((self.keys, keys), (self.values, values)):
                kept[rows, :, at].copy_(_led(new, 4))
        self.open_end[rows] = room_end

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """One token's keys and values [B, Hkv, 1, D] behind every open run, on the device alone (can be captured).

        Nothing here counts replays: call `set_open` or `update` before `room.open` tokens are there.
        """
        at = self.open_end[:, None, None, None].expand_as(keys)
        self.keys.scatter_(2, at, keys.to(self.keys.dtype))
        self.values.scatter_(2, at, values.to(self.values.dtype))
        self.open_end.add_(1)

    def clear(self, b: Rows) -> None:
        """Sequence `b` has no tokens."""
        rows = _rows(b)
        for number in self._numbers(b):
            self._placed[number].clear()
        self.live[rows] = 0
        for counts, n in ((self.slots, 0), (self.n_parts, 0), (self.n_exact, 0), (self.open_end, self.room.exact)):
            counts[rows] = n

    def held(self, b: int) -> tuple[list[Part], PAIR, list[PAIR | None]]:
        """Parts of sequence `b` [Hkv, ..] without their whole tokens, all whole tokens, cos and sin of each part.

        What a plain implementation attends over; waits for the device.
        """
        parts, turns = [], []
        for p, placed in enumerate(self._placed[b]):
            span = slice(placed.begin, placed.begin + placed.n)
            records = Records(*(getattr(self.records, f.name)[b, :, span] for f in fields(Records)))
            tables = Tables(*(getattr(self.tables, f.name)[b, p] for f in fields(Tables)))
            dead = ~self._bits(slice(b, b + 1), 0, self.room.slots)[0, :, span]
            index = dead.nonzero()[:, 1].view(self.room.kv_heads, self._placed[b][p].exact)
            none = self.keys[b, :, :0]
            parts.append(Part(records, tables, index, none, none))
            turns.append((self.cos[b, p], self.sin[b, p]) if placed.offset else None)
        exact, end = int(self.n_exact[b]), int(self.open_end[b])
        whole = [torch.cat([t[b, :, :exact], t[b, :, self.room.exact : end]], 1) for t in (self.keys, self.values)]
        return parts, (whole[0], whole[1]), turns

    def part_tokens(self, b: int) -> list[int]:
        """Records of each part of sequence `b`."""
        return [placed.n for placed in self._placed[b]]

    def position(self, b: int, slots: torch.Tensor) -> torch.Tensor:
        """int64: slots of sequence `b` as positions in its parts joined."""
        begins = torch.tensor([p.begin for p in self._placed[b]], device=slots.device)
        before = torch.tensor([0, *(p.n for p in self._placed[b])], device=slots.device).cumsum(0)
        part = torch.searchsorted(begins, slots.long(), right=True) - 1
        return slots.long() - begins[part] + before[part]

    def _numbers(self, b: Rows) -> range:
        return range(*_rows(b).indices(self.room.requests))

    def _bits(self, rows: slice, begin: int, end: int) -> torch.Tensor:
        """bool [rows, H, end - begin] of slots on borders of words."""
        shifts = torch.arange(32, device=self.device)
        words = self.live[rows, :, begin // 32 : end // 32]
        return ((words.long()[..., None] >> shifts) & 1).bool().flatten(-2)

    def _end(self, placed: Sequence[_Placed]) -> int:
        return -(-(placed[-1].begin + placed[-1].n) // self.room.block) * self.room.block if placed else 0

    def _write(self, b: Rows, p: int, part: Part) -> None:
        """Copy what `part` has more than what lies in place p."""
        room, rows, numbers = self.room, _rows(b), self._numbers(b)
        every = self._placed[numbers[0]]
        placed = every[p]
        n, more = part.records.n_tokens, part.exact.shape[-1] - placed.exact
        used = sum(x.exact for x in every)
        end = -(-(placed.begin + n) // room.block) * room.block
        if end > room.slots or used + more > room.exact or n < placed.n or more < 0:
            raise InvalidInput(
                f"a part of {n} tokens, {part.exact.shape[-1]} of them whole, at slot {placed.begin} for an arena of "
                f"{room.slots} slots and {room.exact} whole tokens ({used} used); reserve a larger one."
            )
        for f in fields(Records):
            new = _led(getattr(part.records, f.name), 4)
            to = getattr(self.records, f.name)[rows, :, placed.begin + placed.n : placed.begin + n]
            to.copy_(new[:, :, placed.n :])
        fresh = _led(part.exact, 3)[..., placed.exact :].to(self.device)
        alive = self._bits(rows, placed.begin, end)
        alive[..., placed.n : n], alive[..., n:] = True, False
        alive.scatter_(-1, fresh, False)
        words = (torch.unflatten(alive, -1, (-1, 32)).long() << torch.arange(32, device=self.device)).sum(-1)
        self.live[rows, :, placed.begin // 32 : end // 32].copy_(words.to(torch.int32))
        at = slice(used, used + more)
        keys, values = (_led(t, 4)[:, :, placed.exact :].to(self.device) for t in (part.keys, part.values))
        first = numbers[0]
        turned = turned_forth(keys, self.cos[first, p], self.sin[first, p]) if placed.offset else keys
        self.keys[rows, :, at].copy_(turned)
        self.values[rows, :, at].copy_(values)
        self.part_of[rows, placed.begin // room.block : end // room.block] = p
        for number in numbers:
            mine = self._placed[number][p]
            mine.n, mine.exact = n, part.exact.shape[-1]
        self.n_exact[rows], self.slots[rows] = used + more, placed.begin + n


def _rows(b: Rows) -> slice:
    return b if isinstance(b, slice) else slice(b, b + 1)


def _led(x: torch.Tensor, dims: int) -> torch.Tensor:
    """x with its sequences in front, where it is of one."""
    return x if x.dim() == dims else x[None]


def turned_forth(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [.., D] turned forward by the angle of cos and sin [R / 2], in x's dtype; with -sin, back."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], -1)
