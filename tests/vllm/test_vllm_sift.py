"""SIFT rows inside vLLM: the same tiles, density and answers as Tamis's own engine, whole, in chunks and in company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_engines import Engine, Engines, Peer

from tamis.integrations.vllm.client import request

SELECTOR = "threshold:local=sampled,theta=0.2"
CHOICES = {"prefill": "sift", "selector": "threshold", "local": "sampled", "theta": 0.2, "min_tokens": 0}
Words = Callable[..., list[int]]


@pytest.fixture(scope="module")
def parts(words: Words) -> list[tuple[str, list[int]]]:
    return [
        ("prefix", words(1, 21)),
        ("document", words(2, 300)),
        ("document", words(3, 390)),
        ("document", words(4, 129)),
        ("question", words(5, 17)),
    ]


def asked(parts: list[tuple[str, list[int]]], **choices: Any) -> dict[str, Any]:
    documents = [ids for kind, ids in parts if kind == "document"]
    return request(parts[0][1], documents, parts[-1][1], mode="sift", selector=SELECTOR, **choices)


def test_same_tiles_and_answer_as_tamis(engine: Engine, peer: Peer, parts: list[tuple[str, list[int]]]) -> None:
    made = engine.run(asked(parts, namespace="alone"))[0]
    tokens, report = peer.run(parts, **CHOICES)
    mine = engine.worker.state.reports[-1]
    assert made.tokens == tokens
    assert report.used == "sift" and 0.3 < report.density < 0.9, "the selector must skip something"
    assert mine.density == pytest.approx(report.density, abs=1e-6) and mine.n_tokens == report.prompt_tokens
    assert made.cached == 0


def test_chunks_change_nothing(engines: Engines, parts: list[tuple[str, list[int]]]) -> None:
    engine = engines.get()
    whole = engine.run(asked(parts, namespace="whole"))[0]
    tiles = engine.worker.state.reports[-1]
    small = engines.get(max_num_batched_tokens=320)
    chunked = small.run(asked(parts, namespace="whole"))[0]
    mine = small.worker.state.reports[-1]
    assert chunked.tokens == whole.tokens
    assert chunked.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert (mine.area, mine.causal_area) == (tiles.area, tiles.causal_area)


def test_exact_and_sparse_in_one_batch(engine: Engine, parts: list[tuple[str, list[int]]], words: Words) -> None:
    """In both orders, each answered as it is alone; no block is shared between them, whoever came first."""
    plain = [t for _, ids in parts for t in ids]
    other = words(9, 333)
    sparse = asked(parts, namespace="mixed")
    alone = [engine.run(other)[0], engine.run(asked(parts, namespace="mixed alone"))[0]]
    both = engine.run(other, sparse)
    assert [b.tokens for b in both] == [a.tokens for a in alone]
    for order in ((sparse, plain), (plain, sparse)):
        fresh = [asked(parts, namespace=f"mixed {order[0] is plain}") if r is sparse else r for r in order]
        found = engine.run(*fresh)
        for one, answered in zip(fresh, found, strict=True):
            assert answered.tokens == engine.run(one)[0].tokens
            if isinstance(one, dict):
                assert answered.cached == 0
    exact = engine.run([*plain, 7])[0]
    assert exact.cached == len(plain) // 32 * 32, "exact requests still share with each other"


def test_a_cache_hit_inside_a_tile(
    engine: Engine, peer: Peer, parts: list[tuple[str, list[int]]], words: Words
) -> None:
    """The same documents again: all but the rest of the last block comes from the cache, the answer stays."""
    first = engine.run(asked(parts, namespace="again"))[0]
    again = engine.run(asked(parts, namespace="again"))[0]
    assert again.cached > 800 and again.tokens == first.tokens
    longer = [*parts[:-1], ("question", words(6, 40))]
    mixed = engine.run(asked(longer, namespace="again"))[0]
    assert mixed.cached > 800
    assert mixed.tokens == peer.run(longer, **CHOICES)[0]


def test_documents_that_differ_late_share_no_tile(engine: Engine, peer: Peer, words: Words) -> None:
    """Which keys a tile's first rows read depends on its last rows too, so a block is only found for one document."""
    long = words(2, 300)
    parts = [("prefix", words(1, 32)), ("document", words(3, 200)), ("document", long), ("question", words(5, 17))]
    engine.run(asked(parts, namespace="late"))
    parts[2] = ("document", [*long[:-1], 3])
    made = engine.run(asked(parts, namespace="late"))[0]
    assert made.cached <= 32 + 200 and made.tokens == peer.run(parts, **CHOICES)[0]


def test_short_prompts_are_exact(engines: Engines, parts: list[tuple[str, list[int]]]) -> None:
    plain = [t for _, ids in parts for t in ids]
    measured = engines.get({})
    made = measured.run(asked(parts))[0]
    assert not measured.worker.state.reports
    again = measured.run(plain)[0]
    assert again.cached and again.tokens == made.tokens
