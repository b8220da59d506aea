"""The decode bench on a CPU: what is checked before it is timed, what is counted, and what is refused."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tamis.bench import decode as module
from tamis.bench import decode_check, decode_scene, decode_tune
from tamis.bench.decode import DecodePlanned, bench_decode
from tamis.bench.decode_clock import timed
from tamis.bench.decode_scene import Scene, copied, full_functions
from tamis.bench.decode_token import Layers
from tamis.bench.results import Row
from tamis.bench.shapes import SHAPES
from tamis.cli.bench import app
from tamis.core.errors import InvalidInput, TamisError, UnknownName

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


def scene(tokens: int = 400, batch: int = 2) -> Scene:
    return Scene.of(TINY, tokens, batch, 0.1, CPU, torch.float32)


def test_every_measure_of_a_case() -> None:
    rows: list[Row] = []
    told: list[str] = []
    plan = DecodePlanned("tiny", (384,), (1, 2), 0.1, rounds=2, device="cpu")
    made = bench_decode(plan, told.append, rows.extend)
    assert made["left_out"] == {} and [c["case"] for c in made["cases"]] == [
        "tiny/384/b1",
        "tiny/384/b2",
        "tiny/384/b1",
    ]
    assert told[0].startswith("no GPU is used") and "cpu checked: compress" in told[1]
    found = {(r.case, r.provider, r.metric) for r in rows}
    for batch in ("b1", "b2"):
        case = f"tiny/384/{batch}"
        assert {(case, "selfindex", m) for m in ("kv_ratio", "attention_us", "attention_speedup", "token_ms",
                                                 "token_speedup")} <= found  # fmt: skip
        assert {(case, "full-math", "attention_us"), (case, "full-tamis", "attention_us"),
                (case, "full-math", "token_ms")} <= found  # fmt: skip
    assert ("tiny/384/b1", "selfindex", "prefill_overhead") in found
    times = {r.provider: r for r in rows if r.case == "tiny/384/b2" and r.metric == "attention_us"}
    fastest = min(times["full-math"].p50, times["full-tamis"].p50)
    speedup = next(r for r in rows if r.case == "tiny/384/b2" and r.metric == "attention_speedup")
    assert speedup.p20 < 3 * fastest / times["selfindex"].p50 and speedup.p80 > 0.3 * fastest / times["selfindex"].p50


def test_only_checks() -> None:
    kept: list[Row] = []
    made = bench_decode(DecodePlanned("tiny", (400,), (1,), check_only=True, device="cpu"), keep=kept.extend)
    names = "compress, share of codes", "compress, share of bytes", "step, worst row", "step, RMS", "step, log-sum-exp"
    assert kept == [] and set(made["cases"][0]["errors"]) == {f"cpu: {name}" for name in names}


@pytest.mark.parametrize("mistake", ["mean", "value_scale", "centroids"])
def test_a_kernel_that_is_wrong_is_not_timed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = scene()
    assert decode_check.refused(decode_check.check(x, "cpu")) is None
    step = decode_check.selfindex_decode

    def broken(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        table = getattr(x.arena.tables, mistake)
        kept = table.clone()
        table.mul_(0.5)
        made = step(*args, **kwargs)
        table.copy_(kept)
        return made

    monkeypatch.setattr(decode_check, "selfindex_decode", broken)
    with pytest.raises(TamisError, match="disagrees with the reference: step, worst row"):
        decode_check.check(x, "cpu")
    kept: list[Row] = []
    monkeypatch.setattr(module.Scene, "of", lambda *a: x)
    with pytest.raises(TamisError, match=r"no case could be timed on cpu.*disagrees"):
        bench_decode(DecodePlanned("tiny", (400,), (2,), measures=["attention"], device="cpu"), keep=kept.extend)
    assert kept == []


def test_full_attention_is_checked_too() -> None:
    x = scene(384)
    found, left_out = full_functions(x)
    assert set(found) == {"full-math", "full-tamis"} and not left_out
    for run in found.values():
        out = run(x.q, x.keys, x.values)
        assert torch.allclose(out[1, 3], x.exact(1, 3), atol=1e-5)
    found, left_out = full_functions(scene(400))
    assert set(found) == {"full-math"} and "whole pages" in left_out["full-tamis"]


def test_long_sequences_have_a_generated_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_scene, "LONG", 700)
    monkeypatch.setattr(decode_scene, "GENERATED", 300)
    x = scene(800)
    parts, whole, turns = x.arena.held(1)
    assert [p.records.n_tokens for p in parts] == [404, 300] and whole[0].shape[1] == 64 + 32 + 96
    assert turns[0] is None and turns[1] is not None
    assert x.count == 96 and x.arena.nbytes < x.keys.nbytes


def test_another_layers_cache_is_the_same_elsewhere() -> None:
    x = scene()
    other = copied(x.arena)
    assert torch.equal(other.records.codes, x.arena.records.codes)
    assert other.records.codes.data_ptr() != x.arena.records.codes.data_ptr()
    assert torch.equal(other.held(1)[1][0], x.arena.held(1)[1][0])


def test_a_whole_step_calls_attention_in_every_layer() -> None:
    model = Layers(TINY, 2, CPU, torch.float32)
    seen: list[tuple[int, ...]] = []

    def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((i, *q.shape, *k.shape, *v.shape))
        return q

    assert model.step(torch.randn(3, 256), attend).shape == (3, 512)
    assert seen == [(i, 3, 4, 1, 64, 3, 2, 1, 64, 3, 2, 1, 64) for i in range(2)]
    with pytest.raises(InvalidInput, match="8 experts"):
        Layers(SHAPES["tiny-moe"], 2, CPU, torch.float32)


def test_contenders_are_timed_in_turn() -> None:
    order: list[str] = []
    found = timed({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, 3)
    assert [len(t) for t in found.values()] == [3, 3] and "".join(order) == "baabbaabbaab"


@pytest.mark.parametrize("kernel", ["triton", "nvrtc"])
def test_tuning_takes_the_fastest_of_each_launch(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are waits here, shorter for some cuts; one cut does not run."""
    pytest.importorskip("triton")
    real, told = decode_tune.module_of(kernel), list[str]()
    wait = {"triton": {"iters": 2, "select_warps": 8, "attend": 16}}.get(
        kernel, {"iters": 2, "every": 16, "cluster": 4, "split": 128, "stages": 2, "early": 2}
    )

    class Module:
        cut_for = staticmethod(real.cut_for)

        @staticmethod
        def launches(*args: Any, cut: Any, scale: float) -> dict[str, Any]:
            if cut.iters == 4:
                raise InvalidInput("four is no number")
            wrong = sum(getattr(cut, name) != best for name, best in wait.items())
            names = ["score", "compact" if kernel == "triton" else "choose", "attend"]
            return dict.fromkeys(names, lambda: time.sleep(2e-3 * wrong))

    monkeypatch.setattr(decode_tune, "module_of", lambda name: Module)
    monkeypatch.setattr(decode_tune, "ROUNDS", 1)
    found = decode_tune.tuned(scene(), kernel, told.append)
    assert {name: getattr(found["cut"], name) for name in wait} == wait
    assert any("four is no number" in line for line in told) and any("tune up to attend: best" in x for x in told)


