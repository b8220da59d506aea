"""Documents reused inside vLLM: found wherever they stand, answered as Tamis's own reuse does, and kept on a shelf."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import BLOCK, SETTINGS, Engine, Engines, Peer

from tamis.integrations.vllm.client import request, warm, warm_for
from tamis.prompt.segments import document_id

CHOICES = {"prefill": "reuse", "accept_block_attention": True}
Words = Callable[..., list[int]]


class Texts:
    """Pieces of prompts."""

    def __init__(self, words: Words) -> None:
        self.prefix, self.question = words(11, 21), words(12, 17)
        self.a, self.b, self.c = words(13, 300), words(14, 224), words(15, 97)

    def asked(self, *documents: list[int], **choices: Any) -> dict[str, Any]:
        return request(self.prefix, documents, self.question, mode="reuse", block_size=BLOCK, **choices)

    def answer(self, peer: Peer, *documents: list[int]) -> list[int]:
        parts = [("prefix", self.prefix), *(("document", d) for d in documents), ("question", self.question)]
        return peer.run(parts, **CHOICES)[0]


@pytest.fixture(scope="module")
def texts(words: Words) -> Texts:
    return Texts(words)


def blocks(*texts: list[int]) -> int:
    return sum(-(-len(t) // BLOCK) * BLOCK for t in texts)


def test_same_answer_as_tamis_in_any_order(engine: Engine, peer: Peer, texts: Texts) -> None:
    a, b, p = texts.a, texts.b, texts.prefix
    first = engine.run(texts.asked(a, b))[0]
    assert first.cached == 0 and first.tokens == texts.answer(peer, a, b)
    swapped = engine.run(texts.asked(b, a))[0]
    assert swapped.cached == blocks(p, a, b), "every block of both documents is found"
    assert swapped.tokens == texts.answer(peer, b, a) and swapped.tokens != first.tokens
    third = engine.run(texts.asked(a, texts.c, b))[0]
    assert third.cached == blocks(p, a), "vLLM's lookup stops at the first document that is missing"
    assert third.tokens == texts.answer(peer, a, texts.c, b)


def test_holes_are_filled_by_warming(engine: Engine, peer: Peer, texts: Texts) -> None:
    """[A cached][C new][B cached]: only C is computed, by a request of its own."""
    choices = {"namespace": "holes"}
    for document in (texts.a, texts.b):
        engine.run(texts.asked(document, **choices))
    for one in warm([texts.c], block_size=BLOCK, **choices):
        engine.run(one, n=1)
    made = engine.run(texts.asked(texts.a, texts.c, texts.b, **choices))[0]
    assert made.cached == blocks(texts.prefix, texts.a, texts.c, texts.b)
    assert made.tokens == texts.answer(peer, texts.a, texts.c, texts.b)


def test_what_is_warmed_is_found_without_waiting(engine: Engine, peer: Peer, texts: Texts) -> None:
    """Warm requests and the one that needs them at once: blocks are found in the step that computes them."""
    choices = {"namespace": "at once"}
    engine.run(texts.asked(texts.b, **choices))
    known = [document_id(ids).hex() for ids in (texts.prefix, texts.b)]
    for order, missing in (((texts.a, texts.c, texts.b), [texts.a, texts.c]), ((texts.b, texts.a), [])):
        first = warm_for(texts.prefix, order, known, block_size=BLOCK, **choices)
        assert [len(one["prompt"]) for one in first] == [blocks(*missing) + 1] * bool(missing)
        made = engine.run(*first, texts.asked(*order, **choices))
        assert made[-1].cached == blocks(texts.prefix, *order)
        assert made[-1].tokens == texts.answer(peer, *order)


def test_requests_of_one_step_share_what_the_first_computes(engine: Engine, peer: Peer, texts: Texts) -> None:
    """Nothing is known: the second prompt finds the first one's blocks, and goes on from them with one of its own."""
    choices = {"namespace": "together"}
    assert warm_for(texts.prefix, [texts.a, texts.c], block_size=BLOCK, **choices) == []
    one, two = engine.run(texts.asked(texts.a, **choices), texts.asked(texts.a, texts.c, **choices))
    assert (one.cached, two.cached) == (0, blocks(texts.prefix, texts.a))
    assert one.tokens == texts.answer(peer, texts.a) and two.tokens == texts.answer(peer, texts.a, texts.c)


def test_a_long_answer_with_others_coming_and_going(engine: Engine, peer: Peer, texts: Texts) -> None:
    """The decode plan is kept from token to token: over pages' borders, and beside requests that end earlier."""
    choices = {"namespace": "long"}
    asked = texts.asked(texts.a, texts.c, **choices)
    want = engine.run(asked, n=80)[0]
    assert want.tokens[:6] == texts.answer(peer, texts.a, texts.c)
    beside = [texts.asked(texts.b, **choices), texts.asked(texts.c, texts.a, **choices)]
    made = engine.run(asked, *beside, n=80)
    assert made[0].tokens == want.tokens
    assert made[1].tokens == engine.run(beside[0], n=80)[0].tokens
    assert engine.worker.state.decodes.plan is not None


