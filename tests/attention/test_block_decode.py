"""A real model's steps over blocks from the host: as dense with all blocks, and to the bit as resident with few."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tamis.attention import block_decode
from tamis.attention.block_choices import ForecastChoice, FusedChoice, StaleChoice
from tamis.attention.block_decode import BlockDecoding, BlockState, Steps, step_blocks
from tamis.attention.block_prefill import OwnChoice, PooledChoice
from tamis.attention.fused import FusedForecast
from tamis.attention.hook import install
from tamis.attention.layer_inputs import decoder_layers, watching
from tamis.cache.block_layer import BlockForm
from tamis.cache.formats import cache_argument, new_cache
from tamis.cache.offload import LayerBlocks, Prefetcher
from tamis.cache.pooled import Pooled
from tamis.cache.streams import Event, Queues, Stream, run_all
from tamis.forecast.heads import Forecast, ForecastInfo, first_weights
from tamis.kernels.blocks import COARSE, BlockRule
from tamis.kernels.reference.blocks import attend_blocks, pool_keys, select_blocks
from tamis.model.rope import Rotary

RULE = BlockRule(top=5, first=1, local=1, block=16, window=8, stride=4, dense_tokens=0)
RULE_BLOCK = 2 * 16 * 64 * 4  # bytes of a block of a KV head in float32
PROMPT = torch.randint(0, 512, (1, 150), generator=torch.Generator().manual_seed(0))


def forecast_of(model: Any, rule: BlockRule) -> Forecast:
    heads = model.config.num_key_value_heads
    weight, bias = first_weights(decoder_layers(model), heads, model.config.head_dim, start="query")
    return Forecast(weight, bias, heads, ForecastInfo({}, "tiny", rule))


def steps(
    model: Any,
    rule: BlockRule,
    who: str,
    n: int = 20,
    *,
    host: bool = True,
    how: Steps | None = None,
    chance: random.Random | None = None,
    slots: int | None = None,
) -> tuple[torch.Tensor, BlockDecoding]:
    """Logits of `n` steps with given tokens, and what read the blocks. chance: of simulated streams."""
    rotary, forecast = Rotary.of(model), forecast_of(model, rule)
    switch, uninstall = install(model)
    fused = FusedForecast(model, forecast) if who == "fused" else None
    made = []
    try:
        with watching(model, residual=True) as seen, torch.no_grad():
            choices: dict[str, PooledChoice] = {
                "own": OwnChoice(rule),
                "forecast": ForecastChoice(rule, forecast, seen, rotary),
                "infinigen": StaleChoice(rule, decoder_layers(model), seen, rotary),
            }
            choose = choices[who] if fused is None else FusedChoice(rule, fused)
            cache = new_cache("blocks", model.config, BlockForm(rule, host=host, slots=slots))
            state = BlockState()
            if chance is not None:
                compute, copy = Stream("compute"), Stream("copy")
                state.queues = Queues(compute, copy, lambda: run_all([compute, copy], chance))
            decoding = BlockDecoding(cache, choose, seen=seen, how=how, state=state)
            with decoding.running(switch, step=False):
                model(PROMPT, **{cache_argument(model): cache}, logits_to_keep=1)
            for i in range(n):
                with decoding.running(switch, step=True):
                    out = model(torch.tensor([[7 * i % 512]]), **{cache_argument(model): cache})
                made.append(out.logits[0, -1])
    finally:
        if fused is not None:
            fused.close()
        uninstall()
    return torch.stack(made), decoding


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("who", ["own", "forecast", "infinigen", "fused"])
def test_all_blocks_are_dense_decoding(tiny_model: Callable[..., Any], family: str, who: str) -> None:
    model = tiny_model(family)
    found, _ = steps(model, BlockRule(top=12, first=1, local=1, block=16, window=8, stride=4), who)
    ids = torch.cat([PROMPT, torch.tensor([[7 * i % 512 for i in range(20)]])], 1)
    with torch.no_grad():
        stock = model(ids, use_cache=False).logits[0, 150:]
    torch.testing.assert_close(found, stock, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("who", ["own", "forecast", "infinigen", "fused"])
def test_from_the_host_as_resident(tiny_model: Callable[..., Any], who: str) -> None:
    model = tiny_model("qwen3", num_hidden_layers=3)
    truth, all_there = steps(model, RULE, who, host=False)
    assert all_there.hit_rate == 1.0 and all_there.report().blocks.moved_bytes == 0  # type: ignore[union-attr]
    kept, pool = steps(model, RULE, who)
    evicted, empty = steps(model, RULE, who, how=Steps(forget=True))
    late, waited = steps(model, RULE, who, how=Steps(prefetch=False))
    for seed in range(2):
        mixed, _ = steps(model, RULE, who, how=Steps(forget=bool(seed)), chance=random.Random(seed))
        assert torch.equal(mixed, truth), "in any order that the events allow"
    many, wide = steps(model, RULE, who, slots=9)
    assert all(torch.equal(found, truth) for found in (kept, evicted, late, many))
    assert empty.hit_rate == 0.0 and 0.3 < pool.hit_rate < wide.hit_rate < 1.0
    reports = [made.report().blocks for made in (pool, waited, empty)]
    shares = [made.late for made in reports if made is not None and made.late is not None]
    assert shares[1] == pytest.approx(1 - pool.hit_rate)
    assert shares[0] == shares[1] if who == "own" else 0 < shares[0] < 0.5 * shares[1]
    assert reports[2] is not None and reports[2].moved_bytes == 20 * 3 * 2 * 4 * RULE_BLOCK
    for layer in pool.layers:
        assert isinstance(layer.blocks, LayerBlocks)
        layer.blocks.map.check()
    everything, _ = steps(model, BlockRule(top=12, first=1, local=1, block=16, window=8, stride=4), who)
    assert float((everything - truth).abs().max()) > 1e-2, "few blocks are not all"


def test_the_fused_forecast_is_the_forecast(tiny_model: Callable[..., Any]) -> None:
    for family in ("llama", "qwen2", "qwen3"):
        model = tiny_model(family, num_hidden_layers=3)
        apart, _ = steps(model, RULE, "forecast", host=False)
        fused, _ = steps(model, RULE, "fused", host=False)
        torch.testing.assert_close(fused, apart, rtol=1e-3, atol=1e-3)


def test_what_a_step_reads_is_what_the_rule_says(tiny_model: Callable[..., Any]) -> None:
    """Every layer's output is attention to the blocks that `select_blocks` takes of the whole sequence's keys."""
    model = tiny_model("llama", num_hidden_layers=3)
    found, _ = steps(model, RULE, "own")
    torch.testing.assert_close(found, by_rule(model, RULE), rtol=1e-3, atol=1e-3)


def by_rule(model: Any, rule: BlockRule, n: int = 20) -> torch.Tensor:
    """Steps over a stock cache whose attention is masked to the blocks of the reference."""
    cache, switch_and_undo = DynamicCache(config=model.config), install(model)
    switch, uninstall = switch_and_undo

    class Masked:
        def attend(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
            k, v = cache.layers[layer].keys[0], cache.layers[layer].values[0]
            at = torch.tensor([k.shape[1] - 1])
            chosen = OwnChoice(rule)(layer, q[0], k, at, scale)
            return attend_blocks(q[0], k, v, chosen, at, block=rule.block, scale=scale)[None]

        def observe(self, layer: int, q: torch.Tensor) -> None:
            pass

    made = []
    try:
        with torch.no_grad():
            model(PROMPT, **{cache_argument(model): cache}, logits_to_keep=1)
            for i in range(n):
                with switch.decoding(Masked()):
                    made.append(model(torch.tensor([[7 * i % 512]]), **{cache_argument(model): cache}).logits[0, -1])
    finally:
        uninstall()
    return torch.stack(made)


class TestMutations:
    """What is planted must be seen by the comparisons above."""

    def test_a_wrong_block(self, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(scores: torch.Tensor | None, own: int, rule: BlockRule, like: torch.Tensor) -> torch.Tensor:
            made = step_blocks(scores, own, rule, like).clone()
            made[0, -1] = next(b for b in range(own) if b not in made[0].tolist())
            return made

        model = tiny_model("llama", num_hidden_layers=3)
        monkeypatch.setattr(block_decode, "step_blocks", wrong)
        found, _ = steps(model, RULE, "own")
        assert float((found - by_rule(model, RULE)).abs().max()) > 1e-2

    def test_a_slot_that_is_not_refreshed(
        self, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, fetch, calls = tiny_model("llama", num_hidden_layers=3), LayerBlocks.fetch, []
        truth, _ = steps(model, RULE, "fused", host=False)

        def forgetful(self: LayerBlocks, wanted: torch.Tensor, moves: Any) -> None:
            calls.append(1)
            if len(calls) != 31:
                fetch(self, wanted, moves)

        monkeypatch.setattr(LayerBlocks, "fetch", forgetful)
        found, _ = steps(model, RULE, "fused", how=Steps(forget=True))
        assert len(calls) == 60 and not torch.equal(found, truth)

    def test_a_copy_that_is_not_waited_for(
        self, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny_model("llama", num_hidden_layers=3)
        truth, _ = steps(model, RULE, "fused", host=False)
        attend = Prefetcher.attend

        def hasty(self: Prefetcher, layer: int, *args: Any, **kwargs: Any) -> None:
            self._arrived[layer] = Event(done=True)
            attend(self, layer, *args, **kwargs)

        monkeypatch.setattr(Prefetcher, "attend", hasty)
        found, _ = steps(model, RULE, "fused", how=Steps(forget=True), chance=random.Random(1))
        assert not torch.equal(found, truth)


@pytest.mark.parametrize("own", [0, 1, 2, 3, 4, 9, 12])
@pytest.mark.parametrize("rule", [RULE, replace(RULE, top=3), replace(RULE, first=0, local=0), replace(RULE, top=20)])
def test_the_blocks_of_a_step_are_those_of_a_row(own: int, rule: BlockRule) -> None:
    scores = torch.randn((3, own + 1)).round(decimals=1)  # with ties
    at = torch.tensor([own * rule.block + 5])
    free = own - min(rule.first, own) - rule.local
    given = scores if 0 < rule.chosen < free else None
    made = step_blocks(given, own, rule, torch.zeros(3, 1))
    row = select_blocks(scores[:, None], at, rule)[:, 0, :own]
    assert [sorted(r) for r in made.tolist()] == [r.nonzero()[:, 0].tolist() for r in row]
    assert BlockForm(rule).width(int(at) + 1) == made.shape[1]


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
