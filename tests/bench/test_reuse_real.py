"""The reuse bench through a real engine: its cache makes the decisions that the replay's own cache makes."""

from __future__ import annotations

from typing import Any

import pytest

from tamis.bench.reuse_cost import CostModel, ModelledExecutor
from tamis.bench.reuse_pool import Pool, PoolOptions
from tamis.bench.reuse_providers import new_provider
from tamis.bench.reuse_real import CHOICES, RealPlan, bench_real, replay_real
from tamis.bench.reuse_simulator import Clock, Simulator
from tamis.bench.reuse_workload import Zipf
from tamis.core.errors import InvalidInput
from tamis.engine.llm import LLM

WORKLOAD = Zipf(1.0, 6, 128, 3, question_tokens=20, output_tokens=1, requests=6, concurrency=1).workload()
PAGES = 64
PAGE_BYTES = 2 * 2 * 2 * 64 * 4 * 128  # of the tiny model


@pytest.mark.parametrize("provider", ["recompute", "block", "lazy"])
def test_the_engine_hits_what_the_replay_hits(loaded: Any, provider: str) -> None:
    cost = CostModel(1e-3, 0.0, PAGE_BYTES // 128, 0, "a test")
    clock = Clock()
    pool = Pool(PoolOptions(PAGES * PAGE_BYTES, cost.token_bytes), clock=clock, cost=cost.document)
    made = new_provider(provider, pool)
    modelled = Simulator(made, pool, ModelledExecutor(cost), clock=clock, concurrency=1).run(WORKLOAD.requests(0), 6)
    with LLM(loaded, cache_bytes=PAGES * PAGE_BYTES) as llm:
        real = replay_real(llm, WORKLOAD, provider, requests=6)
    assert real.document_tokens == modelled.document_tokens == 6 * 3 * 128
    assert real.hit_tokens == modelled.hit_tokens
    assert (real.hit_tokens > 0) == (provider != "recompute")
    assert len(real.ttft_s) == 6 and real.seconds == pytest.approx(sum(real.ttft_s))


def test_pieces_can_be_cut(loaded: Any) -> None:
    with LLM(loaded, cache_bytes=PAGES * PAGE_BYTES) as llm:
        real = replay_real(llm, WORKLOAD, "prefix", requests=2, cut_tokens=30)
    assert real.prompt_tokens == 2 * (3 * 30 + 20)


def test_an_unknown_provider(loaded: Any) -> None:
    with LLM(loaded) as llm, pytest.raises(InvalidInput, match="cacheblend"):
        replay_real(llm, WORKLOAD, "cacheblend")
    assert "cacheblend" not in CHOICES


def test_every_provider_at_a_budget(loaded: Any) -> None:
    rows: list[Any] = []
    plan = RealPlan(WORKLOAD, lambda size: LLM(loaded, cache_bytes=size), ["1MB", "2MB"], requests=3, cut_tokens=64)
    made = bench_real(plan, keep=rows.extend)
    assert [(m["case"].rpartition("/")[2], m["provider"]) for m in made["measured"]] == [
        (budget, provider) for budget in ("1mb", "2mb") for provider in CHOICES
    ]
    assert all("first-3-cut-64" in m["case"] for m in made["measured"]) and "measured" in made["cost_model"]["about"]
    assert {r.provider for r in rows} == {f"{name}-real" for name in CHOICES}
    with pytest.raises(InvalidInput, match="block-tuned"):
        bench_real(RealPlan(WORKLOAD, plan.open_llm, ["1MB"], ["block-tuned"]))


def test_copies_are_taken_off_the_budget(loaded: Any) -> None:
    """Else documents and their copies together would hold more than the budget that the row names."""
    sizes: list[int | None] = []

    def opened(size: int | None) -> LLM:
        sizes.append(size)
        return LLM(loaded, cache_bytes=size)

    workload = Zipf(1.0, 6, 128, 3, question_tokens=20, output_tokens=1, requests=3, concurrency=1).workload()
    budget = 16 * PAGE_BYTES
    bench_real(RealPlan(workload, opened, [f"{budget >> 10}KB"], ["lazy", "block"], requests=3))
    assert sizes == [budget, budget, budget, budget - 4 * PAGE_BYTES]  # three documents of a page, and the question
