"""The offline-pass benchmark on a tiny model: it checks before it times, and both sides do the same packs."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import pytest
import torch

from tamis.attention import offline
from tamis.bench import index as bench
from tamis.bench.index import bench_index, check_packing, shape_subject, text_subject
from tamis.core.errors import ContextOverflow, InvalidInput, TamisError
from tamis.engine.llm import LLM
from tamis.kernels import dispatch


def test_the_result(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    forward = offline.packed_forward

    def counting(model: Any, switch: Any, prompts: Any, job: Any) -> None:
        passes.append(sum(map(len, prompts)))
        forward(model, switch, prompts, job)

    subject = text_subject(llm, 5, 200)
    monkeypatch.setattr(bench, "check_packing", lambda _: 1e-6)
    monkeypatch.setattr(bench, "packed_forward", counting)
    monkeypatch.setattr(offline, "packed_forward", counting)
    told: list[str] = []
    prompt = 200 + len(subject.prefix)
    found = bench_index(subject, repeats=2, pack_tokens=2 * prompt, note=told.append)
    assert passes == [2 * prompt, 2 * prompt, prompt] * 6, "dense and offline, three times"
    assert (found.documents, found.tokens, found.passes, found.pack_tokens) == (5, 200, 3, 2 * prompt)
    assert len(found.offline_s) == len(found.dense_s) == 2 and told == ["warm-up", "run 1 of 2", "run 2 of 2"]
    made = json.loads(json.dumps(found.to_dict()))
    assert made["ratio"] == median(a / b for a, b in zip(found.offline_s, found.dense_s, strict=True))
    assert made["documents_per_s"] == 5 / made["offline_s"]
    rows = {r.metric: r for r in found.rows()}
    assert set(rows) == {"offline_s", "dense_s", "ratio", "documents_per_s"}
    assert {r.case for r in rows.values()} == {"tiny/5 x 200"}


def test_documents_of_text(llm: LLM) -> None:
    subject = text_subject(llm, 4, 150)
    assert [len(d) for d in subject.documents] == [150] * 4 and len({tuple(d) for d in subject.documents}) == 4
    assert [list(d) for d in text_subject(llm, 4, 150).documents] == [list(d) for d in subject.documents]
    assert check_packing(subject) < 1e-4


def test_a_shape() -> None:
    with shape_subject("tiny", 3, 140, device="cpu", dtype=torch.float32, layers=1) as subject:
        found = bench_index(subject, repeats=1)
        assert (found.model, found.passes, found.prefix_tokens) == ("tiny-1-layers", 1, bench.PREFIX_TOKENS)
        assert subject.model.config._attn_implementation == "tamis"
        model = subject.model
    assert model.config._attn_implementation != "tamis"


def test_nothing_is_timed_when_documents_see_each_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dispatch, "packed_causal_attention", lambda q, k, v, scale, _: dispatch.causal_attention(q, k, v, scale)
    )
    told: list[str] = []
    with pytest.raises(TamisError, match=r"share a pass differ from each alone by"):
        bench_index(text_subject(llm, 3, 200), repeats=1, note=told.append)
    assert told == []


def test_a_nan_of_any_document_is_a_difference(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.observe_documents

    def broken(model: Any, switch: Any, documents: Any, prefix: Any, **how: Any) -> Any:
        found = real(model, switch, documents, prefix, **how)
        if len(documents) > 1:
            found[-1].tile_mass[0] = float("nan")
        return found

    monkeypatch.setattr(bench, "observe_documents", broken)
    with pytest.raises(TamisError, match="differ from each alone by nan"):
        check_packing(text_subject(llm, 3, 200))


def test_documents_beyond_the_context_are_named_before_a_pass(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "packed_forward", lambda *_: pytest.fail("a pass was made"))
    limit = llm.runner.geometry.context_tokens
    with pytest.raises(ContextOverflow, match=f"a document of {limit} tokens behind a prefix"):
        bench_index(text_subject(llm, 1, limit))


@pytest.mark.parametrize(("tokens", "same"), [(128, False), (140, True)])
def test_documents_that_cannot_be_timed(tokens: int, same: bool) -> None:
    with shape_subject("tiny", 3, tokens, device="cpu", dtype=torch.float32, layers=1) as subject:
        documents = [subject.documents[0]] * 3 if same else subject.documents
        given = bench.Subject(subject.name, subject.model, subject.switch, subject.spec, subject.prefix, documents)
        with pytest.raises(InvalidInput, match=rf"3 documents, {1 if same else 3} of them different, .* of {tokens}"):
            bench_index(given, repeats=1)
