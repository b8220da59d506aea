"""The attention bench on a CPU: what is checked before it is timed, what is counted, and what is refused."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from tamis.bench import attention
from tamis.bench.attention import AttentionCase, Inputs, Provider, bench_attention
from tamis.bench.results import Row
from tamis.core.errors import InvalidInput, Unavailable, UnknownName


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short checks and few repetitions."""
    monkeypatch.setattr(attention, "CHECK_TOKENS", {"cpu": 256})
    monkeypatch.setattr(attention, "CPU_RUNS", 2)


def test_sparse_and_dense_are_timed_and_compared() -> None:
    rows: list[Row] = []
    made = bench_attention(["512/d64/0.2", "512/d64/1.0"], device="cpu", keep=rows.extend)
    found = [(m["case"], m["provider"], m["over"]) for m in made["measured"]]
    dense = ("512/d64/1.0", "torch-dense", "torch-dense")
    assert found == [dense, ("512/d64/0.2", "cpu", "torch-dense"), ("512/d64/1.0", "cpu", "torch-dense")]
    assert made["left_out"] == {} and made["device"] == "cpu" and made["measured"][0]["speedup"] == 1
    base = made["measured"][0]["ms"]
    assert all(m["speedup"] == pytest.approx(base / m["ms"]) for m in made["measured"])
    assert [(r.case, r.provider, r.metric, r.unit) for r in rows[:2]] == [
        ("512/d64/1.0", "torch-dense", "tflops", "TFLOP/s"),
        ("512/d64/1.0", "torch-dense", "speedup", "1"),
    ]
    assert len(rows) == 6 and rows[0].p50 == made["measured"][0]["tflops"]["p50"]


def test_operations_are_those_of_the_listed_tiles() -> None:
    bench = attention.AttentionBench(torch.device("cpu"), lambda _: None)
    (sparse,) = bench.measure(AttentionCase.parse("512/d64/0.5"), ["cpu"])
    # 4 diagonal tiles, and 1, 1 and 2 of the 1, 2 and 3 before them, in each of 9 heads
    assert sparse.work == 4 * 64 * 128 * 128 * 9 * (4 + 1 + 1 + 2)
    (dense,) = bench.measure(AttentionCase.parse("512/d64/1.0"), ["torch-dense"])
    assert dense.work == 4 * 64 * 9 * 512 * 512 / 2
    assert median(dense.tflops) == pytest.approx(dense.work / median(dense.seconds) / 1e12, rel=0.5)


@pytest.mark.parametrize("mistake", ["scale", "tile"])
def test_a_provider_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    calls = []

    def build(x: Inputs) -> attention.Run:
        right = attention.PROVIDERS["torch-dense"].build(x)

        def run() -> torch.Tensor:
            calls.append(x.q.shape[1])
            out = right().clone()
            if mistake == "scale":
                return out * 1.001
            out[0, :128] = 0
            return out

        return run

    monkeypatch.setitem(attention.PROVIDERS, "planted-dense", Provider(build, "cpu", dense=True))
    notes: list[str] = []
    made = bench_attention(["512/d64/1.0"], ["planted-dense", "torch-dense"], device="cpu", note=notes.append)
    assert [m["provider"] for m in made["measured"]] == ["torch-dense"]
    assert made["left_out"]["planted-dense/d64"].startswith("it disagrees with the reference: worst row's relative")
    assert calls == [256], "it ran once, on the check"
    assert any("planted-dense/d64 is left out" in n for n in notes)


def test_what_raises_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(x: Inputs) -> attention.Run:
        raise KeyError("no such symbol\nand more")

    monkeypatch.setitem(attention.PROVIDERS, "broken", Provider(build, "cpu"))
    made = bench_attention(["256/d96/0.5"], ["broken", "cpu"], device="cpu")
    (measured,) = made["measured"]
    assert made["left_out"]["broken/d96"].startswith("KeyError: 'no such symbol")
    assert measured["provider"] == "cpu" and measured["speedup"] is None and measured["over"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, on which they may run")
def test_providers_of_a_gpu_say_why_they_do_not_run() -> None:
    names = [n for n, p in attention.PROVIDERS.items() if p.home == "cuda"]
    made = bench_attention(["256/d128/0.5"], [*names, "cpu"])
    assert set(made["left_out"]) == {f"{n}/d128" for n in names}
    assert all("NVIDIA GPU" in why for why in made["left_out"].values()), made["left_out"]
    with pytest.raises(Unavailable, match="gluon/d64: there is no NVIDIA GPU"):
        bench_attention(["256/d64/0.5"], ["gluon"])
    with pytest.raises(Unavailable, match="leave --device out"):
        bench_attention(device="cuda")


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_lists_have_the_density_asked_for(density: float) -> None:
    x = Inputs.of(AttentionCase(4096, 64, density), torch.device("cpu"))
    below = int(x.lists.count.sum()) - 9 * 32
    assert below / (9 * 32 * 31 / 2) == pytest.approx(density, abs=0.04)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("1024/d64", "cannot be read.*65536/d128/0.2"),
        ("1024/64/0.5", "cannot be read"),
        ("-128/d64/0.5", "cannot be read"),
        ("1024/d64/nan", "cannot be read"),
        ("1000/d64/0.5", "multiple of 128"),
        ("0/d64/0.5", "multiple of 128"),
        ("1024/d80/0.5", "64, 96 and 128"),
        ("1024/d64/0", "more than 0"),
        ("1024/d64/1.5", "at most 1"),
    ],
)
def test_cases_that_cannot_be_measured(case: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        bench_attention([case], device="cpu")


def test_names_that_do_not_exist() -> None:
    with pytest.raises(UnknownName, match="'gluon'"):
        bench_attention(["256/d64/0.5"], ["gluo"], device="cpu")
    with pytest.raises(InvalidInput, match="cpu, cuda, or cuda:1"):
        bench_attention(device="tpu")


def test_default_cases_are_cases() -> None:
    for text in (*attention.GPU_CASES, *attention.CPU_CASES):
        assert str(AttentionCase.parse(text)) == text


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_our_kernels_pass_their_check_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    monkeypatch.setattr(attention, "CHECK_TOKENS", {"cuda": 512})
    made = bench_attention([f"2048/d{dim}/0.3"], ["gluon", "triton", "cudnn-dense"], device="cuda")
    assert not any("disagrees" in why for why in made["left_out"].values()), made["left_out"]
    assert all(m["tflops"]["p50"] > 0 for m in made["measured"])
