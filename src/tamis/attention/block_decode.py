"""Decode steps that read chosen blocks of keys, which come from host memory as they are wanted: a CPU's reference.

Knows one sequence and its passes; not how tokens are chosen. Streams are simulated (`cache.streams`): each copy runs at
some moment that its events allow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from tamis.attention.block_prefill import OwnChoice, PooledChoice
from tamis.attention.hook import Switch
from tamis.attention.layer_inputs import LayerInputs
from tamis.cache.offload import LayerBlocks, PoolShape, Prefetcher
from tamis.cache.pooled import Pooled
from tamis.cache.streams import Stream, run_all
from tamis.core.errors import InvalidInput
from tamis.kernels.blocks import BlockRule
from tamis.kernels.reference.blocks import block_numbers
from tamis.model.family import Geometry


class BlockLayer(CacheLayerMixin):
    """A layer of a transformers cache that puts keys and values into blocks and hands out the new ones alone."""

    is_sliding = False
    is_croppable = False

    def __init__(self, rule: BlockRule, shape: PoolShape, capacity: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rule = rule
        self.blocks = LayerBlocks(shape, capacity, dtype=dtype)
        self.pooled: Pooled | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the blocks were made with the cache."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append key_states and value_states [1, Hkv, n, D] and return them."""
        if key_states.shape[0] != 1 or (self.blocks.n_tokens and key_states.shape[2] != 1):
            raise InvalidInput(
                f"a pass of {list(key_states.shape[:3:2])} (prompts, tokens); blocks take one whole prompt, then one "
                "token a pass."
            )
        self.blocks.append(key_states[0], value_states[0])
        if self.pooled is None:
            self.pooled = Pooled.of(key_states[0], self.rule)
        else:
            self.pooled.append(key_states[0])
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the next pass sees, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.blocks.n_tokens

    def get_max_length(self) -> int:
        """-1: it grows to the capacity it was made with."""
        return -1


class BlockDecoding:
    """The `DecodeJob` of one sequence's passes: `cache` goes to the model, `running` around every pass.

    choose: who chooses. An `OwnChoice` chooses when the layer's query is there; any other one layer ahead, and its
    blocks are copied while the layer before computes. forget: evict everything at every step. resident: read the blocks
    where they lie on the host, as if all fitted; gives the same to the last bit.
    """

    def __init__(
        self,
        shape: Geometry,
        choose: PooledChoice,
        seen: LayerInputs,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        forget: bool = False,
        resident: bool = False,
        seed: int = 0,
    ) -> None:
        rule = choose.rule
        pool = PoolShape(shape.n_layers, shape.n_kv_heads, shape.head_dim, max(1, rule.top - 1), rule.block)
        self.choose, self.seen, self.forget, self.resident = choose, seen, forget, resident
        self.ahead = not isinstance(choose, OwnChoice)
        self.layers = [BlockLayer(rule, pool, capacity, dtype) for _ in range(shape.n_layers)]
        self.cache = Cache(layers=self.layers)
        self._streams = [Stream("compute"), Stream("copy")]
        self._prefetcher = Prefetcher([layer.blocks for layer in self.layers], *self._streams)
        self._chance = random.Random(seed)
        self._wanted: dict[int, torch.Tensor] = {}

    @contextmanager
    def running(self, switch: Switch) -> Iterator[None]:
        """Make one forward pass inside: of the whole prompt first, which attends to itself in full, then of a token."""
        step = self.layers[0].get_seq_length() > 0
        self.seen.first = self.layers[0].get_seq_length()
        if not step:
            yield
            return
        with switch.decoding(self):
            yield

    def attend(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """See `attention.hook.DecodeJob`."""
        if not (self.ahead and layer):
            self._want(layer, q[0], scale)
        if self.ahead and layer + 1 < len(self.layers):
            self._want(layer + 1, q[0], scale)
        blocks = self.layers[layer].blocks
        if self.resident:
            return blocks.attend_resident(q[0, :, 0], self._wanted[layer], scale=scale)[None, :, None]
        out: list[torch.Tensor] = []
        self._prefetcher.attend(layer, q[0, :, 0], out, scale=scale)
        run_all(self._streams, self._chance)
        return out[0][None, :, None]

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """See `attention.hook.DecodeJob`."""

    @property
    def hit_rate(self) -> float:
        """Share of the wanted blocks that lay in a slot already."""
        copied, asked = (sum(getattr(layer.blocks, name) for layer in self.layers) for name in ("copied", "asked"))
        return 1 - copied / asked if asked else 1.0

    def _want(self, layer: int, q: torch.Tensor, scale: float) -> None:
        keys, rule = self.layers[layer].pooled, self.choose.rule
        assert keys is not None, "the prompt's pass made them"
        position = torch.tensor([self.seen.first], device=q.device)
        chosen = self.choose.choose(layer, q, keys, position, scale)[:, 0]
        chosen[:, self.seen.first // rule.block :] = False  # the token's own block is the tail
        wanted = block_numbers(chosen[:, None], max(1, rule.top - 1))[:, 0]
        self._wanted[layer] = wanted
        if not self.resident:
            self._prefetcher.want(layer, wanted, forget=self.forget)
