"""Who sits where: banks for all sequences that step together, few and not much larger than what sits in them.

A sequence sits in a bank of its size, see `grown`: so much memory is a row of it. Who comes takes a free row; who has
grown out of its bank moves to another, and the others stay. A bank is made anew, from the sequences, only when its rows
are all taken (then with a few more) or three quarters of them are empty.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence

from tamis.attention.decode_bank import LEAST_SLOTS, Bank, Kind, Seat, grown, kind_of
from tamis.cache.selfindex.sequence import settle_layers
from tamis.core.errors import InvalidInput

LEAST_ROWS = 4  # of a bank of the smallest size


class Seating:
    """The banks. kernel: see `Bank`; slots: of a row of the smallest ones."""

    def __init__(self, *, kernel: str = "auto", slots: int = LEAST_SLOTS) -> None:
        self.banks: list[Bank] = []
        self._kernel, self._slots = kernel, slots

    @property
    def nbytes(self) -> int:
        """Bytes of all banks."""
        return sum(bank.nbytes for bank in self.banks)

    def begin(self, seats: Sequence[Seat]) -> dict[Seat, Exception]:
        """Before a step of exactly these: who else sits somewhere leaves, what is due is compressed, and all but those
        that are handed back with a reason have a row."""
        failed: dict[Seat, Exception] = {}
        wanted = set(seats)
        for bank in self.banks:
            for seat in bank.seated:
                if seat not in wanted:
                    seat.bring_back()
        for seat in seats:
            if seat.bank is None:
                seat.look()
            if seat.n_open >= seat.settles_at:
                try:
                    self._settle(seat)
                except Exception as e:
                    seat.leave()
                    failed[seat] = e
        self._tidy(failed)
        self._place([seat for seat in seats if seat.bank is None and seat not in failed], failed)
        return failed

    def clear(self) -> None:
        """Everybody leaves, and nothing is brought back: a step broke off somewhere between its layers."""
        for bank in self.banks:
            for seat in bank.seated:
                seat.leave()
        self.banks = []

    def _settle(self, seat: Seat) -> None:
        """Compress what is due. A seat that does not fit where it is any longer leaves."""
        begin, bank = time.perf_counter(), seat.bank
        if bank is not None:
            bank.flush(seat)
        settle_layers(seat.sequences)
        seat.look()
        if bank is not None and not bank.kind.coded:
            seat.leave()
        elif bank is not None:
            try:
                bank.refresh(seat)
            except InvalidInput:
                seat.leave()
        seat.settle_s += time.perf_counter() - begin

    def _tidy(self, failed: dict[Seat, Exception]) -> None:
        """Let go of banks of nobody, and make those smaller in which few are left."""
        self.banks = [bank for bank in self.banks if bank.seated]
        few = [b for b in self.banks if b.rows > LEAST_ROWS and 4 * len(b.seated) <= b.rows]
        for kind in [bank.kind for bank in few]:
            self._make_anew(kind, [], failed)

    def _place(self, seats: Sequence[Seat], failed: dict[Seat, Exception]) -> None:
        waiting: dict[Kind, list[Seat]] = {}
        for seat in seats:
            kind = kind_of(seat, self._slots)
            there = [bank for bank in self.banks if not bank.full and bank.kind.holds(kind)]
            if there:
                try:
                    min(there, key=lambda bank: bank.kind.slots).sit(seat)
                except Exception as e:
                    seat.leave()
                    failed[seat] = e
            else:
                waiting.setdefault(kind, []).append(seat)
        for kind, group in waiting.items():
            self._make_anew(kind, group, failed)

    def _make_anew(self, kind: Kind, more: list[Seat], failed: dict[Seat, Exception]) -> None:
        """The bank of a kind, for those in it and some more. Where these find no room, the others do without them."""
        seats = [seat for bank in self.banks if bank.kind == kind for seat in bank.seated]
        for seat in seats:
            seat.bring_back()  # the old bank's memory goes with the last one
        self.banks = [bank for bank in self.banks if bank.seated]
        self._fill(kind, seats, more, failed)

    def _fill(self, kind: Kind, there: list[Seat], more: list[Seat], failed: dict[Seat, Exception]) -> None:
        try:
            self._make(kind, [*there, *more])
            return
        except Exception as e:
            traceback.clear_frames(e.__traceback__)  # tensors of what was half made
            failed.update(dict.fromkeys(more or there, e))
        if more and there:
            self._fill(kind, there, [], failed)

    def _make(self, kind: Kind, seats: Sequence[Seat]) -> None:
        rows = max(LEAST_ROWS if kind.slots <= self._slots else 1, grown(len(seats)))
        bank = Bank(kind, rows, seats[0], kernel=self._kernel)
        try:
            for seat in seats:
                bank.sit(seat)
        except Exception:
            for seat in bank.seated:
                seat.leave()
            raise
        self.banks.append(bank)
