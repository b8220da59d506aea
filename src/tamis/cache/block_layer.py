"""Keys and values in blocks as a layer of a transformers cache: on the device or in host memory, with pooled keys.

Stock models run over it, dense; a hook may let a step read chosen blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from tamis.cache.block_view import KernelView, Shared
from tamis.cache.offload import LayerBlocks, PoolShape
from tamis.cache.pooled import Pooled
from tamis.cache.resident import ResidentBlocks
from tamis.cache.selfindex.keep import Budget
from tamis.core.errors import InvalidInput, PoolFull
from tamis.kernels.block_pool import NEVER
from tamis.kernels.blocks import BlockRule

ROOM = 256  # tokens behind a prompt for which memory is taken where nothing is said
GROWTH = 1.25


@dataclass(frozen=True)
class BlockForm:
    """How blocks are kept and how many of them a step reads.

    rule     sizes of blocks and pooled keys, and which blocks are forced
    budget   tokens that a step reads beside the forced blocks; None: the rule's `top` counts
    sparse   whether steps read chosen blocks, for which keys are pooled; else they read everything
    host     keys and values lie in host memory; the device holds slots
    slots    of a KV head and layer; None: as many as a step reads
    bf16     kept in bfloat16 whatever the model computes in
    room     tokens behind the prompt that memory is taken for at once
    """

    rule: BlockRule = field(default_factory=BlockRule)
    budget: Budget | None = None
    sparse: bool = True
    host: bool = False
    slots: int | None = None
    bf16: bool = False
    room: int = 0

    def rule_at(self, n_tokens: int) -> BlockRule:
        """The rule of a step over n_tokens, its own among them."""
        if self.budget is None:
            return self.rule
        chosen = math.ceil(min(self.budget.count(n_tokens), n_tokens) / self.rule.block)
        return replace(self.rule, top=self.rule.forced + chosen)

    def width(self, n_tokens: int) -> int:
        """Blocks beside its own that the step over n_tokens reads."""
        return min(max(0, n_tokens - 1) // self.rule.block, self.rule_at(n_tokens).top - 1)


class BlockLayer(CacheLayerMixin):
    """A layer of a cache in blocks. Heads of all sequences of a batch lie side by side: [B * Hkv, ...].

    `update` hands out all keys and values, or with `only_new` the new ones alone: for a caller that then has the blocks
    attend. `blocks` and `pooled` are there after the first update.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self, form: BlockForm | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.form = form or BlockForm()
        self.only_new = False
        self.blocks: LayerBlocks | ResidentBlocks | None = None
        self.pooled: Pooled | None = None
        self.view: KernelView | None = None
        self.last: torch.Tensor | None = None  # which token read a block last, where the rule sticks
        self.batch = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Memory for a prompt of this shape [B, Hkv, n, D] and the room behind it."""
        self.batch, kv_heads, n, head_dim = key_states.shape
        form, heads = self.form, self.batch * kv_heads
        dtype = torch.bfloat16 if form.bf16 else key_states.dtype
        capacity, self.device = n + (form.room or ROOM), key_states.device
        if form.host:
            slots = self._slots(capacity, n + form.room)
            shape = PoolShape(1, heads, head_dim, slots, form.rule.block)
            self.blocks = LayerBlocks(shape, capacity, dtype=dtype, device=self.device)
        else:
            size = form.rule.block
            self.blocks = ResidentBlocks(heads, head_dim, capacity, block=size, dtype=dtype, device=self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append key_states and value_states [B, Hkv, n, D]; returns all keys and values, or the new ones."""
        if self.view is not None and self.only_new:
            self.view.append(key_states[:, :, 0], value_states[:, :, 0])
            return key_states, value_states
        with _plain():
            self._close_view()
            k, v = key_states.detach().flatten(0, 1), value_states.detach().flatten(0, 1)
            if self.blocks is None:
                self.lazy_initialization(key_states, value_states)
            blocks = self.blocks
            assert blocks is not None, "made above"
            first, end = blocks.n_tokens == 0, blocks.n_tokens + k.shape[1]
            self._reserve(end)
            blocks.append(k, v)
            if self.form.sparse:
                if self.pooled is None:
                    self.pooled = Pooled.of(k, self.form.rule)
                else:
                    self.pooled.append(k)
            if self.only_new or (first and not self.form.bf16):
                return key_states, value_states
            keys, values = blocks.dense()
            k, v = (torch.unflatten(t, 0, (self.batch, -1)).to(key_states.dtype) for t in (keys, values))
            return k, v

    def ready(self, n_tokens: int, shared: Shared, count: torch.Tensor) -> KernelView:
        """What kernels see of the layer, ready for the step over so many tokens; see `KernelView`. Waits for the
        device where memory grows. New tokens of steps go through it until a prompt's come."""
        assert self.blocks is not None and self.pooled is not None, "a step comes behind a prompt"
        with _plain():
            self._reserve(n_tokens)
            if self.view is None:
                self.view = KernelView(self.form, self.blocks, self.pooled, shared, count, self.last)
            self.view.fit(n_tokens)
        return self.view

    @property
    def nbytes(self) -> int:
        """Bytes held, on the device and the host."""
        return self.host_bytes + self.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory that a device reads; 0 where all is on the device."""
        return self.blocks.host.nbytes if isinstance(self.blocks, LayerBlocks) else 0

    @property
    def device_bytes(self) -> int:
        """Bytes of blocks or slots, and of pooled keys."""
        if self.view is not None and self.blocks is not None:
            return self.blocks.nbytes + self.view.nbytes
        pooled = () if self.pooled is None else (self.pooled.pooled, self.pooled.wide, self.pooled.last)
        return (0 if self.blocks is None else self.blocks.nbytes) + sum(t.nbytes for t in pooled)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the next pass sees, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens held."""
        return 0 if self.blocks is None else self.blocks.n_tokens

    def get_max_length(self) -> int:
        """-1: it grows."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.blocks, self.pooled, self.view, self.last, self.is_initialized = None, None, None, None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: full blocks have left the device. 0 changes nothing."""
        if tokens_to_remove:
            raise InvalidInput(
                f"{tokens_to_remove} tokens to take back; a cache in blocks only grows. Use decode='dense' and "
                "offload='none' where tokens are tried and taken back, as assisted generation does."
            )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Not possible: the sequences of a batch lie side by side."""
        raise InvalidInput(
            "a cache in blocks cannot be reordered for beam search; use decode='dense' and offload='none' with beams."
        )

    def _close_view(self) -> None:
        """Have blocks and pooled keys as if no kernel had run."""
        if self.view is not None:
            self.view.close()
            self.last, self.view = self.view.last, None

    def _slots(self, capacity: int, certain: int) -> int:
        """Slots of a head for sequences of `capacity` tokens, of which `certain` will surely come."""
        form = self.form
        if not form.sparse:
            return 1
        least = max(1, form.width(certain))
        if form.slots is not None and form.slots < least:
            raise PoolFull(
                f"a step over {certain} tokens reads {least} blocks beside its own and offload_slots is {form.slots}; "
                f"give {least} or more (None: as many as it takes), or a smaller decode_budget."
            )
        return form.slots or max(1, form.width(capacity))

    def _reserve(self, n_tokens: int) -> None:
        blocks, size = self.blocks, self.form.rule.block
        if blocks is None or n_tokens <= blocks.memory.shape[1] * size:
            return
        capacity = max(n_tokens + ROOM, int(GROWTH * n_tokens))
        if isinstance(blocks, LayerBlocks):
            blocks.reserve(capacity, self._slots(capacity, n_tokens))
        else:
            blocks.reserve(capacity)


def read_last(layer: BlockLayer, n_blocks: int) -> torch.Tensor:
    """Position of the token that read each block of a layer last, for a rule that sticks: int32 [R, n_blocks] or more,
    to be noted in."""
    assert layer.pooled is not None, "a step comes behind a prompt"
    rows, known = layer.pooled.pooled.shape[0], 0 if layer.last is None else layer.last.shape[1]
    if layer.last is None or known < n_blocks:
        with _plain():
            more = torch.full((rows, 2 * n_blocks - known), NEVER, dtype=torch.int32, device=layer.device)
            layer.last = more if layer.last is None else torch.cat([layer.last, more], 1)
    return layer.last


@contextmanager
def _plain() -> Iterator[None]:
    """Tensors made inside may be written to in any mode later: those of inference mode could not."""
    with torch.inference_mode(False), torch.no_grad():
        yield