def test_what_is_refused() -> None:
    with pytest.raises(InvalidInput, match="measures are some of attention, token, prefill"):
        DecodePlanned(measures=["everything"])
    with pytest.raises(UnknownName, match="unknown self-indexing kernel 'tritn'"):
        DecodePlanned(kernel="tritn")
    with pytest.raises(InvalidInput, match="batch is '1,0'; give numbers of sequences such as 1,8"):
        CliRunner().invoke(app, ["decode", "--batch", "1,0"], catch_exceptions=False)
    with pytest.raises(InvalidInput, match="device is no GPU"):
        bench_decode(DecodePlanned("tiny", (400,), (1,), tune=True, device="cpu"))
    with pytest.raises(InvalidInput, match="320 or more"):
        bench_decode(DecodePlanned("tiny", (100,), (1,), device="cpu"))


def test_the_command(tmp_path: Any) -> None:
    command = ["decode", "--shape", "tiny", "--tokens", "400", "--batch", "1", "--only", "attention", "--rounds", "1",
               "--device", "cpu", "--results", str(tmp_path)]  # fmt: skip
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout.splitlines()[-1])
    assert made["cases"][0]["found"]["selfindex"]["kv_ratio"] > 0.5
    assert "tiny/400/b1,selfindex,attention_us" in (tmp_path / "decode.csv").read_text()
    plain = CliRunner().invoke(app, command)
    assert "full-math" in plain.stdout and "errors: cpu: compress" in plain.stdout
