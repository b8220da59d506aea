"""Documents reused in place against stock transformers with a block-diagonal mask, and what a request reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.attention import reuse
from tamis.attention.reuse_layout import Layout, Piece
from tamis.core.errors import InvalidInput, ModelUnsupported
from tamis.engine.llm import LLM
from tamis.engine.runner import Prefilled
from tamis.engine.sampling import Sampling
from tamis.prompt.segments import Kind, Prompt

PAGES = 64
PAGE_BYTES = 2 * 2 * 2 * 64 * 4 * 128  # of the tiny models
CLOSE = 1e-4
REUSE: dict[str, Any] = {"prefill": "reuse", "accept_block_attention": True}


@pytest.fixture
def tokens() -> Callable[[int], list[int]]:
    draw = torch.Generator().manual_seed(3)
    return lambda n: torch.randint(0, 512, (n,), generator=draw).tolist()


@pytest.fixture
def documents(tokens: Callable[[int], list[int]]) -> list[list[int]]:
    """Of lengths around a page: short, whole, one more, two pages and a bit."""
    return [tokens(70), tokens(128), tokens(129), tokens(300)]


@pytest.fixture
def prompt(tokens: Callable[[int], list[int]], documents: list[list[int]]) -> Prompt:
    return placed(tokens(37), documents, tokens(20))


def placed(prefix: Sequence[int], documents: Sequence[Sequence[int]], question: Sequence[int]) -> Prompt:
    return Prompt.of([("prefix", prefix), *(("document", d) for d in documents), ("question", question)])


def block_mask(prompt: Prompt, *, seeing: Sequence[int] = (), more: int = 0) -> torch.Tensor:
    """[1, 1, n, n] to be added to scores: documents see themselves alone, but for those numbered in `seeing`."""
    n = len(prompt.tokens) + more
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    spans = [span for s, span in zip(prompt.segments, prompt.spans, strict=True) if s.kind is Kind.DOCUMENT]
    for i, (start, end) in enumerate(spans):
        if i not in seeing:
            visible[start:end, :start] = False
    return torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]


def stock(llm: LLM, prompt: Prompt, mask: torch.Tensor | None = None, more: Sequence[int] = ()) -> torch.Tensor:
    """Logits of transformers' own attention behind the prompt's last token."""
    ids = torch.tensor([[*prompt.tokens, *more]])
    with torch.inference_mode():
        logits: torch.Tensor = llm.runner.model(ids, attention_mask=mask, use_cache=False).logits[0, -1]
    return logits


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def used(made: Prefilled) -> reuse.ReuseReport:
    assert made.report.reuse is not None
    return made.report.reuse


@pytest.fixture
def open_cached(open_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    return lambda family="llama", **choices: open_llm(family, **{"cache_bytes": PAGES * PAGE_BYTES} | choices)


class TestLogits:
    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
    def test_as_stock_attention_with_a_block_diagonal_mask(
        self, open_cached: Callable[..., LLM], prompt: Prompt, family: str
    ) -> None:
        llm = open_cached(family)
        wanted = stock(llm, prompt, block_mask(prompt))
        assert far(wanted, stock(llm, prompt)) > 100 * CLOSE, "documents that see each other must differ"
        for origin in ("computed", "device"):
            made = llm.prefill(prompt, **REUSE)
            assert far(made.logits, wanted) < CLOSE
            assert used(made).by_tier == {origin: 627} and used(made).fresh == 57
            made.close()

    def test_any_order_changes_offsets_alone(
        self, open_cached: Callable[..., LLM], tokens: Callable[[int], list[int]], documents: list[list[int]]
    ) -> None:
        llm, prefix, question = open_cached(), tokens(5), tokens(9)
        for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 0)):
            prompt = placed(prefix, [documents[i] for i in order], question)
            with_history = Prompt(
                (*prompt.segments[:-1], *Prompt.of([("history", question)]).segments, *prompt.segments[-1:])
            )
            for one in (prompt, with_history):
                assert far(llm.prefill(one, **REUSE).logits, stock(llm, one, block_mask(one))) < CLOSE
        assert llm.reuse_engine().store.cache.statistics().computed == 4

    def test_holes_are_computed_in_place(
        self, open_cached: Callable[..., LLM], tokens: Callable[[int], list[int]], documents: list[list[int]]
    ) -> None:
        llm, question = open_cached(), tokens(9)
        llm.prefill(placed([1], [documents[0], documents[3]], question), **REUSE).close()
        prompt = placed(tokens(37), [documents[0], documents[1], documents[3]], question)
        made = llm.prefill(prompt, missing="inline", **REUSE)
        assert far(made.logits, stock(llm, prompt, block_mask(prompt, seeing=[1]))) < CLOSE
        assert used(made).by_tier == {"device": 370} and used(made).fresh == 37 + 128 + 9
        assert "missing='inline'" in str(made.report)

    def test_greedy_decoding_follows_the_reference(self, open_cached: Callable[..., LLM], prompt: Prompt) -> None:
        llm = open_cached()
        made = llm.prefill(prompt, room_tokens=0, **REUSE)
        found = list(llm.runner.decode(made, Sampling(max_new_tokens=20), frozenset()))
        wanted: list[int] = []
        for n in range(20):
            wanted.append(int(stock(llm, prompt, block_mask(prompt, more=n), wanted).argmax()))
        assert found == wanted

    def test_decoding_over_a_page_border_and_back(self, open_cached: Callable[..., LLM], prompt: Prompt) -> None:
        """120 rows are left in the question's page: 150 tokens need another, beyond the room reserved."""
        llm = open_cached()
        made = llm.prefill(prompt, room_tokens=0, **REUSE)
        new = list(range(150))
        for token in new:
            logits = made.cache.step(token)
        assert far(logits, stock(llm, prompt, block_mask(prompt, more=150), new)) < CLOSE
        made.close()
        llm.reuse_engine().store.cache.check()

    def test_copies_answer_as_documents_in_place(self, open_cached: Callable[..., LLM], prompt: Prompt) -> None:
        llm = open_cached()
        here, copied = llm.prefill(prompt, **REUSE), llm.prefill(prompt, reuse_copies=True, **REUSE)
        assert far(here.logits, copied.logits) < 1e-5 * max(1.0, float(here.logits.abs().max()))
        assert (used(here).copied, used(copied).copied) == (0, 627)
        assert far(here.cache.step(5), copied.cache.step(5)) < CLOSE

    def test_a_document_that_ends_the_prompt_is_computed(
        self, open_cached: Callable[..., LLM], documents: list[list[int]]
    ) -> None:
        llm = open_cached()
        prompt = Prompt.of([("document", documents[3]), ("document", documents[0])])
        made = llm.prefill(prompt, **REUSE)
        assert far(made.logits, stock(llm, prompt, block_mask(prompt, seeing=[1]))) < CLOSE
        assert used(made).fresh == 70 and "generation goes on from it" in str(made.report)

    def test_a_real_model(self, smollm2: Any) -> None:
        with LLM(smollm2, cache_bytes=256 << 20) as llm:
            texts = ["The lamp of the north station is red.", "The crane lifts the stores on Monday. " * 20]
            tokens = [llm.document_tokens(t) for t in texts]
            prompt = llm.template.prompt("Which colour has the lamp?", tokens)
            made, wanted = llm.prefill(prompt, **REUSE), stock(llm, prompt, block_mask(prompt))
            assert far(made.logits, wanted) < CLOSE * max(1.0, float(wanted.abs().max()))


