"""Answers over the self-indexed cache: exact prompts, reported approximations, and combinations that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tamis.core.errors import InvalidInput, ModelUnsupported
from tamis.engine.llm import LLM
from tamis.engine.sampling import Sampling
from tamis.prompt.segments import Prompt

Open = Callable[..., LLM]
QUESTION = "Where is the lamp?"
SPARSE = {"kv": "selfindex", "decode": "selfindex"}


def tokens(llm: LLM, prompt: Prompt, n: int = 12, **choices: Any) -> tuple[list[int], Any]:
    start = llm.prefill(prompt, **choices)
    made = list(llm.runner.decode(start, Sampling(max_new_tokens=n), frozenset()))
    assert start.decoding is not None
    return made, start.decoding.report()


def drawn(n: int) -> Prompt:
    return Prompt.of([("question", torch.randint(4, 500, (n,)).tolist())])


class TestGenerate:
    def test_by_request_and_for_all_requests(self, open_llm: Open, documents: list[str]) -> None:
        llm, always = open_llm(), open_llm("qwen3", **SPARSE)
        sampling = Sampling(max_new_tokens=8)
        plain = llm.generate(QUESTION, documents, sampling=sampling)
        asked = llm.generate(QUESTION, documents, sampling=sampling, **SPARSE)
        for answer in (asked, always.generate(QUESTION, documents, sampling=sampling)):
            report = answer.report.decode
            assert report is not None and (report.used, report.kv, report.approximate) == ("selfindex",) * 2 + (True,)
            assert report.steps >= answer.report.new_tokens - 1 and "selfindex decode" in str(answer.report)
            assert json.loads(json.dumps(answer.to_dict()))["report"]["decode"]["approximate"] is True
        assert torch.equal(asked.first_logits, plain.first_logits)
        assert plain.report.decode is not None and plain.report.decode.kv == "auto"
        assert "decode" not in str(plain.report) and not plain.report.decode.approximate

    def test_with_sift(self, llm: LLM, documents: list[str]) -> None:
        plain = llm.generate(QUESTION, documents, sampling=Sampling(max_new_tokens=6))
        asked = llm.generate(QUESTION, documents, sampling=Sampling(max_new_tokens=6), decode="selfindex")
        assert asked.report.prefill.used == "sift" and asked.report.decode is not None
        assert asked.report.decode.used == "selfindex" and torch.equal(asked.first_logits, plain.first_logits)

    def test_in_chunks(self, llm: LLM, documents: list[str]) -> None:
        prompt = llm.template.prompt(QUESTION, [llm.document_tokens(d) for d in documents])
        whole = tokens(llm, prompt, **SPARSE)[0]
        start = llm.prefill(prompt, chunk_tokens=256, **SPARSE)
        assert start.report.chunks > 1 and start.report.used == "sift"
        assert list(llm.runner.decode(start, Sampling(max_new_tokens=12), frozenset())) == whole

    def test_compare(self, llm: LLM, documents: list[str]) -> None:
        both = llm.compare(QUESTION, documents, sampling=Sampling(max_new_tokens=4), **SPARSE)
        assert all(a.report.decode is not None and a.report.decode.kv == "selfindex" for a in (both.dense, both.sift))

    def test_a_full_budget_over_few_tokens_is_dense(self, open_llm: Open) -> None:
        llm, prompt = open_llm(), drawn(200)
        wanted, _ = tokens(llm, prompt)
        found, report = tokens(llm, prompt, **SPARSE)
        assert found == wanted and not report.approximate

    @pytest.mark.parametrize("n", [1, 2, 321, 1001])
    def test_lengths(self, open_llm: Open, n: int) -> None:
        llm, prompt = open_llm(), drawn(n)
        found, report = tokens(llm, prompt, **SPARSE)
        assert len(found) == 12 and report.steps == 11 and report.n_tokens == n + 11
        assert report.approximate == (n > 300) and found[0] == tokens(llm, prompt, 1)[0][0]

    def test_dense_reading_of_all_records_is_a_full_budget(self, open_llm: Open) -> None:
        llm, prompt = open_llm(), drawn(900)
        read, dense = tokens(llm, prompt, kv="selfindex")
        chosen, sparse = tokens(llm, prompt, decode_budget=1.0, **SPARSE)
        assert read == chosen and (dense.used, sparse.used) == ("dense", "selfindex")
        assert dense.kv_bytes == sparse.kv_bytes < dense.bf16_bytes and sparse.attended == 1.0

    def test_nothing_is_compressed_for_a_first_token(self, open_llm: Open) -> None:
        llm = open_llm()
        start = llm.prefill(drawn(900), **SPARSE)
        assert start.decoding is not None and start.decoding.report().compress_s == 0
        assert len(list(llm.runner.decode(start, Sampling(max_new_tokens=1), frozenset()))) == 1
        assert not start.decoding.report().approximate and start.cache.layers[0].sequence.n_compressed == 0


class TestRefused:
    @pytest.mark.parametrize("prefill", ["reuse", "blend", "prefix"])
    def test_pages(self, open_llm: Open, documents: list[str], prefill: str) -> None:
        llm = open_llm(**SPARSE)
        refusal = rf"prefill='{prefill}' keeps documents in pages .* prefill='dense' or 'sift'"
        with pytest.raises(InvalidInput, match=refusal):
            llm.generate(QUESTION, documents, prefill=prefill, accept_block_attention=True)

    def test_a_head_dim_at_once(self, open_llm: Open) -> None:
        with pytest.raises(ModelUnsupported, match="head_dim 96"):
            open_llm("qwen2", model={"head_dim": 96}, **SPARSE)
        llm = open_llm("qwen2", model={"head_dim": 96})
        with pytest.raises(ModelUnsupported, match="Use kv='auto'"):
            llm.prefill(drawn(20), kv="selfindex")
        assert llm.prefill(drawn(20)).n_tokens == 20

    def test_bf16_beside_it(self, open_llm: Open) -> None:
        with pytest.raises(InvalidInput, match="decode='selfindex' reads codes that kv='bf16' does not keep"):
            open_llm().prefill(drawn(20), kv="bf16", decode="selfindex")


def test_smollm2_finds_the_needle(smollm2: Any) -> None:
    lamps = [f"Station {i} has {3 + 2 * i} lamps and a red roof." for i in range(80)]
    text = " ".join([*lamps[:40], "The keeper's password is heliotrope.", *lamps[40:]])
    with LLM(smollm2, **SPARSE) as llm:
        answer = llm.generate("What is the keeper's password?", [text], sampling=Sampling(max_new_tokens=16))
    report = answer.report.decode
    assert report is not None and report.used == "selfindex" and report.approximate and report.attended < 0.4
    assert "heliotrope" in answer.text
