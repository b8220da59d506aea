"""A real model's steps over blocks from the host: as dense with all blocks, and to the bit as resident with few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tamis.attention.block_choices import ForecastChoice, StaleChoice
from tamis.attention.block_decode import BlockDecoding
from tamis.attention.block_prefill import OwnChoice
from tamis.attention.hook import install
from tamis.attention.layer_inputs import decoder_layers, watching
from tamis.cache.formats import cache_argument
from tamis.cache.pooled import Pooled
from tamis.core.errors import InvalidInput
from tamis.forecast.heads import Forecast, ForecastInfo, first_weights
from tamis.kernels.blocks import BlockRule
from tamis.kernels.reference.blocks import COARSE, pool_keys
from tamis.model.family import geometry
from tamis.model.rope import Rotary

RULE = BlockRule(top=5, first=1, local=1, block=16, window=8, stride=4, dense_tokens=0)
PROMPT = torch.randint(0, 512, (1, 150), generator=torch.Generator().manual_seed(0))


def steps(model: Any, rule: BlockRule, who: str, n: int = 20, **how: bool) -> tuple[torch.Tensor, BlockDecoding]:
    """Logits of `n` steps with given tokens, and what read the blocks."""
    layers, rotary = decoder_layers(model), Rotary.of(model)
    weight, bias = first_weights(layers, 2, 64, start="query")
    forecast = Forecast(weight, bias, 2, ForecastInfo({}, "tiny", rule))
    switch, uninstall = install(model)
    made = []
    try:
        with watching(model, residual=True) as seen, torch.no_grad():
            choose = {
                "own": OwnChoice(rule),
                "forecast": ForecastChoice(rule, forecast, seen, rotary),
                "infinigen": StaleChoice(rule, layers, seen, rotary),
            }[who]
            decoding = BlockDecoding(geometry(model.config), choose, seen, 200, **how)
            with decoding.running(switch):
                model(PROMPT, **{cache_argument(model): decoding.cache}, logits_to_keep=1)
            for i in range(n):
                with decoding.running(switch):
                    out = model(torch.tensor([[7 * i % 512]]), **{cache_argument(model): decoding.cache})
                made.append(out.logits[0, -1])
    finally:
        uninstall()
    return torch.stack(made), decoding


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("who", ["own", "forecast", "infinigen"])
def test_all_blocks_are_dense_decoding(tiny_model: Callable[..., Any], family: str, who: str) -> None:
    model = tiny_model(family)
    found, _ = steps(model, BlockRule(top=12, first=1, local=1, block=16, window=8, stride=4), who)
    ids = torch.cat([PROMPT, torch.tensor([[7 * i % 512 for i in range(20)]])], 1)
    with torch.no_grad():
        stock = model(ids, use_cache=False).logits[0, 150:]
    torch.testing.assert_close(found, stock, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("who", ["own", "forecast", "infinigen"])
def test_from_the_host_as_resident(tiny_model: Callable[..., Any], who: str) -> None:
    model = tiny_model("qwen3", num_hidden_layers=3)
    truth, _ = steps(model, RULE, who, resident=True)
    kept, pool = steps(model, RULE, who)
    evicted, empty = steps(model, RULE, who, forget=True)
    assert torch.equal(kept, truth) and torch.equal(evicted, truth)
    assert empty.hit_rate == 0.0 and 0.3 < pool.hit_rate < 1.0
    for layer in pool.layers:
        layer.blocks.map.check()
    everything, _ = steps(model, BlockRule(top=12, first=1, local=1, block=16, window=8, stride=4), who)
    assert float((everything - truth).abs().max()) > 1e-2, "few blocks are not all"


def test_several_tokens_or_prompts_at_once_are_refused(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    _, decoding = steps(model, RULE, "own", 1)
    with pytest.raises(InvalidInput, match="one whole prompt, then one token"):
        model(PROMPT, **{cache_argument(model): decoding.cache})


@pytest.mark.parametrize("parts", [(1,) * 70, (31, 1, 1, 40, 3), (7, 120)])
def test_pooled_keys_grow_to_what_they_are_at_once(parts: tuple[int, ...]) -> None:
    keys = torch.randn((2, sum(parts), 8))
    made = Pooled.of(keys[:, : parts[0]], RULE)
    done = parts[0]
    for n in parts[1:]:
        made.append(keys[:, done : done + n])
        done += n
        assert made.last.shape[1] <= COARSE * RULE.window + n
    assert made.n_tokens == done and torch.equal(made.pooled, pool_keys(keys, 8, 4))
    assert torch.equal(made.wide, pool_keys(keys, 8 * COARSE, 4 * COARSE))
