"""Tamis inside tiny transformers models: no job changes nothing, all tiles next to nothing, some tiles something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tamis.attention.hook import NAME, Job, Switch, attention_layers, install
from tamis.attention.prefill import SparsePrefill, recall
from tamis.core.errors import InvalidInput, ModelUnsupported
from tamis.eval.metrics import kl_divergence
from tamis.index.encode import Bits
from tamis.kernels.cpu.dense import causal_attention
from tamis.prompt.segments import Prompt
from tamis.select.every import AllTiles, NoCrossTiles
from tamis.select.oracle import Oracle
from tamis.select.sampled import Sampled
from tamis.select.scene import Scene, Selector
from tamis.select.stored import Stored

TILE = 64
Logits = Callable[..., torch.Tensor]
Attach = Callable[[Any], Switch]
LAYOUT = [("prefix", 10), ("document", 150), ("document", 64), ("document", 101), ("question", 30)]


def make_prompt(seed: int = 0) -> Prompt:
    draw = torch.Generator().manual_seed(seed)
    return Prompt.of([(kind, torch.randint(0, 512, (n,), generator=draw).tolist()) for kind, n in LAYOUT])


def all_ones(prompt: Prompt) -> list[Bits]:
    pages = [-(-len(d.tokens) // TILE) for d in prompt.documents]
    return [Bits(torch.ones(2, 4, p, p, dtype=torch.bool).tril(), torch.ones(2, 4, p, dtype=torch.bool)) for p in pages]


def job(selector: Selector, *, bits: Any = None, kernel: str = "cpu", **options: Any) -> tuple[SparsePrefill, Prompt]:
    prompt = make_prompt()
    scene = Scene.of(prompt, bits or [None] * len(prompt.documents), TILE)
    return SparsePrefill(scene, selector, kernel, **options), prompt


def run(model: Any, switch: Switch, selector: Selector, logits: Logits, **options: Any) -> torch.Tensor:
    prefill, prompt = job(selector, **options)
    with switch.running(prefill, len(prompt.tokens)):
        found = logits(model, prompt.tokens)
    assert sorted(prefill.layers) == [0, 1] and not switch.refused
    return found


class TestWithoutAJob:
    def test_logits_are_those_of_transformers(self, stock: Any, attach: Attach, logits: Logits) -> None:
        ids = make_prompt().tokens
        before = logits(stock, ids)
        attach(stock)
        assert torch.equal(logits(stock, ids), before)

    def test_generation_and_padded_batches_too(self, stock: Any, attach: Attach) -> None:
        ids = torch.tensor([make_prompt(1).tokens[:40], make_prompt(2).tokens[:40]])
        mask = torch.ones_like(ids)
        mask[1, :13] = 0
        options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        before = stock.generate(ids, **options)
        attach(stock)
        assert torch.equal(stock.generate(ids, **options), before)


class TestInstall:
    def test_everything_is_undone(self, stock: Any, logits: Logits) -> None:
        ids = make_prompt().tokens
        before, implementation = logits(stock, ids), stock.config._attn_implementation
        attributes = [set(vars(layer)) for layer in attention_layers(stock)]
        assert not any("tamis_switch" in names for names in attributes)
        _, uninstall = install(stock)
        assert stock.config._attn_implementation == NAME
        uninstall()
        assert stock.config._attn_implementation == implementation
        assert [set(vars(layer)) for layer in attention_layers(stock)] == attributes
        assert torch.equal(logits(stock, ids), before)

    def test_another_implementation_comes_back(self, tiny_model: Callable[..., Any]) -> None:
        model = tiny_model("llama")
        model.set_attn_implementation("eager")
        _, uninstall = install(model)
        uninstall()
        assert model.config._attn_implementation == "eager"

    def test_twice_is_refused_and_harmless(self, llama: Any, attach: Attach, logits: Logits) -> None:
        switch = attach(llama)
        with pytest.raises(InvalidInput, match="attached to Tamis already; detach it first"):
            install(llama)
        assert all(layer.tamis_switch is switch for layer in attention_layers(llama))
        logits(llama, [1, 2, 3])

    def test_two_models_have_their_own_jobs(
        self, llama: Any, attach: Attach, logits: Logits, tiny_model: Callable[..., Any]
    ) -> None:
        other = tiny_model("llama", seed=2)
        ids = make_prompt().tokens
        before = logits(other, ids)
        first, second = attach(llama), attach(other)
        assert first is not second
        prefill, prompt = job(NoCrossTiles())
        with first.running(prefill, len(prompt.tokens)):
            assert torch.equal(logits(other, ids), before)
        assert not prefill.layers

    def test_layers_come_in_order(self, stock: Any) -> None:
        assert [layer.layer_idx for layer in attention_layers(stock)] == [0, 1]

    def test_a_model_without_attention_is_refused(self) -> None:
        with pytest.raises(ModelUnsupported, match="Linear has no attention layers"):
            attention_layers(torch.nn.Linear(2, 2))


class TestAllTiles:
    @pytest.mark.parametrize("kernel", ["cpu", "reference", "auto"])
    def test_close_to_transformers(self, stock: Any, attach: Attach, logits: Logits, kernel: str) -> None:
        before = logits(stock, make_prompt().tokens)
        found = run(stock, attach(stock), AllTiles(), logits, kernel=kernel)
        assert before.std() > 0.1
        torch.testing.assert_close(found, before, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("kernel", ["cpu", "reference"])
    def test_all_bits_set_is_all_tiles_bit_for_bit(
        self, stock: Any, attach: Attach, logits: Logits, kernel: str
    ) -> None:
        switch, ones = attach(stock), all_ones(make_prompt())
        wanted = run(stock, switch, AllTiles(), logits, kernel=kernel)
        for selector in (Stored(), Sampled(rows=TILE, mass=1.0), Oracle(1.0)):
            for bits in (ones, None):  # all set, and no record at all
                prefill, prompt = job(selector, bits=bits, kernel=kernel)
                with switch.running(prefill, len(prompt.tokens)):
                    found = logits(stock, prompt.tokens)
                assert prefill.density == 1.0 and torch.equal(found, wanted)

    def test_density_is_one_and_recall_too(self, llama: Any, attach: Attach, logits: Logits) -> None:
        prefill, prompt = job(AllTiles(), measure_recall=True)
        with attach(llama).running(prefill, len(prompt.tokens)):
            logits(llama, prompt.tokens)
        assert prefill.density == 1.0 and prefill.recall == pytest.approx(1.0, abs=1e-5)


class TestSparse:
    @pytest.mark.parametrize(
        "selector", [NoCrossTiles(), Oracle(0.5), Sampled(4, 0.5)], ids=["none", "oracle", "sampled"]
    )
    def test_differs_from_dense_and_stays_finite(
        self, stock: Any, attach: Attach, logits: Logits, selector: Selector
    ) -> None:
        dense = logits(stock, make_prompt().tokens)
        found = run(stock, attach(stock), selector, logits)
        assert bool(found.isfinite().all())
        kl = kl_divergence(dense[-1], found[-1])
        assert 1e-6 < kl < 20
        n = LAYOUT[0][1]
        torch.testing.assert_close(found[:n], dense[:n], rtol=1e-4, atol=1e-4)  # the prefix sees itself alone

    def test_kernels_agree_on_a_choice(self, llama: Any, attach: Attach, logits: Logits) -> None:
        switch = attach(llama)
        a, b = (run(llama, switch, NoCrossTiles(), logits, kernel=k) for k in ("cpu", "reference"))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

    def test_no_cross_attention_is_a_block_mask(self, llama: Any, attach: Attach, logits: Logits) -> None:
        """Stock transformers with the same mask, element by element, must give the same logits."""
        prompt = make_prompt()
        segment = torch.repeat_interleave(torch.arange(5), torch.tensor(prompt.lengths))
        document = (segment >= 1) & (segment <= 3)
        apart = document[:, None] & document[None, :] & (segment[:, None] != segment[None, :])
        allowed = torch.ones(len(segment), len(segment)).tril().bool() & ~apart
        wanted = logits(llama, prompt.tokens, attention_mask=allowed[None, None])
        found = run(llama, attach(llama), NoCrossTiles(), logits)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

    def test_report_of_a_layer(self, llama: Any, attach: Attach, logits: Logits) -> None:
        prefill, prompt = job(NoCrossTiles(), measure_recall=True)
        with attach(llama).running(prefill, len(prompt.tokens)):
            logits(llama, prompt.tokens)
        causal = sum(prompt.lengths) * (sum(prompt.lengths) + 1) // 2
        skipped = 64 * 150 + 101 * (150 + 64)
        for trace in prefill.layers.values():
            assert (trace.area, trace.causal_area) == (4 * (causal - skipped), 4 * causal)
            assert trace.recall is not None and 0 < trace.recall < 1
        assert prefill.density == pytest.approx(1 - skipped / causal)
        assert prefill.recall is not None and prefill.recall < 0.999

    def test_recall_against_the_whole_matrix(self) -> None:
        prefill, prompt = job(AllTiles())
        n = len(prompt.tokens)
        q, k = torch.randn(4, n, 64), torch.randn(2, n, 64)
        mask = NoCrossTiles().select(0, q, k, 0.2, prefill.scene)
        scores = q @ k.repeat_interleave(2, 0).mT * 0.2
        p = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1)
        tiling = prefill.scene.tiling
        of = torch.repeat_interleave(torch.arange(len(tiling)), torch.tensor(tiling.lengths))
        wanted = float((p * mask[:, of][:, :, of]).sum(-1).mean())
        assert recall(mask, q, k, 0.2, prefill.scene) == pytest.approx(wanted, abs=1e-5)


class Counting:
    """Dense attention that counts its calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(layer)
        return causal_attention(q, k, v, scale)


