"""Reused documents with some tokens recomputed: the ends of the scale, the choice of tokens, rows that become fewer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tamis.attention import blend_attention, blend_cacheblend
from tamis.attention.blend import CHOOSERS
from tamis.attention.blend_attention import PROBES, probed, schedule
from tamis.attention.reuse import Session
from tamis.core.errors import InvalidInput
from tamis.engine.llm import LLM
from tamis.engine.runner import Prefilled
from tamis.engine.sampling import Sampling
from tamis.kernels.paged_dispatch import paged_attention
from tamis.prompt.segments import Prompt

PAGE_BYTES = 6 * 2 * 2 * 64 * 4 * 128  # of the model with 6 layers
CLOSE = 1e-4
BLENDS = tuple(CHOOSERS)


@pytest.fixture
def prompt() -> Prompt:
    draw = torch.Generator().manual_seed(5)
    parts = [
        ("prefix", 37),
        *[("document", n) for n in (70, 128, 200)],
        ("history", 11),
        ("document", 90),
        ("question", 20),
    ]
    return Prompt.of([(kind, torch.randint(0, 512, (n,), generator=draw).tolist()) for kind, n in parts])


@pytest.fixture
def deep(open_llm: Callable[..., LLM]) -> LLM:
    """Six layers, so that stages and checked layers have others behind them."""
    return open_llm(model={"num_hidden_layers": 6}, cache_bytes=40 * PAGE_BYTES, accept_block_attention=True)


def stock(llm: LLM, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = llm.runner.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return logits


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def blended(llm: LLM, prompt: Prompt, share: float, **choices: Any) -> Prefilled:
    return llm.prefill(prompt, prefill="blend", recompute=share, **choices)


class TestEnds:
    @pytest.mark.parametrize("blend", BLENDS)
    def test_everything_recomputed_is_dense(self, deep: LLM, prompt: Prompt, blend: str) -> None:
        made = blended(deep, prompt, 1.0, blend=blend)
        assert far(made.logits, stock(deep, prompt.tokens)) < CLOSE
        assert made.report.reuse is not None and not made.report.reuse.approximate
        assert made.report.reuse.recomputed == 488 and made.report.density == pytest.approx(1.0)
        new = [3, 1, 4]
        for token in new:
            logits = made.cache.step(token)
        assert far(logits, stock(deep, [*prompt.tokens, *new])) < CLOSE

    @pytest.mark.parametrize("blend", BLENDS)
    def test_nothing_recomputed_is_plain_reuse(self, deep: LLM, prompt: Prompt, blend: str) -> None:
        assert far(blended(deep, prompt, 0.0, blend=blend).logits, deep.prefill(prompt, prefill="reuse").logits) == 0

    @pytest.mark.parametrize("blend", BLENDS)
    def test_copies_change_nothing(self, deep: LLM, prompt: Prompt, blend: str) -> None:
        here, copied = (blended(deep, prompt, 0.3, blend=blend, reuse_copies=c) for c in (False, True))
        assert far(here.logits, copied.logits) < CLOSE
        assert far(here.cache.step(7), copied.cache.step(7)) < CLOSE

    @pytest.mark.parametrize("blend", BLENDS)
    def test_a_full_cache_changes_nothing(
        self, open_llm: Callable[..., LLM], deep: LLM, prompt: Prompt, blend: str
    ) -> None:
        wanted = blended(deep, prompt, 0.3, blend=blend)
        tokens = list(deep.runner.decode(wanted, Sampling(max_new_tokens=5), frozenset()))
        deep.close()
        tight = open_llm(model={"num_hidden_layers": 6}, cache_bytes=7 * PAGE_BYTES, accept_block_attention=True)
        made = blended(tight, prompt, 0.3, blend=blend)
        assert made.report.reuse is not None and made.report.reuse.private
        assert far(made.logits, wanted.logits) < CLOSE
        assert list(tight.runner.decode(made, Sampling(max_new_tokens=5), frozenset())) == tokens


class TestShares:
    @pytest.mark.parametrize("share", [0.05, 0.15, 0.5, 0.8])
    @pytest.mark.parametrize("blend", BLENDS)
    def test_as_many_as_asked_for(self, deep: LLM, prompt: Prompt, share: float, blend: str) -> None:
        found = blended(deep, prompt, share, blend=blend).report.reuse
        assert found is not None
        if blend in ("attention", "bits_attention"):
            assert found.recomputed_share == pytest.approx(share, abs=0.01)
        else:  # one layer of all tokens, to measure in
            assert found.recomputed_share == pytest.approx((1 + 5 * share) / 6, abs=0.01)
            assert found.recomputed == round(488 * share)
        assert found.reused + found.recomputed == 488 and found.fresh == 68

    def test_later_layers_have_fewer_rows(self, deep: LLM, prompt: Prompt) -> None:
        seen: list[int] = []
        hooks = [
            m.register_forward_hook(lambda m, a, out: seen.append(out.shape[1])) for m in deep.runner.model.model.layers
        ]
        deep.prefill(prompt, prefill="reuse").close()
        seen.clear()
        found = blended(deep, prompt, 0.2).report.reuse
        for hook in hooks:
            hook.remove()
        assert found is not None and [n for _, n in found.stages] == [68 + n for n in (146, 98, 49)]
        assert seen == [68] * 6 + [214] * 2 + [166] * 2 + [117] * 2, "a probe, then three stages"

    @pytest.mark.parametrize("share", [0.01, 0.15, 0.6, 0.9, 1.0])
    @pytest.mark.parametrize("layers", [1, 2, 6, 30])
    def test_the_schedule_keeps_the_mean(self, share: float, layers: int) -> None:
        parts = schedule(share, layers)
        assert all(0 < part <= 1 + 1e-9 for _, part in parts) and parts[0][0] == 0
        assert sum(part for _, part in parts) / len(parts) == pytest.approx(share)

    def test_a_share_outside_is_refused(self, deep: LLM, prompt: Prompt) -> None:
        for share in (-0.1, 1.1):
            with pytest.raises(InvalidInput, match="0 to 1"):
                blended(deep, prompt, share)
        with pytest.raises(InvalidInput, match="cacheblend"):
            blended(deep, prompt, 0.1, blend="cacheblent")


class TestChoice:
    def test_what_is_probed_is_the_attention_of_the_last_rows(self, deep: LLM, prompt: Prompt) -> None:
        """Against a pass whose mask is block-diagonal, its attention weights read out by transformers."""
        from test_reuse import block_mask

        start = deep.prefill(prompt, prefill="reuse")
        session = start.cache
        assert isinstance(session, Session)
        mass = probed(session)
        model, rows = deep.runner.model, min(PROBES, 20)
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            out = model(torch.tensor([prompt.tokens]), attention_mask=block_mask(prompt), output_attentions=True)
        model.set_attn_implementation("tamis")
        wanted = torch.stack([a[0, :, -rows:].sum((0, 1)) for a in out.attentions])
        stored = ~session.layout.fresh
        assert far(mass[:, stored], wanted[:, stored]) < 1e-3
        assert float(wanted[:, stored].max()) > 0.1

    def test_cacheblend_takes_what_deviates_most(
        self, deep: LLM, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Values of layer 1 by transformers, alone and in the prompt."""
        values: list[torch.Tensor] = []
        hook = deep.runner.model.model.layers[1].self_attn.v_proj.register_forward_hook(
            lambda m, a, out: values.append(out[0])
        )
        chosen: list[torch.Tensor] = []
        most = blend_cacheblend.most

        def kept(*args: Any) -> torch.Tensor:
            chosen.append(most(*args))
            return chosen[-1]

        stock(deep, prompt.tokens)
        for document in prompt.documents:
            stock(deep, list(document.tokens))
        hook.remove()
        monkeypatch.setattr(blend_cacheblend, "most", kept)
        blended(deep, prompt, 0.1, blend="cacheblend")
        spans = [s for p, s in zip(prompt.segments, prompt.spans, strict=True) if p.kind == "document"]
        away = torch.zeros(len(prompt.tokens))
        for (start, end), alone in zip(spans, values[1:], strict=True):
            away[start:end] = (values[0][start:end] - alone).square().sum(-1)
        assert set(chosen[0].nonzero()[:, 0].tolist()) == set(away.topk(49).indices.tolist())

    def test_more_recomputed_is_nearer_to_dense(self, smollm2: Any) -> None:
        facts = ["The lamp of the north station is red.", "Its keeper is called Ada.", "Ada painted the lamp of hers."]
        with LLM(smollm2, cache_bytes=200 << 20, accept_block_attention=True) as llm:
            tokens = [llm.document_tokens(f"{fact} The boat comes on Monday with stores. " * 2) for fact in facts]
            prompt = llm.template.prompt("Which colour has the lamp that Ada painted?", tokens)
            dense = llm.prefill(prompt, prefill="dense").logits.log_softmax(-1)
            away = []
            for share in (0.0, 0.2, 1.0):
                found = blended(llm, prompt, share).logits.log_softmax(-1)
                away.append(float((dense.exp() * (dense - found)).sum()))
        assert away[0] > 2 * away[1] and away[2] < 1e-5


class TestMutations:
    def test_a_key_left_out_is_seen(self, deep: LLM, prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
        """All tokens recomputed, but the rows of one are dropped from what is read."""
        of = blend_attention.most

        def one_short(*args: Any) -> torch.Tensor:
            chosen = of(*args)
            chosen[40] = False
            return chosen

        monkeypatch.setattr(blend_attention, "most", one_short)
        assert far(blended(deep, prompt, 1.0).logits, stock(deep, prompt.tokens)) > 10 * CLOSE

    def test_rows_of_a_wrong_place_are_seen(self, deep: LLM, prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
        from tamis.attention.reuse_pass import Stage

        among = Stage.among
        wanted = blended(deep, prompt, 0.3).logits
        monkeypatch.setattr(Stage, "among", lambda self, other: (among(self, other) - 1).clamp(min=0))
        assert far(blended(deep, prompt, 0.3).logits, wanted) > 10 * CLOSE


def test_the_dispatched_kernel_is_the_one_used() -> None:
    """`reuse_pass` goes through the dispatcher, so that a GPU takes its own kernel."""
    from tamis.attention import reuse_pass

    assert reuse_pass.paged_attention is paged_attention
