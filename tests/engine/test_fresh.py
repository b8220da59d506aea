"""Documents that a request computes itself beside stored ones: dense, or as a selector of SIFT chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tamis.attention.blend import CHOOSERS
from tamis.core.errors import InvalidInput
from tamis.engine.llm import LLM
from tamis.engine.runner import Prefilled
from tamis.prompt.segments import Kind, Prompt

PAGE_BYTES = 2 * 2 * 2 * 64 * 4 * 128
CLOSE = 1e-4
PIECES = (("prefix", 128), ("document", 256), ("document", 128), ("document", 384), ("history", 128), ("question", 20))
ODD = (("prefix", 37), ("document", 300), ("document", 170), ("document", 90), ("history", 11), ("question", 20))


def prompt_of(pieces: Sequence[tuple[str, int]] = PIECES) -> Prompt:
    draw = torch.Generator().manual_seed(5)
    return Prompt.of([(kind, torch.randint(0, 512, (n,), generator=draw).tolist()) for kind, n in pieces])


@pytest.fixture
def llm(open_llm: Callable[..., LLM]) -> LLM:
    return open_llm(cache_bytes=60 * PAGE_BYTES, accept_block_attention=True, missing="inline", min_tokens=0)


def store(llm: LLM, prompt: Prompt, *numbers: int) -> None:
    """Have these documents of the prompt stored."""
    documents = [prompt.documents[i] for i in numbers]
    some = Prompt.of([("prefix", [1]), *[("document", d.tokens) for d in documents], ("question", [2, 3])])
    llm.prefill(some, prefill="reuse", missing="store").close()


def mixed(llm: LLM, prompt: Prompt, **choices: Any) -> Prefilled:
    return llm.prefill(prompt, **{"prefill": "reuse", "fresh": "sift", **choices})


def masked(llm: LLM, prompt: Prompt, stored: Sequence[int]) -> torch.Tensor:
    """The stock model's logits where stored documents see themselves, fresh ones no other document, others all."""
    kind = torch.cat([torch.full((len(s.tokens),), i) for i, s in enumerate(prompt.segments)])
    document = [i for i, s in enumerate(prompt.segments) if s.kind is Kind.DOCUMENT]
    n = len(prompt.tokens)
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    for number, i in enumerate(document):
        rows = kind == i
        others = kind != i if number in stored else (torch.isin(kind, torch.tensor(document)) & (kind != i))
        seen &= ~(rows[:, None] & others[None, :])
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        ids = torch.tensor([prompt.tokens])
        logits: torch.Tensor = llm.runner.model(ids, attention_mask=mask, use_cache=False).logits[0, -1]
    return logits


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("pieces", [PIECES, ODD])
@pytest.mark.parametrize("stored", [(), (0, 2), (1,)])
def test_all_tiles_are_what_dense_computes(llm: LLM, pieces: Any, stored: tuple[int, ...]) -> None:
    prompt = prompt_of(pieces)
    if stored:
        store(llm, prompt, *stored)
    dense, made = mixed(llm, prompt, fresh="dense"), mixed(llm, prompt, selector="all")
    assert far(dense.logits, made.logits) < CLOSE
    assert (made.report.selector, dense.report.selector) == ("all", "")
    assert made.report.density == pytest.approx(dense.report.density)
    assert far(dense.cache.step(7), made.cache.step(7)) < CLOSE


@pytest.mark.parametrize("selector", ["none", "sampled", "threshold", "stored", "oracle"])
def test_with_nothing_stored_it_is_sift(llm: LLM, selector: str) -> None:
    prompt = prompt_of()
    llm.index([d.tokens for d in prompt.documents])
    # thresholds at which a random model's bits and rows leave something out
    choices: dict[str, Any] = {"selector": selector, "mass": 0.6, "theta": 0.2}
    sift = llm.prefill(prompt, prefill="sift", **choices)
    made = mixed(llm, prompt, **choices)
    assert far(sift.logits, made.logits) < CLOSE
    assert made.report.density == pytest.approx(sift.report.density, abs=1e-6)
    assert selector == "stored" or made.report.density < 1


@pytest.mark.parametrize("stored", [(0, 2), (1,), (0, 1), (2,)])
def test_fresh_rows_see_no_other_document_where_none_is_chosen(llm: LLM, stored: tuple[int, ...]) -> None:
    prompt = prompt_of()
    store(llm, prompt, *stored)
    made = mixed(llm, prompt, selector="none")
    assert far(made.logits, masked(llm, prompt, stored)) < CLOSE
    assert made.report.density < mixed(llm, prompt, fresh="dense").report.density


@pytest.mark.parametrize("tile", [64, 128])
def test_pages_that_two_documents_share(llm: LLM, tile: int) -> None:
    prompt = prompt_of(ODD)
    store(llm, prompt, 0)
    made, dense = (mixed(llm, prompt, selector=s, tile=tile) for s in ("none", "all"))
    assert 0 < made.report.density < dense.report.density


@pytest.mark.parametrize("blend", list(CHOOSERS))
def test_recomputed_tokens_beside_it(llm: LLM, blend: str) -> None:
    prompt = prompt_of(ODD)
    store(llm, prompt, 0, 2)
    choices: dict[str, Any] = {"prefill": "blend", "blend": blend, "recompute": 0.3}
    dense, made = mixed(llm, prompt, fresh="dense", **choices), mixed(llm, prompt, selector="all", **choices)
    assert far(dense.logits, made.logits) < CLOSE
    assert made.report.density == pytest.approx(dense.report.density)
    assert mixed(llm, prompt, selector="none", **choices).report.density < made.report.density


def test_in_pages_outside_a_full_cache(llm: LLM, open_llm: Callable[..., LLM]) -> None:
    prompt = prompt_of()
    store(llm, prompt, 0, 2)
    wanted = mixed(llm, prompt, selector="none").logits
    llm.close()
    tight = open_llm(cache_bytes=6 * PAGE_BYTES, accept_block_attention=True, missing="inline", min_tokens=0)
    store(tight, prompt, 0, 2)
    made = mixed(tight, prompt, selector="none")
    assert made.report.reuse is not None and made.report.reuse.private and made.report.reuse.reused == 640
    assert far(made.logits, wanted) < CLOSE


def test_copies(llm: LLM) -> None:
    prompt = prompt_of()
    store(llm, prompt, 0, 2)
    here, copied = (mixed(llm, prompt, selector="none", reuse_copies=c) for c in (False, True))
    assert far(here.logits, copied.logits) < CLOSE


def test_no_record_is_made_and_none_is_needed(llm: LLM) -> None:
    prompt = prompt_of()
    store(llm, prompt, 0)
    made = mixed(llm, prompt, selector="sampled", mass=0.6)
    assert made.report.indexed == 0
    assert llm.index([d.tokens for d in prompt.documents]) == 3


def test_a_short_prompt_stays_dense_and_says_so(llm: LLM) -> None:
    prompt = prompt_of()
    made = mixed(llm, prompt, selector="none", min_tokens=5000)
    assert made.report.selector == "" and "fresh documents are dense: the prompt has 1044" in made.report.fallbacks[-1]
    store(llm, prompt, 0, 1, 2)
    assert mixed(llm, prompt, min_tokens=5000).report.fallbacks == (), "there is no fresh document to speak of"


def test_unknown(llm: LLM) -> None:
    with pytest.raises(InvalidInput, match="unknown fresh 'spares'"):
        mixed(llm, prompt_of(), fresh="spares")
