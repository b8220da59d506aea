"""The offline pass against attention matrices that transformers itself gives out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from tamis.attention import offline
from tamis.attention.hook import Switch
from tamis.attention.offline import Indexer, index_spec, observe_documents, packs
from tamis.core.errors import ContextOverflow, InvalidInput
from tamis.index.encode import encode
from tamis.index.observe import Observer
from tamis.index.spec import DocumentStats, Thresholds
from tamis.index.store import RecordStore
from tamis.kernels.dispatch import causal_attention

TILE = 64
PREFIX = tuple(range(7, 17))
Attach = Callable[[Any], Switch]


def document(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def observe(model: Any, switch: Switch, tokens: list[int], prefix: Any, *, tile: int, beta: float) -> DocumentStats:
    """Statistics of one document, alone in its pass."""
    (found,) = observe_documents(model, switch, [tokens], prefix, tile=tile, beta=beta)
    return found


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
    found = observe(model, attach(model), tokens, prefix, tile=TILE, beta=beta)
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
    alone = observe(llama, switch, tokens, (), tile=TILE, beta=0.01)
    behind = observe(llama, switch, tokens, PREFIX, tile=TILE, beta=0.01)
    torch.testing.assert_close(alone.tile_mass.sum(-1), torch.ones(2, 4, 3), rtol=1e-4, atol=1e-4)
    assert bool((behind.tile_mass.sum(-1) < 0.999).any())


def test_a_document_longer_than_the_context(llama: Any, attach: Attach) -> None:
    with pytest.raises(ContextOverflow, match="4090 tokens behind a prefix of 10 exceeds the model's 4096"):
        observe(llama, attach(llama), document(4090), PREFIX, tile=TILE, beta=0.01)


def test_the_switch_is_free_again_after_a_failure(llama: Any, attach: Attach) -> None:
    switch = attach(llama)
    with pytest.raises(IndexError):
        observe(llama, switch, [512] * 100, (), tile=TILE, beta=0.01)
    assert switch.job is None


@pytest.fixture
def indexer(llama: Any, attach: Attach) -> Indexer:
    spec = index_spec(llama, None, PREFIX, Thresholds(alpha=0.5), TILE)
    return Indexer(llama, attach(llama), RecordStore.open(None, spec), spec, PREFIX)


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Lengths of the documents of each pass through the model."""
    passes: list[list[int]] = []

    def counting(model: Any, switch: Switch, documents: list[list[int]], *rest: Any, **options: Any) -> Any:
        passes.append([len(tokens) for tokens in documents])
        return observe_documents(model, switch, documents, *rest, **options)

    monkeypatch.setattr(offline, "observe_documents", counting)
    return passes


class TestIndexer:
    def test_only_what_is_missing_is_made(self, indexer: Indexer, observed: list[list[int]]) -> None:
        a, b, c = document(100, 1), document(130, 2), document(160, 3)
        assert indexer.index([a, b]) == 2 and observed == [[100, 130]]
        assert indexer.index([b, c, a, c]) == 1 and observed == [[100, 130], [160]]
        assert indexer.index([a, b, c]) == 0 and len(observed) == 2
        assert len(indexer.store) == 3

    def test_a_document_of_one_tile_needs_no_pass(self, indexer: Indexer, observed: list[list[int]]) -> None:
        small = [document(1), document(TILE), document(TILE + 1)]
        assert indexer.index(small) == 3 and observed == [[TILE + 1]]
        for record in indexer.records(small[:2]):
            assert record is not None
            assert bool(record.bits().la.all()) and bool(record.bits().ca.all())

    def test_records_are_the_thresholds_on_the_statistics(self, indexer: Indexer) -> None:
        tokens = document(200)
        indexer.index([tokens])
        (record,) = indexer.records([tokens])
        stats = observe(indexer.model, indexer.switch, tokens, PREFIX, tile=TILE, beta=0.01)
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

    def test_an_interrupted_index_goes_on_where_it_stopped(self, indexer: Indexer, observed: list[list[int]]) -> None:
        documents = [document(n) for n in (20, 130, 110, 120, 100)]

        def stop(done: int, total: int) -> None:
            if done == 3:
                raise KeyboardInterrupt

        two_each = replace(indexer, pack_tokens=240)
        with pytest.raises(KeyboardInterrupt):
            two_each.index(documents, stop)
        assert observed == [[100, 110]] and len(indexer.store) == 3
        assert two_each.index(documents) == 2 and observed == [[100, 110], [120], [130]]

    def test_a_pass_that_fails_costs_its_own_pack_alone(self, indexer: Indexer) -> None:
        documents = [document(100, 1), document(100, 2), document(4090, 3)]
        with pytest.raises(ContextOverflow):
            indexer.index(documents)
        assert [r is not None for r in indexer.records(documents)] == [True, True, False]
        assert indexer.switch.job is None


