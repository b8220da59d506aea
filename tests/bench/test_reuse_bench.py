"""The reuse bench on toy traces whose hits, bytes and times can be counted by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tamis.bench.results import HEADER, read_rows
from tamis.bench.reuse import Plan, bench_reuse, budget_bytes, ratios_of, table
from tamis.bench.reuse_cost import CostModel, ModelledExecutor, Pass, Work
from tamis.bench.reuse_pool import Pool, PoolOptions
from tamis.bench.reuse_providers import PROVIDERS, Admission, new_provider
from tamis.bench.reuse_simulator import Clock, Outcome, Simulator
from tamis.bench.reuse_workload import Piece, Request, Workload, Zipf
from tamis.cli.bench import app
from tamis.core.errors import InvalidInput, UnknownName

KEY = 10  # bytes of a token in these tests
PAGE = 128 * KEY
COST = CostModel(token_s=1e-3, pair_s=0.0, token_bytes=KEY, weight_bytes=0, source="a test", device_bytes_s=1e12)
A, B, C = (Piece(i * 1000, 256) for i in range(3))
SYSTEM = Piece(50_000, 128)


def question(number: int, n_tokens: int = 10) -> Piece:
    return Piece(100_000 + 1000 * number, n_tokens)


def asks(number: int, *documents: Piece, prefix: Sequence[Piece] = (), at: float = 0.0, output: int = 1) -> Request:
    return Request(at, tuple(prefix), documents, (question(number),), output)


def replay(
    name: str, requests: Sequence[Request], *, pages: int | None = None, concurrency: int | None = 1, host: int = 0
) -> tuple[Outcome, Pool]:
    clock = Clock()
    options = PoolOptions(None if pages is None else pages * PAGE, KEY, host_bytes=host * PAGE)
    pool = Pool(options, clock=clock, cost=COST.document)
    simulator = Simulator(new_provider(name, pool), pool, ModelledExecutor(COST), clock=clock, concurrency=concurrency)
    return simulator.run(iter(requests), len(requests)), pool


ORDERS = [asks(0, A, B), asks(1, B, A), asks(2, A, B), asks(3, A, C)]


class TestHits:
    @pytest.mark.parametrize(
        ("name", "hits"),
        [
            ("recompute", 0),
            ("prefix", 3 * 256),
            ("block", 5 * 256),
            ("cacheblend", 3 * 1 + 5 * 215 - 3),
            ("lazy", 5 * 256),
        ],
    )
    def test_of_documents_in_several_orders(self, name: str, hits: int) -> None:
        # B A hits nothing of A B as a prefix; A B then hits whole, A C hits A; of 8 documents 3 are new
        out, _ = replay(name, ORDERS)
        assert out.document_tokens == 8 * 256 and out.prompt_tokens == 8 * 256 + 40
        assert abs(out.hit_tokens - hits) <= 3, "CacheBlend's share is rounded in each request"

    def test_a_prefix_ends_where_it_differs(self) -> None:
        odd = Piece(9000, 200)  # 128 tokens are a block, the other 72 share one with what follows
        out, _ = replay("prefix", [asks(0, odd, A), asks(1, odd, B), asks(2, odd, A)])
        assert out.hit_tokens == 128 + (200 + 256) // 128 * 128

    def test_the_last_token_of_a_known_prompt_is_computed(self) -> None:
        same = Request(0.0, (), (A,), (Piece(70_000, 128),), 1)
        out, _ = replay("prefix", [same, same])
        assert out.prompt_hit_tokens == 256 + 127 and out.computed_tokens == 384 + 1

    @pytest.mark.parametrize("name", ["block", "lazy"])
    def test_a_system_prompt_is_an_exact_prefix(self, name: str) -> None:
        out, _ = replay(name, [asks(0, A, prefix=[SYSTEM]), asks(1, A, prefix=[SYSTEM])])
        assert out.hit_tokens == 256 and out.prompt_hit_tokens == 256 + 128 and out.computed_tokens == 394 + 10

    def test_a_document_twice_in_a_prompt_is_computed_once(self) -> None:
        out, pool = replay("lazy", [asks(0, A, A)])
        assert out.hit_tokens == 256 and out.computed_tokens == 256 + 10
        assert pool.peak_bytes == 3 * PAGE, "two pages of the document, one of the request"

    def test_eviction_forgets_the_least_recently_used(self) -> None:
        out, _ = replay("lazy", [asks(0, A), asks(1, B), asks(2, A), asks(3, C), asks(4, A), asks(5, B)], pages=5)
        assert out.hit_tokens == 2 * 256 and out.evictions == 2

    def test_what_is_evicted_comes_back_from_the_host(self) -> None:
        requests = [asks(0, A), asks(1, B), asks(2, A)]
        for name in ("lazy", "block"):
            # a copying request needs 3 pages of its own, so that of 5 only one document's are left
            out, _ = replay(name, requests, pages=3 if name == "lazy" else 5, host=4)
            assert (out.hit_tokens, out.loaded_tokens) == (256, 256), name


class TestMemory:
    def test_copies_take_bytes_while_they_run(self) -> None:
        requests = [asks(i, A, B, output=20) for i in range(3)]
        lazy, _ = replay("lazy", requests, concurrency=3)
        block, _ = replay("block", requests, concurrency=3)
        assert lazy.peak_in_use_bytes == (4 + 3) * PAGE, "one copy of two documents, a page for each request"
        assert block.peak_in_use_bytes == 3 * (4 + 1) * PAGE
        assert block.peak_bytes == block.peak_in_use_bytes + 4 * PAGE, "and the store"
        assert (lazy.copied_tokens, block.copied_tokens) == (0, 3 * 512)

    def test_copies_let_fewer_requests_run(self) -> None:
        requests = [asks(i, A, B, output=20) for i in range(3)]
        lazy, _ = replay("lazy", requests, concurrency=3, pages=7)
        block, _ = replay("block", requests, concurrency=3, pages=7)
        assert (lazy.most_running, block.most_running) == (3, 1)
        assert block.seconds > lazy.seconds

    @pytest.mark.parametrize("name", list(PROVIDERS))
    def test_the_budget_holds(self, name: str) -> None:
        zipf = Zipf(1.0, 10, 256, 3, output_tokens=30, requests=60, concurrency=4)
        out, pool = replay(name, list(zipf.workload().requests(0)), pages=9, concurrency=4)
        assert 0 < out.peak_bytes <= 9 * PAGE and len(out.ttft_s) == 60
        pool.cache.check()
        assert pool.available_bytes == 9 * PAGE, "everything was given back"

    @pytest.mark.parametrize("name", list(PROVIDERS))
    def test_what_never_fits_falls_back(self, name: str) -> None:
        out, pool = replay(name, [asks(0, A, B, C), asks(1, A)], pages=5)
        assert out.fallbacks == 1 and len(out.ttft_s) == 2 and out.ttft_s[0] == pytest.approx(0.778)
        assert pool.available_bytes == 5 * PAGE

    def test_a_refused_request_changes_nothing(self) -> None:
        clock = Clock()
        pool = Pool(PoolOptions(5 * PAGE, KEY), clock=clock, cost=COST.document)
        lazy = new_provider("lazy", pool)
        first = lazy.admit(asks(0, A))
        assert isinstance(first, Admission)
        assert lazy.admit(asks(1, B, C)) is None
        assert pool.places([]) == [] and pool.statistics().computed == 1 and pool.available_bytes == 2 * PAGE


class TestTime:
    def test_of_a_queue(self) -> None:
        out, _ = replay("recompute", [asks(0, A), asks(1, A), asks(2, A, at=5.0)], concurrency=None)
        assert list(out.ttft_s) == pytest.approx([0.532, 0.532, 0.266]), "the two at 0 are one batch"
        assert out.seconds == pytest.approx(5.266)

    def test_of_decoding(self) -> None:
        # a prompt of 10 and the first token; the step reads them and the key that it makes
        slow = CostModel(1e-3, 0.0, KEY, 700, "a test", device_bytes_s=1e6)
        took = ModelledExecutor(slow).decode(11, 1, 3)
        assert took == pytest.approx((3 * 700 + (12 + 13 + 14) * KEY) / 1e6)
        two = ModelledExecutor(slow).decode(22, 2, 3)
        assert two == pytest.approx((3 * 700 + 2 * (12 + 13 + 14) * KEY) / 1e6), "weights are read once a step"

    def test_of_copies_and_loads(self) -> None:
        work = Work(Pass.of(10, 256), (Pass.of(256),), copied=100, loaded=50)
        cost = CostModel(1e-3, 0.0, KEY, 0, "a test", device_bytes_s=1e9, host_bytes_s=1e3)
        took = ModelledExecutor(cost).prefill([asks(0, A)], [work])
        keys = (266 + 256) * KEY / 1e9  # pairs cost nothing here, reading the keys does
        assert took == pytest.approx(0.256 + 0.010 + keys + 2 * 100 * KEY / 1e9 + 50 * KEY / 1e3, rel=1e-9)

    def test_a_small_pass_reads_weights_and_keys(self) -> None:
        cost = CostModel(1e-9, 0.0, KEY, 500, "a test", device_bytes_s=1e3)
        assert cost.passes([Pass.of(1, 9)]) == pytest.approx(0.5 + 10 * KEY / 1e3)

    def test_steps_until_an_arrival(self) -> None:
        made = ModelledExecutor(COST)
        for seconds in (1e-9, 2e-4, 1e-2, 9.0):
            steps = made.steps_within(5, 2, seconds, 50)
            assert steps == 50 or made.decode(5, 2, steps) >= seconds
            assert steps == 1 or made.decode(5, 2, steps - 1) < seconds


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "ttft.csv"
    rows = [
        f"d,c,x,g,,,,llama-3.1-8b/bf16/{n},{p},{metric},0,{value},0,s"
        for n, p, ttft, attention in (
            (1000, "dense-a", 3.0, 1.0),
            (1000, "dense-b", 2.5, 0.5),
            (2000, "dense-a", 6.0, 2.0),
        )
        for metric, value in (("ttft_s", ttft), ("attention_s", attention))
    ]
    path.write_text(HEADER + "\n".join(rows) + "\n")
    return path


def test_the_cost_model_is_fitted_to_measured_rows(costs: Path, tmp_path: Path) -> None:
    made = CostModel.fitted(costs)
    assert made.token_s == pytest.approx((2.0 / 1000 + 4.0 / 2000) / 2), "the faster of two, each length once"
    assert made.pair_s == pytest.approx((0.5 / 500500 + 2.0 / 2001000) / 2)
    assert made.token_bytes == 131072 and 14.9e9 < made.weight_bytes < 15.1e9
    with pytest.raises(InvalidInput, match="does not exist"):
        CostModel.fitted(tmp_path / "none.csv")
    costs.write_text(HEADER)
    with pytest.raises(InvalidInput, match="no dense prefill"):
        CostModel.fitted(costs)


class TestBench:
    def test_the_same_seed_gives_the_same_result(self, costs: Path) -> None:
        plan = Plan(
            Zipf(1.0, 10, 256, 2, requests=20, concurrency=3).workload(), ("200MB",), repeats=2, costs=str(costs)
        )
        first = bench_reuse(plan)
        assert first == bench_reuse(plan)
        measured = {m["provider"]: m for m in first["measured"]}
        assert set(measured) == {*PROVIDERS, "block-tuned"}
        assert measured["block"]["throughput_vs_block"] == 1
        assert measured["block-tuned"]["throughput_vs_block"] >= 1
        assert measured["lazy"]["token_hit_rate"] >= measured["block"]["token_hit_rate"]
        assert "NOT measured" in table(first) and "zipf1-n10-t256-k2-c3/200mb" in table(first)

    def test_without_block_there_is_no_ratio_to_it(self, costs: Path) -> None:
        assert ratios_of([]) == {}
        plan = Plan(Workload("toy", 4, 1, lambda _: iter(ORDERS), "toys"), providers=("lazy",), costs=str(costs))
        assert not any("_vs_" in name for name in bench_reuse(plan)["measured"][0])

    @pytest.mark.parametrize(("text", "size"), [("1GB", 1 << 30), ("0.5 gb", 1 << 29), ("unlimited", None)])
    def test_budgets(self, text: str, size: int | None) -> None:
        assert budget_bytes(text) == size

    def test_wrong_plans(self, costs: Path) -> None:
        toy = Workload("toy", 4, 1, lambda _: iter(ORDERS), "toys")
        for wrong in ({"budgets": ("1",)}, {"providers": ("bloc",)}, {"repeats": 0}, {"ttl_s": 3.0}, {"budgets": ()}):
            with pytest.raises(InvalidInput):
                Plan(toy, **wrong)  # type: ignore[arg-type]
        with pytest.raises(UnknownName, match="eviction policy"):
            bench_reuse(Plan(toy, policy="lrru", costs=str(costs)))

    def test_the_command(self, costs: Path, tmp_path: Path) -> None:
        words = ["reuse", "--requests", "6", "--repeats", "1", "--budgets", "2GB", "--costs", str(costs), "--json"]
        done = CliRunner().invoke(app, [*words, "--results", str(tmp_path)])
        assert done.exit_code == 0, done.output
        made = json.loads(done.stdout)
        rows = read_rows(tmp_path / "reuse.csv")
        assert made["results"].endswith("reuse.csv") and {r["case"] for r in rows} == {"zipf2.1/2gb"}
        assert "lazy-modelled" in {r["provider"] for r in rows}
        assert {"token_hit_rate", "ttft_speedup_vs_block", "throughput_vs_block"} <= {r["metric"] for r in rows}