def test_documents_without_pads_behind_the_last(engine: Engine, peer: Peer, texts: Texts) -> None:
    """The question goes on in the last document's last block, which is then not shared."""
    padded = texts.asked(texts.b, texts.a, namespace="tight")
    spans = padded["kv_transfer_params"]["tamis"]["segments"]
    pad = next(s for s in reversed(spans) if s[2] == "pad")
    gap = pad[1] - pad[0]
    prompt = padded["prompt"][: pad[0]] + padded["prompt"][pad[1] :]
    kept = [s for s in spans if s is not pad]
    kept[-1] = [kept[-1][0] - gap, kept[-1][1] - gap, *kept[-1][2:]]
    padded["kv_transfer_params"]["tamis"]["segments"] = kept
    asked = {"prompt": prompt, "kv_transfer_params": padded["kv_transfer_params"]}
    for _ in range(2):
        assert engine.run(asked, n=40)[0].tokens[:6] == texts.answer(peer, texts.b, texts.a)


def test_namespaces_and_modes_share_nothing(engine: Engine, texts: Texts) -> None:
    engine.run(texts.asked(texts.a, namespace="one"))
    assert engine.run(texts.asked(texts.a, namespace="two"))[0].cached == 0
    sparse = request(texts.prefix, [texts.a], texts.question, mode="sift", namespace="one")
    assert engine.run(sparse)[0].cached == 0
    before = engine.run(sparse["prompt"])[0]
    assert before.cached == 0
    assert engine.run(sparse["prompt"])[0].tokens == before.tokens


def test_exact_and_reused_in_one_batch(engine: Engine, peer: Peer, texts: Texts, words: Words) -> None:
    """In both orders, while they are prefilled and while they are decoded."""
    plain = words(21, 260)
    exact = engine.run(plain, n=12)[0]
    for order in (0, 1):
        asked = texts.asked(texts.b, texts.c, namespace=f"batch {order}")
        pair = (plain, asked) if order else (asked, plain)
        made = engine.run(*pair, n=12)
        assert made[order].tokens[:6] == texts.answer(peer, texts.b, texts.c)
        assert made[1 - order].tokens == exact.tokens
    sparse = request(texts.prefix, [texts.a], texts.question, mode="sift", namespace="batch")
    three = engine.run(sparse, plain, texts.asked(texts.a, namespace="batch"), n=12)
    assert [t.tokens for t in three] == [
        engine.run(r, n=12)[0].tokens for r in (sparse, plain, texts.asked(texts.a, namespace="batch"))
    ]


def test_chunks_and_preemption_change_nothing(
    engines: Engines, peer: Peer, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 320 tokens, and a cache in which two requests do not fit: one is put off and begins anew."""
    pairs = [(texts.a, texts.b), (texts.b, texts.c), (texts.c, texts.a)]
    answers = [texts.answer(peer, *pair) for pair in pairs]
    small = engines.get(max_num_batched_tokens=320, num_gpu_blocks_override=34, max_model_len=1024)
    put_off = counted(small, monkeypatch)
    made = small.run(*(texts.asked(*pair) for pair in pairs), n=200)
    assert put_off and [m.tokens[:6] for m in made] == answers
    sparse = [request(texts.prefix, pair, texts.question, mode="sift", selector="all") for pair in pairs]
    before = len(put_off)
    dense = small.run(*sparse, n=200)
    assert len(put_off) > before
    large = engines.get()
    assert [d.tokens for d in dense] == [large.run(s, n=200)[0].tokens for s in sparse]
    whole = [large.run(texts.asked(*pair, namespace="whole"), n=200)[0].tokens for pair in pairs]
    assert [m.tokens for m in made] == whole


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that the engine's scheduler has put off since."""
    found: list[str] = []
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    stock = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(request.request_id)
        return stock(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", preempt)
    return found


def test_a_restart_loads_from_the_shelf(engines: Engines, peer: Peer, texts: Texts, tmp_path: Path) -> None:
    shelf = SETTINGS | {"directory": str(tmp_path)}
    first = engines.get(shelf)
    made = first.run(texts.asked(texts.a, texts.b))[0]
    second = engines.get(shelf, fresh=True)
    again = second.run(texts.asked(texts.b, texts.a))[0]
    assert made.cached == 0 and again.cached == blocks(texts.prefix, texts.a, texts.b)
    assert again.tokens == texts.answer(peer, texts.b, texts.a)
    engines.close()
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-100])
    third = engines.get(shelf, fresh=True)
    torn = third.run(texts.asked(texts.b, texts.a))[0]
    assert torn.tokens == again.tokens, "a torn file is not read; the document is computed again"
