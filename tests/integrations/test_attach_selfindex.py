"""The self-indexed cache in other people's calls: `generate` gets it by itself, padding and beams are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import tamis
from tamis.cache.formats import cache_argument, form_of
from tamis.core.errors import InvalidInput, ModelUnsupported
from tamis.integrations.hf.attach import Attached

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
SPARSE = {"kv": "selfindex", "decode": "selfindex"}


def drawn(n: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 500, (batch, n), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Any]) -> Any:
    return tiny_model("llama")


def decoded(attached: Attached) -> Any:
    assert attached.decode_report is not None
    return attached.decode_report


class TestGenerate:
    def test_the_cache_that_generate_makes_becomes_selfindex(self, model: Any) -> None:
        ids = drawn(700)
        with tamis.attach(model, **SPARSE) as attached:
            made = model.generate(ids, return_dict_in_generate=True, **GREEDY)
        cache = made.cache
        assert form_of(cache) == "selfindex" and cache.layers[0].sequence.n_compressed >= 600
        report = decoded(attached)
        assert (report.used, report.kv, report.steps, report.kernel) == ("selfindex", "selfindex", 11, "cpu")
        assert report.approximate and not report.reason and report.n_tokens == 711
        assert attached.report is not None and attached.report.prompt_tokens == 700

    def test_first_tokens_are_stock_and_short_ones_all(self, model: Any) -> None:
        long, short = drawn(700), drawn(60)
        wanted = [model.generate(ids, **GREEDY) for ids in (long, short)]
        with tamis.attach(model, **SPARSE) as attached:
            found = [model.generate(ids, **GREEDY) for ids in (long, short)]
        assert torch.equal(found[0][:, :701], wanted[0][:, :701])
        assert torch.equal(found[1], wanted[1]) and not decoded(attached).approximate

    def test_it_is_what_steps_by_hand_give(self, model: Any) -> None:
        ids = drawn(700)
        with tamis.attach(model, **SPARSE) as attached:
            wanted = model.generate(ids, **GREEDY)
            cache, given = attached.new_cache(), ids
            with torch.inference_mode():
                for _ in range(12):
                    out = model(given, **{cache_argument(model): cache}, use_cache=True)
                    given = out.logits[:, -1:].argmax(-1)
                    ids = torch.cat([ids, given], 1)
        assert torch.equal(ids, wanted) and decoded(attached).steps == 11

    def test_arguments_by_their_places(self, model: Any) -> None:
        ids = drawn(400)
        wanted = model(ids).logits
        with tamis.attach(model, **SPARSE) as attached:
            made = model(ids, None, None, None)
            assert torch.equal(made.logits, wanted) and form_of(made.cache) == "selfindex"
            cache = attached.new_cache()
            for given in (ids, drawn(1)):
                model(given, None, None, cache)
            assert decoded(attached).steps == 1

    def test_decode_dense_over_selfindex(self, model: Any) -> None:
        with tamis.attach(model, kv="selfindex") as attached:
            model.generate(drawn(700), **GREEDY)
        report = decoded(attached)
        assert (report.used, report.kv, report.attended, report.approximate) == ("dense", "selfindex", 1.0, True)

    def test_auto_means_selfindex_where_decode_asks_for_it(self, model: Any) -> None:
        with tamis.attach(model, decode="selfindex") as attached:
            model.generate(drawn(500), **GREEDY)
        assert decoded(attached).kv == "selfindex"

    def test_bf16_is_kept_too(self, model: Any) -> None:
        with tamis.attach(model, kv="bf16") as attached:
            made = model.generate(drawn(50), return_dict_in_generate=True, **GREEDY)
        assert made.cache.layers[0].keys.dtype == torch.bfloat16
        assert decoded(attached).kv == "bf16" and decoded(attached).kv_bytes == decoded(attached).bf16_bytes

    def test_auto_touches_nothing(self, model: Any) -> None:
        with tamis.attach(model) as attached:
            made = model.generate(drawn(50), return_dict_in_generate=True, **GREEDY)
        assert form_of(made.cache) == "auto" and attached.decode_report is None

    def test_a_prompt_in_chunks(self, model: Any) -> None:
        ids = drawn(700)
        with tamis.attach(model, **SPARSE) as attached:
            wanted = model.generate(ids, **GREEDY)
            found = model.generate(ids, prefill_chunk_size=256, **GREEDY)
        assert torch.equal(found, wanted) and decoded(attached).steps == 11

    def test_with_a_sparse_prefill(self, model: Any) -> None:
        documents = [drawn(200, seed=i)[0].tolist() for i in (1, 2, 3)]
        ids = torch.tensor([[2, 2, *(t for d in documents for t in d), *drawn(30, seed=4)[0].tolist()]])
        options = {"prefill": "sift", "min_tokens": 0, "documents": documents}
        with tamis.attach(model, **options) as attached:
            wanted = model.generate(ids, **GREEDY)
        with tamis.attach(model, **options, **SPARSE) as attached:
            found = model.generate(ids, **GREEDY)
        assert attached.report is not None and attached.report.used == "sift" and decoded(attached).used == "selfindex"
        assert found[0, 632] == wanted[0, 632]

    def test_a_prompt_of_one_token(self, model: Any) -> None:
        wanted = model.generate(drawn(1), **GREEDY)
        with tamis.attach(model, **SPARSE) as attached:
            assert torch.equal(model.generate(drawn(1), **GREEDY), wanted)
        assert decoded(attached).steps == 11 and decoded(attached).kv == "selfindex"

    def test_smollm2(self, smollm2: Any) -> None:
        text = " ".join(f"Lamp {i} stands {i * 3} metres above the sea." for i in range(60))
        ids = smollm2.tokenizer(text, return_tensors="pt").input_ids
        with tamis.attach(smollm2.model, **SPARSE) as attached:
            made = smollm2.model.generate(ids, max_new_tokens=24, do_sample=False)
        report = decoded(attached)
        assert report.used == "selfindex" and report.kv_bytes < report.bf16_bytes and report.attended < 0.4
        assert "metres above the sea" in smollm2.tokenizer.decode(made[0, ids.shape[1] :])


class TestTurns:
    @pytest.mark.parametrize("make", ["new_cache", "DynamicCache"])
    def test_a_cache_that_the_caller_keeps(self, model: Any, make: str) -> None:
        first, more = drawn(600), drawn(150, seed=5)
        with tamis.attach(model, **SPARSE) as attached:
            cache = attached.new_cache() if make == "new_cache" else DynamicCache(config=model.config)
            name = cache_argument(model)
            one = model.generate(first, **{name: cache}, **GREEDY)
            assert form_of(cache) == "selfindex" and cache.get_seq_length() == 611
            two = model.generate(torch.cat([one, more], 1), **{name: cache}, **GREEDY)
        assert two.shape[1] == 600 + 12 + 150 + 12 and cache.get_seq_length() == two.shape[1] - 1
        assert decoded(attached).steps == 22 and cache.layers[1].sequence.n_compressed >= 640

    def test_each_cache_has_its_own_count(self, model: Any) -> None:
        with tamis.attach(model, **SPARSE) as attached:
            for _ in range(2):
                model.generate(drawn(400), **GREEDY)
                assert decoded(attached).steps == 11

    def test_the_cache_goes_on_without_tamis(self, model: Any) -> None:
        with tamis.attach(model, **SPARSE) as attached:
            cache = attached.new_cache()
            ids = model.generate(drawn(600), **{cache_argument(model): cache}, **GREEDY)
        longer = model.generate(ids, **{cache_argument(model): cache}, **GREEDY)
        assert longer.shape[1] == 624 and decoded(attached).steps == 11


class TestPlainCalls:
    def test_a_pass_that_makes_its_own_cache(self, model: Any) -> None:
        ids = drawn(400)
        with torch.inference_mode():
            wanted = model(ids).logits
        with tamis.attach(model, **SPARSE), torch.inference_mode():
            out = model(ids)
            plain = model(ids, use_cache=False)
        assert torch.equal(out.logits, wanted) and torch.equal(plain.logits, wanted)
        assert form_of(out.cache) == "selfindex" and plain.cache is None

    def test_arguments_by_place_and_embeddings(self, model: Any) -> None:
        ids, token = drawn(400), drawn(1)
        made = []
        with tamis.attach(model, **SPARSE) as attached, torch.inference_mode():
            for kind in ("names", "places", "embeddings"):
                cache = attached.new_cache()
                for x in (ids, token):
                    if kind == "names":
                        out = model(input_ids=x, **{cache_argument(model): cache})
                    elif kind == "places":
                        out = model(x, None, None, cache)
                    else:
                        out = model(inputs_embeds=model.get_input_embeddings()(x), **{cache_argument(model): cache})
                made.append(out.logits)
                assert decoded(attached).steps == 1
        assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])

    def test_with_gradients_on(self, model: Any) -> None:
        with tamis.attach(model, **SPARSE) as attached:
            cache = attached.new_cache()
            for x in (drawn(400), drawn(1), drawn(1)):
                out = model(x, **{cache_argument(model): cache})
        sequence = cache.layers[0].sequence
        assert bool(out.logits.isfinite().all()) and not sequence.parts[0].records.codes.requires_grad
        assert sequence._energy is not None and not sequence._energy.requires_grad


class TestBatches:
    def test_of_one_length(self, model: Any) -> None:
        ids = drawn(500, batch=2)
        with tamis.attach(model, **SPARSE) as attached:
            together = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
            assert (decoded(attached).used, decoded(attached).steps) == ("selfindex", 11)
            alone = torch.cat([model.generate(row[None], **GREEDY) for row in ids])
        assert torch.equal(together, alone)

    def test_padded_ones_keep_everything_and_say_so(self, model: Any) -> None:
        ids = drawn(500, batch=2)
        mask = torch.ones_like(ids)
        mask[1, :13] = 0
        wanted = model.generate(ids, attention_mask=mask, **GREEDY)
        with tamis.attach(model, **SPARSE) as attached:
            found = model.generate(ids, attention_mask=mask, **GREEDY)
        assert torch.equal(found, wanted)
        report = decoded(attached)
        assert (report.used, report.kv, report.approximate, report.steps) == ("dense", "auto", False, 11)
        assert "selfindex decode was asked for: the batch is padded" in str(report)

    def test_padding_in_a_cache_of_that_form_is_refused(self, model: Any) -> None:
        ids = drawn(500, batch=2)
        mask = torch.ones_like(ids)
        mask[1, :13] = 0
        with tamis.attach(model, **SPARSE) as attached:
            with pytest.raises(InvalidInput, match=r"hides tokens of a selfindex cache .* Group prompts by length"):
                model.generate(ids, attention_mask=mask, **{cache_argument(model): attached.new_cache()}, **GREEDY)
            model.generate(drawn(20), **GREEDY)  # nothing is left running

    def test_a_mask_in_a_step(self, model: Any) -> None:
        with tamis.attach(model, **SPARSE) as attached, torch.inference_mode():
            cache = attached.new_cache()
            model(drawn(500), **{cache_argument(model): cache})
            mask = torch.ones(1, 501, dtype=torch.long)
            mask[0, 3] = 0
            with pytest.raises(InvalidInput, match="hides tokens"):
                model(drawn(1), attention_mask=mask, **{cache_argument(model): cache})

    def test_beams_are_refused(self, model: Any) -> None:
        beams = "cannot be reordered for beam search"
        with tamis.attach(model, **SPARSE), pytest.raises(InvalidInput, match=beams):
            model.generate(drawn(400), num_beams=2, **GREEDY)


class TestOtherCaches:
    def test_static(self, model: Any) -> None:
        ids = drawn(300)
        wanted = model.generate(ids, **GREEDY)
        with tamis.attach(model, **SPARSE) as attached:
            cache = StaticCache(config=model.config, max_cache_len=400)
            found = model.generate(ids, **{cache_argument(model): cache}, **GREEDY)
        assert torch.equal(found, wanted)
        assert decoded(attached).kv == "auto" and "StaticCache" in decoded(attached).reason

    def test_begun(self, model: Any) -> None:
        cache = DynamicCache(config=model.config)
        name = cache_argument(model)
        with torch.inference_mode():
            model(drawn(100), **{name: cache})
            with tamis.attach(model, **SPARSE) as attached:
                model(drawn(1), **{name: cache})
        assert "holds 100 tokens already" in decoded(attached).reason and form_of(cache) == "auto"

    def test_without_config(self, model: Any) -> None:
        with tamis.attach(model, **SPARSE) as attached:
            cache = DynamicCache()
            model.generate(drawn(400), **{cache_argument(model): cache}, **GREEDY)
        assert form_of(cache) == "selfindex" and decoded(attached).steps == 11

    def test_offloaded(self, model: Any) -> None:
        with tamis.attach(model, **SPARSE) as attached, torch.inference_mode():
            cache = DynamicCache(config=model.config)
            cache.offloading = True
            assert attached._caches.of_pass((), {"input_ids": drawn(3), "cache": cache}) is not None
        assert "offloaded" in decoded(attached).reason


def test_a_head_dim_without_the_form(tiny_model: Callable[..., Any]) -> None:
    with pytest.raises(ModelUnsupported, match="head_dim 96"):
        tamis.attach(tiny_model("llama", head_dim=96), decode="selfindex")
