"""Steps over sequences laid out for kernels: on a GPU they take the place of `CodedSequence.attend`."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from tamis.cache.selfindex.keep import Budget
from tamis.cache.selfindex.sequence import CodedSequence
from tamis.core.errors import InvalidInput
from tamis.kernels.selfindex import Part, Records, Tables
from tamis.kernels.selfindex_arena import Arena, Held
from tamis.kernels.selfindex_dispatch import ON_A_GPU, reasons, selfindex_append, selfindex_decode
from tamis.kernels.selfindex_workspace import Workspace

SPARE = 1024  # tokens that an arena has room for beside those it is made of; then it is made anew


@dataclass
class _Layer:
    """An arena and how much of the sequence it holds."""

    arena: Arena
    n_tokens: int
    n_compressed: int


class ArenaReader:
    """Keeps an arena for each layer in step with its sequence. See `decode.Reader`."""

    def __init__(self, *, kernel: str = "auto", spare: int = SPARE) -> None:
        self.kernel, self._asked, self._spare = "", kernel, spare
        self._layers: dict[int, _Layer] = {}
        self._work: Workspace | None = None
        self._work_of: tuple[object, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas and of what steps scribble on."""
        work = 0 if self._work is None else self._work.nbytes
        return work + sum(held.arena.nbytes for held in self._layers.values())

    def read(
        self, layer: int, sequence: CodedSequence, q: torch.Tensor, *, budget: Budget, scale: float
    ) -> torch.Tensor:
        """q [B, Hq, 1, D] of the newest token, whose key is appended → out [B, Hq, 1, D]."""
        arena = self._current(layer, sequence, q.dtype)
        if not self.kernel:
            there = (name for name, why in reasons(q, arena).items() if why is None)
            self.kernel = next(there) if self._asked == "auto" else self._asked
        count, work = budget.count(sequence.n_tokens), None
        if self.kernel in ON_A_GPU:
            most = budget.count(sequence.n_compressed + self._spare)
            work = self._workspace(arena, q, most)
        return selfindex_decode(q, arena, count=count, scale=scale, work=work, kernel=self.kernel)[0]

    def _current(self, layer: int, sequence: CodedSequence, dtype: torch.dtype) -> Arena:
        """The layer's arena with all that the sequence holds."""
        assert sequence.open is not None, "a step comes behind its own key"
        held, n, done = self._layers.get(layer), sequence.n_tokens, sequence.n_compressed
        one_more = held is not None and (held.n_compressed, held.n_tokens + 1) == (done, n)
        if held is not None and one_more and sequence.open[0].shape[-2] <= held.arena.room.open:
            selfindex_append(held.arena, sequence.open[0][..., -1:, :], sequence.open[1][..., -1:, :])
            held.n_tokens = n
            return held.arena
        rows = [_row(sequence, b) for b in range(sequence.open[0].shape[0])]
        angles = None if sequence.rotary is None else sequence.rotary.angles
        if held is not None and self._updated(held.arena, rows, sequence):
            held.n_tokens, held.n_compressed = n, done
            return held.arena
        self._layers.pop(layer, None)  # its memory goes before the new one's comes
        held = None
        device = sequence.open[0].device
        arena = Arena.of(rows, sequence.layout, angles, dtype=dtype, device=device, spare=self._spare)
        self._layers[layer] = _Layer(arena, n, done)
        return arena

    def _updated(self, arena: Arena, rows: list[Held], sequence: CodedSequence) -> bool:
        """Whether the arena had room for what the sequence has more."""
        try:
            for b, row in enumerate(rows):
                arena.update(b, row, None if sequence.rotary is None else sequence.rotary.angles)
        except InvalidInput:
            return False
        return True

    def _workspace(self, arena: Arena, q: torch.Tensor, most: int) -> Workspace:
        """One for all layers, whose arenas are alike; larger when they are or more is chosen."""
        fits = self._work is not None and min(most, arena.room.slots) <= self._work.chosen.shape[1]
        if self._work is None or self._work_of != (arena.room, q.shape[1], q.dtype) or not fits:
            self._work = None
            self._work = Workspace.reserve(arena, q.shape[1], most, dtype=q.dtype)
            self._work_of = (arena.room, q.shape[1], q.dtype)
        return self._work


def _row(sequence: CodedSequence, b: int) -> Held:
    """Sequence `b` of a batch."""
    assert sequence.open is not None, "checked before"
    parts = [_part(p, b) for p in sequence.parts]
    offsets = sequence.offsets if sequence.rotary is not None else [0] * len(parts)  # where nothing is turned
    return Held(parts, offsets, (sequence.open[0][b], sequence.open[1][b]))


def _part(part: Part, b: int) -> Part:
    records = Records(*(getattr(part.records, f.name)[b] for f in fields(Records)))
    tables = Tables(*(getattr(part.tables, f.name)[b] for f in fields(Tables)))
    return Part(records, tables, part.exact[b], part.keys[b], part.values[b])
