"""One layer's keys and values of a sequence that grows, in self-indexed form, with its newest tokens whole.

New tokens enter an open run in full precision. When it holds a block more than must stay recent, its oldest tokens are
compressed. Records are made against tables that never change afterwards; what runs is the tables of what comes next:
after `epoch` tokens new ones are fitted to the last epoch's keys as they are stored and the block that leaves the open
run, and begin a new part. Rotated keys drift with the position, so that tables fitted to the last thousand tokens are
wrong for the next: each part is therefore kept as a document is, turned back to positions from 0 on, where the last
epoch's keys do look like the next one's. Of each block the tokens that were attended to most stay whole. The number of
chosen records is not used up by generated tokens: these compete for it like all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch

from tamis.cache.selfindex.keep import Budget, Keep, energy_of, exact_tokens
from tamis.core.errors import InvalidInput
from tamis.kernels.cpu import selfindex as cpu
from tamis.kernels.reference import selfindex as reference
from tamis.kernels.reference.selfindex import Fit
from tamis.kernels.selfindex import Layout, Part, Records, Tables, check_pair, dequantised
from tamis.kernels.selfindex_dispatch import fit_sampled, selfindex_compress
from tamis.model.rope import Rotary

DECAY = 0.99  # of the running query energy, a step
AT_ONCE_BYTES = 64 << 20  # of float32 keys that are compressed at once, of several layers
Bundle = TypeVar("Bundle", Records, Tables)


@dataclass(frozen=True)
class Growth:
    """When tokens are compressed, and against what.

    block  tokens that leave the open run at once; it holds up to recent + block - 1 between steps
    least  tokens that the first tables need: a shorter sequence stays whole
    epoch  tokens after which tables are fitted anew
    chosen tokens of a block that stay whole, by what the window attends to
    """

    keep: Keep = field(default_factory=Keep)
    fit: Fit = field(default_factory=Fit)
    block: int = 64
    least: int = 256
    epoch: int = 1024
    chosen: int = 2

    def __post_init__(self) -> None:
        if min(self.block, self.least, self.epoch) < 1:
            raise InvalidInput(f"block {self.block}, least {self.least}, epoch {self.epoch} tokens; give 1 or more.")


class CodedSequence:
    """Keys and values [B, Hkv, T, D] of one layer. All sequences of the batch have one length.

    rotary  how the model turns keys, positions counting from 0: each part is then kept at positions of its own
    parts, offsets  compressed tokens in order, and the position of each part's first token
    """

    def __init__(self, layout: Layout, growth: Growth | None = None, rotary: Rotary | None = None) -> None:
        self.layout, self.growth, self.rotary = layout, growth or Growth(), rotary
        self.parts: list[Part] = []
        self.offsets: list[int] = []
        self.open: tuple[torch.Tensor, torch.Tensor] | None = None
        self._energy: torch.Tensor | None = None
        self._window: torch.Tensor | None = None
        self._observed = 0

    @property
    def n_compressed(self) -> int:
        """Tokens that have records."""
        return sum(p.records.n_tokens for p in self.parts)

    @property
    def n_tokens(self) -> int:
        """All tokens."""
        return self.n_compressed + (0 if self.open is None else self.open[0].shape[-2])

    @property
    def nbytes(self) -> int:
        """Bytes of records, tables, exact copies and the open run, as they lie in memory."""
        held = [t for p in self.parts for t in (p.records, p.tables, p.exact, p.keys, p.values)]
        return sum(t.nbytes for t in (*held, *(self.open or ())))

    @property
    def settles_at(self) -> int:
        """Open tokens from which on `settle` has something to do."""
        grow = self.growth
        return grow.keep.recent + (grow.block if self.parts else max(grow.least, grow.block))

    @property
    def noted(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Query energy float32 [B, Hkv, D] and newest queries [B, Hq, 1 or more, D]; None before `observe`."""
        return None if self._energy is None or self._window is None else (self._energy, self._window)

    @property
    def observed(self) -> int:
        """Tokens whose queries were noted."""
        return self._observed

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add tokens [B, Hkv, n, D], turned at their positions, to the open run."""
        check_pair(keys, values, self.layout)
        if self.open is None:
            self.open = keys.clone(), values.clone()
            return
        if keys.shape[:-2] != self.open[0].shape[:-2]:
            raise InvalidInput(
                f"keys are {tuple(keys.shape)}; this sequence is of {tuple(self.open[0].shape[:-2])} rows and KV heads."
            )
        self.open = torch.cat([self.open[0], keys], -2), torch.cat([self.open[1], values], -2)

    def observe(self, q: torch.Tensor) -> None:
        """Note queries [B, Hq, n, D] of the newest tokens: what is coded well, and what a prompt keeps whole."""
        if self.open is None:
            raise InvalidInput("queries before any keys; append the keys first.")
        new, n, window = energy_of(q, self.open[0].shape[-3]), q.shape[-2], q[..., -self.growth.keep.window :, :]
        # chunks of a prompt count as the prompt would in one pass; behind it the past fades
        share = DECAY**n if self.parts else self._observed / (self._observed + n)
        self._energy = new if self._energy is None else share * self._energy + (1 - share) * new
        self._observed += n
        if self._window is not None and not self.parts:
            window = torch.cat([self._window, window], -2)[..., -self.growth.keep.window :, :]
        self._window = window.clone()  # a view would keep the whole prompt's queries

    def resume(
        self, run: tuple[torch.Tensor, torch.Tensor], energy: torch.Tensor, window: torch.Tensor, n_tokens: int
    ) -> None:
        """Take what steps elsewhere did with n_tokens >= 1 tokens, as if each had been appended and observed here.

        The open run as it is now, the energy, and the newest queries [B, Hq, up to n_tokens, D].
        """
        self.open, self._energy = run, energy
        if self._window is not None and not self.parts:
            window = torch.cat([self._window, window], -2)
        most = 1 if self.parts else self.growth.keep.window
        # a view of more would keep all of it
        self._window = window if window.shape[-2] <= most else window[..., -most:, :].clone()
        self._observed += n_tokens

    def settle(self) -> int:
        """Compress what need not stay open; returns the number of tokens. Call it between steps, never inside one."""
        n = self._due
        if self.open is None or not n:
            return 0
        keys, values = (t[..., :n, :] for t in self.open)
        done = self.n_compressed
        for begin, end, fresh in self._pieces(n):
            self._compress(keys[..., begin:end, :], values[..., begin:end, :], done + begin, fresh)
        self.open = self.open[0][..., n:, :].clone(), self.open[1][..., n:, :].clone()
        return n

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, Hkv, T, D] of all tokens in their order, in the dtype they came in."""
        if self.open is None:
            raise InvalidInput("an empty sequence has no keys; append some first.")
        if not self.parts:
            return self.open
        keys, values = [], []
        for part, offset in zip(self.parts, self.offsets, strict=True):
            k, v = dequantised(part.records, part.tables, self.layout)
            index = part.exact[..., None].expand(part.keys.shape)
            keys.append(self._turned(k.to(self.open[0].dtype).scatter_(-2, index, part.keys), offset))
            values.append(v.to(self.open[1].dtype).scatter_(-2, index, part.values))
        return torch.cat([*keys, self.open[0]], -2), torch.cat([*values, self.open[1]], -2)

    def attend(self, q: torch.Tensor, budget: Budget, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Sparse attention of q [B, Hq, R, D], the newest R tokens' queries, whose keys are appended already.

        The open run, first and chosen tokens are attended whole, and `budget` of the other records. Returns out
        [B, Hq, R, D] in q's dtype and float32 log-sum-exp [B, Hq, R].
        """
        if self.open is None or q.shape[-2] > self.open[0].shape[-2]:
            raise InvalidInput(f"{q.shape[-2]} query rows; append their keys first, and settle after the step.")
        queries, count = [*(self._turned(q, -o) for o in self.offsets), q], budget.count(self.n_tokens)
        step = cpu.decode if q.shape[-2] == 1 and q.device.type == "cpu" else reference.attention
        return step(queries, self.parts, self.open, self.layout, count=count, scale=scale)

    @property
    def _due(self) -> int:
        """Tokens that would be compressed now."""
        n = 0 if self.open is None else self.open[0].shape[-2]
        if n < self.settles_at:
            return 0
        spare = n - self.growth.keep.recent
        return spare - spare % self.growth.block

    def _pieces(self, n: int) -> Iterator[tuple[int, int, bool]]:
        """Spans of the n tokens to compress, and whether each begins a part: a long run is one part of its own."""
        if not self.parts or n >= self.growth.epoch:
            yield 0, n, True
            return
        room = max(0, self.growth.epoch - self.parts[-1].records.n_tokens)
        if room:
            yield 0, min(room, n), False
        if room < n:
            yield room, n, True

    def _compress(self, keys: torch.Tensor, values: torch.Tensor, begin: int, fresh: bool) -> None:
        """Tokens at positions from `begin` on, as a part of their own or at the end of the last one."""
        exact = self._exact(keys, fresh)
        copies = [t.gather(-2, exact[..., None].expand(*exact.shape, t.shape[-1])) for t in (keys, values)]
        offset = begin if fresh else self.offsets[-1]
        local, copies[0] = self._turned(keys, -offset), self._turned(copies[0], -offset)
        if not fresh:
            last = self.parts[-1]
            records = self._records(local, values, last.tables)
            joined = Records.joined([last.records, records])
            exact = torch.cat([last.exact, exact + last.records.n_tokens], -1)
            pairs = zip((last.keys, last.values), copies, strict=True)
            self.parts[-1] = Part(joined, last.tables, exact, *(torch.cat(p, -2) for p in pairs))
            return
        left_out = torch.zeros(keys.shape[:-1], dtype=torch.bool, device=keys.device).scatter_(-1, exact, True)
        k, v = local, values
        if self.parts and keys.shape[-2] < self.growth.epoch:
            k, v = self._history(local, values)
            left_out = torch.nn.functional.pad(left_out, (k.shape[-2] - keys.shape[-2], 0))
        fit = fit_sampled if keys.is_cuda else reference.fit_tables  # of all of a long prompt it costs as much again
        tables = fit(k, v, self.layout, energy=self._energy, left_out=left_out, fit=self.growth.fit)
        records = self._records(local, values, tables)
        self.parts.append(Part(records, tables, exact, *copies))
        self.offsets.append(offset)

    def _records(self, keys: torch.Tensor, values: torch.Tensor, tables: Tables) -> Records:
        if self.growth.fit.steps == 0:
            return reference.compress(keys, values, tables, self.layout, signs=True)
        return selfindex_compress(keys, values, tables, self.layout)

    def _turned(self, keys: torch.Tensor, offset: int) -> torch.Tensor:
        return keys if self.rotary is None or not offset else self.rotary.rotate(keys, offset)

    def _exact(self, keys: torch.Tensor, fresh: bool) -> torch.Tensor:
        """Tokens that stay whole: first and chosen ones of a prompt or a long turn, a few of a block of new tokens."""
        keep = self.growth.keep
        if self.parts:
            long = fresh and keys.shape[-2] >= self.growth.epoch
            chosen = keep.chosen if long else math.ceil(self.growth.chosen * keys.shape[-2] / self.growth.block)
            keep = Keep(0, chosen, keep.recent, keep.window)
        return exact_tokens(self._window, keys, keep, keys.shape[-1] ** -0.5)

    def _history(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The last epoch of the newest part as it is stored, from position 0 on, and the new tokens beside it."""
        last = self.parts[-1]
        n = last.records.n_tokens
        begin = max(0, n - self.growth.epoch)
        k, v = dequantised(last.records.span(begin, n), last.tables, self.layout)
        return torch.cat([self._turned(k, -begin), keys.float()], -2), torch.cat([v, values.float()], -2)


def settle_layers(sequences: Sequence[CodedSequence]) -> int:
    """`CodedSequence.settle` of all layers of one cache, which hold the same numbers of everything; tokens of a layer.

    As many of them at once as a bounded amount of memory allows: a layer alone is so little work that a GPU would wait
    for its launches.
    """
    first = sequences[0]
    n, last = first._due, first.parts[-1].records.n_tokens if first.parts else 0
    if not n or first.open is None:
        return 0
    each = 4 * first.open[0][..., 0, :].numel() * (n + min(last, first.growth.epoch))
    # a long prompt's records would be copied for the sake of their last thousand
    at_once = max(1, AT_ONCE_BYTES // each) if last <= 2 * first.growth.epoch else 1
    for begin in range(0, len(sequences), at_once):
        _settle_together(sequences[begin : begin + at_once])
    return n


def _settle_together(sequences: Sequence[CodedSequence]) -> None:
    """Layers as if they were sequences of a batch."""
    first, n_parts = sequences[0], len(sequences[0].parts)
    if len(sequences) == 1:
        first.settle()
        return
    all_ = CodedSequence(first.layout, first.growth, first.rotary)
    last = [joined_layers([s.parts[-1] for s in sequences])] if n_parts else []
    all_.parts, all_.offsets = [*first.parts[:-1], *last], list(first.offsets)
    runs = [s.open for s in sequences if s.open is not None]
    all_.open = torch.cat([r[0] for r in runs]), torch.cat([r[1] for r in runs])
    all_._energy, all_._window = _joined([s._energy for s in sequences]), _joined([s._window for s in sequences])
    all_.settle()
    rows = runs[0][0].shape[0]
    for i, sequence in enumerate(sequences):
        mine = slice(i * rows, (i + 1) * rows)
        for number in range(max(0, n_parts - 1), len(all_.parts)):
            part = all_.parts[number]
            if number >= n_parts:
                sequence.parts.append(_of_layer(part, _rows_of(part.tables, mine), mine))
            elif part is not last[0]:
                sequence.parts[number] = _of_layer(part, sequence.parts[number].tables, mine)
        sequence.offsets = list(all_.offsets)
        sequence.open = all_.open[0][mine], all_.open[1][mine]


def _joined(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [t for t in tensors if t is not None]
    return torch.cat(there) if there else None


def joined_layers(parts: Sequence[Part]) -> Part:
    """Parts [B, Hkv, ..] of several layers, which are alike in everything, as one [layers * B, Hkv, ..]."""

    def joined(kind: type[Records] | type[Tables], of: Sequence[Any]) -> Any:
        return kind(*(torch.cat([getattr(x, f.name) for x in of]) for f in fields(kind)))

    whole = (torch.cat([getattr(p, name) for p in parts]) for name in ("exact", "keys", "values"))
    return Part(joined(Records, [p.records for p in parts]), joined(Tables, [p.tables for p in parts]), *whole)


def _of_layer(part: Part, tables: Tables, rows: slice) -> Part:
    """The rows of one layer, as views."""
    return Part(_rows_of(part.records, rows), tables, part.exact[rows], part.keys[rows], part.values[rows])


def _rows_of(bundle: Bundle, rows: slice) -> Bundle:
    return type(bundle)(*(getattr(bundle, f.name)[rows] for f in fields(bundle)))
