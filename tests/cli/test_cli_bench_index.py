"""`tamis bench index` on a tiny model and on a shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
SMALL = ("bench", "index", "--documents", 2, "--tokens", 140, "--repeats", 1)


@pytest.mark.parametrize("shape", [False, True], ids=["model", "shape"])
def test_rows_and_json(tamis: Run, model_folder: str, tmp_path: Path, shape: bool) -> None:
    what = ("--shape", "tiny", "--layers", 1) if shape else ("--model", model_folder)
    found = tamis(*SMALL, *what, "--results", tmp_path / "r", "--json").json
    assert (found["documents"], found["tokens"], found["passes"]) == (2, 140, 1) and found["gate_error"] < 1e-4
    assert found["ratio"] == pytest.approx(found["offline_s"] / found["dense_s"])
    rows = Path(found["results"]).read_text().splitlines()
    assert Path(found["results"]).name == "index.csv" and len(rows) == 1 + 4 and "2 x 140" in rows[1]


def test_rows_that_cannot_be_kept_are_not_lost(tamis: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = tamis(*SMALL, "--shape", "tiny", "--layers", 1, "--results", tmp_path / "file")
    assert ran.code == 2 and "Name a folder that can be written with --results" in ran.err
    assert "\ntiny-1-layers/2 x 140,dense,dense_s," in ran.err


def test_what_is_refused(failed: Run) -> None:
    assert "unknown shape" in failed(*SMALL, "--shape", "tinny").lower()
    assert "dtype is 'int8'; allowed are" in failed(*SMALL, "--shape", "tiny", "--dtype", "int8")
    assert "name one, or leave --layers out" in failed(*SMALL, "--layers", 1)
    assert "leave --docs out" in failed(*SMALL, "--shape", "tiny", "--docs", "x.md")
    assert "device is 'gpu'" in failed(*SMALL, "--shape", "tiny", "--device", "gpu")
    assert "of more than 128 tokens" in failed(*SMALL, "--shape", "tiny", "--layers", 1, "--tokens", 100)
