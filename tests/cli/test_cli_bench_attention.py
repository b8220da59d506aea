"""`tamis bench attention` as a command: table, JSON, rows and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tamis.bench import attention
from tamis.bench.results import read_rows

ARGS = ("bench", "attention", "--device", "cpu", "--case", "256/d64/0.5")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short checks and few repetitions."""
    monkeypatch.setattr(attention, "CHECK_TOKENS", {"cpu": 256})
    monkeypatch.setattr(attention, "CPU_RUNS", 2)


def test_a_table_and_rows(tamis: Callable[..., object], tmp_path: Path) -> None:
    ran = tamis(*ARGS, "--results", tmp_path / "out")
    assert ran.code == 0
    head, dense, sparse = ran.out.splitlines()
    assert head.split()[:4] == ["case", "provider", "TFLOP/s", "p20"]
    assert dense.split()[:2] == ["256/d64/1.0", "torch-dense"] and dense.endswith("1.00x over torch-dense")
    assert sparse.split()[:2] == ["256/d64/0.5", "cpu"]
    rows = read_rows(tmp_path / "out" / "attention.csv")
    assert [(r["provider"], r["metric"], r["unit"]) for r in rows] == [
        ("torch-dense", "tflops", "TFLOP/s"),
        ("torch-dense", "speedup", "1"),
        ("cpu", "tflops", "TFLOP/s"),
        ("cpu", "speedup", "1"),
    ]
    assert rows[0]["command"].startswith("tamis bench attention") and float(rows[0]["p50"]) > 0


def test_json_says_what_was_left_out(tamis: Callable[..., object]) -> None:
    found = tamis(*ARGS, "--provider", "cpu", "--provider", "cudnn-dense", "--json").json
    assert set(found) == {"device", "measured", "left_out", "results"} and found["results"] is None
    assert set(found["left_out"]) == {"cudnn-dense/d64"}
    (measured,) = found["measured"]
    assert measured["provider"] == "cpu" and set(measured["tflops"]) == {"p20", "p50", "p80"}


def test_mistakes_are_answered(failed: Callable[..., str]) -> None:
    assert "density 2.0" in failed("bench", "attention", "--case", "256/d64/2.0", code="invalid_input")
    assert "'triton'" in failed("bench", "attention", "--provider", "tritn", code="unknown_name")
