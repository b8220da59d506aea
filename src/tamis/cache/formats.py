"""Forms in which a sequence's keys and values are kept, as transformers caches that know their bytes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from tamis.cache.selfindex.layer import SelfIndexLayer
from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown
from tamis.model.rope import Rotary

FORMS = ("auto", "bf16", "selfindex")


class Bf16Layer(DynamicLayer):
    """Keeps bfloat16, hands out the model's dtype: half the bytes of a float32 model, keys rounded to 8 bits."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append key_states and value_states [B, Hkv, T, D]; returns all of both in their dtype."""
        dtype = key_states.dtype
        keys, values = super().update(key_states.bfloat16(), value_states.bfloat16(), *args, **kwargs)
        return keys.to(dtype), values.to(dtype)


def new_cache(form: str, config: Any) -> Cache:
    """An empty cache of `form`: "auto" (the model's dtype), "bf16", or "selfindex" (codes that are their own index)."""
    if form == "auto":
        return DynamicCache(config=config)
    if form == "bf16":
        return Cache(layers=[Bf16Layer() for _ in range(config.num_hidden_layers)])
    if form == "selfindex":
        rotary = Rotary.of(config)
        return Cache(layers=[SelfIndexLayer(rotary=rotary) for _ in range(config.num_hidden_layers)])
    raise InvalidInput(unknown("kv format", form, list(FORMS)))


def cache_bytes(cache: Cache) -> int:
    """Bytes that the cache's keys and values take."""
    coded = [layer for layer in cache.layers if isinstance(layer, SelfIndexLayer)]
    plain = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
    held: int = sum(layer.nbytes for layer in coded) + sum(t.nbytes for t in plain)
    return held


def stored_dtype(form: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which `form` keeps keys and values of a model that computes in model_dtype."""
    if form == "auto":
        return model_dtype
    if form == "bf16":
        return torch.bfloat16
    if form == "selfindex":
        raise InvalidInput("kv format 'selfindex' keeps codes, not keys of one dtype; allowed here are auto and bf16.")
    raise InvalidInput(unknown("kv format", form, list(FORMS)))
