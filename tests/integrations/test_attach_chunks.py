"""`generate(prefill_chunk_size=…)` on an attached model: chunks that fit the tiles are one sparse prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tamis
from tamis.attention.hook import NAME
from tamis.cache.formats import cache_argument
from tamis.integrations.hf.attach import Attached
from tamis.integrations.hf.chunks import PREPARE, cut, whole_documents
from tamis.prompt.segments import Kind, Prompt, find_documents

TILE = 64
ANY_LENGTH = {"prefill": "sift", "min_tokens": 0, "tile": TILE}
GREEDY = {
    "max_new_tokens": 4,
    "do_sample": False,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def draw(n: int, seed: int) -> list[int]:
    return torch.randint(4, 500, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


DOCUMENTS = [draw(5 * TILE, 1), draw(2 * TILE, 2), draw(3 * TILE, 3)]
IDS = torch.tensor([[*draw(TILE, 4), *DOCUMENTS[0], *DOCUMENTS[1], *DOCUMENTS[2], *draw(20, 5)]])


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Any]) -> Any:
    return tiny_model("llama")


def generate(model: Any, ids: torch.Tensor = IDS, chunk: int | None = None, **attached: Any) -> tuple[Any, Attached]:
    with tamis.attach(model, documents=DOCUMENTS, **(ANY_LENGTH | attached)) as made:
        found = model.generate(ids, prefill_chunk_size=chunk, **GREEDY)
    assert model.config._attn_implementation != NAME
    return found, made


@pytest.mark.parametrize("chunk", [TILE, 2 * TILE, 3 * TILE, 5 * TILE])
@pytest.mark.parametrize("selector", ["all", "none", "stored", "sampled", "oracle"])
def test_chunks_are_the_prompt(model: Any, selector: str, chunk: int) -> None:
    options = {"selector": selector, "measure_recall": True}
    wanted, whole = generate(model, **options)
    found, parts = generate(model, chunk=chunk, **options)
    torch.testing.assert_close(found.logits[0], wanted.logits[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(found.sequences, wanted.sequences)
    one, last = whole.report, parts.report
    assert one is not None and last is not None and one.used == last.used == "sift"
    # the first chunk may hold no document yet; then it is dense, and has a report of its own
    before = [r for r in parts.reports[:-1] if r.used == "sift"]
    assert before == [] and len(parts.reports) == (2 if chunk == TILE else 1)
    if chunk > TILE:
        assert last.layers == one.layers and last.density == one.density
    assert last.recall == pytest.approx(one.recall, abs=1e-5)
    assert last.chunks == -(-IDS.shape[1] // chunk)
    assert (last.documents, last.document_tokens, last.prompt_tokens) == (3, 10 * TILE, IDS.shape[1])
    assert last.indexed == one.indexed and last.fallbacks == ()


class TestAChunkOfOneToken:
    """It looks like a decode step, and is known by what `generate` says of it."""

    IDS = IDS[:, : 11 * TILE + 1]

    @pytest.mark.parametrize("chunk", [TILE, 11 * TILE])
    @pytest.mark.parametrize("selector", ["all", "none", "stored", "sampled"])
    def test_it_is_the_prompts_last(self, model: Any, selector: str, chunk: int) -> None:
        wanted, whole = generate(model, self.IDS, selector=selector)
        found, parts = generate(model, self.IDS, chunk, selector=selector)
        torch.testing.assert_close(found.logits[0], wanted.logits[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(found.sequences, wanted.sequences)
        one, last = whole.report, parts.report
        assert one is not None and last is not None and last.fallbacks == one.fallbacks == ()
        assert (last.prompt_tokens, last.chunks) == (11 * TILE + 1, 11 * TILE // chunk + 1)
        assert chunk == TILE or last.layers == one.layers  # a first chunk of one tile holds no document: dense

    def test_a_step_by_hand_stays_a_step(self, model: Any) -> None:
        with torch.inference_mode(), tamis.attach(model, documents=DOCUMENTS, **ANY_LENGTH) as made:
            past = model(self.IDS[:, :-1], use_cache=True)
            model(self.IDS[:, -1:], **{cache_argument(model): past[cache_argument(model)]})
        assert made.report is not None and made.report.prompt_tokens == self.IDS.shape[1] - 1

    def test_a_prompt_of_one_token_has_a_report(self, model: Any) -> None:
        for chunk in (None, 1):
            _, made = generate(model, self.IDS[:, :1], chunk)
            assert [r.prompt_tokens for r in made.reports] == [1]

    def test_chunks_of_one_token_are_dense_and_say_so(self, model: Any) -> None:
        ids = self.IDS[:, :5]
        wanted = model.generate(ids, **GREEDY)
        found, made = generate(model, ids, 1)
        assert torch.equal(found.sequences, wanted.sequences)
        assert [r.prompt_tokens for r in made.reports] == [1, 2, 3, 4, 5] and all(r.reason for r in made.reports)

    def test_a_compressed_cache_reads_it_exactly(self, model: Any) -> None:
        wanted = model.generate(self.IDS, **GREEDY)
        found, made = generate(model, self.IDS, 11 * TILE, prefill="dense", kv="selfindex", decode="selfindex")
        torch.testing.assert_close(found.logits[0], wanted.logits[0], rtol=1e-4, atol=1e-4)
        assert made.decode_report is not None and made.decode_report.steps == GREEDY["max_new_tokens"] - 1

    def test_the_model_is_left_as_it_was(self, model: Any) -> None:
        def others(*args: Any, **kwargs: Any) -> Any:
            return type(model).prepare_inputs_for_generation(model, *args, **kwargs)

        with tamis.attach(model):
            assert PREPARE in vars(model)
        assert PREPARE not in vars(model)
        with tamis.attach(model):
            setattr(model, PREPARE, others)
        assert vars(model)[PREPARE] is others
        with tamis.attach(model):
            assert vars(model)[PREPARE] is not others
        assert vars(model)[PREPARE] is others
        delattr(model, PREPARE)


def test_sparse_is_sparse(model: Any) -> None:
    stock = model.generate(IDS, **GREEDY).logits[0]
    found, made = generate(model, chunk=2 * TILE, selector="none")
    assert made.report is not None and made.report.density < 0.8
    assert not torch.allclose(found.logits[0], stock, atol=1e-3)


def test_borders_inside_tiles_are_stock(model: Any) -> None:
    wanted = model.generate(IDS, prefill_chunk_size=100, **GREEDY)
    found, made = generate(model, chunk=100, selector="none")
    fits = [r for r in made.reports if r.used == "sift"]
    assert [r.used for r in made.reports][1:6] == ["dense"] * 5
    assert all("goes on after cached tokens, with a chunk" in r.reason for r in made.reports[1:] if r not in fits)
    assert made.reports[0].reason or made.reports[0].used == "sift"
    assert bool(found.logits[0].isfinite().all()) and wanted.logits[0].shape == found.logits[0].shape


def test_a_border_that_fits_after_some_that_do_not(model: Any) -> None:
    """Every second border of chunks of 96 lies on a tile's. Where one ends inside, its document's rows are dense."""
    found, made = generate(model, chunk=96, selector="none")
    _, whole = generate(model, selector="none")
    assert {r.used for r in made.reports} == {"dense", "sift"} and bool(found.logits[0].isfinite().all())
    assert made.report is not None and whole.report is not None
    assert all(r.density > whole.report.density for r in made.reports if r.prompt_tokens == IDS.shape[1])


def test_the_next_prompt_is_another(model: Any) -> None:
    other = torch.tensor([draw(300, 9)])
    wanted = model.generate(other, prefill_chunk_size=128, **GREEDY)
    with tamis.attach(model, documents=DOCUMENTS, selector="none", **ANY_LENGTH) as made:
        model.generate(IDS, prefill_chunk_size=128, **GREEDY)
        found = model.generate(other, prefill_chunk_size=128, **GREEDY)
    assert torch.equal(found.sequences, wanted.sequences) and torch.equal(found.logits[0], wanted.logits[0])
    assert made.report is not None and made.report.used == "dense" and "holds no document" in made.report.reason


def test_padding_and_batches_stay_stock(model: Any) -> None:
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    for ids, options, says in ((IDS, {"attention_mask": mask}, "padded"), (IDS.repeat(2, 1), {}, "batch of 2")):
        wanted = model.generate(ids, prefill_chunk_size=128, **options, **GREEDY)
        with tamis.attach(model, documents=DOCUMENTS, selector="none", **ANY_LENGTH) as made:
            found = model.generate(ids, prefill_chunk_size=128, **options, **GREEDY)
        assert torch.equal(found.sequences, wanted.sequences)
        assert all(r.used == "dense" and says in r.reason for r in made.reports)


def test_a_preallocated_cache_stays_stock(model: Any) -> None:
    options = {"cache_implementation": "static", "prefill_chunk_size": 128, "disable_compile": True} | GREEDY
    wanted = model.generate(IDS, **options)
    with tamis.attach(model, documents=DOCUMENTS, selector="none", **ANY_LENGTH) as made:
        found = model.generate(IDS, **options)
    assert torch.equal(found.sequences, wanted.sequences)
    assert all(r.used == "dense" and r.reason for r in made.reports)


class TestWholeDocuments:
    DOCUMENTS = (tuple(range(100)), tuple(range(200, 260)))

    def found(self, tokens: list[int]) -> Prompt:
        return whole_documents(find_documents(tokens, self.DOCUMENTS), self.DOCUMENTS, 16)

    @pytest.mark.parametrize("n", [16, 17, 64, 99])
    def test_one_has_begun(self, n: int) -> None:
        made = self.found([7, 7, *range(200, 260), 7, *range(n)])
        assert [s.kind for s in made.segments] == [Kind.PREFIX, Kind.DOCUMENT, Kind.HISTORY, Kind.DOCUMENT]
        assert made.segments[-1].tokens == self.DOCUMENTS[0]
        assert cut(made, 63 + n).tokens == [7, 7, *range(200, 260), 7, *range(n)]

    @pytest.mark.parametrize(
        "tokens",
        [
            [7, 7, *range(15)],  # too little of it
            [7, 7, *range(50), 7],  # goes on otherwise
            [*range(100)],  # all of it
            [*range(100), 7, *range(30)],  # stands there already
        ],
    )
    def test_none(self, tokens: list[int]) -> None:
        assert self.found(tokens) == find_documents(tokens, self.DOCUMENTS)