LENGTHS = (65, 100, 128, 129, 150, 200, 333)


class TestPacked:
    """Documents that share a pass against each of them alone."""

    def test_statistics(self, stock: Any, attach: Attach) -> None:
        switch, documents = attach(stock), [document(n, n) for n in LENGTHS]
        packed = observe_documents(stock, switch, documents, PREFIX, tile=TILE, beta=0.01)
        assert switch.refused == {}
        for tokens, found in zip(documents, packed, strict=True):
            alone = observe(stock, switch, tokens, PREFIX, tile=TILE, beta=0.01)
            torch.testing.assert_close(found.tile_max, alone.tile_max, rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(found.tile_mass, alone.tile_mass, rtol=1e-3, atol=1e-6)
            assert torch.equal(found.later_rows, alone.later_rows)
            assert float((found.later_high != alone.later_high).float().mean()) < 1e-3

    def test_records(self, indexer: Indexer, observed: list[list[int]]) -> None:
        documents = [document(n, n) for n in LENGTHS]
        single = replace(indexer, store=RecordStore.open(None, indexer.spec), pack_tokens=1)
        replace(indexer, pack_tokens=5000).index(documents)
        single.index(documents)
        assert observed == [list(LENGTHS), *([n] for n in LENGTHS)]
        for a, b in zip(indexer.records(documents), single.records(documents), strict=True):
            assert a is not None and b is not None and a.bits().equal(b.bits())

    def test_another_neighbour_changes_nothing(self, llama: Any, attach: Attach) -> None:
        switch, tokens = attach(llama), document(200, 1)
        first, second = (
            observe_documents(llama, switch, [document(130, s), tokens], PREFIX, tile=TILE, beta=0.01) for s in (2, 3)
        )
        assert not torch.equal(first[0].tile_max, second[0].tile_max)
        assert torch.equal(first[1].tile_max, second[1].tile_max)
        assert torch.equal(first[1].later_high, second[1].later_high)

    def test_a_document_that_sees_another_would_be_noticed(
        self, llama: Any, attach: Attach, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        switch, documents = attach(llama), [document(n, n) for n in (130, 200)]
        right = observe_documents(llama, switch, documents, PREFIX, tile=TILE, beta=0.01)
        monkeypatch.setattr(
            offline.dispatch, "packed_causal_attention", lambda q, k, v, scale, _: causal_attention(q, k, v, scale)
        )
        wrong = observe_documents(llama, switch, documents, PREFIX, tile=TILE, beta=0.01)
        assert not torch.allclose(wrong[1].tile_max, right[1].tile_max, rtol=1e-2)

    def test_no_mask_is_made(self, llama: Any, attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
        import transformers.masking_utils as masking

        made: list[int] = []
        whole = masking.sdpa_mask
        monkeypatch.setattr(masking, "sdpa_mask", lambda *a, **o: made.append(1) or whole(*a, **o))
        switch = attach(llama)
        observe_documents(llama, switch, [document(100), document(120)], PREFIX, tile=TILE, beta=0.01)
        assert made == [] and switch.refused == {}
        positions = torch.tensor([[*range(100), *range(120)]])
        ids = torch.tensor([[*document(100), *document(120)]])
        with torch.inference_mode():
            alone = llama(ids[:, 100:], use_cache=False).logits[0]
            stock = llama(ids, position_ids=positions, use_cache=False).logits[0, 100:]
        torch.testing.assert_close(stock, alone, rtol=1e-3, atol=1e-3)
        assert made, "an ordinary packed pass keeps its mask"

    def test_held_on_the_host_alike(self, llama: Any, attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
        released: list[Observer] = []
        release = Observer.release
        monkeypatch.setattr(Observer, "held_bytes", property(lambda self: 1))
        monkeypatch.setattr(Observer, "release", lambda self: released.append(self) or release(self))
        switch, documents = attach(llama), [document(100), document(120)]
        held = observe_documents(llama, switch, documents, PREFIX, tile=TILE, beta=0.01)
        assert released == []
        monkeypatch.setattr(offline, "HELD_BYTES", 1)
        freed = observe_documents(llama, switch, documents, PREFIX, tile=TILE, beta=0.01)
        assert len(released) == 4, "both documents after both layers"
        assert all(torch.equal(a.tile_mass, b.tile_mass) for a, b in zip(held, freed, strict=True))

    @pytest.mark.gpu
    def test_on_a_gpu(self, tiny_model: Callable[..., Any], attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model("llama").to("cuda")
        switch, documents = attach(model), [document(n, n) for n in LENGTHS]
        packed = observe_documents(model, switch, documents, PREFIX, tile=TILE, beta=0.01)
        monkeypatch.setattr(offline, "HELD_BYTES", 0)
        freed = observe_documents(model, switch, documents, PREFIX, tile=TILE, beta=0.01)
        for tokens, held, sent in zip(documents, packed, freed, strict=True):
            assert held.tile_mass.device.type == "cpu" and torch.equal(held.tile_mass, sent.tile_mass)
            assert torch.equal(held.tile_max, sent.tile_max) and torch.equal(held.later_high, sent.later_high)
            alone = observe(model, switch, tokens, PREFIX, tile=TILE, beta=0.01)
            torch.testing.assert_close(held.tile_mass, alone.tile_mass, rtol=1e-3, atol=1e-5)

    @pytest.mark.gpu
    def test_a_pass_on_a_gpu_waits_for_nothing(self, tiny_model: Callable[..., Any], attach: Attach) -> None:
        model = tiny_model("llama").to("cuda", torch.bfloat16)
        switch, documents = attach(model), [document(n, n) for n in LENGTHS]
        observers = [Observer(len(PREFIX), len(d), tile=TILE, beta=0.01) for d in documents]
        job = offline.ObserveJob(observers)
        offline.packed_forward(model, switch, [[*PREFIX, *d] for d in documents], job)  # compiles, and makes the lists
        q, k = (torch.randn(h, sum(job.lengths), 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2))
        torch.cuda.set_sync_debug_mode("error")
        try:
            job.attend(1, q, k, k, 0.125)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_the_small_real_model(self, smollm2: Any, attach: Attach) -> None:
        model, tokenizer = smollm2.model, smollm2.tokenizer
        text = topics["with"] + topics["naming"] + topics["exceptions"]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        documents = [ids[0:140], ids[140:450], ids[450:706], ids[706:1100]]
        spec = index_spec(model, tokenizer, PREFIX, Thresholds(), TILE)
        packed = Indexer(model, attach(model), RecordStore.open(None, spec), spec, PREFIX, pack_tokens=5000)
        single = replace(packed, store=RecordStore.open(None, spec), pack_tokens=1)
        packed.index(documents)
        single.index(documents)
        for a, b in zip(packed.records(documents), single.records(documents), strict=True):
            assert a is not None and b is not None and a.bits().equal(b.bits())


@pytest.mark.parametrize(
    ("lengths", "room", "expected"),
    [
        ([], 10, []),
        ([5], 1, [[0]]),
        ([3, 1, 2], 100, [[1, 2, 0]]),
        ([4, 4, 4, 4, 4], 8, [[0, 1], [2, 3], [4]]),
        ([90, 4, 5, 1], 10, [[3, 1, 2], [0]]),
    ],
)
def test_packs(lengths: list[int], room: int, expected: list[list[int]]) -> None:
    assert list(packs(lengths, room)) == expected


def test_packs_of_no_tokens() -> None:
    with pytest.raises(InvalidInput, match="packs of 0 tokens; give 1 or more"):
        list(packs([5], 0))


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
