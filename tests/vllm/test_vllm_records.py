"""Stored bits inside vLLM: the lists of Tamis's own engine; an index of another model or tile is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from vllm_engines import BLOCK, SETTINGS, Engines, Peer

from tamis.attention.offline import Indexer, index_spec
from tamis.core.errors import StoreMismatch
from tamis.index.spec import Thresholds
from tamis.index.store import RecordStore
from tamis.integrations.vllm.client import request
from tamis.integrations.vllm.step import Counters

BITS = {"alpha": 0.15, "beta": 0.05, "gamma": 0.5}
SELECTORS = {"stored": {}, "sampled:rows=4,mass=0.7": {"rows": 4, "mass": 0.7}}
Words = Callable[..., list[int]]


@pytest.fixture(scope="module")
def documents(words: Words) -> list[list[int]]:
    return [words(2, 300), words(3, 390), words(4, 129)]


def index(peer: Peer, folder: Path, documents: Sequence[Sequence[int]], tile: int = 128) -> str:
    llm = peer.llm
    prefix = llm.template.prefix_tokens
    spec = index_spec(llm.runner.model, llm.tokenizer, prefix, Thresholds(**BITS), tile)
    with RecordStore.open(folder, spec) as store:
        Indexer(llm.runner.model, llm.runner.switch, store, spec, prefix).index(documents)
    return str(folder)


@pytest.mark.parametrize("selector", SELECTORS)
def test_same_tiles_as_tamis(
    engines: Engines,
    peer: Peer,
    documents: list[list[int]],
    words: Words,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    selector: str,
) -> None:
    monkeypatch.setattr(Counters, "taken", lambda self: {})  # the sums stay where this test can read them
    prefix, question = list(peer.llm.template.prefix_tokens), words(5, 17)
    parts = [("prefix", prefix), *(("document", d) for d in documents), ("question", question)]
    tokens, report = peer.run(
        parts, prefill="sift", selector=selector.partition(":")[0], min_tokens=0, **BITS, **SELECTORS[selector]
    )
    settings = SETTINGS | {"index": index(peer, tmp_path / "index", documents), "selector": selector}
    asked = request(prefix, documents, question, mode="sift")
    for options in ({}, {"max_num_batched_tokens": 320}):
        engine = engines.get(settings, **options)
        made = engine.run(asked)[0]
        mine = engine.worker.state.reports[-1]
        assert made.tokens == tokens
        assert report.used == "sift" and 0.2 < report.density < 0.95, "bits must leave something out"
        assert mine.density == pytest.approx(report.density, abs=1e-6)
    # behind another prefix, and of a document that is not in the index, no bit is read: more is computed
    other = engine.run(request(words(8, len(prefix)), documents, question, mode="sift"))[0]
    assert other.cached == 0 and engine.worker.state.reports[-1].density > mine.density
    assert engine.worker.counters.sift_unrecorded == len(documents)
    new = [documents[0], words(9, 390), documents[2]]
    engine.run(request(prefix, new, question, mode="sift", namespace="new"))
    assert engine.worker.counters.sift_unrecorded == len(documents) + 1


def test_a_document_that_gets_bits_later_shares_no_block_with_itself(
    engines: Engines, peer: Peer, documents: list[list[int]], words: Words, tmp_path: Path
) -> None:
    folder = index(peer, tmp_path / "index", documents[:1])
    engine = engines.get(SETTINGS | {"index": folder, "selector": "stored"})
    prefix = list(peer.llm.template.prefix_tokens)
    asked = request(prefix, documents, words(5, 17), mode="sift")
    engine.run(asked)
    again = engine.run(asked)[0]
    assert again.cached > 700
    index(peer, tmp_path / "index", documents)
    later = engine.run(asked)[0]
    assert later.cached <= len(prefix) + len(documents[0]) < again.cached


@pytest.mark.parametrize("what", ["weights", "tile"])
def test_another_index_is_refused(
    engines: Engines, peer: Peer, documents: list[list[int]], tmp_path: Path, what: str
) -> None:
    weight = peer.llm.runner.model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        before = weight[0, 0].item()
        weight[0, 0] += 0.25 if what == "weights" else 0.0
        try:
            folder = index(peer, tmp_path / "index", documents, 64 if what == "tile" else 128)
        finally:
            weight[0, 0] = before
    with pytest.raises(StoreMismatch, match="the weights are others" if what == "weights" else "64 tokens there, 128"):
        engines.get(SETTINGS | {"index": folder, "selector": "stored"}, fresh=True)


def test_without_an_index(engines: Engines) -> None:
    assert BLOCK == 32
    with pytest.raises(Exception, match="stored bits"):
        engines.get(SETTINGS | {"selector": "stored"}, fresh=True)
