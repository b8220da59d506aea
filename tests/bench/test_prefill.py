"""The prefill benchmark on a tiny model: it checks before it times, and its prompt has the length asked for."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
import torch

from tamis.bench import prefill as bench
from tamis.bench.prefill import bench_prefill, check_dense_equality
from tamis.bench.text import passages
from tamis.core.errors import NothingFound, TamisError
from tamis.engine.llm import LLM
from tamis.select.every import AllTiles, NoCrossTiles


def test_the_result(llm: LLM) -> None:
    told: list[str] = []
    found = bench_prefill(llm, 700, repeats=2, note=told.append)
    assert (found.prompt_tokens, found.selector, found.kernel) == (700, "sampled", "cpu")
    assert len(found.dense_ttft_s) == len(found.sift_ttft_s) == 2 and found.gate_error < 1e-4
    assert found.speedup == median(found.dense_ttft_s) / median(found.sift_ttft_s)
    assert 0 < found.density <= 1 and found.recall is not None and 0.5 < found.recall <= 1 and found.kl >= 0
    assert json.loads(json.dumps(found.to_dict()))["dense_ttft_s"] == median(found.dense_ttft_s)
    assert told == [f"indexing {found.documents} documents", "warm-up", "run 1 of 2", "run 2 of 2", "measuring recall"]
    rows = found.rows(llm.dtype)
    assert {(r.provider, r.metric) for r in rows} == {
        ("dense", "ttft_s"),
        *(("sampled", m) for m in ("ttft_s", "speedup", "density", "kl", "recall")),
    }


def test_nothing_is_timed_when_the_sparse_path_is_wrong(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllTiles, "select", NoCrossTiles.select)
    told: list[str] = []
    with pytest.raises(TamisError, match=r"differ from stock transformers by"):
        bench_prefill(llm, 700, repeats=1, note=told.append)
    assert told == []


def test_not_a_number_is_no_equality(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_error", lambda a, b: float("nan"))
    with pytest.raises(TamisError, match=r"by nan"):
        check_dense_equality(llm, bench._prompt(llm, 300, ()))


@pytest.mark.parametrize("n_tokens", [1, 140, 256, 900, 5000])
def test_lengths(llm: LLM, n_tokens: int) -> None:
    least = len(llm.template.prompt(bench.QUESTION, []).tokens)
    prompt = bench._prompt(llm, n_tokens, ())
    assert len(prompt.tokens) == max(least, min(n_tokens, 1499))
    assert all(d.tokens for d in prompt.documents)


def test_given_files(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("The boat comes. " * 30)
    prompt = bench._prompt(llm, 1400, [str(tmp_path)])
    assert 100 < len(prompt.tokens) < 1400 and "The boat" in llm.tokenizer.decode(prompt.documents[0].tokens)
    with pytest.raises(TamisError, match=r"nothing"):
        passages(100, llm.template.count, [str(tmp_path / "nothing")])
    (tmp_path / "none").mkdir()
    with pytest.raises(NothingFound, match=r"hold no passages"):
        passages(100, llm.template.count, [str(tmp_path / "none")])


def test_built_in_text_is_the_same_each_time(llm: LLM) -> None:
    first = passages(3000, llm.template.count)
    assert first == passages(3000, llm.template.count)
    assert sum(llm.template.count(p.text) for p in first) >= 3000
    assert torch.equal(*(llm.prefill(bench._prompt(llm, 600, ()), prefill="dense").logits for _ in range(2)))
