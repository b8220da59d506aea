"""`tamis ask` from stored documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def ask(tamis: Run, docs: Path, model_folder: str, tmp_path: Path) -> Run:
    given = ("--docs", docs, "--max-tokens", 4, "--model", model_folder, "--store", tmp_path / "kb")
    return lambda *more: tamis("ask", "crane station 3?", *given, *more)


def test_blend_reports_what_was_recomputed(ask: Run) -> None:
    found = ask("--prefill", "blend", "--recompute", 0.2, "--json").json
    reuse = found["report"]["prefill"]["reuse"]
    assert found["report"]["prefill"]["used"] == "blend" and reuse["by_tier"].keys() == {"computed"}
    assert reuse["recomputed_share"] == pytest.approx(0.2, abs=0.02) and reuse["approximate"]
    assert "recomputed" in ask("--prefill", "blend").err


def test_everything_recomputed_answers_as_dense(ask: Run) -> None:
    blend, dense = (ask("--prefill", *p, "--json").json["answer"] for p in (("blend", "--recompute", 1), ("dense",)))
    assert blend == dense


def test_documents_outlive_the_command(ask: Run, tmp_path: Path) -> None:
    given = ("--prefill", "blend", "--cache-dir", tmp_path / "kv", "--json")
    tiers = [set(ask(*given).json["report"]["prefill"]["reuse"]["by_tier"]) for _ in range(2)]
    assert tiers == [{"computed"}, {"disk"}]


def test_plain_reuse_needs_consent(ask: Run) -> None:
    refused = ask("--prefill", "reuse")
    assert refused.code != 0 and "accept_block_attention" in refused.err
    assert ask("--prefill", "reuse", "--accept-block-attention").code == 0


def test_compare_names_what_it_compares(ask: Run) -> None:
    ran = ask("--prefill", "blend", "--compare")
    assert ran.code == 0 and "\nblend: " in ran.out and "speed-up" in ran.out


def test_quality_without_a_question_set(tamis: Run, model_folder: str, tmp_path: Path) -> None:
    """A needle in the built-in text; a variant that leaves an option out is on its rule's curve."""
    variants = "dense,reuse,blend:recompute=0.3,blend:blend=cacheblend"
    ran = tamis("eval", "reuse", "--model", model_folder, "--variants", variants, "--results", tmp_path, "--json")
    assert ran.code == 0, ran.err
    (group,) = ran.json["tasks"]
    assert group == "needle/512/0.5" and set(ran.json["tasks"][group]["reuse"]) >= {"kl", "agreement", "match_part"}
    curves = ran.json["curves"][group]
    assert curves["attention"][0]["asked"] == 0.3 and curves["cacheblend"][0]["asked"] == 0.15
    assert ran.json["complete"] and (tmp_path / "reuse_quality.csv").is_file()
