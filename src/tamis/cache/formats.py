"""Forms in which a sequence's keys and values are kept, as transformers caches that know their bytes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from tamis.cache.block_layer import BlockForm, BlockLayer
from tamis.cache.selfindex.layer import SelfIndexLayer
from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown
from tamis.model.rope import Rotary

FORMS = ("auto", "bf16", "selfindex", "blocks")


class Bf16Layer(DynamicLayer):
    """Keeps bfloat16, hands out the model's dtype: half the bytes of a float32 model, keys rounded to 8 bits."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append key_states and value_states [B, Hkv, T, D]; returns all of both in their dtype."""
        dtype = key_states.dtype
        keys, values = super().update(key_states.bfloat16(), value_states.bfloat16(), *args, **kwargs)
        return keys.to(dtype), values.to(dtype)


def new_cache(form: str, config: Any, blocks: BlockForm | None = None) -> Cache:
    """An empty cache of `form`: "auto" (the model's dtype), "bf16", "selfindex" (codes that are their own index), or
    "blocks", which are kept as `blocks` says."""
    if form == "auto":
        return DynamicCache(config=config)
    if form == "bf16":
        return Cache(layers=[Bf16Layer() for _ in range(config.num_hidden_layers)])
    if form == "selfindex":
        rotary = Rotary.of(config)
        return Cache(layers=[SelfIndexLayer(rotary=rotary) for _ in range(config.num_hidden_layers)])
    if form == "blocks":
        return Cache(layers=[BlockLayer(blocks) for _ in range(config.num_hidden_layers)])
    raise InvalidInput(unknown("kv format", form, list(FORMS)))


def take_over(cache: Cache, form: str, config: Any, blocks: BlockForm | None = None) -> str:
    """Give an empty `DynamicCache`, as transformers makes one for `generate`, the layers of `form`.

    In place: whoever holds it goes on with it. Returns why that cannot be, or "".
    """
    if type(cache) is not DynamicCache:
        return f"the caller's cache is a {type(cache).__name__}; only an empty DynamicCache can be turned into {form!r}"
    if cache.get_seq_length():
        return f"the caller's cache holds {cache.get_seq_length()} tokens already; only an empty one becomes {form!r}"
    if cache.offloading or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return f"the caller's cache is offloaded or has layers of another kind; it cannot be turned into {form!r}"
    cache.layers, cache.layer_class_to_replicate = new_cache(form, config, blocks).layers, None
    return ""


def form_of(cache: Cache) -> str:
    """The form that a cache has: "selfindex", "blocks", "bf16", or else "auto"."""
    first = cache.layers[0] if cache.layers else None
    kinds = {"selfindex": SelfIndexLayer, "blocks": BlockLayer, "bf16": Bf16Layer}
    return next((name for name, kind in kinds.items() if isinstance(first, kind)), "auto")


def cache_argument(model: Any) -> str:
    """What a model's forward calls its cache: transformers 5.24 renamed it, and warns about the old name."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def layer_bytes(layer: Any) -> int:
    """Bytes that one layer's keys and values take."""
    if isinstance(layer, SelfIndexLayer | BlockLayer):
        return layer.nbytes
    return sum(t.nbytes for t in (layer.keys, layer.values) if t is not None)


def cache_bytes(cache: Cache) -> int:
    """Bytes that the cache's keys and values take."""
    return sum(layer_bytes(layer) for layer in cache.layers)


def stored_dtype(form: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which `form` keeps keys and values of a model that computes in model_dtype."""
    if form == "auto":
        return model_dtype
    if form == "bf16":
        return torch.bfloat16
    if form == "blocks":
        raise InvalidInput("kv format 'blocks' is no format of pages; allowed here are auto and bf16.")
    if form == "selfindex":
        raise InvalidInput("kv format 'selfindex' keeps codes, not keys of one dtype; allowed here are auto and bf16.")
    raise InvalidInput(unknown("kv format", form, list(FORMS)))
