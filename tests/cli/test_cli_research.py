"""`tamis eval research` and `tamis eval calibrate` on a tiny model: a table, rows, a log to go on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three questions of three short passages."""
    path = tmp_path / "q.jsonl"
    with path.open("w") as file:
        for n in range(3):
            docs = [{"title": f"A{n}{i}", "text": f"The crane {n * 3 + i} lifts stores. " * 15} for i in range(3)]
            row = {"id": str(n), "question": "What lifts stores?", "answers": ["the crane"], "docs": docs}
            file.write(json.dumps(row) + "\n")
    return path


def test_research(tamis: Run, failed: Run, model_folder: str, data: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    common = ["eval", "research", "--data", data, "--model", model_folder, "--tokens", 600, "--limit", 2]
    common += ["--log", tmp_path / "log.jsonl"]
    found = tamis(*common, "--variants", "none; sampled:mass=0.5", "--json").json
    assert list(found["variants"]) == ["none", "sampled:mass=0.5"] and found["case"].endswith("/q/600")
    assert found["variants"]["none"]["kl"]["n"] == 2
    rows = Path(found["results"]).read_text().splitlines()
    # of each variant the number of prompts, and every metric's quantiles and mean
    assert len(rows) == 1 + 2 * (1 + 2 * 7) and "sampled:mass=0.5" in rows[-1]
    assert [row.split(",")[-5:] for row in rows if ",prompts," in row] == [["prompts", "2", "2", "2", "1"]] * 2
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    again = tamis(*common, "--variants", "none;all")
    assert again.code == 0 and "none" in again.out and "kl_rows" in again.out and "sampled" not in again.out
    assert (tmp_path / "log.jsonl").read_text().splitlines()[:4] == lines
    assert "unknown selector" in failed(*common, "--variants", "nonne")
    assert "left no time" in failed(*common, "--variants", "stored", "--deadline-s", 0)
    assert "names none" in failed(*common, "--variants", " ;")
    fewer = tamis(*common, "--variants", "none", "--limit", 1, "--json").json
    assert fewer["variants"]["none"]["kl"]["n"] == 1, "the log's other questions were not asked for"


def test_a_stretched_context(tamis: Run, failed: Run, model_folder: str, data: Path) -> None:
    common = ["eval", "research", "--data", data, "--model", model_folder, "--limit", 1, "--variants", "none"]
    plain, stretched = tamis(*common, "--json").json, tamis(*common, "--yarn", 4, "--json").json
    assert stretched["case"] == plain["case"].replace("/q/own", "+yarn4/q/own")
    assert stretched["variants"]["none"]["kl"]["mean"] != plain["variants"]["none"]["kl"]["mean"]
    assert "YaRN factor is 1.0" in failed(*common, "--yarn", 1)


def test_calibrate(tamis: Run, failed: Run, model_folder: str, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    common = ["eval", "calibrate", "--data", data, "--model", model_folder, "--tokens", 600, "--limit", 1, "--out", out]
    assert tamis(*common, "--density", 0.9, "--json").json == {"out": str(out), "layers": 2, "heads": 4, "density": 0.9}
    assert json.loads(out.read_text())["density"] == 0.9
    asked = ["eval", "research", "--data", data, "--model", model_folder, "--limit", 1]
    found = tamis(*asked, "--variants", f"calibrated:file={out}", "--json").json
    assert 0 < found["variants"][f"calibrated:file={out}"]["density"]["mean"] <= 1
    assert "smallest share" in failed(*common, "--density", 0.001)


def test_calibrate_leaves_the_questions_to_test_on_out(
    tamis: Run, failed: Run, model_folder: str, data: Path, tmp_path: Path
) -> None:
    """Their passages fill prompts, but they are never asked, however few are left."""
    common = ["eval", "calibrate", "--data", data, "--model", model_folder, "--tokens", 600, "--density", 0.9]
    out = tmp_path / "new" / "t.json"
    tamis(*common, "--skip", 2, "--limit", 3, "--out", out)
    one = tmp_path / "one.json"
    tamis(*common, "--skip", 2, "--limit", 1, "--out", one)
    assert json.loads(out.read_text()) == json.loads(one.read_text())
    assert "leaves none of the 3 questions" in failed(*common, "--skip", 3, "--out", one)
