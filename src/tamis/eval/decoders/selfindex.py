"""`selfindex`: the library's own records and choice (`cache.selfindex`), and Quest at the bytes it reads.

Records are made by `CodedSequence`, as in a real run; what the choice looks at and what the attention reads is decoded
once and kept, so that a step is a few products. The look-up tables of a real step are those products, regrouped.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from tamis.cache.selfindex.keep import Budget
from tamis.cache.selfindex.sequence import CodedSequence, Growth
from tamis.eval.decoders.base import (
    LayerPrompt,
    Size,
    as_tensor,
    attention,
    best,
    causal,
    counted,
    mean_product,
    shares_of,
)
from tamis.eval.decoders.full import full_bytes
from tamis.eval.decoders.quest import LEAST_PAGES, PAGE, Quest
from tamis.kernels.selfindex import Layout, Part, Tables, dequantised, looked_up, unpack_nibbles

LARGEST_PAGE = 1024


class SelfIndex:
    """budgets: shares of the tokens whose records are read, beside those that are whole (`cache.selfindex.keep`)."""

    name = "selfindex"
    wants_module = False

    def __init__(self, budgets: Sequence[float], growth: Growth | None = None) -> None:
        self.growth = growth or Growth()
        self.budgets: tuple[float | None, ...] = shares_of(self.name, budgets)

    def prefill(self, x: LayerPrompt) -> Coded:
        """See `Method`."""
        shares = [b for b in self.budgets if b is not None]
        sequence = self._sequence(x, x.q, x.keys, x.values)
        if not sequence.parts:  # too short for records: the first ones will be made of each budget's own tokens too
            sequence = self._sequence(x, *(_repeated(t, len(shares)) for t in (x.q, x.keys, x.values)))
        return Coded(sequence, shares, x.scale)

    def _sequence(self, x: LayerPrompt, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> CodedSequence:
        sequence = CodedSequence(Layout(keys.shape[-1]), self.growth, x.rotary)
        sequence.append(keys, values)
        sequence.observe(q)
        sequence.settle()
        return sequence

    def sizes(self, n_tokens: int, head_dim: int, n_layers: int) -> list[Size]:
        """See `Method`. Tables are read whole at each step."""
        layout, keep = Layout(head_dim), self.growth.keep
        full, whole = full_bytes(head_dim), keep.first + keep.chosen
        recent = min(keep.recent, n_tokens)
        if n_tokens - recent < self.growth.least:
            return [Size(full, full)] * len(self.budgets)
        n = n_tokens - recent
        fixed = (whole + recent) * full + layout.table_bytes
        held = (layout.total_bytes(n, exact_tokens=whole) + recent * full) / n_tokens
        codes = layout.plane_bytes["codes"]
        counts = [min(Budget(b, least=0).count(n_tokens), n - whole) for b in self.budgets if b is not None]
        return [Size(held, (fixed + n * codes + c * (layout.record_bytes - codes)) / n_tokens) for c in counts]


class QuestEqual(Quest):
    """Quest that reads the bytes `selfindex` reads at each budget, in every layer.

    Bounds of pages of 16 alone may cost more, so the page is the least power of two whose bounds take at most half.
    """

    def __init__(self, budgets: Sequence[float], like: SelfIndex | None = None) -> None:
        super().__init__(budgets, dense_layers=0, name="quest-equal")
        self.like = like or SelfIndex(budgets)

    def page_of(self, n_tokens: int, head_dim: int) -> int:
        """See `Quest`: for the smallest budget, and so for all."""
        return equal_page(min(s.read for s in self.like.sizes(n_tokens, head_dim, 1)), head_dim)

    def shares(self, n_tokens: int, head_dim: int) -> tuple[float, ...]:
        """See `Quest`."""
        page = self.page_of(n_tokens, head_dim)
        least = LEAST_PAGES * page / n_tokens
        reads = [s.read for s in self.like.sizes(n_tokens, head_dim, 1)]
        return tuple(min(1.0, max(least, equal_share(read, head_dim, page))) for read in reads)


def equal_share(read: float, head_dim: int, page: int = PAGE) -> float:
    """Share of the tokens that Quest may read for `read` bytes a token; below 0 where the bounds alone are more."""
    return read / full_bytes(head_dim) - 1 / page


def equal_page(read: float, head_dim: int) -> int:
    """The least power of two from 16 on whose bounds take at most half of `read`."""
    page = PAGE
    while page < LARGEST_PAGE and full_bytes(head_dim) / page > read / 2:
        page *= 2
    return page


@dataclass(frozen=True)
class View:
    """A part, decoded: float32 [.., Hkv, T, D] at absolute positions, exact copies in place; `whole` bool [.., Hkv, T].

    coarse  keys as the codes alone have them
    """

    part: Part
    coarse: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    whole: torch.Tensor


class Coded:
    """One layer."""

    def __init__(self, sequence: CodedSequence, shares: Sequence[float], scale: float) -> None:
        self.scale, self.most, self.batch = scale, max(shares), len(shares)
        assert sequence.open is not None, "the prompt was appended"
        self.shares = as_tensor(shares, sequence.open[0].device)
        self.layout, self.rotary = sequence.layout, sequence.rotary
        self.views = [self._view(p, o) for p, o in zip(sequence.parts, sequence.offsets, strict=True)]
        self.sequence = sequence
        if sequence.parts:
            sequence.parts = [_wide(part, self.batch) for part in sequence.parts]
            sequence.open = (_repeated(sequence.open[0], self.batch), _repeated(sequence.open[1], self.batch))
        # the views are made of what all budgets share, and stand for the wide parts
        self.views = [replace(view, part=part) for view, part in zip(self.views, sequence.parts, strict=True)]

    def branch(self) -> Coded:
        """See `LayerState`."""
        other = copy.copy(self)
        other.sequence, other.views = copy.copy(self.sequence), list(self.views)
        other.sequence.parts, other.sequence.offsets = list(self.sequence.parts), list(self.sequence.offsets)
        return other

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `LayerState`: what is old is compressed between steps."""
        seq = self.sequence
        if seq.settle():
            self.views = [self._current(i) for i in range(len(seq.parts))]
        seq.append(k, v)
        assert seq.open is not None, "appended above"
        visible = self._visible(q.float(), seq.n_tokens)
        pieces = [(view.keys, view.values) for view in self.views]
        recent = seq.open[0].float(), seq.open[1].float()
        out = attention(q.float(), [*pieces, recent], visible & causal(q.shape[-2], seq.n_tokens, q.device), self.scale)
        seq.observe(q)
        return out

    def _current(self, index: int) -> View:
        part = self.sequence.parts[index]
        if index < len(self.views) and self.views[index].part is part:
            return self.views[index]
        return self._view(part, self.sequence.offsets[index])

    def _visible(self, q: torch.Tensor, n_tokens: int) -> torch.Tensor:
        """bool [B, Hkv, R, n_tokens]: chosen records, whole tokens, the open run."""
        if not self.views:
            return torch.ones((1, 1, 1, n_tokens), dtype=torch.bool, device=q.device)
        scores = [mean_product(q, view.coarse).masked_fill(view.whole[..., None, :], -math.inf) for view in self.views]
        joined = torch.cat(scores, -1)
        limits = counted(self.shares, q.shape[-2], n_tokens)
        chosen = best(joined, limits, math.ceil(self.most * n_tokens)) | (joined == -math.inf)
        return torch.nn.functional.pad(chosen, (0, n_tokens - joined.shape[-1]), value=True)

    def _view(self, part: Part, offset: int) -> View:
        keys, values = dequantised(part.records, part.tables, self.layout)
        index = part.exact[..., None].expand(part.keys.shape)
        keys, values = (t.scatter(-2, index, e.float()) for t, e in ((keys, part.keys), (values, part.values)))
        codes = unpack_nibbles(part.records.codes).long()
        coarse = part.tables.unstored(looked_up(part.tables.centroids, codes)) + part.tables.mean.float()[..., None, :]
        if offset and self.rotary is not None:
            keys, coarse = self.rotary.rotate(keys, offset), self.rotary.rotate(coarse, offset)
        whole = torch.zeros(keys.shape[:-1], dtype=torch.bool, device=keys.device).scatter_(-1, part.exact, True)
        return View(part, coarse, keys, values, whole)


def _wide(part: Part, batch: int) -> Part:
    """The part for `batch` sequences, not copied."""
    records = replace(
        part.records, **{f.name: _repeated(getattr(part.records, f.name), batch) for f in fields(part.records)}
    )
    tables = Tables(**{f.name: _repeated(getattr(part.tables, f.name), batch) for f in fields(part.tables)})
    return Part(records, tables, *(_repeated(t, batch) for t in (part.exact, part.keys, part.values)))


def _repeated(x: torch.Tensor, batch: int) -> torch.Tensor:
    return x.expand(batch, *x.shape)
