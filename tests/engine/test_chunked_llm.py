"""Prompts in chunks through a whole model: the logits, densities and answers of the whole prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils

from tamis.engine.llm import LLM
from tamis.engine.sampling import Sampling
from tamis.prompt.segments import Prompt

Open = Callable[..., LLM]
SAME = ("all", "none", "stored", "sampled", "threshold", "oracle", "xattention")
CHUNKS = {"one tile": 1, "three tiles": 192, "uneven": 300}


def prompt_of(llm: LLM, documents: list[str]) -> Prompt:
    return llm.template.prompt("Where is the lamp?", [llm.document_tokens(d) for d in documents])


@pytest.fixture
def small(open_llm: Open) -> LLM:
    """Tiles of 64, so that the documents have several."""
    return open_llm(prefill="sift", min_tokens=0, tile=64)


@pytest.mark.parametrize("cut", CHUNKS)
class TestEqual:
    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
    def test_dense(self, open_llm: Open, documents: list[str], family: str, cut: str) -> None:
        llm = open_llm(family, prefill="dense")
        prompt = prompt_of(llm, documents)
        whole, parts = (llm.prefill(prompt, chunk_tokens=n) for n in (None, CHUNKS[cut]))
        torch.testing.assert_close(parts.logits, whole.logits, rtol=1e-4, atol=1e-4)
        assert whole.report.chunks == 1 < parts.report.chunks
        assert (parts.report.used, parts.report.fallbacks) == ("dense", ())

    @pytest.mark.parametrize("selector", SAME)
    def test_sparse(self, small: LLM, documents: list[str], selector: str, cut: str) -> None:
        prompt = prompt_of(small, documents)
        whole, parts = (
            small.prefill(prompt, selector=selector, chunk_tokens=n, measure_recall=True) for n in (None, CHUNKS[cut])
        )
        torch.testing.assert_close(parts.logits, whole.logits, rtol=1e-4, atol=1e-4)
        assert (parts.report.density, parts.report.layers) == (whole.report.density, whole.report.layers)
        assert parts.report.recall == pytest.approx(whole.report.recall, abs=1e-5)
        assert parts.report.used == "sift" and not parts.report.fallbacks
        assert f"in {parts.report.chunks} chunks" in str(parts.report) and parts.report.chunks > 1

    @pytest.mark.parametrize("selector", ["flexprefill", "vertical_slash"])
    def test_those_that_decide_per_chunk(self, small: LLM, documents: list[str], selector: str, cut: str) -> None:
        made = small.prefill(prompt_of(small, documents), selector=selector, chunk_tokens=CHUNKS[cut])
        assert bool(made.logits.isfinite().all()) and 0 < made.report.density <= 1 and not made.report.fallbacks


def test_sparse_is_sparse(small: LLM, documents: list[str]) -> None:
    prompt = prompt_of(small, documents)
    dense, sparse = (small.prefill(prompt, selector=s, chunk_tokens=192) for s in ("all", "none"))
    assert sparse.report.density < 0.9 and not torch.allclose(dense.logits, sparse.logits, atol=1e-3)


@pytest.mark.parametrize("kv", ["auto", "bf16"])
def test_answers(small: LLM, documents: list[str], kv: str) -> None:
    """Decoding goes on from the cache of all chunks."""
    sampling = Sampling(max_new_tokens=8)
    found = []
    for chunk_tokens in (None, 192):
        start = small.prefill(prompt_of(small, documents), kv=kv, chunk_tokens=chunk_tokens)
        found.append(list(small.runner.decode(start, sampling, frozenset())))
    assert found[0] == found[1] and len(found[0]) == 8


def test_chunks_longer_than_the_prompt(small: LLM, documents: list[str]) -> None:
    prompt = prompt_of(small, documents)
    whole, parts = (small.prefill(prompt, chunk_tokens=n) for n in (None, 10**6))
    assert torch.equal(whole.logits, parts.logits) and parts.report.chunks == 1


def test_a_failed_chunk_leaves_nothing_behind(small: LLM, documents: list[str]) -> None:
    prompt = prompt_of(small, documents)
    wanted = small.prefill(prompt).logits
    passes: list[int] = []

    def broken(*_: object) -> None:
        passes.append(1)
        if len(passes) == 2:
            raise RuntimeError("planted")

    hook = small.runner.model.model.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="planted"):
        small.prefill(prompt, chunk_tokens=192)
    hook.remove()
    assert small.runner.switch.job is None and torch.equal(small.prefill(prompt).logits, wanted)


@pytest.mark.parametrize(
    "choices", [{"selector": "none"}, {"prefill": "blocks", "prefill_blocks": 4, "decode_local": 1}]
)
def test_no_mask_is_made_for_a_sparse_chunk(
    small: LLM, documents: list[str], choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be as long as all tokens so far, for each row."""
    prompt = prompt_of(small, documents)
    wanted = small.prefill(prompt, **choices).logits
    made: list[Any] = []
    make = masking_utils.sdpa_mask
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda *a, **k: made.append(make(*a, **k)) or made[-1])
    parts = small.prefill(prompt, chunk_tokens=192, **choices)
    assert parts.report.chunks > 2 and not parts.report.fallbacks and not made
    torch.testing.assert_close(parts.logits, wanted, rtol=1e-3, atol=1e-3)
    dense = small.prefill(prompt, prefill="dense", chunk_tokens=192)
    assert any(mask is not None for mask in made) and dense.report.used == "dense"


def test_a_sparse_chunk_that_no_job_takes_is_an_error(
    small: LLM, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a mask its rows would see what comes behind them."""
    monkeypatch.setattr(small.runner.switch, "takes", lambda *_: False)
    with pytest.raises(RuntimeError, match="has no mask and no job"):
        small.prefill(prompt_of(small, documents), selector="all", chunk_tokens=192)
    monkeypatch.undo()
    assert small.prefill(prompt_of(small, documents), chunk_tokens=192).report.used == "sift"
