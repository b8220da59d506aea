"""Answers of tiny models: equal to transformers' own, cut where they must be, with a report that is true."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tamis
from tamis.attention.policy import MIN_TOKENS, Policy
from tamis.core.errors import ContextOverflow, InvalidInput, TamisError
from tamis.engine.llm import LLM
from tamis.engine.sampling import Sampling
from tamis.engine.template import Turn
from tamis.index.encode import trivial_bits
from tamis.index.record import Record, document_id
from tamis.prompt.segments import Prompt

FAMILIES = ("llama", "qwen2", "qwen3")
QUESTION = "Where is the lamp?"
Open = Callable[..., LLM]


def prompt_of(llm: LLM, documents: list[str], question: str = QUESTION) -> Prompt:
    return llm.template.prompt(question, [llm.document_tokens(d) for d in reversed(documents)])


def stock_logits(model: Any, prompt: Prompt) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt.tokens]), logits_to_keep=1).logits[0, -1]
    return logits


class TestAllTilesAreDense:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_equal_to_transformers(self, open_llm: Open, loaded: Any, documents: list[str], family: str) -> None:
        llm = open_llm(family)
        prompt = prompt_of(llm, documents)
        llm.close()
        stock = stock_logits(loaded(family).model, prompt)
        llm = open_llm(family)
        assert torch.equal(llm.prefill(prompt, prefill="dense").logits, stock)
        made = llm.prefill(prompt, prefill="sift", selector="all", min_tokens=0)
        assert (made.report.used, made.report.density, stock.std() > 0.1) == ("sift", 1.0, True)
        torch.testing.assert_close(made.logits, stock, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_records_with_all_bits_set_bit_for_bit(self, open_llm: Open, documents: list[str], family: str) -> None:
        llm = open_llm(family, prefill="sift", min_tokens=0)
        prompt = prompt_of(llm, documents)
        wanted = llm.prefill(prompt, selector="all").logits
        with llm.corpus() as base:
            spec = base.indexer.spec
            for d in prompt.documents:
                bits = trivial_bits(spec.n_layers, spec.n_heads, 1, spec.tile)
                pages = -(-len(d.tokens) // spec.tile)
                la = torch.ones(spec.n_layers, spec.n_heads, pages, pages, dtype=torch.bool).tril()
                full = type(bits)(la, torch.ones(spec.n_layers, spec.n_heads, pages, dtype=torch.bool))
                base.indexer.store.put(
                    [Record.of(full, document_id=document_id(d.tokens), spec=spec, n_tokens=len(d.tokens))]
                )
            for selector, options in (("stored", {}), ("sampled", {"mass": 1.0})):
                made = llm.prefill(prompt, selector=selector, **options)
                assert made.report.indexed == 0
                assert made.report.density == 1.0, selector
                assert torch.equal(made.logits, wanted), selector

    def test_sparse_differs_and_says_how_much(self, llm: LLM, documents: list[str]) -> None:
        prompt = prompt_of(llm, documents)
        made = llm.prefill(prompt, selector="none", measure_recall=True)
        assert made.report.density < 1
        assert made.report.recall is not None and made.report.recall < 1
        assert not torch.equal(made.logits, llm.prefill(prompt, prefill="dense").logits)


class TestGenerate:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_greedy_is_transformers_generate(
        self, open_llm: Open, loaded: Any, documents: list[str], family: str
    ) -> None:
        llm = open_llm(family)
        answer = llm.generate(QUESTION, documents, sampling=Sampling(max_new_tokens=24))
        prompt = prompt_of(llm, documents)
        llm.close()
        ids = torch.tensor([prompt.tokens])
        made = (
            loaded(family)
            .model.generate(
                ids, max_new_tokens=24, do_sample=False, eos_token_id=sorted(llm.stop_tokens), pad_token_id=0
            )[0, ids.shape[1] :]
            .tolist()
        )
        assert list(answer.tokens) == [t for t in made if t not in llm.stop_tokens]
        assert answer.report.new_tokens == len(answer.tokens)

    def test_a_seed_repeats_and_another_differs(self, llm: LLM, documents: list[str]) -> None:
        def draw(seed: int | None) -> tuple[int, ...]:
            sampling = Sampling(max_new_tokens=16, temperature=5.0, top_k=200, top_p=0.99, seed=seed)
            return llm.generate(QUESTION, documents, sampling=sampling).tokens

        assert draw(1) == draw(1)
        assert len({draw(1), draw(2), draw(None), draw(None)}) == 4

    def test_pieces_joined_are_the_text(self, llm: LLM, documents: list[str]) -> None:
        for seed in range(4):
            sampling = Sampling(max_new_tokens=40, temperature=5.0, seed=seed)
            pieces: list[str] = []
            answer = llm.generate(QUESTION, documents, sampling=sampling, on_text=pieces.append)
            assert "".join(pieces) == answer.text == "".join(llm.stream(QUESTION, documents, sampling=sampling))
            assert answer.text == answer.text.strip()

    def test_no_documents_and_empty_ones(self, llm: LLM) -> None:
        answer = llm.generate(QUESTION, sampling=Sampling(max_new_tokens=3))
        assert answer.report.prefill.used == "dense" and "no document" in answer.report.prefill.reason
        assert answer.sources == ()
        empty = llm.generate(QUESTION, ["", "  \n"], sampling=Sampling(max_new_tokens=3))
        assert empty.tokens == answer.tokens and len(empty.sources) == 2

    def test_tiny_and_repeated_documents(self, llm: LLM, documents: list[str]) -> None:
        given = ["a", documents[0], documents[0], "b"]
        answer = llm.generate(QUESTION, given, sampling=Sampling(max_new_tokens=2))
        report = answer.report.prefill
        assert (report.used, report.documents, report.indexed) == ("sift", 4, 3)
        full = llm.prefill(prompt_of(llm, given), selector="all").logits
        dense = llm.prefill(prompt_of(llm, given), prefill="dense").logits
        torch.testing.assert_close(full, dense, rtol=1e-4, atol=1e-4)

    def test_the_best_document_stands_last(self, llm: LLM) -> None:
        prompt = llm.template.prompt(QUESTION, [llm.document_tokens(d) for d in ("second", "first")])
        answer = llm.generate(QUESTION, ["first", "second"], sampling=Sampling(max_new_tokens=1))
        assert torch.equal(answer.first_logits, llm.prefill(prompt).logits)
        assert [s.place.split(":")[0] for s in answer.sources] == ["text 1", "text 2"]

    def test_history_stands_between_documents_and_question(self, llm: LLM) -> None:
        turns = [Turn("Who keeps the lamp?", "The keeper.")]
        prompt = llm.template.prompt(QUESTION, [llm.document_tokens("a boat")], turns)
        text = llm.tokenizer.decode(prompt.tokens)
        places = [text.index(t) for t in ("a boat", "Who keeps the lamp?", "The keeper.", QUESTION)]
        assert places == sorted(places)
        answer = llm.generate(QUESTION, ["a boat"], history=turns, sampling=Sampling(max_new_tokens=1))
        assert torch.equal(answer.first_logits, llm.prefill(prompt).logits)

    def test_report_as_json(self, llm: LLM, documents: list[str]) -> None:
        answer = llm.generate(QUESTION, documents, sampling=Sampling(max_new_tokens=3))
        found = json.loads(json.dumps(answer.to_dict()))
        assert found["density"] == answer.report.prefill.density <= 1
        assert len(found["report"]["prefill"]["layers"]) == 2 and len(found["sources"]) == 3
        timing = answer.report.timing
        assert timing.ttft_s >= timing.prefill_s + timing.index_s > 0
        later = answer.with_retrieval(1.5, ["note"])
        assert later.report.timing.ttft_s == pytest.approx(timing.ttft_s + 1.5)
        assert later.report.notes == ("note",) and "note" in str(later.report)

    def test_compare(self, llm: LLM, documents: list[str]) -> None:
        both = llm.compare(QUESTION, documents, sampling=Sampling(max_new_tokens=2), measure_recall=True)
        assert (both.dense.report.prefill.used, both.sift.report.prefill.used) == ("dense", "sift")
        assert both.sift.report.prefill.indexed == 0  # made beforehand
        assert both.kl >= 0 and both.sift.report.prefill.recall is not None
        found = json.loads(json.dumps(both.to_dict()))
        assert found["speedup"] == pytest.approx(found["dense"]["ttft_s"] / found["sift"]["ttft_s"])
        same = llm.compare(QUESTION, documents, sampling=Sampling(max_new_tokens=2), selector="all")
        assert same.kl < 1e-6 and same.same_first_token and same.dense.tokens == same.sift.tokens

    def test_short_prompts_are_dense_and_say_so(self, open_llm: Open) -> None:
        llm = open_llm(prefill="sift")
        answer = llm.generate(QUESTION, ["a boat"], sampling=Sampling(max_new_tokens=1))
        assert f"sparse prefill pays from {MIN_TOKENS['cpu']}" in str(answer.report)


class TestTheContextsEnd:
    def test_answers_stop_at_the_context(self, open_llm: Open) -> None:
        llm = open_llm(model={"max_position_embeddings": 320})
        llm.stop_tokens = frozenset()
        room = 320 - len(prompt_of(llm, ["the boat " * 20]).tokens)
        assert 0 < room < 320
        answer = llm.generate(QUESTION, ["the boat " * 20], sampling=Sampling(max_new_tokens=500))
        assert len(answer.tokens) == room and answer.report.finish == "length"
        exact = llm.generate(QUESTION, ["the boat " * 20], sampling=Sampling(max_new_tokens=5))
        assert len(exact.tokens) == 5 and exact.report.finish == "length"

    def test_a_stop_token_is_a_stop(self, llm: LLM, documents: list[str]) -> None:
        tokens = llm.generate(QUESTION, documents, sampling=Sampling(max_new_tokens=8)).tokens
        llm.stop_tokens = frozenset({tokens[3]})
        answer = llm.generate(QUESTION, documents, sampling=Sampling(max_new_tokens=8))
        cut = tokens.index(tokens[3])
        assert answer.tokens == tokens[:cut] and answer.report.finish == "stop"

    @pytest.mark.parametrize("prefill", ["dense", "sift"])
    def test_too_long_a_question(self, open_llm: Open, prefill: str) -> None:
        llm = open_llm(model={"max_position_embeddings": 320}, prefill=prefill, min_tokens=0)
        for documents, question in ((["boat"], "why " * 500), (["boat " * 400], "why")):
            with pytest.raises(ContextOverflow, match=r"the prompt has \d+ tokens; this model takes 320"):
                llm.generate(question, documents)
        llm.generate(QUESTION, ["boat"], sampling=Sampling(max_new_tokens=1))  # still in order

    def test_fit(self, open_llm: Open) -> None:
        llm = open_llm(model={"max_position_embeddings": 320})
        many = [f"the boat {i} comes" for i in range(100)]
        kept = llm.fit(QUESTION, many, room=30)
        assert 0 < len(kept) < 100 and kept == many[: len(kept)]
        assert len(prompt_of(llm, kept).tokens) + 30 < 320 <= len(prompt_of(llm, many[: len(kept) + 1]).tokens) + 30
        with pytest.raises(ContextOverflow, match=r"the first document has \d+ tokens .* model's 320"):
            llm.fit(QUESTION, ["boat " * 400], room=30)
        with pytest.raises(ContextOverflow, match=r"takes 320"):
            llm.fit("why " * 500, many)
        assert llm.fit(QUESTION, [], room=30) == []


class TestChoices:
    @pytest.mark.parametrize(
        ("choices", "says"),
        [
            ({"prefil": "sift"}, "Did you mean 'prefill'"),
            ({"prefill": "sfit"}, "Did you mean 'sift'"),
            ({"selector": "sample"}, "Did you mean 'sampled'"),
            ({"kernel": "cpuu"}, "Did you mean 'cpu'"),
            ({"kv": "fp8"}, "unknown kv"),
            ({"decode": "sparse"}, "unknown decode"),
            ({"tile": 32}, "tile is 32"),
            ({"mass": 1.5}, "mass is 1.5"),
            ({"rows": 0}, "rows is 0"),
            ({"alpha": -1}, "alpha is -1"),
            ({"min_tokens": -1}, "min_tokens is -1"),
            ({"ca_rule": "all"}, "ca_rule"),
        ],
        ids=str,
    )
    def test_typos_are_told(self, llm: LLM, choices: dict[str, Any], says: str) -> None:
        with pytest.raises(InvalidInput, match=says):
            Policy.of(**choices)
        with pytest.raises(InvalidInput, match=says):
            llm.generate(QUESTION, ["a"], **choices)

    @pytest.mark.parametrize(
        "options",
        [
            {"max_new_tokens": 0},
            {"temperature": -0.1},
            {"top_p": 0.0},
            {"top_k": -1},
            {"stop": "text"},
            {"stop": ("a", "")},
        ],
        ids=str,
    )
    def test_sampling_out_of_range(self, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput, match=f"{next(iter(options))} is"):
            Sampling(**options)

    def test_bf16_cache_halves_and_stays_close(self, llm: LLM, documents: list[str]) -> None:
        from tamis.cache.formats import cache_bytes

        prompt = prompt_of(llm, documents)
        full, half = (llm.prefill(prompt, selector="all", kv=kv) for kv in ("auto", "bf16"))
        assert cache_bytes(half.cache) * 2 == cache_bytes(full.cache) == len(prompt.tokens) * 2 * 2 * 2 * 64 * 4
        kl = torch.nn.functional.kl_div(half.logits.log_softmax(-1), full.logits.softmax(-1), reduction="sum")
        assert 0 < float(kl) < 0.05
        assert len(llm.generate(QUESTION, documents, kv="bf16", sampling=Sampling(max_new_tokens=6)).tokens) > 0

    @pytest.mark.parametrize(
        ("question", "texts", "says"),
        [
            (None, [], "question is None; give a text"),
            ("Where?", "One text, and no list.", "give a list of documents"),
            ("Where?", ["A text.", None, 3], "documents has NoneType, int; give texts, passages or hits"),
        ],
    )
    def test_what_is_no_text(self, llm: LLM, question: Any, texts: Any, says: str) -> None:
        with pytest.raises(InvalidInput, match=says):
            llm.generate(question, texts)

    def test_what_is_no_sampling(self, llm: LLM) -> None:
        with pytest.raises(InvalidInput, match="sampling is 'greedy'; give a tamis"):
            llm.generate("Where?", [], sampling="greedy")  # type: ignore[arg-type]


class TestLifetime:
    def test_close_gives_the_stock_model_back(self, loaded: Any) -> None:
        model = loaded("qwen3").model
        before = model.config._attn_implementation
        with LLM(loaded("qwen3")) as llm:
            assert model.config._attn_implementation == "tamis"
            with pytest.raises(InvalidInput, match=r"attached to Tamis already"):
                LLM(loaded("qwen3"))
        llm.close()  # twice is harmless
        assert model.config._attn_implementation == before
        assert not any(hasattr(m, "tamis_switch") for m in model.modules())

    def test_a_failed_prefill_leaves_the_next_one_alone(self, llm: LLM, documents: list[str]) -> None:
        prompt = prompt_of(llm, documents)
        wanted = llm.prefill(prompt).logits

        def broken(*_: Any) -> None:
            raise KeyboardInterrupt

        hook = llm.runner.model.model.layers[1].register_forward_pre_hook(broken)
        with pytest.raises(KeyboardInterrupt):
            llm.prefill(prompt)
        hook.remove()
        assert torch.equal(llm.prefill(prompt).logits, wanted)

    def test_the_public_names(self) -> None:
        assert all(getattr(tamis, name) is not None for name in tamis.__all__)
        assert tamis.LLM is LLM and issubclass(ContextOverflow, TamisError)
        with pytest.raises(AttributeError, match=r"Public names: Answer"):
            _ = tamis.Llm


class TestOnTheRealModel:
    def test_all_tiles_are_stock_transformers(self, smollm2: Any) -> None:
        text = ("The harbour crane lifts stores from the boat on Mondays. The lamp is lit at dusk. " * 14).strip()
        with LLM(smollm2, prefill="sift", min_tokens=0) as llm:
            prompt = llm.template.prompt("When does the crane work?", [llm.document_tokens(text), (7, 8, 9)])
            assert 300 < len(prompt.tokens) < 700
            listed = llm.prefill(prompt, selector="all").logits
            sampled = llm.prefill(prompt, selector="sampled", mass=1.0, alpha=0.0)
        stock = stock_logits(smollm2.model, prompt)
        torch.testing.assert_close(listed, stock, rtol=1e-4, atol=1e-4)
        assert sampled.report.density == 1.0 and torch.equal(sampled.logits, listed)
