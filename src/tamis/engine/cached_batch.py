"""One decode step of many requests whose keys and values lie in caches of their own: one pass, each row its own cache.

Knows caches and what reads them, one layer at a time; not pages. Linear layers read their weights once for all rows.
On a GPU the rows of self-indexed caches are a few launches a layer together (`Seating`); others follow one by one. On a
CPU all do: what a row attends to is computed as it would be alone, so that in float32 a request's logits do not depend
on the others to the last bit, where `Products` or a multiple of four rows sees to that for the linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from tamis.attention.decode import Decoding
from tamis.attention.decode_bank import LEAST_SLOTS, Bank, Seat
from tamis.attention.decode_seats import Seating
from tamis.attention.hook import DecodeJob, Switch, attention_layers
from tamis.attention.reuse import ReuseEngine
from tamis.engine.batch import bucket, forward_rows, least_rows
from tamis.engine.cached import CachedMember
from tamis.engine.products import products_of


@dataclass
class CachedPass:
    """The job of one step. Its rows: those of `banks`, one after the other, then `caches` with their `jobs`, in order,
    then nobody's.

    numbers: of the members that the caches are of
    failed: members that found no room, for example, and why; the pass goes on for the others
    broken: banks whose launches failed, and so all that sit there
    """

    modules: Sequence[Any]
    banks: Sequence[Bank] = ()
    caches: list[Any] = field(default_factory=list)
    jobs: list[DecodeJob | None] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    failed: dict[int, Exception] = field(default_factory=dict)
    broken: dict[Bank, Exception] = field(default_factory=dict)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        """See `Job.attend`: q [Hq, R, D], k and v [Hkv, R, D]."""
        heads, rows, dim = q.shape
        begin = sum(bank.rows for bank in self.banks)
        out = (torch.empty if begin == rows else torch.zeros)((rows, heads, dim), dtype=q.dtype, device=q.device)
        end = 0
        by_row = [t.transpose(0, 1)[:, :, None] for t in (q, k, v)]
        for bank in self.banks:
            at = slice(end, end := end + bank.rows)
            if bank not in self.broken:
                try:
                    bank.step(layer, [t[at] for t in by_row], scale, out[at, :, None])
                except Exception as e:
                    self.broken[bank] = e
            if bank in self.broken:
                out[at] = 0
        for i, number in enumerate(self.numbers, begin):
            if number in self.failed:
                continue
            try:
                mine = [t[None, :, i : i + 1].contiguous() for t in (q, k, v)]
                out[i] = self._row(layer, i - begin, mine, scale)
            except Exception as e:
                self.failed[number] = e
        return out.transpose(0, 1), None

    def _row(self, layer: int, i: int, qkv: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
        """[Hq, D], as `attention_forward` makes it of a lone token."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        q, job = qkv[0], self.jobs[i]
        keys, values = self.caches[i].update(qkv[1], qkv[2], layer)
        found = None if job is None else job.attend(layer, q, scale)
        if found is None:
            made, _ = sdpa_attention_forward(self.modules[layer], q, keys, values, None, scaling=scale)
            found = made.transpose(1, 2)
        if job is not None:
            job.observe(layer, q)
        row: torch.Tensor = found[0, :, 0]
        return row


