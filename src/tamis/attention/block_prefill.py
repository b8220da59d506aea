"""A prefill whose tokens read blocks of keys that their layer chose by pooled keys: the training-free sparse baseline.

Knows one prompt's tensors; not documents or plans. Plain PyTorch, in chunks of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tamis.cache.pooled import Pooled
from tamis.kernels.blocks import BlockRule
from tamis.kernels.reference.blocks import attend_blocks, block_scores, own_scores, select_blocks

CHUNK_BYTES = 1 << 28  # of float32 scores of one chunk of rows, over all heads


class Chooser(Protocol):
    """Says which blocks rows of a layer read."""

    def __call__(
        self, layer: int, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """q [Hq, Q, D] of rows at `positions`, keys [Hkv, T, D] → bool [Hkv, Q, N]."""


@dataclass(frozen=True)
class PooledChoice(ABC):
    """A `Chooser` that scores pooled keys; `cells` says how."""

    rule: BlockRule

    @abstractmethod
    def cells(self, layer: int, q: torch.Tensor, keys: Pooled, positions: torch.Tensor, scale: float) -> torch.Tensor:
        """Scores [Hkv, Q, C] of the layer's pooled keys, -inf where a row does not see."""

    def __call__(
        self, layer: int, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `Chooser`."""
        return self.choose(layer, q, Pooled.of(keys, self.rule), positions, scale)

    def choose(self, layer: int, q: torch.Tensor, keys: Pooled, positions: torch.Tensor, scale: float) -> torch.Tensor:
        """The same from keys that are pooled already, of `keys.n_tokens` tokens or of those before the rows' own."""
        n_blocks = self.rule.n_blocks(max(keys.n_tokens, int(positions.max()) + 1))
        cells = self.cells(layer, q, keys, positions, scale)
        return select_blocks(block_scores(cells, self.rule, n_blocks), positions, self.rule)


@dataclass(frozen=True)
class OwnChoice(PooledChoice):
    """A layer's own selection. coarse: estimate the softmax's normaliser from keys pooled four times as wide."""

    coarse: bool = False

    def cells(self, layer: int, q: torch.Tensor, keys: Pooled, positions: torch.Tensor, scale: float) -> torch.Tensor:
        """See `PooledChoice`."""
        wide = keys.wide if self.coarse else None
        return own_scores(q, keys.pooled, positions, self.rule, scale=scale, coarse=wide)


@dataclass
class BlockPrefill:
    """A job for `Switch.running`: prompts above the rule's dense_tokens read blocks, others everything.

    A prompt may come in chunks, if dense_tokens is 0: its rows are then the last ones of the tokens so far.

    density: per layer, the share of the causal area that was read.
    """

    rule: BlockRule
    choose: Chooser
    density: dict[int, float]
    _read: dict[int, tuple[int, int]] = field(default_factory=dict)  # tokens read, and all, of a layer's rows

    @classmethod
    def of(cls, rule: BlockRule, choose: Chooser | None = None) -> BlockPrefill:
        """With the layer's own choice where none is given."""
        return cls(rule, choose or OwnChoice(rule), {})

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        """See `attention.hook.Job`."""
        n, begin = k.shape[1], k.shape[1] - q.shape[1]
        every = torch.arange(begin, n, device=q.device)
        area = k.shape[0] * int((every + 1).sum())
        if n <= self.rule.dense_tokens:
            self._note(layer, area, area, before=0)
            return dense(q, k, v, scale), None
        parts, read = [], 0
        for rows in row_chunks(q.shape[1], q.shape[0] * n):
            positions = every[rows]
            chosen = self.choose(layer, q[:, rows], k, positions, scale)
            parts.append(attend_blocks(q[:, rows], k, v, chosen, positions, block=self.rule.block, scale=scale))
            read += _tokens(chosen, positions, self.rule.block)
        self._note(layer, read, area, before=k.shape[0] * begin * (begin + 1) // 2)
        return torch.cat(parts, 1), None

    def go_on(self, before: BlockPrefill) -> None:
        """Count the chunks that another job has done, too."""
        self._read.update(before._read)

    def _note(self, layer: int, read: int, area: int, *, before: int) -> None:
        """before: the area of the rows before these; what no job has counted was dense."""
        done = self._read.get(layer, (before, before)) if before else (0, 0)
        self._read[layer] = read, area = done[0] + read, done[1] + area
        self.density[layer] = read / area


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of a whole prompt: q [Hq, T, D], k and v [Hkv, T, D] → [Hq, T, D]."""
    return torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
    )[0]


def row_chunks(n_rows: int, scores_a_row: int) -> Iterator[slice]:
    """Slices of rows whose float32 scores fit CHUNK_BYTES, 16 rows at least."""
    size = max(16, CHUNK_BYTES // (4 * scores_a_row))
    for begin in range(0, n_rows, size):
        yield slice(begin, min(begin + size, n_rows))


def _tokens(chosen: torch.Tensor, positions: torch.Tensor, block: int) -> int:
    """Tokens that the rows read: whole blocks, the own one up to the row."""
    whole = chosen.sum() * block
    return int(whole - (chosen.shape[0] * (block - 1 - positions % block)).sum())
