"""`tamis train forecast` and `tamis eval forecast` on a tiny model."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
SMALL = ("--top", 4, "--local", 1)


@pytest.fixture
def data(docs: Path, tmp_path: Path) -> list[str]:
    """A question set and a folder of files."""
    asked = tmp_path / "asked.jsonl"
    passages = [
        {"title": f"Boat {i}", "text": f"Boat {i} comes on Monday, lamp {i * 5} is lit. " * 9} for i in range(40)
    ]
    asked.write_text(json.dumps({"id": "1", "question": "When?", "answers": ["Monday"], "docs": passages}))
    return ["--data", str(asked), "--data", str(docs)]


@pytest.fixture
def trained(tamis: Run, model_folder: str, data: list[str], tmp_path: Path) -> Any:
    asked = ("--steps", 3, "--tokens", 512, "--rows", 64, "--dense-tokens", 0, "--checks", 1, "--holdout", 0.3)
    return tamis("train", "forecast", "--model", model_folder, *data, "--out", tmp_path / "f", *SMALL, *asked, "--json")


def test_trained_and_measured(tamis: Run, trained: Any, model_folder: str, data: list[str], tmp_path: Path) -> None:
    made = trained.json
    assert made["steps"] == 3 and made["parameters"] == 2 * 128 * 256 and made["before"]["kl"] > 0
    assert 0 < made["parameters_share"] < 0.2 and (tmp_path / "f" / "loss.png").exists()
    (tmp_path / "results").mkdir()
    asked = ("--tokens", 512, "--texts", 2, "--rows", 16, "--generated", 2)
    ran = tamis("eval", "forecast", "--model", model_folder, "--forecast", tmp_path / "f", *data, *asked, "--json")
    found = ran.json
    assert found["rule"]["top"] == 4 and 0 < found["prefill"]["forecast"]["recall"] <= 1
    assert len(found["decode"]["infinigen"]["recall_by_layer"]) == 2 and found["decode"]["own"]["recall"] == 1
    with (tmp_path / "results" / "forecast.csv").open() as file:
        rows = list(csv.DictReader(file))
    moved = {"attended", "hit_rate", "late", "moved_bytes"}
    assert {r["metric"] for r in rows} == {"recall", "recall_attention", "mass", "kl", "agreement", "density"} | moved
    assert {r["provider"] for r in rows} == {"forecast", "infinigen", "own", "forecast-unfetched"}
    assert any(r["case"].endswith("/float32/asked+docs/512/top-4/decode/layer-1") for r in rows)
    text = tamis("eval", "forecast", "--model", model_folder, "--forecast", tmp_path / "f", *data, *asked)
    assert text.code == 0 and "recall by layer" in text.out and "decode, KV on host" in text.out


def test_asked_with_it(tamis: Run, trained: Any, model_folder: str, docs: Path, tmp_path: Path) -> None:
    assert trained.code == 0
    given = ("ask", "How many lamps are lit?", "--docs", docs, "--model", model_folder, "--max-tokens", 6)
    asked = ("--decode", "forecast", "--decode-budget", 0.1, "--decode-local", 1, "--offload", "host")
    ran = tamis(*given, *asked, "--forecast", tmp_path / "f", "--recall", "--json")
    assert ran.code == 0, ran.json
    found = ran.json["report"]["decode"]
    assert (found["used"], found["kv"]) == ("forecast", "blocks") and found["blocks"]["moved_bytes"] > 0
    assert tamis(*given, "--decode", "blocks", "--prefill", "blocks", "--json").code == 0


def test_asked_without_it(failed: Callable[..., str], model_folder: str, docs: Path) -> None:
    given = ("ask", "When?", "--docs", docs, "--model", model_folder)
    assert "--forecast" in failed(*given, "--decode", "forecast", code="invalid_input")
    assert "Did you mean 'host'" in failed(*given, "--offload", "hos", code="invalid_input")
    assert "in pages" in failed(*given, "--offload", "host", "--prefill", "prefix", code="invalid_input")


def test_another_models_forecast_is_refused(
    failed: Callable[..., str], trained: Any, other_model_folder: str, data: list[str], tmp_path: Path
) -> None:
    assert trained.code == 0
    asked = ("--model", other_model_folder, "--forecast", tmp_path / "f", *data, "--tokens", 512)
    assert "architecture" in failed("eval", "forecast", *asked, code="store_mismatch")
    nothing = failed("eval", "forecast", "--forecast", tmp_path / "none", code="model_not_found")
    assert "tamis train forecast" in nothing


def test_nothing_to_judge_is_said(
    failed: Callable[..., str], tamis: Run, model_folder: str, data: list[str], tmp_path: Path
) -> None:
    asked = ("--steps", 1, "--tokens", 512, "--rows", 64, "--dense-tokens", 0, "--checks", 0, "--holdout", 0)
    made = tamis("train", "forecast", "--model", model_folder, *data, "--out", tmp_path / "f", *SMALL, *asked)
    assert made.code == 0
    given = ("eval", "forecast", "--model", model_folder, "--forecast", tmp_path / "f", *data)
    assert "holdout 0" in failed(*given, "--tokens", 512, code="invalid_input")
    assert "generated is 600 of 512" in failed(*given, "--tokens", 512, "--generated", 600, code="invalid_input")


def test_files_without_texts_are_said(failed: Callable[..., str], model_folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    asked = ("--model", model_folder, "--data", tmp_path / "empty", "--out", tmp_path / "g", "--tokens", 8192)
    assert "hold no texts" in failed("train", "forecast", *asked, code="nothing_found")


def test_the_built_in_text() -> None:
    from tamis.cli.texts import texts_of

    pieces, names = texts_of([])
    assert len(pieces) > 50 and names == ["python-reference"]


def test_the_count_for_every_shape(tmp_path: Path) -> None:
    """In a process of its own: where `torch.empty` is patched, torch's meta device does not know it."""
    command = [
        sys.executable,
        "-m",
        "tamis.cli.main",
        "bench",
        "forecast-size",
        "--results",
        str(tmp_path / "r"),
        "--json",
    ]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)["shapes"]
    published = found["minicpm4.1-8b"]
    assert published["added"] == 33_554_432 and 0.0040 < published["share"] < 0.0042
    assert found["llama-3.1-8b"]["added"] == 4 * published["added"] and 0.0166 < found["llama-3.1-8b"]["share"] < 0.0168
    assert found["qwen2.5-14b"]["added"] == 48 * 1024 * (5120 + 1), "its queries have a bias, so has the forecast"
    assert "added_parameters_share" in (tmp_path / "r" / "forecast.csv").read_text()


def test_measured_without_training(tamis: Run, model_folder: str, data: list[str], tmp_path: Path) -> None:
    """The weights that a training begins with, on texts of which it has seen none."""
    given = ["--tokens", 600, "--texts", 1, "--rows", 16, "--generated", 4, "--top", 4, "--local", 1]
    ran = tamis("eval", "forecast", "--model", model_folder, *data, *given, "--results", tmp_path, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["forecast"] is None and ran.json["steps"] == 0 and ran.json["texts"] == 1
    assert 0 < ran.json["prefill"]["forecast"]["recall"] <= 1
    assert "/untrained/" in (tmp_path / "forecast.csv").read_text()
