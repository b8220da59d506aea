"""Recall against the layers' own choices: what the providers are, which rows are judged, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tamis.attention.hook import NAME
from tamis.attention.layer_inputs import decoder_layers
from tamis.core.errors import InvalidInput
from tamis.eval.forecast import METRICS, MOVES, OFFLOADED, PROVIDERS, Found, Plan, eval_forecast
from tamis.forecast.heads import Forecast, ForecastInfo, first_weights
from tamis.kernels.blocks import BlockRule
from tamis.model.source import LoadedModel
from tiny_chat import tiny_tokenizer

RULE = BlockRule(top=5, first=1, local=1, block=16, window=8, stride=4, dense_tokens=0)
PLAN = Plan(RULE, rows=20, generated=3)


@pytest.fixture
def fresh(tiny_model: Callable[..., Any]) -> LoadedModel:
    """One query head a KV head: what a layer chooses is then what its query alone chooses."""
    return LoadedModel(tiny_model("qwen3", num_attention_heads=2, num_hidden_layers=3), tiny_tokenizer(), "tiny", "")


def heads(loaded: LoadedModel, start: str = "query") -> Forecast:
    weight, bias = first_weights(decoder_layers(loaded.model), 2, 64, start=start)
    return Forecast(weight, bias, 2, ForecastInfo({}, "tiny", RULE))


def texts(n: int = 2, tokens: int = 200) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, 512, (tokens,), generator=draw).tolist() for _ in range(n)]


def test_what_is_known_of_the_layers(fresh: LoadedModel) -> None:
    found = eval_forecast(fresh, heads(fresh), texts(), PLAN)
    assert fresh.model.config._attn_implementation != NAME and found.texts == 2
    for rows in ("prefill", "decode"):
        assert found.mean(rows, "own", "recall") == 1.0
        assert 0 < found.mean(rows, "own", "recall_attention") <= 1
        assert found.mean(rows, "infinigen", "recall", 0) == 1.0, "layer 0 has no layer before it"
        for provider in PROVIDERS:
            assert all(0 <= found.mean(rows, provider, metric) <= 1 for metric in METRICS)
    both = [found.mean("prefill", p, "recall", 1) for p in ("forecast", "infinigen")]
    assert both[0] == pytest.approx(both[1], abs=0.12), "an untrained forecast is the same query but for its norm"
    random = eval_forecast(fresh, heads(fresh, "uniform"), texts(), PLAN)
    assert random.mean("prefill", "forecast", "recall", 0) < found.mean("prefill", "forecast", "recall", 0) - 0.1
    assert random.mean("prefill", "infinigen", "recall") == found.mean("prefill", "infinigen", "recall")


def test_rows_and_summary(fresh: LoadedModel) -> None:
    found = eval_forecast(fresh, heads(fresh), texts(1), replace(PLAN, generated=0))
    rows = found.rows()
    assert {r[0] for r in rows} == {*(f"prefill/{w}" for w in ("layer-0", "layer-1", "layer-2", "mean")), "quality"}
    assert len(rows) == 4 * 3 * 3 + 3 * 3 and all(len(values) == 1 for *_, values, _ in rows)
    summary = found.summary()["prefill"]["forecast"]
    assert len(summary["recall_by_layer"]) == 3
    assert summary["recall"] == pytest.approx(sum(summary["recall_by_layer"][1:]) / 2)
    assert not Found().rows()


def test_blocks_only_against_dense(fresh: LoadedModel) -> None:
    most = replace(PLAN, rule=replace(RULE, top=12))
    found = eval_forecast(fresh, heads(fresh), texts(1), most).summary()["quality"]
    few = eval_forecast(fresh, heads(fresh), texts(1), PLAN).summary()["quality"]
    for provider in PROVIDERS:
        assert 0 <= found[provider]["kl"] < few[provider]["kl"], "blocks that are not read are missed"
        assert 0.5 < few[provider]["density"] < found[provider]["density"] <= 1.0
        assert 0 <= few[provider]["agreement"] <= 1
    assert few["forecast"]["density"] == pytest.approx(few["own"]["density"])
    assert "quality" not in eval_forecast(fresh, heads(fresh), texts(1), replace(PLAN, quality=False)).summary()


def test_steps_from_host_memory(fresh: LoadedModel) -> None:
    plan = replace(PLAN, generated=12)
    found = eval_forecast(fresh, heads(fresh), texts(1), plan)
    moves = found.summary()["offload"]
    assert set(moves) == set(OFFLOADED) and all(set(values) == set(MOVES) for values in moves.values())
    same = [moves["forecast"], moves["forecast-unfetched"]]
    assert same[0]["kl"] == same[1]["kl"] and same[0]["moved_bytes"] == same[1]["moved_bytes"]
    assert same[0]["late"] < same[1]["late"] == pytest.approx(1 - same[1]["hit_rate"])
    assert moves["own"]["late"] == pytest.approx(1 - moves["own"]["hit_rate"])
    most = eval_forecast(fresh, heads(fresh), texts(1), replace(plan, rule=replace(RULE, top=12))).summary()["offload"]
    for provider in OFFLOADED:
        assert moves[provider]["kl"] > 2 * most[provider]["kl"] > 0
        assert moves[provider]["attended"] < 0.5 < 0.85 < most[provider]["attended"] < 1
    assert {case for case, *_ in found.rows()} >= {"quality", "offload"}


def test_what_cannot_be_judged_is_said(fresh: LoadedModel) -> None:
    with pytest.raises(InvalidInput, match="up to 80 are read"):
        eval_forecast(fresh, heads(fresh), texts(1, 80), PLAN)
    with pytest.raises(InvalidInput, match="rows is 0"):
        replace(PLAN, rows=0)
