"""`tamis bench paged` as a command: table, JSON, rows and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tamis.bench.results import read_rows

ARGS = ("bench", "paged", "--device", "cpu", "--case", "prefill/2x200/150", "--case", "decode/2x200/b3", "--rounds", 2)


def test_a_table_and_rows(tamis: Callable[..., object], tmp_path: Path) -> None:
    ran = tamis(*ARGS, "--results", tmp_path / "out")
    assert ran.code == 0 and "no GPU is used" in ran.err
    lines = ran.out.splitlines()
    assert len(lines) == 8 and lines[0].split() == ["prefill/2x200/150", "cpu"]
    assert lines[1].split()[0] == "without" and lines[3].split()[0] == "turned" and "TFLOP/s" in lines[3]
    assert "TB/s" in lines[6]
    rows = read_rows(tmp_path / "out" / "paged.csv")
    metrics = ["overhead", "ms", "tflops", "overhead", "ms", "tb_per_s"]
    assert [(r["provider"], r["metric"]) for r in rows] == [("cpu", m) for m in metrics]


def test_json(tamis: Callable[..., object]) -> None:
    found = tamis(*ARGS, "--json").json
    assert set(found) == {"device", "measured", "tuned", "left_out", "results"} and found["results"] is None
    assert [m["case"] for m in found["measured"]] == ["prefill/2x200/150", "decode/2x200/b3"]


def test_mistakes_are_answered(failed: Callable[..., str]) -> None:
    assert "decode/5x64/8" in failed("bench", "paged", "--case", "decode/5x64/8", code="invalid_input")
    assert "leave it out" in failed("bench", "paged", "--device", "cpu", "--tune", code="invalid_input")
