"""Steps of many sequences at once whose caches are self-indexed: each has a row of one arena a layer.

A sequence stays what it is: parts and an open run. While it has a seat in a bank, its newest tokens lie in the bank's
arenas alone, and with them what its queries were like; `Seat.bring_back` puts them where they belong. So a step is two
calls of kernels a layer for all sequences together, and nothing is done for each of them until one is to be compressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tamis.cache.selfindex.keep import Budget
from tamis.cache.selfindex.sequence import DECAY, CodedSequence, Growth, joined_layers
from tamis.core.errors import InvalidInput
from tamis.kernels.selfindex_arena import PAIR, Arena, ArenaRoom, Held
from tamis.kernels.selfindex_dispatch import ON_A_GPU, step_of
from tamis.kernels.selfindex_notes import Notes
from tamis.kernels.selfindex_workspace import Workspace

BLOCK = 512  # slots that share a part
LEAST_SLOTS = 2048
MOST_PARTS = 64  # of a row, unless its sequence has more
STACKED_BYTES = 256 << 20  # of records that are put in place at once, of all layers
EPOCH = 1024  # slots of a part that new tokens make, at least


class Kind(NamedTuple):
    """What a row of a bank can hold, see `ArenaRoom`; `window` queries are noted. coded: of sequences with parts.

    Short sequences, which stay whole, have banks of their own: many open tokens and queries, no records.
    """

    slots: int
    parts: int
    exact: int
    open: int
    window: int
    coded: bool
    growth: Growth

    def holds(self, other: Kind) -> bool:
        """Whether a sequence that needs the other may sit here, without wasting more than three quarters."""
        alike = (self.growth, self.coded, self.window) == (other.growth, other.coded, other.window)
        large = all(mine >= need for mine, need in zip(self[:4], other[:4], strict=True))
        return alike and large and self.slots <= 4 * other.slots


class Seat:
    """One cache's sequences, layer by layer, of one row each, and where their newest tokens are.

    bank, row   where it sits; None: nowhere, and the sequences hold everything
    fresh       tokens that are in the bank alone
    n_coded, n_open, n_exact   tokens: with records, of the open run, kept whole beside their records
    settle_s    seconds spent on compressing; whoever counts them sets it back
    """

    def __init__(self, sequences: Sequence[CodedSequence], budget: Budget) -> None:
        self.sequences, self.budget, self.settle_s = list(sequences), budget, 0.0
        self.bank: Bank | None = None
        self.row, self.fresh = -1, 0
        self.look()

    def look(self) -> None:
        """Read the numbers anew from the sequences."""
        first = self.sequences[0]
        assert first.open is not None, "a step comes behind a prompt"
        self.n_coded, self.n_open = first.n_compressed, first.open[0].shape[-2]
        self.n_exact = sum(p.exact.shape[-1] for p in first.parts)
        self.settles_at, self.observed = first.settles_at, first.observed
        self.sequence_bytes = first.nbytes * len(self.sequences)

    @property
    def n_tokens(self) -> int:
        """All tokens."""
        return self.n_coded + self.n_open

    @property
    def nbytes(self) -> int:
        """Bytes of the sequences and of a row of the bank."""
        return self.sequence_bytes + (0 if self.bank is None else self.bank.row_bytes)

    def advance(self) -> None:
        """A step has brought a token."""
        self.n_open += 1
        self.fresh += 1
        self.observed += 1

    def bring_back(self) -> None:
        """Give the sequences what the bank alone has, and leave it."""
        if self.bank is not None:
            self.bank.flush(self)
            self.leave()

    def leave(self) -> None:
        """Without bringing anything back: the sequences are of no more use, or have everything."""
        if self.bank is not None:
            self.bank.clear(self)


def kind_of(seat: Seat, least: int = LEAST_SLOTS) -> Kind:
    """The smallest kind of bank for a sequence, with room for its next tokens. least: slots where it has records."""
    first = seat.sequences[0]
    grow = first.growth
    if not first.parts:
        return Kind(BLOCK, 1, 0, first.settles_at, grow.keep.window, False, grow)
    need = sum(-(-p.records.n_tokens // BLOCK) for p in first.parts) * BLOCK + 2 * BLOCK
    slots, most = grown(max(least, need)), max(MOST_PARTS, grown(len(first.parts) + 1))
    while True:
        parts = max(4, min(most, slots // EPOCH))
        exact = grow.keep.first + grow.keep.chosen + slots // grow.block * grow.chosen
        if parts > len(first.parts) and exact >= seat.n_exact + EPOCH // grow.block * grow.chosen:
            return Kind(slots, parts, exact, first.settles_at, 1, True, grow)
        slots = grown(slots + 1)


def grown(n: int) -> int:
    """n >= 1 rounded up to a power of two, or to one and a half of one: few sizes, a sixth wasted in the mean."""
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if n <= power * 3 // 4 else power


class Bank:
    """Arenas of all layers with `rows` rows for seats of one kind. `like`: a seat whose sequences are like all others'.

    Rows of nobody have no tokens and cost next to nothing. kernel: see `selfindex_decode`; later the one that
    computes.
    """

    def __init__(self, kind: Kind, rows: int, like: Seat, *, kernel: str = "auto") -> None:
        first, noted = like.sequences[0], like.sequences[0].noted
        assert first.open is not None and noted is not None, "a prompt was run and observed"
        keys, n = first.open[0], len(like.sequences)
        rotary = 0 if first.rotary is None else first.rotary.dims
        heads, dim, device = noted[1].shape[1], first.layout.head_dim, keys.device
        self.kind, self.rows, self._n_layers = kind, rows, n
        self._angles = None if first.rotary is None else first.rotary.angles
        room = ArenaRoom(n * rows, keys.shape[1], kind.slots, kind.parts, kind.exact, kind.open, rotary, BLOCK)
        # one tensor for all layers: what changes in all of them changes at once
        self._whole: Arena | None = Arena(room, first.layout, dtype=keys.dtype, device=device)
        self._energy = torch.zeros((n * rows, keys.shape[1], dim), device=device)
        self._queries = torch.zeros((n * rows, kind.window, heads, dim), dtype=keys.dtype, device=device)
        self.weight = torch.full((rows,), 1 - DECAY, device=device)
        self.there = torch.zeros(rows, dtype=torch.int32, device=device)
        self.count = torch.zeros(rows, dtype=torch.int32, device=device)
        self._layers = [self._layer(slice(i * rows, (i + 1) * rows)) for i in range(n)]
        self.seats: list[Seat | None] = [None] * rows
        q = torch.zeros((rows, heads, 1, dim), dtype=keys.dtype, device=device)
        self.kernel, self._note, self._decode = step_of(q, self._layers[0][0], kernel=kernel)
        self._work: Workspace | None = None
        self._most, self._heads = 0, heads
        self.row_bytes = self.nbytes // rows

    @property
    def seated(self) -> list[Seat]:
        """Who sits here."""
        return [seat for seat in self.seats if seat is not None]

    @property
    def full(self) -> bool:
        """Whether no row is free; so it is when all have left, and its tensors are gone."""
        return self._whole is None or all(seat is not None for seat in self.seats)

    @property
    def nbytes(self) -> int:
        """Bytes of arenas and notes, and of what steps scribble on."""
        if self._whole is None:
            return 0
        work = 0 if self._work is None else self._work.nbytes
        return self._whole.nbytes + self._energy.nbytes + self._queries.nbytes + work

    def sit(self, seat: Seat) -> None:
        """Give a seat a free row, and put all that its sequences hold there. Raises InvalidInput if it is too small."""
        row = self.seats.index(None)
        self.seats[row], seat.bank, seat.row, seat.fresh = seat, self, row, 0
        self.refresh(seat)  # a free row has no tokens
        noted = [sequence.noted for sequence in seat.sequences]
        self._energy[self._at(seat)].copy_(torch.cat([n[0] for n in noted if n is not None]))
        self.there[row] = 1
        self._most = max(self._most, seat.budget.count(sum(self.kind[:4])))

    def flush(self, seat: Seat) -> None:
        """Give the sequences of a seat what only this bank has."""
        if not seat.fresh:
            return
        whole, at, begin = self._arena, self._at(seat), self.kind.exact
        keys, values = (t[at, :, begin : begin + seat.n_open].clone() for t in (whole.keys, whole.values))
        energy, window = self._energy[at].clone(), self._newest(seat)
        for i, sequence in enumerate(seat.sequences):
            one = slice(i, i + 1)
            sequence.resume((keys[one], values[one]), energy[one], window[one], seat.fresh)
        seat.fresh = 0

    def refresh(self, seat: Seat) -> None:
        """Bring the row to what the sequences are, at first or after they settled.

        Raises InvalidInput where there is no room for it; the seat must leave then.
        """
        whole, layers, first = self._arena, seat.sequences, seat.sequences[0]
        there = whole.part_tokens(seat.row)
        same = 0
        while same < len(there) and there[same] == first.parts[same].records.n_tokens:
            same += 1
        offsets = first.offsets if self._angles is not None else [0] * len(first.parts)  # where nothing is turned
        if len(layers) * sum(p.records.nbytes for p in first.parts[same:]) > STACKED_BYTES:
            for i, sequence in enumerate(layers):
                held = Held(sequence.parts, offsets, sequence.open)
                whole.update(i * self.rows + seat.row, held, self._angles)
            return
        more = [joined_layers([s.parts[i] for s in layers]) for i in range(same, len(first.parts))]
        runs = [s.open for s in layers if s.open is not None]
        run: PAIR = torch.cat([r[0] for r in runs]), torch.cat([r[1] for r in runs])
        whole.update(self._at(seat), Held([*first.parts[:same], *more], offsets, run), self._angles)

    def clear(self, seat: Seat) -> None:
        """Take a seat's row from it. When the last one leaves, all memory goes."""
        self.seats[seat.row] = None
        if self.seated:
            self.there[seat.row] = 0
            self._arena.clear(self._at(seat))
        else:
            self._whole, self._work, self._layers = None, None, []
            del self._energy, self._queries
        seat.bank, seat.row, seat.fresh = None, -1, 0

    def prepare(self, counts: torch.Tensor, observed: torch.Tensor) -> None:
        """Before the layers of a step: records to choose, and queries noted with this step's, int64 [rows] both."""
        if self.kernel in ON_A_GPU:
            if self._work is None or self._work.chosen.shape[1] < min(self._most, self.kind.slots):
                self._work = None
                self._work = Workspace.reserve(self._layers[0][0], self._heads, self._most, dtype=self._queries.dtype)
                self.row_bytes = self.nbytes // self.rows
            self.count = self._work.count
        self.count.copy_(counts)
        if not self.kind.coded:
            self.weight.copy_(observed.reciprocal())

    def step(self, layer: int, qkv: Sequence[torch.Tensor], scale: float, out: torch.Tensor) -> None:
        """One layer's new tokens in, their attention out: q and out [rows, Hq, 1, D], k and v [rows, Hkv, 1, D].

        Does the same launches on the same tensors at every step between two `sit`, `refresh` or `clear`.
        """
        arena, notes = self._layers[layer]
        self._note(arena, notes, *qkv)
        self._decode(qkv[0], arena, count=self.count, scale=scale, out=out, work=self._work)

    @property
    def _arena(self) -> Arena:
        if self._whole is None:
            raise InvalidInput("everybody has left this bank; make another one.")
        return self._whole

    def _at(self, seat: Seat) -> slice:
        """Its rows in all layers."""
        return slice(seat.row, self._n_layers * self.rows, self.rows)

    def _layer(self, rows: slice) -> tuple[Arena, Notes]:
        arena = self._arena.rows(rows.start, rows.stop)
        return arena, Notes(self._energy[rows], self._queries[rows], self.weight, self.there)

    def _newest(self, seat: Seat) -> torch.Tensor:
        """Queries [layers, Hq, n, D] of the newest tokens that are here alone, as many as are noted."""
        noted, size = self._queries[self._at(seat)], self.kind.window
        n = min(seat.fresh, size)
        begin = (seat.n_open - n) % size
        spans = [noted[:, begin : begin + n], noted[:, : max(0, begin + n - size)]]
        return torch.cat(spans, 1).transpose(1, 2)
