"""Forms of keys and values: what they cost, and that they say so."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tamis.cache.formats import cache_bytes, new_cache
from tamis.core.errors import InvalidInput


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Any]) -> Any:
    return tiny_model("qwen3")


def fill(model: Any, form: str, ids: torch.Tensor) -> Any:
    cache = new_cache(form, model.config)
    with torch.inference_mode():
        name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
        model(ids, **{name: cache}, use_cache=True)
    return cache


@pytest.mark.parametrize(("form", "item"), [("auto", 4), ("bf16", 2)])
def test_bytes(model: Any, form: str, item: int) -> None:
    assert cache_bytes(new_cache(form, model.config)) == 0
    cache = fill(model, form, torch.randint(0, 512, (1, 33)))
    assert cache.get_seq_length() == 33
    assert cache_bytes(cache) == 2 * 2 * 33 * 2 * 64 * item  # keys and values, layers, tokens, KV heads, head dim


def test_bf16_keeps_rounded_values(model: Any) -> None:
    ids = torch.randint(0, 512, (1, 33))
    full, half = fill(model, "auto", ids), fill(model, "bf16", ids)
    first, rounded = full.layers[0], half.layers[0]
    assert torch.equal(first.keys.bfloat16(), rounded.keys) and torch.equal(first.values.bfloat16(), rounded.values)


def test_bf16_hands_out_what_it_was_given_dtypes() -> None:
    layer = new_cache("bf16", type("C", (), {"num_hidden_layers": 1})).layers[0]
    for n in (3, 1):
        keys, values = layer.update(torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8))
        assert keys.dtype == values.dtype == torch.float32
    assert keys.shape == (1, 2, 4, 8) and layer.keys.dtype == torch.bfloat16


def test_an_unknown_form(model: Any) -> None:
    with pytest.raises(InvalidInput, match=r"kv format 'int4'.*auto, bf16"):
        new_cache("int4", model.config)
