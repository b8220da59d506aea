"""`tamis eval answers`: what it prints, keeps and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tamis.bench.results import read_rows
from tamis.cli.main import app
from tamis.core.errors import TamisError
from tiny_chat import tiny_tokenizer

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def model_folder(tiny_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one question set; the working folder and the cache are the test's own."""
    monkeypatch.setenv("TAMIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "sets"
    folder.mkdir()
    lines = []
    for i in range(3):
        docs = [{"title": f"Lamp {j}", "text": f"Lamp {i} is boat {j}. " * 12} for j in range(4)]
        found = {"id": f"q{i}", "question": f"Which boat is lamp {i}?", "answers": ["boat"], "docs": docs, "gold": [0]}
        lines.append(json.dumps(found))
    (folder / "lamps.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def run(model_folder: str) -> Run:
    def invoke(*args: object) -> Any:
        words = ["eval", "answers", "--model", model_folder, "--answer-tokens", "2", *map(str, args)]
        return CliRunner().invoke(app, words, catch_exceptions=False)

    return invoke


def test_all_kinds_in_one_run(run: Run, sets: Path) -> None:
    (sets.parent / "results").mkdir()
    ran = run(
        *("--data", sets, "--tasks", "qa,needle,niah_single_2", "--tokens", "1200", "--limit", "2"),
        *("--variants", "dense,none", "--json"),
    )
    found = json.loads(ran.stdout)
    assert found["complete"] and found["skipped"] == [] and found["log"] is None
    assert list(found["tasks"]) == [
        *("qa/lamps", "needle/1200/0.1", "needle/1200/0.5", "needle/1200/0.9", "ruler/niah_single_2/1200", "needle"),
    ]
    assert all(m["n"] == 2 for m in found["tasks"]["qa/lamps"]["none"].values())
    rows = read_rows(found["results"])
    cases = {r["case"].rpartition("/float32/")[2] for r in rows}
    assert cases >= {"qa/lamps/2", "needle/6", "ruler/niah_single_2/1200/2"}
    assert {"f1_mean", "f1_minus_dense_mean", "kl_mean", "density_mean"} <= {r["metric"] for r in rows}
    assert not list((sets.parent / "cache" / "answers").iterdir()), "a finished run leaves no log"


def test_a_table_for_people(run: Run, sets: Path) -> None:
    ran = run("--data", sets / "lamps.jsonl", "--limit", 1, "--variants", "none")
    lines = ran.stdout.splitlines()
    assert lines[0].split()[:3] == ["task", "variant", "metric"]
    assert sum(line.startswith("qa/lamps") for line in lines) == 10


def test_a_log_is_kept_and_gone_on_from(run: Run, sets: Path) -> None:
    command = ("--data", sets, "--variants", "dense", "--json")
    cut = json.loads(run(*command, "--deadline-s", 0).stdout)
    assert not cut["complete"] and cut["tasks"] == {} and Path(cut["log"]).is_file()
    first = json.loads(run(*command, "--log", "a.jsonl", "--limit", 2).stdout)
    assert first["log"] == "a.jsonl" and first["tasks"]["qa/lamps"]["dense"]["f1"]["n"] == 2
    again = json.loads(run(*command, "--log", "a.jsonl").stdout)
    assert again["tasks"]["qa/lamps"]["dense"]["f1"]["n"] == 3
    assert len(Path("a.jsonl").read_text().splitlines()) == 1 + 3


def test_ruler_without_questions_says_what_it_leaves_out(run: Run, sets: Path) -> None:
    ran = run("--tasks", "ruler", "--tokens", 1800, "--limit", 1, "--variants", "dense", "--json")
    assert "qa_1 and qa_2 are left out" in ran.stderr
    found = json.loads(ran.stdout)["tasks"]
    assert len(found) == 12 and found["ruler"]["dense"]["density"]["n"] == 11


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--tasks", "qq"], "unknown task 'qq'"),
        (["--tasks", ","], "names none"),
        (["--tasks", "qa"], "needs question sets"),
        (["--tasks", "needle", "--tokens", "4k"], "whole numbers"),
        (["--tasks", "needle", "--tokens", "0"], "at least 1"),
        (["--tasks", "needle", "--tokens", "5000"], "this model takes 4096"),
        (["--tasks", "needle", "--variants", "spase"], "unknown selector"),
        (["--tasks", "needle", "--fill", "2000"], "--fill 2000 fills qa prompts, and --tasks names needle"),
        (["--tasks", "ruler,vt"], "vt/4000 would run twice"),
        (["--data", "nowhere.jsonl"], "no question set at"),
    ],
)
def test_refused(run: Run, sets: Path, args: list[str], says: str) -> None:
    more = ["--tokens", "4000"] if "--tokens" not in args else []
    with pytest.raises(TamisError, match=says):
        run(*args, *more)
