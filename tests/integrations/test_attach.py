"""Tamis inside other people's calls: documents found in the prompt, everything else stock, and the model given back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tamis
from tamis.attention.policy import MIN_TOKENS
from tamis.core.errors import InvalidInput, ModelUnsupported, StoreMismatch
from tamis.integrations.hf.attach import Attached
from tamis.kernels.lists import TILE
from tiny_chat import tiny_tokenizer

FAMILIES = ("llama", "qwen2", "qwen3")
ANY_LENGTH = {"prefill": "sift", "min_tokens": 0}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def draw(n: int, seed: int) -> list[int]:
    return torch.randint(4, 500, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


DOCUMENTS = [draw(TILE + 40, 1), draw(2 * TILE + 7, 2), draw(90, 3)]
IDS = torch.tensor([[2, 2, 2, *DOCUMENTS[0], *DOCUMENTS[1], 3, *DOCUMENTS[2], *draw(20, 4)]])


@pytest.fixture(scope="module")
def models(tiny_model: Callable[..., Any]) -> dict[str, Any]:
    return {family: tiny_model(family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, models: dict[str, Any]) -> Any:
    """A model of each family in turn; the test must give it back as it was."""
    found = models[request.param]
    before = state(found)
    yield found
    assert state(found) == before


@pytest.fixture
def llama(models: dict[str, Any]) -> Any:
    before = state(models["llama"])
    yield models["llama"]
    assert state(models["llama"]) == before


def state(model: Any) -> Any:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m))) for m in model.modules()]
    return model.config._attn_implementation, hooks


def logits(model: Any, ids: torch.Tensor = IDS, **options: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(ids, **options).logits
    return found


def report(attached: Attached) -> Any:
    assert attached.report is not None
    return attached.report


class TestFound:
    def test_all_tiles_equal_stock(self, model: Any) -> None:
        wanted = logits(model)
        with tamis.attach(model, documents=DOCUMENTS, selector="all", **ANY_LENGTH) as attached:
            found = logits(model)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert (report(attached).used, report(attached).documents, report(attached).density) == ("sift", 3, 1.0)
        assert torch.equal(logits(model), wanted)

    def test_generate_with_all_tiles_is_generate(self, model: Any) -> None:
        wanted = model.generate(IDS, **GREEDY)
        with tamis.attach(model, documents=DOCUMENTS, selector="all", **ANY_LENGTH) as attached:
            found = model.generate(IDS, **GREEDY)
        assert torch.equal(found, wanted)
        assert len(attached.reports) == 1 and report(attached).used == "sift"

    def test_sparse_is_sparse(self, model: Any) -> None:
        wanted = logits(model)
        with tamis.attach(model, documents=DOCUMENTS, selector="none", measure_recall=True, **ANY_LENGTH) as attached:
            found = logits(model)
        assert report(attached).density < 0.9 and report(attached).recall < 1
        assert not torch.allclose(found, wanted, atol=1e-3) and bool(found.isfinite().all())

    def test_the_order_given_does_not_matter(self, llama: Any) -> None:
        found = []
        for documents in (DOCUMENTS, DOCUMENTS[::-1]):
            with tamis.attach(llama, documents=documents, **ANY_LENGTH) as attached:
                found.append(logits(llama))
            assert report(attached).documents == 3 and not report(attached).fallbacks
        assert torch.equal(*found)

    def test_texts(self, llama: Any) -> None:
        tokenizer = tiny_tokenizer()
        texts = ["The boat comes." * 30, "The lamp burns." * 20]
        ids = tokenizer("\n\n".join(texts) + "\n\nWhere?", return_tensors="pt").input_ids
        with tamis.attach(llama, documents=texts, tokenizer=tokenizer, **ANY_LENGTH) as attached:
            logits(llama, ids)
        assert report(attached).documents == 2
        n_tokens = len(tokenizer("".join(texts)).input_ids)
        assert report(attached).document_tokens == n_tokens
        with pytest.raises(InvalidInput, match=r"need a tokenizer"):
            tamis.attach(llama, documents=texts)

    def test_texts_whose_ends_the_tokenizer_joins_with_their_neighbours(self, llama: Any) -> None:
        """The space after the last word and the one before the first make other tokens in the prompt."""
        tokenizer = tiny_tokenizer()
        texts = ["The boat comes. " * 30, "The lamp burns. " * 20]
        prompt = "The " + "".join(texts) + "Where?"
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        alone = [tokenizer(t).input_ids for t in texts]
        assert not any(str(a)[1:-1] in str(ids[0].tolist()) for a in alone)
        wanted = logits(llama, ids)
        with tamis.attach(llama, documents=texts, tokenizer=tokenizer, selector="all", **ANY_LENGTH) as attached:
            found = logits(llama, ids)
        assert (report(attached).documents, report(attached).fallbacks) == (2, ())
        assert 1 <= sum(map(len, alone)) - report(attached).document_tokens <= 6
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


class TestNotFound:
    def test_one_of_them(self, llama: Any) -> None:
        with tamis.attach(llama, documents=[*DOCUMENTS, draw(50, 9)], **ANY_LENGTH) as attached:
            logits(llama)
        assert report(attached).documents == 3
        assert report(attached).fallbacks == ("1 of 4 documents do not stand in the prompt",)
        assert "1 of 4" in str(report(attached))

    @pytest.mark.parametrize("documents", [[], [draw(50, 9)], [[]]], ids=["none given", "other", "empty"])
    def test_none(self, llama: Any, documents: list[list[int]]) -> None:
        wanted = logits(llama)
        with tamis.attach(llama, documents=documents, **ANY_LENGTH) as attached:
            assert torch.equal(logits(llama), wanted)
        assert report(attached).used == "dense" and "holds no document" in report(attached).reason
        assert ("1 of 1 documents do not stand" in str(report(attached))) is bool(documents)


class TestDense:
    """What no plan fits is answered by transformers, bit for bit, and the report says why."""

    def same(self, model: Any, says: str, run: Callable[[], torch.Tensor]) -> Attached:
        wanted = run()
        with tamis.attach(model, documents=DOCUMENTS, selector="none", **ANY_LENGTH) as attached:
            found = run()
        assert torch.equal(found, wanted)
        assert report(attached).used == "dense" and says in str(report(attached))
        return attached

    def test_asked_for(self, llama: Any) -> None:
        wanted = logits(llama)
        with tamis.attach(llama, documents=DOCUMENTS) as attached:
            assert torch.equal(logits(llama), wanted)
        assert (report(attached).asked, report(attached).used, report(attached).reason) == ("dense", "dense", "")

    def test_short(self, llama: Any) -> None:
        wanted = logits(llama)
        with tamis.attach(llama, documents=DOCUMENTS, prefill="sift") as attached:
            assert torch.equal(logits(llama), wanted)
        assert f"pays from {MIN_TOKENS['cpu']}" in report(attached).reason

    def test_batch(self, model: Any) -> None:
        ids = IDS.repeat(2, 1)
        self.same(model, "a batch of 2 prompts", lambda: logits(model, ids))
        self.same(model, "a batch of 2 prompts", lambda: model.generate(ids, **GREEDY))

    def test_beams_are_a_batch(self, llama: Any) -> None:
        self.same(llama, "a batch of 2", lambda: llama.generate(IDS, num_beams=2, **GREEDY))

    def test_padding(self, model: Any) -> None:
        mask = torch.ones_like(IDS)
        mask[0, :3] = 0
        self.same(model, "padded", lambda: logits(model, attention_mask=mask))
        self.same(model, "padded", lambda: model.generate(IDS, attention_mask=mask, **GREEDY))

    def test_a_mask_of_the_callers(self, llama: Any) -> None:
        n = IDS.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
        mask[..., 50:, :5] = False
        self.same(llama, "mask hides tokens", lambda: logits(llama, attention_mask=mask))

    def test_past_cache(self, model: Any) -> None:
        def go_on() -> torch.Tensor:
            with torch.inference_mode():
                past = model(IDS[:, :10], use_cache=True).past_key_values
                name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
                found: torch.Tensor = model(IDS[:, 10:], **{name: past}).logits
            return found

        attached = self.same(model, "goes on after cached tokens", go_on)
        assert len(attached.reports) == 2

    def test_chunks(self, llama: Any) -> None:
        run = lambda: llama.generate(IDS, prefill_chunk_size=100, **GREEDY)  # noqa: E731
        wanted = run()
        with tamis.attach(llama, documents=DOCUMENTS, selector="none", **ANY_LENGTH) as attached:
            assert torch.equal(run(), wanted)
        assert len(attached.reports) > 1
        assert all(r.used == "dense" and r.reason for r in attached.reports)


class TestGivenBack:
    def test_after_a_failed_pass(self, model: Any) -> None:
        wanted = logits(model)

        def broken(*_: Any) -> None:
            raise RuntimeError("planted")

        with tamis.attach(model, documents=DOCUMENTS, selector="all", **ANY_LENGTH) as attached:
            hook = model.model.layers[1].register_forward_pre_hook(broken)
            with pytest.raises(RuntimeError, match=r"planted"):
                model.generate(IDS, **GREEDY)
            hook.remove()
            assert attached.reports == []
            torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits(model), wanted)

    def test_an_interrupted_pass_leaves_no_plan_behind(self, llama: Any) -> None:
        """torch calls no hooks after Ctrl-C; the next prompt of the same length must not get this one's tiles."""

        def broken(*_: Any) -> None:
            raise KeyboardInterrupt

        other = torch.tensor([draw(IDS.shape[1], 77)])
        wanted = logits(llama, other)
        with tamis.attach(llama, documents=DOCUMENTS, selector="none", **ANY_LENGTH) as attached:
            hook = llama.model.layers[1].register_forward_pre_hook(broken)
            with pytest.raises(KeyboardInterrupt):
                logits(llama)
            hook.remove()
            assert torch.equal(logits(llama, other), wanted)
            assert "holds no document" in report(attached).reason
            hook = llama.model.layers[1].register_forward_pre_hook(broken)
            with pytest.raises(KeyboardInterrupt):
                logits(llama)
            hook.remove()
        assert torch.equal(logits(llama, other), wanted)

    def test_an_error_in_the_block(self, llama: Any) -> None:
        with pytest.raises(ZeroDivisionError), tamis.attach(llama, documents=DOCUMENTS, **ANY_LENGTH):
            raise ZeroDivisionError

    def test_nested_is_refused(self, llama: Any, tmp_path: Path) -> None:
        with tamis.attach(llama, documents=DOCUMENTS, selector="all", **ANY_LENGTH) as attached:
            for store in (None, str(tmp_path / "kb")):
                with pytest.raises(InvalidInput, match=r"attached to Tamis already"):
                    tamis.attach(llama, documents=DOCUMENTS, store=store)
            logits(llama)
            assert report(attached).used == "sift"
        attached.close()  # twice is harmless
        with tamis.attach(llama):
            pass

    def test_another_implementation_comes_back(self, tiny_model: Callable[..., Any]) -> None:
        model = tiny_model("llama")
        model.set_attn_implementation("eager")
        with tamis.attach(model):
            pass
        assert model.config._attn_implementation == "eager"


