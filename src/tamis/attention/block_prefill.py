"""A prefill whose tokens read blocks of keys that their layer chose by pooled keys: the training-free sparse baseline.

Knows one prompt's tensors; not documents or plans. By kernels where they run, else by plain PyTorch; in chunks of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from tamis.cache.pooled import Pooled
from tamis.kernels.blocks import BlockRule
from tamis.kernels.blocks_dispatch import block_steps, steps_name
from tamis.kernels.reference.blocks import block_scores, own_scores, raw_scores, select_blocks

CHUNK_BYTES = 1 << 28  # of float32 scores of one chunk of rows, over all heads


@dataclass(frozen=True)
class PooledChoice(ABC):
    """Says which blocks rows of a layer read, by products of a vector of each row with pooled keys."""

    rule: BlockRule

    @abstractmethod
    def vectors(
        self, layer: int, q: torch.Tensor, positions: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, float | None]:
        """What is multiplied with the pooled keys, for the layer's queries q [Hq, Q, D] at `positions`: queries
        [Hq, Q, D] and the scale of the softmax that is taken of the products, or [Hkv, Q, D] and None for none.

        A prefill asks once for all rows of a pass."""

    def wide(self, keys: Pooled) -> torch.Tensor | None:
        """Keys that the softmax's normaliser is estimated from; None: from all pooled keys."""
        return None

    def cells(self, layer: int, q: torch.Tensor, keys: Pooled, positions: torch.Tensor, scale: float) -> torch.Tensor:
        """Scores [Hkv, Q, C] of the layer's pooled keys, -inf where a row does not see."""
        x, scaled = self.vectors(layer, q, positions, scale)
        if scaled is None:
            return raw_scores(x, keys.pooled, positions, self.rule)
        return own_scores(x, keys.pooled, positions, self.rule, scale=scaled, coarse=self.wide(keys))

    def __call__(
        self, layer: int, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """q [Hq, Q, D] of rows at `positions`, keys [Hkv, T, D] → bool [Hkv, Q, N]. Every row chooses for itself."""
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

    def vectors(
        self, layer: int, q: torch.Tensor, positions: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, float | None]:
        """See `PooledChoice`."""
        return q, scale

    def wide(self, keys: Pooled) -> torch.Tensor | None:
        """See `PooledChoice`."""
        return keys.wide if self.coarse else None


@dataclass
class BlockPrefill:
    """A job for `Switch.running`: prompts above the rule's dense_tokens read blocks, others everything.

    Tokens choose together as the rule has it. A prompt may come in chunks, if dense_tokens is 0: its rows are then the
    last ones of the tokens so far; those of a choice that a border cuts in two choose apart.

    part    watches the parts of the work: "selection" and "attention"
    kernel  what ran, a name in `kernels.blocks_dispatch`
    """

    rule: BlockRule
    choose: PooledChoice
    part: Callable[[str], AbstractContextManager[Any]] = nullcontext
    kernel: str = ""
    _read: dict[int, tuple[Any, int]] = field(default_factory=dict)  # tokens read, and all, of a layer's rows

    @classmethod
    def of(cls, rule: BlockRule, choose: PooledChoice | None = None, **more: Any) -> BlockPrefill:
        """With the layer's own choice where none is given, its normaliser estimated as InfLLM-v2 does."""
        return cls(rule, choose or OwnChoice(rule, coarse=True), **more)

    @property
    def density(self) -> dict[int, float]:
        """Per layer, the share of the causal area that was read so far. Waits for the device."""
        return {layer: float(read) / area for layer, (read, area) in self._read.items()}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        """See `attention.hook.Job`. Nothing waits for the device."""
        n, begin = k.shape[1], k.shape[1] - q.shape[1]
        area = k.shape[0] * (n * (n + 1) - begin * (begin + 1)) // 2
        if n <= self.rule.dense_tokens:
            self._note(layer, area, area, before=0)
            return dense(q, k, v, scale), None
        group, rule = q.shape[0] // k.shape[0], self.rule
        self.kernel = steps_name(q, group)
        ops = block_steps(q, group, kernel=self.kernel)
        out = q.new_empty(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)  # as the output product reads it
        with self.part("selection"):
            pooled, read = Pooled.of(k, rule), torch.zeros((), dtype=torch.int64, device=q.device)
            x, scaled = self.choose.vectors(layer, q, torch.arange(begin, n, device=q.device), scale)
        for rows in row_chunks(q.shape[1], self._scores_a_row(q, k.shape[0], n), rule.block, begin % rule.block):
            first, mine = begin + rows.start, q[:, rows]
            with self.part("selection"):
                values = ops.prefill_scores(
                    x[:, rows], pooled.pooled, first, rule, scale=scaled, wide=self.choose.wide(pooled),
                    n_blocks=rule.n_blocks(n),
                )  # fmt: skip
                chosen = ops.prefill_select(values, first, rule)
                read += _tokens(chosen, first, mine.shape[1], rule)
            with self.part("attention"):
                ops.prefill_attend(mine, k, v, chosen, first, rule, scale=scale, out=out[:, rows])
        self._note(layer, read, area, before=k.shape[0] * begin * (begin + 1) // 2)
        return out, None

    def _scores_a_row(self, q: torch.Tensor, kv_heads: int, n: int) -> int:
        """float32 numbers, or bytes' worth of them, that a row of a chunk takes."""
        if self.kernel == "reference":
            return q.shape[0] * n  # a mask and scores of every token
        # scores, those that reach into the next block, and a byte: of each KV head; a GPU has four times the room
        return max(1, kv_heads * self.rule.n_blocks(n) // self.rule.together * 9 // 16)

    def go_on(self, before: BlockPrefill) -> None:
        """Count the chunks that another job has done, too."""
        self._read.update(before._read)

    def _note(self, layer: int, read: Any, area: int, *, before: int) -> None:
        """before: the area of the rows before these; what no job has counted was dense."""
        done = self._read.get(layer, (before, before)) if before else (0, 0)
        self._read[layer] = done[0] + read, done[1] + area


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of a whole prompt: q [Hq, T, D], k and v [Hkv, T, D] → [Hq, T, D]."""
    return torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
    )[0]


def row_chunks(n_rows: int, scores_a_row: int, whole: int = 1, behind: int = 0) -> Iterator[slice]:
    """Slices of rows whose float32 scores fit CHUNK_BYTES, 16 rows at least, and a multiple of `whole` of them; the
    first one lacks the `behind` rows, fewer than `whole`, that come before it."""
    size = max(16, CHUNK_BYTES // (4 * scores_a_row))
    size = -(-size // whole) * whole
    for begin in range(-behind, n_rows, size):
        yield slice(max(0, begin), min(begin + size, n_rows))


def _tokens(chosen: torch.Tensor, first: int, n_rows: int, rule: BlockRule) -> torch.Tensor:
    """Tokens that rows from `first` on read: whole blocks, the own one up to the row. int64, on their device."""
    positions = torch.arange(first, first + n_rows, device=chosen.device)
    rows = torch.zeros(chosen.shape[1], dtype=torch.int64, device=chosen.device)
    rows.index_add_(0, positions // rule.together - first // rule.together, torch.ones_like(positions))
    behind = (rule.block - 1 - positions % rule.block).sum()
    return (chosen.sum(-1) * rows).sum() * rule.block - chosen.shape[0] * behind
