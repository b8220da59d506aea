"""`tamis bench offload` and `record-locality` as commands: table, JSON, rows and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tamis.bench.locality import Locality, save
from tamis.bench.results import read_rows
from tamis.kernels.blocks import BlockRule


def args(folder: Path) -> tuple[object, ...]:
    rule = BlockRule(6, 1, 2, 16, 8, 4, 0)
    save(
        [Locality("m", "d", "own", 8, 8, rule, (0.4, 0.8), {"1": 0.2, "2": 0.1}, 1.0)], str(folder / "l.json"), how="x"
    )
    return ("bench", "offload", "--shape", "tiny", "--tokens", "256", "--batch", "1", "--rounds", 2, "--device", "cpu",
            "--host-gb", 0.002, "--locality", folder / "l.json")  # fmt: skip


def test_a_table_and_rows(tamis: Callable[..., object], tmp_path: Path) -> None:
    ran = tamis(*args(tmp_path), "--results", tmp_path / "out")
    assert ran.code == 0 and "no GPU is used" in ran.err
    assert "tiny/256/b1/2x/l" in ran.out.splitlines() and "  locality of m, own" in ran.out
    rows = read_rows(tmp_path / "out" / "offload.csv")
    assert {"tokens_per_s", "speedup_vs_sparse_offload", "throughput_vs_resident", "copy_hidden_share"} <= {
        r["metric"] for r in rows
    }


def test_json(tamis: Callable[..., object], tmp_path: Path) -> None:
    found = tamis(*args(tmp_path), "--only", "cells", "--providers", "forecast,sparse-offload", "--json").json
    assert set(found) == {"device", "errors", "cases", "left_out", "plan", "results"} and found["results"] is None
    assert set(found["cases"][0]["found"]) == {"forecast", "sparse-offload"}


def test_mistakes_are_answered(failed: Callable[..., str], tmp_path: Path) -> None:
    assert "give some of copy" in failed(*args(tmp_path), "--only", "nothing", code="invalid_input")
    assert "numbers such as" in failed(*args(tmp_path), "--slots", "2x", code="invalid_input")
    known = args(tmp_path)[:-1]
    assert "record-locality" in failed(*known, tmp_path / "none.json", code="nothing_found")


def test_locality_of_a_model(tamis: Callable[..., object], model_folder: str, tmp_path: Path) -> None:
    rule = ("--tokens", 600, "--steps", 64, "--top", 12, "--local", 3, "--block", 16)
    ran = tamis("bench", "record-locality", "--out", tmp_path / "new.json", "--model", model_folder, *rule)
    assert ran.code == 0 and ran.out.startswith("own ") and "recall 1.000" in ran.out
    kept = json.loads((tmp_path / "new.json").read_text())
    assert "--block 16 --top 12" in kept["how"] and kept["recorded"][0]["data"] == "python-reference"