class TestStore:
    def test_reused(self, llama: Any, tmp_path: Path) -> None:
        found = []
        for made in (3, 0):
            with tamis.attach(llama, documents=DOCUMENTS, store=str(tmp_path / "kb"), **ANY_LENGTH) as attached:
                found.append(logits(llama))
            assert report(attached).indexed == made
        assert torch.equal(*found)

    def test_of_another_model(self, models: dict[str, Any], tmp_path: Path) -> None:
        with tamis.attach(models["llama"], store=str(tmp_path / "kb")):
            pass
        before = state(models["qwen3"])
        with pytest.raises(StoreMismatch, match=r"architecture is 'llama.* against 'qwen3"):
            tamis.attach(models["qwen3"], store=str(tmp_path / "kb"))
        assert state(models["qwen3"]) == before
        with pytest.raises(StoreMismatch, match=r"prefix"):
            tamis.attach(models["llama"], store=str(tmp_path / "kb"), prefix=[2, 2])
        with pytest.raises(StoreMismatch, match=r"tile is 128 against 64"):
            tamis.attach(models["llama"], store=str(tmp_path / "kb"), tile=64)
        with tamis.attach(models["llama"], store=str(tmp_path / "kb")):
            pass


class TestRefused:
    def refused(self, model: Any, says: str) -> None:
        before = state(model)
        with pytest.raises(ModelUnsupported, match=says):
            tamis.attach(model)
        assert state(model) == before

    def test_a_family(self) -> None:
        import transformers as hf

        config = hf.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=1, n_positions=64)
        self.refused(hf.GPT2LMHeadModel(config), "model family 'gpt2' is not supported. Supported: llama")

    def test_a_sliding_window(self, tiny_model: Callable[..., Any]) -> None:
        model = tiny_model("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1)
        self.refused(model, "qwen2 with .*sliding window 64 is not supported")

    def test_a_head_dim(self, tiny_model: Callable[..., Any]) -> None:
        self.refused(tiny_model("llama", head_dim=32), "head_dim 32 is not supported. Supported: 64, 96, 128")

    def test_an_unknown_option(self, llama: Any) -> None:
        with pytest.raises(InvalidInput, match=r"Did you mean 'selector'"):
            tamis.attach(llama, selctor="all")


class TestOnTheRealModel:
    def test_generate(self, smollm2: Any) -> None:
        texts = [
            "The harbour crane lifts stores from the boat on Mondays.\n\n" * 13,
            "The lamp is lit at dusk.\n\n" * 18,
        ]
        ids = smollm2.tokenizer("".join(texts) + "Question: When?\nAnswer:", return_tensors="pt").input_ids
        options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        wanted = smollm2.model.generate(ids, **options)
        with tamis.attach(
            smollm2.model, documents=texts, tokenizer=smollm2.tokenizer, selector="all", **ANY_LENGTH
        ) as attached:
            found = smollm2.model.generate(ids, **options)
        assert (report(attached).used, report(attached).documents) == ("sift", 2)
        assert torch.equal(found.sequences, wanted.sequences)
        torch.testing.assert_close(found.logits[0], wanted.logits[0], rtol=1e-4, atol=1e-4)