class TestMutations:
    """What these tests would not notice if they were blind."""

    def test_a_wrong_offset_is_seen(
        self, open_cached: Callable[..., LLM], prompt: Prompt, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm, of = open_cached(), Layout.of

        def shifted(pieces: list[Piece], page: int) -> Layout:
            return of([Piece(p.start, p.length, p.stored, p.local if p.local is None else 1) for p in pieces], page)

        monkeypatch.setattr(Layout, "of", shifted)
        assert far(llm.prefill(prompt, **REUSE).logits, stock(llm, prompt, block_mask(prompt))) > 10 * CLOSE

    def test_another_document_is_seen(
        self, open_cached: Callable[..., LLM], tokens: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompt = placed(tokens(9), [tokens(128), tokens(128)], tokens(9))
        llm, lay = open_cached(), Layout.of

        def swapped(pieces: Sequence[Piece], page: int) -> Layout:
            first, one, other, *rest = pieces
            one, other = (Piece(a.start, a.length, b.stored, b.local) for a, b in ((one, other), (other, one)))
            return lay([first, one, other, *rest], page)

        assert far(llm.prefill(prompt, **REUSE).logits, stock(llm, prompt, block_mask(prompt))) < CLOSE
        monkeypatch.setattr(Layout, "of", swapped)
        assert far(llm.prefill(prompt, **REUSE).logits, stock(llm, prompt, block_mask(prompt))) > 10 * CLOSE

    def test_a_stale_key_is_seen(
        self, open_cached: Callable[..., LLM], prompt: Prompt, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm, segments = open_cached(), Layout.stored_segments
        monkeypatch.setattr(Layout, "stored_segments", lambda self, own: segments(self, torch.zeros_like(own)))
        found = llm.prefill(prompt, prefill="blend", recompute=1.0).logits
        assert far(found, stock(llm, prompt)) > 10 * CLOSE


class TestCache:
    def test_documents_survive_a_restart(self, open_cached: Callable[..., LLM], prompt: Prompt, tmp_path: Path) -> None:
        with open_cached(cache_dir=tmp_path) as first:
            made = first.prefill(prompt, **REUSE)
            assert used(made).by_tier == {"computed": 627}
        second = open_cached(cache_dir=tmp_path)
        again = second.prefill(prompt, **REUSE)
        assert used(again).by_tier == {"disk": 627} and second.reuse_engine().store.passes == 0
        assert far(again.logits, made.logits) == 0.0

    def test_the_host_serves_what_the_device_evicts(
        self, open_cached: Callable[..., LLM], tokens: Callable[[int], list[int]], documents: list[list[int]]
    ) -> None:
        llm = open_cached(cache_bytes=5 * PAGE_BYTES, host_bytes=8 * PAGE_BYTES)
        one, two = (placed([1], [d], tokens(9)) for d in (documents[3], documents[2]))
        before = llm.prefill(one, **REUSE).logits
        llm.prefill(two, **REUSE).close()
        made = llm.prefill(one, **REUSE)
        assert used(made).by_tier == {"host": 300} and far(made.logits, before) == 0.0

    def test_many_threads_compute_a_document_once(
        self, open_cached: Callable[..., LLM], tokens: Callable[[int], list[int]], documents: list[list[int]]
    ) -> None:
        llm = open_cached()
        prompts = [placed([1], documents[:2], tokens(5 + i)) for i in range(8)]
        found: dict[int, torch.Tensor] = {}

        def ask(i: int) -> None:
            made = llm.prefill(prompts[i], **REUSE)
            found[i] = made.cache.step(3)
            made.close()

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store = llm.reuse_engine().store
        assert store.cache.statistics().computed == 2 and store.passes == 1
        assert not store._ready and not store._handed
        for i, prompt in enumerate(prompts):
            assert far(found[i], stock(llm, prompt, block_mask(prompt, more=1), [3])) < CLOSE
        store.cache.check()

    def test_several_documents_go_through_in_one_pass(self, open_cached: Callable[..., LLM], prompt: Prompt) -> None:
        llm = open_cached()
        llm.prefill(prompt, **REUSE).close()
        assert llm.reuse_engine().store.passes == 1  # 627 tokens fit one pass of a CPU

    @pytest.mark.parametrize("pages", [1, 2, 4, 7])
    def test_a_small_budget_falls_back_with_the_reason(
        self, open_cached: Callable[..., LLM], prompt: Prompt, pages: int
    ) -> None:
        llm = open_cached(cache_bytes=pages * PAGE_BYTES)
        made = llm.prefill(prompt, room_tokens=200, **REUSE)
        kept = [d is not None for d in made.cache.held.documents]
        assert not all(kept) or pages == 7
        wanted = stock(llm, prompt, block_mask(prompt, seeing=[i for i, k in enumerate(kept) if not k]))
        assert far(made.logits, wanted) < CLOSE
        assert used(made).private and "available" in str(made.report)
        found = list(llm.runner.decode(made, Sampling(max_new_tokens=150), frozenset()))
        assert len(found) == 150
        llm.reuse_engine().store.cache.check()
        assert (
            not llm.reuse_engine().store.pool.allocator.n_pages
            - llm.reuse_engine().store.pool.allocator.n_free
            - sum(-(-d.n_tokens // 128) for d in made.cache.held.documents if d is not None)
        )

    def test_what_is_not_closed_is_given_back_when_it_goes(
        self, open_cached: Callable[..., LLM], prompt: Prompt
    ) -> None:
        llm = open_cached()
        made = llm.prefill(prompt, **REUSE)
        assert llm.reuse_engine().store.cache.statistics().tiers["device"].pinned_bytes
        del made
        assert not llm.reuse_engine().store.cache.statistics().tiers["device"].pinned_bytes
        llm.reuse_engine().store.cache.check()

    def test_prefix_blocks_are_exact_and_their_own(self, open_cached: Callable[..., LLM], prompt: Prompt) -> None:
        llm = open_cached()
        llm.prefill(prompt, **REUSE).close()
        wanted = stock(llm, prompt)
        for by_tier in ({}, {"device": 640}):
            made = llm.prefill(prompt, prefill="prefix")
            assert far(made.logits, wanted) < CLOSE
            assert used(made).by_tier == by_tier and not used(made).approximate
        other = Prompt((*prompt.segments[:2], *prompt.segments[3:]))
        made = llm.prefill(other, prefill="prefix")
        assert used(made).by_tier == {} and far(made.logits, stock(llm, other)) < CLOSE


class TestPolicy:
    def test_reuse_on_a_stock_model_needs_consent(self, open_cached: Callable[..., LLM], prompt: Prompt) -> None:
        llm = open_cached()
        with pytest.raises(InvalidInput, match=r"1\.25 nats KL.*prefill='blend'.*adapter=DIR.*accept_block_attention"):
            llm.prefill(prompt, prefill="reuse")
        with pytest.raises(InvalidInput, match="accept_block_attention"):
            llm.prefill(prompt, prefill="blend", recompute=0.0)

    def test_a_tuned_model_needs_none(self, loaded: Callable[..., Any], prompt: Prompt) -> None:
        from dataclasses import replace

        with LLM(replace(loaded(), block_tuned=True), cache_bytes=PAGES * PAGE_BYTES) as llm:
            assert used(llm.prefill(prompt, prefill="reuse")).approximate

    def test_another_form_of_keys_is_refused(self, open_cached: Callable[..., LLM], prompt: Prompt) -> None:
        with pytest.raises(InvalidInput, match="kv='auto'"):
            open_cached().prefill(prompt, kv="bf16", **REUSE)

    def test_a_rotation_that_changes_with_length_is_refused(self, open_cached: Callable[..., LLM]) -> None:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        with pytest.raises(ModelUnsupported, match="dynamic"):
            open_cached(model={"rope_parameters": rope}).reuse_engine()

    @pytest.mark.parametrize("wrong", [{"cache_bytes": -1}, {"disk_bytes": -5}])
    def test_budgets_are_checked(self, open_cached: Callable[..., LLM], wrong: dict[str, int]) -> None:
        with pytest.raises(InvalidInput, match="0 or more bytes"):
            open_cached(**wrong)

    def test_an_answer_reports_it(self, open_cached: Callable[..., LLM]) -> None:
        llm = open_cached(**REUSE)
        answer = llm.generate("Where?", ["The lamp is in the north.", "The boat is in the south."])
        found = answer.to_dict()["report"]["prefill"]["reuse"]
        assert found["by_tier"].keys() == {"computed"} and "tokens reused" in str(answer.report)
        both = llm.compare("Where?", ["The lamp is in the north.", "The boat is in the south."])
        assert both.sift.report.prefill.used == "reuse" and both.kl >= 0
