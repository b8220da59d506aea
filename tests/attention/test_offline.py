"""The offline pass against attention matrices that transformers itself gives out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tamis.attention import offline
from tamis.attention.hook import Switch
from tamis.attention.offline import Indexer, index_spec, observe_document
from tamis.core.errors import ContextOverflow
from tamis.index.encode import encode
from tamis.index.spec import Thresholds
from tamis.index.store import RecordStore

TILE = 64
PREFIX = tuple(range(7, 17))
Attach = Callable[[Any], Switch]


def document(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def eager_attention(model: Any, ids: list[int]) -> torch.Tensor:
    """[L, H, T, T] by transformers' own eager implementation."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            return torch.cat(model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions)
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("n_prefix", [0, 1, 10, 64, 70])
@pytest.mark.parametrize("n", [1, 64, 150])
def test_statistics_against_eager_attention(llama: Any, attach: Attach, n: int, n_prefix: int) -> None:
    prefix, tokens = document(n_prefix, 5), document(n)
    assert_observed(llama, attach, prefix, tokens)


def test_statistics_of_every_family(stock: Any, attach: Attach) -> None:
    assert_observed(stock, attach, list(PREFIX), document(230))


def assert_observed(model: Any, attach: Attach, prefix: list[int], tokens: list[int], beta: float = 0.01) -> None:
    p = eager_attention(model, [*prefix, *tokens])[:, :, len(prefix) :, len(prefix) :]
    found = observe_document(model, attach(model), tokens, prefix, tile=TILE, beta=beta)
    n = len(tokens)
    pages = -(-n // TILE)
    assert found.n_tokens == n and found.tile == TILE and found.tile_max.shape == (2, 4, pages, pages)
    tile_of = torch.arange(n) // TILE
    for i in range(pages):
        for j in range(pages):
            part = p[:, :, tile_of == i][..., tile_of == j]
            torch.testing.assert_close(found.tile_max[:, :, i, j], part.amax((-2, -1)), rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(found.tile_mass[:, :, i, j], part.sum(-1).mean(-1), rtol=1e-3, atol=1e-6)
    later = tile_of[:, None] > tile_of[None, :]
    high = ((p > beta) & later).sum(-2)
    undecided = ((p - beta).abs() < 1e-5).any(-2)
    assert torch.equal(found.later_high[~undecided], high[~undecided].int())
    assert found.later_rows.tolist() == later.sum(0).tolist()
    if pages > 1:
        assert bool(high.any()) and not bool((high > 0).all()), "this input tells nothing"


def test_the_prefix_takes_its_share(llama: Any, attach: Attach) -> None:
    switch, tokens = attach(llama), document(150)
    alone = observe_document(llama, switch, tokens, (), tile=TILE, beta=0.01)
    behind = observe_document(llama, switch, tokens, PREFIX, tile=TILE, beta=0.01)
    torch.testing.assert_close(alone.tile_mass.sum(-1), torch.ones(2, 4, 3), rtol=1e-4, atol=1e-4)
    assert bool((behind.tile_mass.sum(-1) < 0.999).any())


def test_a_document_longer_than_the_context(llama: Any, attach: Attach) -> None:
    with pytest.raises(ContextOverflow, match="4090 tokens behind a prefix of 10 exceeds the model's 4096"):
        observe_document(llama, attach(llama), document(4090), PREFIX, tile=TILE, beta=0.01)


def test_the_switch_is_free_again_after_a_failure(llama: Any, attach: Attach) -> None:
    switch = attach(llama)
    with pytest.raises(IndexError):
        observe_document(llama, switch, [512] * 100, (), tile=TILE, beta=0.01)
    assert switch.job is None


@pytest.fixture
def indexer(llama: Any, attach: Attach) -> Indexer:
    spec = index_spec(llama, None, PREFIX, Thresholds(alpha=0.5), TILE)
    return Indexer(llama, attach(llama), RecordStore.open(None, spec), spec, PREFIX)


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the documents that went through the model."""
    lengths: list[int] = []

    def counting(model: Any, switch: Switch, tokens: list[int], *rest: Any, **options: Any) -> Any:
        lengths.append(len(tokens))
        return observe_document(model, switch, tokens, *rest, **options)

    monkeypatch.setattr(offline, "observe_document", counting)
    return lengths


class TestIndexer:
    def test_only_what_is_missing_is_made(self, indexer: Indexer, observed: list[int]) -> None:
        a, b, c = document(100, 1), document(130, 2), document(160, 3)
        assert indexer.index([a, b]) == 2 and observed == [100, 130]
        assert indexer.index([b, c, a, c]) == 1 and observed == [100, 130, 160]
        assert indexer.index([a, b, c]) == 0 and len(observed) == 3
        assert len(indexer.store) == 3

    def test_a_document_of_one_tile_needs_no_pass(self, indexer: Indexer, observed: list[int]) -> None:
        small = [document(1), document(TILE), document(TILE + 1)]
        assert indexer.index(small) == 3 and observed == [TILE + 1]
        for record in indexer.records(small[:2]):
            assert record is not None
            assert bool(record.bits().la.all()) and bool(record.bits().ca.all())

    def test_records_are_the_thresholds_on_the_statistics(self, indexer: Indexer) -> None:
        tokens = document(200)
        indexer.index([tokens])
        (record,) = indexer.records([tokens])
        stats = observe_document(indexer.model, indexer.switch, tokens, PREFIX, tile=TILE, beta=0.01)
        assert record is not None and record.n_tokens == 200
        assert record.bits().equal(encode(stats, indexer.spec.thresholds))
        la = record.bits().la
        assert not bool((la | ~torch.ones(4, 4).tril().bool()).all()), "every tile kept: this input tells nothing"

    def test_no_record_is_none(self, indexer: Indexer) -> None:
        indexer.index([document(5)])
        first, second = indexer.records([document(6), document(5)])
        assert first is None and second is not None

    def test_progress(self, indexer: Indexer) -> None:
        seen: list[tuple[int, int]] = []
        indexer.index([document(10), document(100, 1), document(100, 2)], lambda *at: seen.append(at))
        assert seen == [(1, 3), (2, 3), (3, 3)]

    def test_an_interrupted_pass_goes_on_where_it_stopped(
        self, indexer: Indexer, observed: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        documents = [document(n) for n in (20, 100, 110, 120)]

        def stop(done: int, total: int) -> None:
            if done == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            indexer.index(documents, stop)
        assert observed == [100, 110] and len(indexer.store) == 3
        assert indexer.index(documents) == 1 and observed == [100, 110, 120]


class TestSpec:
    def test_says_what_decides_the_bits(self, llama: Any) -> None:
        spec = index_spec(llama, None, PREFIX, Thresholds(), TILE)
        assert (spec.n_layers, spec.n_heads, spec.tile) == (2, 4, TILE)
        others = [
            index_spec(llama, None, PREFIX[:-1], Thresholds(), TILE),
            index_spec(llama, None, PREFIX, Thresholds(alpha=0.1), TILE),
            index_spec(llama, None, PREFIX, Thresholds(), 128),
        ]
        assert len({s.digest for s in (spec, *others)}) == 4
        assert spec == index_spec(llama, None, list(PREFIX), Thresholds(), TILE)

    def test_other_weights_are_another_model(self, tiny_model: Callable[..., Any]) -> None:
        model = tiny_model("llama")
        before = index_spec(model, None, (), Thresholds(), TILE)
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[100, 17] += 1e-3
        after = index_spec(model, None, (), Thresholds(), TILE)
        assert before.digest != after.digest
        assert before == replace(after, fingerprint=before.fingerprint)