class TestRefusals:
    @pytest.fixture
    def counted(self) -> Counting:
        return Counting()

    def refuse(self, model: Any, switch: Switch, counted: Job, n_tokens: int, says: str, **inputs: Any) -> None:
        with torch.inference_mode():
            before = model(**inputs).logits
            with switch.running(counted, n_tokens):
                found = model(**inputs).logits
        assert torch.equal(found, before)
        assert len(switch.refused) == 1
        (reason, times), *_ = switch.refused.items()
        assert says in reason and times == 2  # once per layer

    def test_a_batch(self, stock: Any, attach: Attach, counted: Counting) -> None:
        ids = torch.randint(0, 512, (2, 20))
        self.refuse(stock, attach(stock), counted, 20, "batch of 2", input_ids=ids)
        assert counted.calls == []

    def test_another_length(self, stock: Any, attach: Attach, counted: Counting) -> None:
        ids = torch.randint(0, 512, (1, 20))
        self.refuse(stock, attach(stock), counted, 21, "20 tokens where the plan has 21", input_ids=ids)
        assert counted.calls == []

    def test_padding(self, llama: Any, attach: Attach, counted: Counting) -> None:
        """A job attends causally to all tokens; what a mask hides it cannot hide."""
        ids, mask = torch.randint(0, 512, (1, 20)), torch.ones(1, 20, dtype=torch.long)
        mask[0, :5] = 0
        self.refuse(llama, attach(llama), counted, 20, "mask", input_ids=ids, attention_mask=mask)
        assert counted.calls == []

    def test_a_mask_that_hides_nothing_is_none(self, stock: Any, attach: Attach, counted: Counting) -> None:
        ids = torch.randint(0, 512, (1, 20))
        switch = attach(stock)
        with torch.inference_mode(), switch.running(counted, 20):
            stock(ids, attention_mask=torch.ones_like(ids))
        assert counted.calls == [0, 1] and not switch.refused

    def test_tokens_after_a_cache(self, stock: Any, attach: Attach, counted: Counting) -> None:
        ids = torch.randint(0, 512, (1, 30))
        with torch.inference_mode():
            wanted = stock(ids).logits[:, 20:]
            switch = attach(stock)
            past = stock(ids[:, :20], use_cache=True).past_key_values
            with switch.running(counted, 10):
                found = stock(ids[:, 20:], past_key_values=past).logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert counted.calls == [] and list(switch.refused.values()) == [2]
        assert "chunked prefill" in next(iter(switch.refused))

    def test_decoding_under_a_job_is_stock_and_not_counted(self, llama: Any, attach: Attach, counted: Counting) -> None:
        ids = torch.randint(0, 512, (1, 20))
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        wanted = llama.generate(ids, **options)
        switch = attach(llama)
        with switch.running(counted, 20):
            found = llama.generate(ids, **options)
        assert torch.equal(found, wanted) and counted.calls == [0, 1] and not switch.refused

    def test_one_job_at_a_time(self) -> None:
        switch = Switch()
        with switch.running(Counting(), 1):
            with (
                pytest.raises(InvalidInput, match="another prefill of this model is still running"),
                switch.running(Counting(), 1),
            ):
                pass
            assert switch.job is not None
        assert switch.job is None

    def test_a_failed_pass_leaves_no_job(self) -> None:
        switch = Switch()
        with pytest.raises(RuntimeError), switch.running(Counting(), 1):
            raise RuntimeError
        assert switch.job is None