class CachedBatch:
    """Decodes members together whose caches are their own.

    exact     see `Batch`
    together  whether rows of self-indexed caches are computed in one go; None: on a GPU. Not to the last bit as alone
    kernel, slots   see `Seating`
    """

    def __init__(
        self,
        engine: ReuseEngine,
        *,
        exact: bool = True,
        together: bool | None = None,
        kernel: str = "auto",
        slots: int = LEAST_SLOTS,
    ) -> None:
        self.engine = engine
        self._products = products_of(engine.model)
        self._modules = attention_layers(engine.model)
        self._least, self._device = least_rows(engine, exact=exact), engine.store.pool.keys.device
        self._together = self._device.type == "cuda" if together is None else together
        self.seating = Seating(kernel=kernel, slots=slots)
        self._inputs: dict[int, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are kept beside the members' caches."""
        return self.seating.nbytes

    def step(self, members: Sequence[CachedMember]) -> tuple[torch.Tensor, dict[int, Exception]]:
        """Logits [n, vocabulary] behind the newest token of each, and which of them failed with what."""
        engine = self.engine
        seats = [member.seat if self._together else None for member in members]
        with engine.store.lock, torch.inference_mode(), ExitStack() as passing:
            seated = [(i, seat) for i, seat in enumerate(seats) if seat is not None]
            failed = self.seating.begin([seat for _, seat in seated])
            job = CachedPass(self._modules, self.seating.banks)
            job.failed.update({i: failed[seat] for i, seat in seated if seat in failed})
            seated = [(i, seat) for i, seat in seated if seat not in failed]
            for i, member in enumerate(members):
                if seats[i] is None:
                    self._begin(job, i, member, passing)
            places, inputs = self._fill(job, members, seated)

            # from here on nothing is done for a seat alone, and what its rows read lies in tensors that stay: a graph
            # could be recorded of this for each (rows, banks, calls of `sit`)
            with self._products.running():
                try:
                    logits = forward_rows(engine, job, inputs[:1], inputs[1:2])
                except Exception:
                    self.seating.clear()
                    raise
            for i, seat in seated:
                if seat.bank in job.broken:
                    job.failed[i] = job.broken[seat.bank]
            for bank in job.broken:
                for seat in bank.seated:
                    seat.leave()
        for i, seat in seated:
            if i not in job.failed:
                self._count(members[i], seat)
        return logits[: len(members)] if places is None else logits[places], job.failed

    def _begin(self, job: CachedPass, i: int, member: CachedMember, passing: ExitStack) -> None:
        """What a row's cache needs around a pass. The model's own switch has one job, which asks the rows' jobs."""
        assert member.decoding is not None, "its prompt was run"
        own = Switch()
        try:
            passing.enter_context(member.decoding.running(own, step=True))
        except Exception as e:
            job.failed[i] = e
        job.numbers.append(i)
        job.caches.append(member.cache)
        job.jobs.append(own.decode)

    def _fill(
        self, job: CachedPass, members: Sequence[CachedMember], seated: Sequence[tuple[int, Seat]]
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Members' rows, None where they are the first ones, and int64 [5, rows] on the device, always the same tensor:
        tokens, positions, records to choose, queries noted, members' rows. Nothing waits for the device."""
        begins, end = {}, 0
        for bank in job.banks:
            begins[bank] = end
            end += bank.rows
        alone = len(job.numbers)
        rows = max(end + (bucket(alone) if alone else 0), self._least, len(members))
        places = [0] * len(members)
        for row, i in enumerate(job.numbers, end):
            places[i] = row
        made = [[0] * rows for _ in range(3)] + [[1] * rows]
        for i, seat in seated:
            assert seat.bank is not None, "it was given a row"
            row = places[i] = begins[seat.bank] + seat.row
            made[2][row], made[3][row] = seat.budget.count(seat.n_tokens + 1), seat.observed + 1
        for i, row in enumerate(places):
            if i not in job.failed:
                made[0][row], made[1][row] = members[i].new[-1], members[i].position
        made.append(places + [0] * (rows - len(places)))
        inputs = self._on_device(made)
        for bank, begin in begins.items():
            try:
                bank.prepare(*inputs[2:4, begin : begin + bank.rows])
            except Exception as e:
                job.broken[bank] = e
        return None if places == list(range(len(places))) else inputs[4, : len(places)], inputs

    def _on_device(self, made: list[list[int]]) -> torch.Tensor:
        """Numbers in the tensor that is there for so many rows."""
        rows, device = len(made[0]), self._device
        if rows not in self._inputs:
            self._inputs[rows] = torch.zeros((len(made), rows), dtype=torch.int64, device=device)
        numbers = torch.tensor(made)
        # pinned memory is not reused before the copy is done: the allocator keeps an event
        return self._inputs[rows].copy_(numbers.pin_memory() if device.type == "cuda" else numbers, non_blocking=True)

    def _count(self, member: CachedMember, seat: Seat) -> None:
        """A seat's step was made."""
        seat.advance()
        decoding = member.decoding
        assert isinstance(decoding, Decoding) and seat.bank is not None, "it has a seat"
        decoding.count_step(
            seat.n_tokens,
            seat.n_open + seat.n_exact,
            compressed=seat.n_coded > 0,
            kernel=seat.bank.kernel,
            kv_bytes=seat.nbytes,
        )
        if seat.settle_s:
            decoding.trace.compress_s += seat.settle_s
            seat.settle_s = 0.0
