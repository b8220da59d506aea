"""Choices are checked at birth; a plan says what will be done, a report what was, and why."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tamis.attention.hook import Switch
from tamis.attention.offline import Indexer, index_spec
from tamis.attention.planner import Plan, plan_prefill
from tamis.attention.policy import MIN_TOKENS, Policy
from tamis.core.errors import InvalidInput
from tamis.index.store import RecordStore
from tamis.prompt.segments import Prompt
from tamis.select import SELECTORS

TILE = 64
PREFIX = (5, 6, 7)
Attach = Callable[[Any], Switch]
Logits = Callable[..., torch.Tensor]


class TestPolicy:
    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"prefill": "sieve"}, "unknown prefill 'sieve'. .*Choices: blend, blocks, dense, forecast, prefix"),
            ({"prefill": "sft"}, "Did you mean 'sift'"),
            ({"decode": "dens"}, "unknown decode 'dens'. Did you mean 'dense'"),
            ({"kv": "bf61"}, "Did you mean 'bf16'"),
            ({"kv": "selfindx"}, "Did you mean 'selfindex'"),
            ({"decode": "selfindex", "kv": "bf16"}, "reads codes that kv='bf16' does not keep"),
            ({"decode": "selfindex", "prefill": "reuse"}, "prefill='reuse' keeps documents in pages"),
            ({"kv": "selfindex", "prefill": "prefix"}, "Use prefill='dense' or 'sift' with it"),
            ({"decode_budget": 1.5}, "decode_budget is 1.5"),
            ({"decode": "block"}, "Did you mean 'blocks'"),
            ({"offload": "hots"}, "unknown offload 'hots'. Did you mean 'host'"),
            ({"decode": "blocks", "kv": "selfindex"}, "kept either as codes or in blocks"),
            ({"decode": "selfindex", "offload": "host"}, "kept either as codes or in blocks"),
            ({"decode": "forecast", "prefill": "reuse"}, "in pages, which decode='forecast' .* does not read"),
            ({"offload": "host", "prefill": "prefix"}, "in pages, which decode='dense' with offload='host' does not"),
            ({"decode_local": -1}, "decode_local is -1; give 0 to 16777216, or None"),
            ({"decode_stick": -0.5}, "decode_stick is -0.5; give 0"),
            ({"offload_slots": 0}, "offload_slots is 0; give 1 to 16777216, or None"),
            ({"offload_slots": 4}, "slots are used by offload='host' with decode='blocks'"),
            ({"offload_slots": 4, "offload": "host"}, "slots are used by offload='host' with decode='blocks'"),
            ({"prefill_blocks": 0}, "prefill_blocks is 0"),
            ({"prefill_blocks": 1 << 31, "decode_local": 9}, "prefill_blocks is 2147483648; give 1 to 16777216"),
            ({"decode_local": 10**30}, "give 0 to 16777216, or None"),
            ({"prefill_together": 3}, "prefill_together is 3"),
            ({"prefill": "blocks", "prefill_blocks": 9}, "prefill_blocks is 9, and 34 blocks are read in any case"),
            ({"decode_least": -1}, "decode_least -1; give a share"),
            ({"decode_least": 1 << 31}, "decode_least 2147483648; give a share of the tokens.* 0 to 1073741824"),
            ({"selector": "sample"}, "unknown selector 'sample'. Did you mean 'sampled'"),
            ({"ca_rule": "shares"}, "Did you mean 'share'"),
            ({"tile": 32}, "tile is 32; allowed are 64 and 128"),
            ({"min_tokens": -1}, "min_tokens is -1; give 0 or more"),
            ({"alpha": 1.5}, "alpha is 1.5"),
            ({"beta": -0.1}, "beta is -0.1"),
            ({"gamma": 2.0}, "gamma is 2.0"),
            ({"rows": 0}, "rows is 0; allowed are 1 to 128"),
            ({"mass": 0.0}, "mass is 0.0; allowed are shares"),
            ({"selector": "oracle", "mass": 1.1}, "mass is 1.1"),
            ({"selectr": "stored"}, "unknown option 'selectr'. Did you mean 'selector'"),
        ],
    )
    def test_what_is_not_allowed(self, changes: dict[str, Any], says: str) -> None:
        with pytest.raises(InvalidInput, match=says):
            Policy.of(**changes)
        if "selectr" not in changes:
            with pytest.raises(InvalidInput, match=says):
                Policy(**changes)

    def test_decode_implies_a_form(self) -> None:
        forms = [Policy(kv=kv).kv_form for kv in ("auto", "bf16", "selfindex")]
        assert forms == ["auto", "bf16", "selfindex"] and Policy(decode="selfindex").kv_form == "selfindex"
        assert Policy(kv="selfindex").budget is None
        blocks = ({"decode": "blocks"}, {"decode": "forecast", "kv": "bf16"}, {"offload": "host"})
        assert {Policy(**choices).kv_form for choices in blocks} == {"blocks"}  # type: ignore[arg-type]
        budget = Policy(decode="selfindex", decode_budget=0.2, decode_least=5).budget
        assert budget is not None and (budget.count(10), budget.count(1000)) == (5, 200)

    def test_of_keeps_the_rest(self) -> None:
        base = Policy(prefill="sift", mass=0.95)
        assert Policy.of(base, rows=4) == Policy(prefill="sift", mass=0.95, rows=4)
        assert Policy.of() == Policy() and Policy.of(base) == base

    def test_of_something_else(self) -> None:
        wrong: Any = "sift"
        with pytest.raises(InvalidInput, match=r"policy is 'sift'; give a tamis\.Policy, or its fields by name"):
            Policy.of(wrong, rows=4)

    def test_frozen_and_hashable(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            Policy().rows = 3  # type: ignore[misc]
        assert len({Policy(), Policy(), Policy(rows=4)}) == 2

    @pytest.mark.parametrize("name", list(SELECTORS))
    def test_selectors_get_their_settings(self, name: str) -> None:
        selector = Policy(selector=name, rows=3, mass=0.7).make_selector()
        assert isinstance(selector, SELECTORS.get(name))
        for setting in {"sampled": ["rows", "mass"], "oracle": ["mass"]}.get(name, []):
            assert getattr(selector, setting) == {"rows": 3, "mass": 0.7}[setting]

    def test_thresholds(self) -> None:
        found = Policy(alpha=0.1, beta=0.2, gamma=0.3, ca_rule="share").thresholds
        assert (found.alpha, found.beta, found.gamma, found.ca_rule) == (0.1, 0.2, 0.3, "share")

    def test_crossover(self) -> None:
        assert Policy().crossover_tokens("cpu") == MIN_TOKENS["cpu"]
        assert Policy(min_tokens=7).crossover_tokens("cuda") == 7
        assert Policy(min_tokens=0).crossover_tokens("cpu") == 0


def make_prompt(*lengths: int) -> Prompt:
    draw = torch.Generator().manual_seed(sum(lengths))
    documents = [("document", torch.randint(0, 512, (n,), generator=draw).tolist()) for n in lengths]
    return Prompt.of([("prefix", PREFIX), *documents, ("question", range(20))])


@dataclasses.dataclass
class Bench:
    """A tiny model with an empty store, and how often its indexer was asked for."""

    model: Any
    switch: Switch
    store: RecordStore
    asked: int = 0

    def plan(self, prompt: Prompt, policy: Policy, **options: Any) -> Plan:
        def indexer() -> Indexer:
            self.asked += 1
            return Indexer(self.model, self.switch, self.store, self.store.spec, PREFIX)

        return plan_prefill(self.model, prompt, policy, indexer, **options)


@pytest.fixture
def bench(llama: Any, attach: Attach) -> Bench:
    spec = index_spec(llama, None, PREFIX, Policy().thresholds, TILE)
    return Bench(llama, attach(llama), RecordStore.open(None, spec))


SIFT = Policy(prefill="sift", tile=TILE, min_tokens=0)


class TestPlan:
    def test_dense_needs_no_reason(self, bench: Bench) -> None:
        plan = bench.plan(make_prompt(100), Policy(tile=TILE))
        assert plan.job is None and plan.reason == "" and bench.asked == 0
        with plan.running(bench.switch):
            assert bench.switch.job is None
        report = plan.report()
        assert (report.asked, report.used, report.density, report.reason) == ("dense", "dense", 1.0, "")

    def test_a_short_prompt(self, bench: Bench) -> None:
        plan = bench.plan(make_prompt(100), Policy.of(SIFT, min_tokens=124))
        assert plan.job is None and bench.asked == 0
        assert "the prompt has 123 tokens and a sparse prefill pays from 124" in plan.reason
        report = plan.report()
        assert (report.asked, report.used, report.density) == ("sift", "dense", 1.0)
        assert "sift was asked for: the prompt has 123 tokens" in str(report)
        assert bench.plan(make_prompt(100), Policy.of(SIFT, min_tokens=123)).job is not None

    def test_the_measured_crossover_is_the_default(self, bench: Bench) -> None:
        plan = bench.plan(make_prompt(100), Policy.of(SIFT, min_tokens=None))
        assert plan.job is None and f"pays from {MIN_TOKENS['cpu']}" in plan.reason

    def test_no_document(self, bench: Bench) -> None:
        plan = bench.plan(make_prompt(), SIFT)
        assert plan.job is None and "holds no document" in plan.reason and bench.asked == 0

    @pytest.mark.parametrize("selector", list(SELECTORS))
    def test_records_are_made_only_for_selectors_that_read_them(self, bench: Bench, selector: str) -> None:
        plan = bench.plan(make_prompt(100, 30), Policy.of(SIFT, selector=selector))
        needs = SELECTORS.get(selector).needs_records
        assert plan.job is not None and bench.asked == int(needs) and plan.indexed == (2 if needs else 0)
        assert [b is not None for b in plan.job.scene.bits] == [needs] * 2
        again = bench.plan(make_prompt(100, 30), Policy.of(SIFT, selector=selector))
        assert again.indexed == 0 and again.job is not None

    def test_report_of_what_ran(self, bench: Bench, logits: Logits) -> None:
        prompt = make_prompt(150, 64, 101)
        plan = bench.plan(prompt, Policy.of(SIFT, mass=0.5), measure_recall=True)
        with plan.running(bench.switch):
            logits(bench.model, prompt.tokens)
        report = plan.report()
        assert (report.asked, report.used, report.selector, report.kernel) == ("sift", "sift", "sampled", "cpu")
        assert (report.prompt_tokens, report.documents, report.document_tokens) == (338, 3, 315)
        assert 0 < report.density < 1 and report.recall is not None and 0.5 < report.recall < 1
        assert len(report.layers) == 2 and sum(report.layers) / 2 == pytest.approx(report.density)
        assert report.indexed == 3 and report.fallbacks == () and report.reason == ""
        assert report.select_s is not None and report.attend_s is not None
        assert json.loads(json.dumps(report.to_dict()))["density"] == report.density
        assert f"density {report.density:.3f}" in str(report)

    def test_what_fell_back_is_said(self, bench: Bench, logits: Logits) -> None:
        prompt = make_prompt(150)
        plan = bench.plan(prompt, SIFT)
        with plan.running(bench.switch):
            logits(bench.model, prompt.tokens[:-1])
        report = plan.report()
        assert (report.used, report.density) == ("dense", 1.0)
        assert report.fallbacks == ("2 layers dense: 172 tokens where the plan has 173",)
        assert report.reason == report.fallbacks[0] and report.reason in str(report)

    def test_a_plan_counts_only_its_own_fallbacks(self, bench: Bench, logits: Logits) -> None:
        prompt = make_prompt(150)
        for _ in range(2):
            plan = bench.plan(prompt, SIFT)
            with plan.running(bench.switch):
                logits(bench.model, prompt.tokens[:-1])
            assert plan.report().fallbacks == ("2 layers dense: 172 tokens where the plan has 173",)
        plan = bench.plan(prompt, SIFT)
        with plan.running(bench.switch):
            logits(bench.model, prompt.tokens)
        assert plan.report().fallbacks == () and plan.report().used == "sift"
