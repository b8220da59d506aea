"""The paged bench on a CPU: what is checked before it is timed, what is counted, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tamis.bench import paged
from tamis.bench.paged import PLAIN, TURNED, Inputs, PagedCase, bench_paged, fault, runs_of
from tamis.bench.results import Row
from tamis.core.errors import InvalidInput, Unavailable

PREFILL, DECODE = "prefill/2x200/150", "decode/2x200/b3"
CPU = torch.device("cpu")


def test_both_cases_are_timed_and_compared() -> None:
    rows: list[Row] = []
    told: list[str] = []
    made = bench_paged([PREFILL, DECODE], rounds=2, device="cpu", note=told.append, keep=rows.extend)
    assert made["left_out"] == {} and made["tuned"] == [] and made["device"] == "cpu"
    assert told[0].startswith("no GPU is used: the path of a CPU is timed")
    assert [(r.case, r.provider, r.metric, r.unit) for r in rows] == [
        (PREFILL, "cpu", "overhead", "1"),
        (PREFILL, "cpu", "ms", "ms"),
        (PREFILL, "cpu", "tflops", "TFLOP/s"),
        (DECODE, "cpu", "overhead", "1"),
        (DECODE, "cpu", "ms", "ms"),
        (DECODE, "cpu", "tb_per_s", "TB/s"),
    ]
    for measured in made["measured"]:
        assert set(measured["runs"][PLAIN]["overhead"].values()) == {0.0}
        assert measured["runs"][TURNED]["ms"] > 0 and len(measured["runs"]) == 3
    assert rows[1].p50 == pytest.approx(made["measured"][0]["runs"][TURNED]["ms"])


def test_times_are_paired_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    # a clock that slows down by a hundredth at every call: both sides must meet the same of it
    order: list[str] = []

    def timer(run: Any) -> Any:
        while True:
            order.append(run)
            yield {PLAIN: 1.0, TURNED: 1.02}[run] * (1 + 0.01 * len(order))

    monkeypatch.setattr(paged, "_on_gpu", timer)
    runs: Any = {PLAIN: PLAIN, TURNED: TURNED}
    made = paged.times(runs, 20, torch.device("cuda"))
    assert order[:8] == [TURNED, PLAIN, PLAIN, TURNED, PLAIN, TURNED, TURNED, PLAIN]
    assert all(a / b == pytest.approx(1.02) for a, b in zip(made[TURNED], made[PLAIN], strict=True))
    assert len(made[PLAIN]) == 20


def test_a_noisy_gpu_is_timed_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def timer(run: str, noise: float) -> Any:
        draw = np.random.default_rng(len(run))
        while True:
            yield 1 + noise * draw.standard_normal()

    runs: Any = {PLAIN: PLAIN, TURNED: TURNED}
    lengths = []
    for noise in (0.0005, 0.01, 0.5):
        monkeypatch.setattr(paged, "_on_gpu", lambda run, noise=noise: timer(run, noise))
        made = paged.times(runs, 10, torch.device("cuda"))
        lengths.append(len(made[PLAIN]))
        low, high = paged.interval(made[TURNED], made[PLAIN])
        assert high - low <= 2 * paged.PRECISION or lengths[-1] == 100
    assert lengths[0] == 10 < lengths[1] < 100 == lengths[2]


def test_what_is_counted() -> None:
    x = Inputs.of(PagedCase.parse(PREFILL), CPU)
    visible = sum(128 + 400 + i + 1 for i in range(150))
    assert x.work == 4 * 8 * 64 * visible
    step = Inputs.of(PagedCase.parse(DECODE), CPU)
    assert step.work == 3 * (128 + 400 + 77) * 2 * 2 * 64 * 4
    assert step.positions.tolist() == [[128 + 400 + 76]] * 3
    # every request reads pages of its own
    pages = torch.cat([t.table[:, 0] for t in step.tiles]).tolist()
    assert len(set(pages)) == len(pages) == len(step.keys)


@pytest.mark.parametrize("text", [PREFILL, DECODE])
@pytest.mark.parametrize("mistake", ["wrong way", "not turned", "a document less"])
def test_a_kernel_that_is_wrong_is_noticed(text: str, mistake: str) -> None:
    x = Inputs.of(PagedCase.parse(text), CPU)
    runs = runs_of(x, "cpu")
    assert fault(x, runs[TURNED]) is None
    if mistake == "not turned":
        told = fault(x, runs[PLAIN])
    else:
        wrong = replace(x, tiles=[broken(t, mistake) for t in x.tiles])
        told = fault(x, runs_of(wrong, "cpu")[TURNED])
    assert told is not None and told.startswith("it disagrees with dense attention: worst row's relative error")


def broken(tiles: Any, mistake: str) -> Any:
    if mistake == "wrong way":
        return replace(tiles, sin=-tiles.sin)
    return replace(tiles, table=tiles.table[tiles.table[:, 3] != 1])


def test_a_provider_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[object] = []
    attend = paged.paged_dispatch.paged_attention

    def planted(*args: Any, **given: Any) -> Any:
        out, lse = attend(*args, **given)
        out[:, -1] *= 1.01
        return out, lse

    times = paged.times
    monkeypatch.setattr(paged.paged_dispatch, "paged_attention", planted)
    monkeypatch.setattr(paged, "times", lambda runs, *rest: timed.append(runs) or times(runs, *rest))
    rows: list[Row] = []
    made = bench_paged([PREFILL, DECODE], rounds=1, device="cpu", keep=rows.extend)
    assert [m["case"] for m in made["measured"]] == [DECODE] and {r.case for r in rows} == {DECODE}
    assert made["left_out"][f"{PREFILL}/cpu"].startswith("it disagrees with dense attention")
    assert len(timed) == 1


def test_nothing_to_time_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: Any, **__: Any) -> Any:
        raise KeyError("no such symbol\nand more")

    monkeypatch.setattr(paged.paged_dispatch, "paged_decode", raising)
    with pytest.raises(Unavailable, match=r"decode/2x200/b3/cpu: KeyError: 'no such symbol"):
        bench_paged([DECODE], rounds=1, device="cpu")


@pytest.mark.parametrize("text", ["prefill/5x4096/b64", "decode/5x4096/64", "decode/5x0/b4", "prefill/x/1", "5x4096/1"])
def test_cases_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be read; write prefill/DOCUMENTSxTOKENS/ROWS"):
        bench_paged([text], device="cpu")


def test_what_a_cpu_cannot_do() -> None:
    with pytest.raises(InvalidInput, match="tune is for the Triton kernels"):
        bench_paged([PREFILL], tune=True, device="cpu")
    with pytest.raises(InvalidInput, match="benchmarks run on cpu, cuda"):
        bench_paged([PREFILL], device="mps")
    if not torch.cuda.is_available():
        with pytest.raises(Unavailable, match="torch sees 0 NVIDIA GPUs"):
            bench_paged([PREFILL], device="cuda")


@pytest.mark.gpu
def test_cuts_on_a_gpu() -> None:
    made = bench_paged(["prefill/2x300/200", "decode/2x300/b3"], rounds=2, tune=True, device="cuda")
    left = [what for what in made["left_out"] if what.endswith("/gluon")]  # where the GPU is not for it
    assert [m["provider"] for m in made["measured"]] == ["gluon"] * (not left) + ["triton"] * 2
    assert made["tuned"] and not [why for why in made["left_out"].values() if "disagrees" in why]
