"""Blocks, forecasts and host memory in other people's calls: `generate` gets them by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tamis
from tamis.attention.layer_inputs import decoder_layers
from tamis.cache.formats import cache_argument, form_of
from tamis.core.errors import InvalidInput, StoreMismatch
from tamis.forecast.heads import Forecast, ForecastInfo, first_weights
from tamis.kernels.blocks import BlockRule
from tamis.model.adapter_info import base_of
from tiny_chat import tiny_tokenizer

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
FEW = {"decode_budget": 0.1, "decode_least": 0, "decode_local": 1}


def drawn(n: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 500, (batch, n), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Any]) -> Any:
    return tiny_model("llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def forecast(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forecast")
    weight, bias = first_weights(decoder_layers(model), 2, 64, start="query")
    Forecast(weight, bias, 2, ForecastInfo(base_of(model, tiny_tokenizer()), "tiny", BlockRule())).save(folder)
    return folder


def decoded(attached: Any) -> Any:
    assert attached.decode_report is not None
    return attached.decode_report


@pytest.mark.parametrize("decode", ["blocks", "forecast"])
@pytest.mark.parametrize("offload", ["none", "host"])
def test_generate(model: Any, forecast: Path, decode: str, offload: str) -> None:
    ids = drawn(700)
    wanted = model.generate(ids, **GREEDY)
    how = {"decode": decode, "offload": offload, "forecast": forecast, "tokenizer": tiny_tokenizer()}
    with tamis.attach(model, decode_budget=1.0, **how) as attached:
        assert torch.equal(model.generate(ids, **GREEDY), wanted) and not decoded(attached).approximate
    with tamis.attach(model, measure_recall=True, **FEW, **how) as attached:
        made = model.generate(ids, return_dict_in_generate=True, **GREEDY)
    report = decoded(attached)
    assert form_of(made.cache) == "blocks" and (report.used, report.kv, report.steps) == (decode, "blocks", 11)
    assert report.approximate and report.attended < 0.5 and report.n_tokens == 711
    assert (report.blocks.recall is not None) == (decode == "forecast")
    assert (report.blocks.moved_bytes > 0) == (offload == "host")
    assert torch.equal(model.generate(ids, **GREEDY), wanted), "the model is as it was"


def test_from_the_host_as_resident(model: Any, forecast: Path) -> None:
    ids, how = drawn(700), {"decode": "forecast", "forecast": forecast, "tokenizer": tiny_tokenizer(), **FEW}
    with tamis.attach(model, **how):
        wanted = model.generate(ids, output_scores=True, return_dict_in_generate=True, **GREEDY)
    with tamis.attach(model, offload="host", **how):
        found = model.generate(ids, output_scores=True, return_dict_in_generate=True, **GREEDY)
    assert all(torch.equal(a, b) for a, b in zip(found.scores, wanted.scores, strict=True))


@pytest.mark.parametrize("decode", ["blocks", "forecast"])
def test_batches_of_one_length(model: Any, forecast: Path, decode: str) -> None:
    ids = drawn(500, batch=2)
    how = {"decode": decode, "offload": "host", "forecast": forecast, "tokenizer": tiny_tokenizer()}
    with tamis.attach(model, **FEW, **how) as attached:
        together = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        assert decoded(attached).used == decode
        alone = torch.cat([model.generate(row[None], **GREEDY) for row in ids])
    assert torch.equal(together, alone)


def test_padded_ones_keep_everything_and_say_so(model: Any) -> None:
    ids = drawn(300, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    wanted = model.generate(ids, attention_mask=mask, **GREEDY)
    with tamis.attach(model, decode="blocks", **FEW) as attached:
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), wanted)
        report = decoded(attached)
        assert (report.used, report.kv) == ("dense", "auto") and "blocks are made of sequences" in report.reason
        with pytest.raises(InvalidInput, match="hides tokens of a blocks cache"):
            model.generate(ids, attention_mask=mask, **{cache_argument(model): attached.new_cache()}, **GREEDY)
        with pytest.raises(InvalidInput, match="cannot be reordered for beam search"):
            model.generate(drawn(200), num_beams=2, **GREEDY)


def test_turns_chunks_and_life_without_tamis(model: Any) -> None:
    first, more, name = drawn(400), drawn(150, seed=5), cache_argument(model)
    with tamis.attach(model, decode="blocks", offload="host", decode_budget=1.0) as attached:
        cache = attached.new_cache()
        one = model.generate(first, **{name: cache}, **GREEDY)
        two = model.generate(torch.cat([one, more], 1), **{name: cache}, **GREEDY)
        assert decoded(attached).steps == 22 and cache.get_seq_length() == two.shape[1] - 1
        chunked = model.generate(first, prefill_chunk_size=128, **GREEDY)
    assert torch.equal(one, model.generate(first, **GREEDY)) and torch.equal(chunked, one)
    assert torch.equal(two, model.generate(torch.cat([one, more], 1), **GREEDY))
    three = model.generate(two, **{name: cache}, **GREEDY)
    assert torch.equal(three, model.generate(two, **GREEDY)), "an ordinary cache, but that it lies on the host"


def test_a_cache_of_another_form_is_read_as_it_is(model: Any) -> None:
    ids, name = drawn(400), cache_argument(model)
    wanted = model.generate(ids, **GREEDY)
    with tamis.attach(model, offload="host") as attached:
        kept = attached.new_cache()
    with tamis.attach(model, decode="blocks", **FEW) as attached:
        blocks = attached.new_cache()
        assert torch.equal(model.generate(ids, **{name: kept}, **GREEDY), wanted)
        assert decoded(attached).used == "dense"
    with tamis.attach(model, decode="selfindex") as attached:
        assert torch.equal(model.generate(ids, **{name: blocks}, **GREEDY), wanted)
        assert (decoded(attached).used, decoded(attached).kv) == ("dense", "blocks")


def test_in_any_mode_of_autograd(model: Any, forecast: Path) -> None:
    ids, name = drawn(300), cache_argument(model)
    how = {"decode": "forecast", "offload": "host", "forecast": forecast, "tokenizer": tiny_tokenizer()}
    made = []
    with tamis.attach(model, **FEW, **how) as attached:
        for modes in ((torch.no_grad, torch.no_grad), (torch.inference_mode, torch.no_grad), (torch.enable_grad,) * 2):
            cache = attached.new_cache()
            with modes[0]():
                model(ids, **{name: cache})
            for token in (5, 9, 11):
                with modes[1]():
                    out = model(torch.tensor([[token]]), **{name: cache})
            made.append(out.logits.detach())
    assert torch.equal(made[0], made[1])
    torch.testing.assert_close(made[2], made[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("prefill", ["blocks", "forecast"])
def test_a_prefill_by_blocks(model: Any, forecast: Path, prefill: str) -> None:
    ids = drawn(700)
    how = {"prefill": prefill, "prefill_blocks": 4, "decode_local": 1}
    if prefill == "forecast":
        how |= {"forecast": forecast, "tokenizer": tiny_tokenizer()}
    with tamis.attach(model, **how) as attached:
        whole = model.generate(ids, **GREEDY)
        report = attached.report
        assert report is not None and report.used == prefill and 0.4 < report.density < 0.9
        parts = model.generate(ids, prefill_chunk_size=300, **GREEDY)
        assert len(attached.reports) == 2 and attached.report is not None and attached.report.chunks == 3
        assert attached.report.density == pytest.approx(report.density) and torch.equal(parts, whole)
        model.generate(ids, prefill_chunk_size=256, **GREEDY)
        short, rest = attached.reports[2:]
        assert (short.used, rest.used) == ("dense", prefill) and rest.density == pytest.approx(report.density)


def test_forecasts_that_are_refused(model: Any, forecast: Path, tiny_model: Callable[..., Any]) -> None:
    other = tiny_model("llama", num_hidden_layers=3, seed=2)
    with pytest.raises(StoreMismatch, match="was trained on tiny; the weights_bfloat16 of this model differ"):
        tamis.attach(other, forecast=forecast, tokenizer=tiny_tokenizer())
    with pytest.raises(InvalidInput, match="pass tokenizer="):
        tamis.attach(model, forecast=forecast)
    with pytest.raises(InvalidInput, match="decode='forecast' needs a forecast"):
        tamis.attach(model, decode="forecast")
    wrong: Any = 3
    with pytest.raises(InvalidInput, match="forecast is 3; give the folder"):
        tamis.attach(model, forecast=wrong, tokenizer=tiny_tokenizer())
    with tamis.attach(model, decode="blocks"):
        pass


def test_one_text_is_no_list(model: Any) -> None:
    with pytest.raises(InvalidInput, match="give a list of documents"):
        tamis.attach(model, documents="One text.", tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("wrong", ["smollm2", None, torch.nn.Linear(2, 2)])
def test_what_is_no_model(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=f"model is a {type(wrong).__name__}; give a transformers model"):
        tamis.attach(wrong)
