"""The vLLM bench without vLLM: what is asked, what rows come of it, and that a failing or late engine is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tamis.bench import vllm as bench
from tamis.bench import vllm_prompts as prompts
from tamis.bench.results import Row
from tamis.bench.reuse_workload import Zipf
from tamis.bench.vllm import Plan, bench_vllm
from tamis.bench.vllm_child import Child
from tamis.bench.vllm_report import table
from tamis.core.errors import InvalidInput, Unavailable
from tamis.integrations.vllm.request import parse

SIZES = prompts.Sizes(16, 64, 20)
WORKLOAD = Zipf(documents=6, document_tokens=64, per_prompt=3, question_tokens=20).workload()


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {"repeats": 2, "requests": 5, "block_size": 32, "sizes": SIZES}
    return Plan("tiny", (256, 512), WORKLOAD, **(values | changes))


class Fake:
    """An engine that reuses what it has seen, and takes a millisecond a computed token."""

    made: ClassVar[list[Fake]] = []

    def __init__(self, setup: dict[str, Any], log: Path, environment: dict[str, str]) -> None:
        self.setup, self.seen, self.closed, self.asked = setup, set[str](), False, list[dict[str, Any]]()
        Fake.made.append(self)

    def started(self, seconds: float) -> dict[str, Any]:
        return {"vllm": "9.9", "gpu": "", "attention": ["fake"], "start_s": 1.0}

    def ask(self, job: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        self.asked.append(job)
        rows = []
        for body in job["requests"]:
            asked = body.get("kv_transfer_params", {}).get("tamis", {})
            spans = asked.get("segments", []) if asked.get("mode") == "reuse" else []
            keys = {(s[3] or "prefix", s[1] - s[0]) for s in spans if s[3] or s[2] == "prefix"}
            cached = sum(n for key, n in keys if key in self.seen)
            self.seen |= {key for key, _ in keys}
            first_s, n = (len(body["prompt"]) - cached) / 1e3, body.get("max_tokens", job["max_tokens"])
            done_s = first_s + (n - 1) / 100
            rows.append({"ttft_s": first_s, "done_s": done_s, "cached": cached, "tokens": list(range(n))})
        return rows

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    Fake.made = []
    monkeypatch.setattr(bench, "Child", Fake)
    monkeypatch.setattr(bench, "installed", lambda: "9.9")
    return Fake


def test_both_engines_are_measured_and_rows_come_one_by_one(fake: type[Fake]) -> None:
    kept: list[list[Row]] = []
    made = bench_vllm(plan(), keep=kept.append)
    providers = [rows[0].provider for rows in kept]
    assert providers == [
        *["vllm-9.9"] * 3,
        *["vllm-9.9-tamis-stock", "vllm-9.9-tamis-sift", "vllm-9.9-tamis-reuse"] * 2,
        "vllm-9.9-tamis-reuse",
        *["vllm-9.9-tamis-stock", "vllm-9.9-tamis-sift", "vllm-9.9-tamis-reuse"],
    ]
    found = {(r.case, r.provider, r.metric): r.p50 for rows in kept for r in rows}
    assert found["tiny/float32/512", "vllm-9.9", "ttft_s"] == 0.512
    assert found["tiny/float32/512", "vllm-9.9-tamis-stock", "speedup_vs_vllm"] == 1
    assert found["tiny/float32/512", "vllm-9.9-tamis-reuse", "speedup_vs_vllm"] > 4
    assert found["tiny/float32/512", "vllm-9.9-tamis-reuse", "token_hit_rate"] > 0.8
    assert found["tiny/float32/tp-2", "vllm-9.9-tamis-sift", "same_tokens"] == 1
    load = "tiny/float32/zipf2.1-n6-t64-k3-q20-first-5/poisson-8"
    assert 0 < found[load, "vllm-9.9-tamis-reuse", "token_hit_rate"] < 1
    assert not made["left_out"] and all(one.closed for one in fake.made)
    assert [one.setup["tamis"] is None for one in fake.made] == [True, False, False, False]
    assert fake.made[0].setup["engine"].get("block_size") is None, "stock vLLM keeps its own"
    assert [one.setup["engine"].get("tensor_parallel_size", 1) for one in fake.made] == [1, 1, 1, 2]
    assert "vllm-9.9-tamis-reuse" in table(made)


def test_a_load_with_answers_says_what_a_token_takes(fake: type[Fake]) -> None:
    workload = Zipf(documents=12, document_tokens=64, per_prompt=3, question_tokens=20).workload()
    made = bench_vllm(replace(plan(parts=("load",), load_tokens=5, requests=40), workload=workload))
    found = {(m["case"], m["provider"], m["metric"]): m["p50"] for m in made["measured"]}
    load = "tiny/float32/zipf2.1-n12-t64-k3-q20-first-40+5/poisson-8"
    for provider in ("vllm-9.9", "vllm-9.9-tamis-reuse"):
        assert found[load, provider, "time_per_token_s"] == pytest.approx(0.01)
    asked = [b for job in fake.made[1].asked for b in job["requests"]]
    warming = [b for b in asked if not b.get("measured", True)]
    assert warming and all(b["max_tokens"] == 1 for b in warming), "a document that is only warmed has no answer"


def test_layers_can_be_split_over_gpus_too(fake: type[Fake]) -> None:
    made = bench_vllm(plan(parts=("pp",), gpus=3))
    assert [one.setup["engine"].get("pipeline_parallel_size") for one in fake.made] == [1, 3]
    assert {row["case"] for row in made["measured"]} == {"tiny/float32/pp-3"}


def test_no_two_prompts_of_a_sitting_are_alike_but_for_shared_documents(fake: type[Fake]) -> None:
    bench_vllm(plan(parts=("ttft",)))
    ends = [tuple(b["prompt"][-20:]) for job in fake.made[1].asked for b in job["requests"] if len(job["requests"]) > 2]
    stock, tamis = fake.made
    assert [b["prompt"] for j in stock.asked for b in j["requests"]] == [
        b["prompt"] for j in tamis.asked for b in j["requests"] if "kv_transfer_params" not in b
    ], "stock and Tamis are asked the same"
    assert len(set(ends)) == len(ends)


def test_a_failing_engine_does_not_keep_the_rest_from_running(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "started", lambda self, s: (_ for _ in ()).throw(Unavailable("no memory")))
    made = bench_vllm(plan())
    assert set(made["left_out"]) == {"vllm-9.9", "vllm-9.9-tamis", "tp"} and not made["measured"]
    assert "no memory" in table(made)


def test_nothing_starts_after_the_deadline(fake: type[Fake]) -> None:
    made = bench_vllm(plan(deadline_s=1.0))
    assert not made["measured"] and all("deadline" in why for why in made["left_out"].values())


def keys(body: dict[str, Any]) -> list[str]:
    """Of the documents of a prompt, the prefix among them, in order."""
    told = parse(body["kv_transfer_params"]["tamis"], body["prompt"], block_size=32)
    return [unit.key for unit in told.units]


@pytest.mark.parametrize("warm_up", [0, 3])
def test_what_could_not_be_reused_otherwise_is_computed_before(warm_up: int) -> None:
    """Each prompt of the load finds a prefix of documents that were computed before it, and nothing known behind."""
    choices: dict[str, Any] = {"requests": 12, "rate": 8.0, "cut_tokens": None, "warm_up": warm_up}
    many = Zipf(exponent=1.0, documents=20, document_tokens=64, per_prompt=4, question_tokens=20).workload()
    first, asked = prompts.load(many, 512, block_size=32, **choices)
    plain_first, plain = prompts.load(many, 512, block_size=None, **choices)
    mine = [a for a in asked if a["measured"]]
    assert len(plain) == len(mine) == 12 and len(plain_first) == warm_up
    assert not any(one["measured"] or one["at_s"] for one in (*first, *plain_first))
    assert [a["at_s"] for a in mine] == [p["at_s"] for p in plain] == sorted(a["at_s"] for a in mine)
    known, warmed, none = set[str](), 0, 0
    for body in (*first, *asked):
        own = keys(body)
        if "real" in body:
            found = [key in known for key in own]
            assert found == sorted(found, reverse=True), "vLLM's lookup stops at the first that is missing"
            none += not warmed
            warmed = 0
        else:
            assert not known & set(own), "each document is computed once"
            warmed += 1
        known |= set(own)
    assert 0 < none < 12 + warm_up, "only where something known stands behind something missing"
    for a, p in zip(mine, plain, strict=True):
        spans = a["kv_transfer_params"]["tamis"]["segments"]
        assert [t for s in spans if s[2] != "pad" for t in a["prompt"][s[0] : s[1]]] == p["prompt"]
        assert a["real"] == len(p["prompt"]) == p["real"]
    cut = prompts.load(WORKLOAD, 512, requests=2, rate=8.0, cut_tokens=10, block_size=None)[1]
    assert [a["real"] for a in cut] == [40, 40]


def test_a_warm_up_is_not_measured_and_named_by_the_case(fake: type[Fake]) -> None:
    """The work of the warm-up counts for nobody, what it left counts for those that find it."""
    rates = {}
    for warm in (0, 4):
        made = bench_vllm(plan(parts=("load",), warm=warm))
        rows = [m for m in made["measured"] if m["provider"] == "vllm-9.9-tamis-reuse"]
        rates[warm] = {m["case"]: m["p50"] for m in rows if m["metric"] == "token_hit_rate"}
        assert [len(job["requests"]) for job in fake.made[-2].asked] == ([4, 5] if warm else [5])
    name = "tiny/float32/zipf2.1-n6-t64-k3-q20"
    cold, warm_rate = rates[0][f"{name}-first-5/poisson-8"], rates[4][f"{name}-5-after-4/poisson-8"]
    assert 0 < cold < warm_rate < 1


def test_sparse_prompts_are_as_long_as_plain_ones() -> None:
    sparse = prompts.sparse(333, 512, [1], SIZES)[0]
    assert sparse["prompt"] == prompts.plain(333, 512, [1])[0]["prompt"]
    with pytest.raises(InvalidInput, match="too few"):
        SIZES.documents(99)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"parts": ("speed",)}, "speed"),
        ({"warm": 196}, "ask for less"),
        ({"warm": -1}, "after -1"),
        ({"rate": 0.0}, "rate"),
        ({"deadline_s": 0.0}, "deadline"),
    ],
)
def test_wrong_plans_are_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        plan(**changes)
    with pytest.raises(InvalidInput, match="experts"):
        Plan("tiny-moe", (2048,), WORKLOAD)


def test_a_child_that_cannot_start_says_why_and_one_that_hangs_is_ended(tmp_path: Path) -> None:
    setup = {"model": str(tmp_path / "nothing"), "engine": {}, "tamis": None}
    child = Child(setup, tmp_path / "log", {"VLLM_TARGET_DEVICE": "cpu"})
    with pytest.raises(Unavailable, match="engine"):
        child.started(120)
    child.close()
    slow = Child(setup, tmp_path / "slow", {})
    with pytest.raises(Unavailable, match="no answer within 0 s"):
        slow.started(0)
    assert slow._process.poll() is not None, "it was ended"
