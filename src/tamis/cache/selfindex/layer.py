"""`selfindex` as a layer of a transformers cache: stock models run over it, dense; a hook may attend sparsely."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from tamis.cache.selfindex.sequence import CodedSequence, Growth
from tamis.core.errors import InvalidInput
from tamis.kernels.selfindex import Layout
from tamis.model.rope import Rotary


class SelfIndexLayer(CacheLayerMixin):
    """Compresses what earlier passes brought before it takes the next one's tokens; hands out all keys and values.

    `sequence` is there after the first update. Whoever has the queries calls `sequence.observe(q)` after a pass;
    without it, codes weigh all channels alike and no tokens but the first and the recent are kept whole. With
    `only_new`, `update` hands out the new tokens alone: for a caller that then uses `sequence.attend`. With `whole` it
    compresses nothing: for chunks of one prompt, which are to see each other in full precision.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self, growth: Growth | None = None, rotary: Rotary | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.growth, self.rotary = growth, rotary
        self.only_new = self.whole = False
        self.sequence: CodedSequence | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """An empty sequence for keys of this shape."""
        self.device = key_states.device
        self.sequence = CodedSequence(Layout(key_states.shape[-1]), self.growth, self.rotary)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append key_states and value_states [B, Hkv, n, D]; returns all keys and values, or the new ones."""
        if self.sequence is None:
            self.lazy_initialization(key_states, value_states)
        assert self.sequence is not None, "made above"
        if not self.whole:
            self.sequence.settle()
        self.sequence.append(key_states, value_states)
        return (key_states, value_states) if self.only_new else self.sequence.dense()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self.sequence is None else self.sequence.nbytes

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the next pass sees, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens held."""
        return 0 if self.sequence is None else self.sequence.n_tokens

    def get_max_length(self) -> int:
        """-1: it grows."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.sequence, self.is_initialized = None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: a record is made once. 0 changes nothing."""
        if tokens_to_remove:
            raise InvalidInput(
                f"{tokens_to_remove} tokens to take back; a selfindex cache only grows. Use kv='auto' where tokens are "
                "tried and taken back, as assisted generation does."
            )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Not possible: the records of a batch are made together."""
        raise InvalidInput("a selfindex cache cannot be reordered for beam search; use kv='bf16' with beams.")
