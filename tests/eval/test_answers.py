"""Answers per variant: shared dense pass, paired differences, a log that a second run goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tamis.core.errors import InvalidInput
from tamis.engine.llm import LLM
from tamis.eval import answers as module
from tamis.eval.answers import Cell, Log, eval_answers, settings_of
from tamis.eval.needle import needle_tasks
from tamis.eval.questions import Passage, Question
from tamis.eval.tasks import Task, qa_task

VARIANTS = ("dense", "stored", "none")


def question(number: int, words: int = 60) -> Question:
    docs = tuple(Passage(f"Station {i}", f"The crane {number * i} lifts stores. " * (words // 5)) for i in range(3))
    return Question(f"q{number}", "What lifts stores?", ("the crane",), docs)


@pytest.fixture
def tasks(llm: LLM) -> list[Task]:
    haystack = [Passage("", f"The boat {i} comes on Monday. " * 12) for i in range(12)]
    return [
        qa_task("tiny", [question(1), question(2)]),
        *needle_tasks(llm.template, haystack, [900], size=1, depths=[0.1, 0.9]),
    ]


class Counted:
    """Counts the prefills of a model."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        prefill = llm.prefill

        def counting(*args: Any, **choices: Any) -> Any:
            self.asked.append(choices.get("selector") or choices["prefill"])
            return prefill(*args, **choices)

        monkeypatch.setattr(llm, "prefill", counting)


def test_each_variant_on_each_item(llm: LLM, tasks: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    counted, steps = Counted(llm, monkeypatch), []
    found = eval_answers(llm, tasks, ["none", "stored"], answer_tokens=3, note=lambda *s: steps.append(s))
    assert counted.asked == ["dense", "none", "stored"] * 4, "one dense prefill per prompt"
    assert steps == [(i, 4) for i in range(5)] and found.complete and found.skipped == ()
    assert found.variants == ("dense", "none", "stored") and len(found.outcomes) == 12
    summary = found.summary()
    assert list(summary) == ["qa/tiny", "needle/900/0.1", "needle/900/0.9", "needle"]
    assert set(summary["qa/tiny"]["none"]) == {"f1", "em", "kl", "agreement", "density"}
    assert summary["needle"]["stored"]["match_part"]["n"] == 2
    for variants in summary.values():
        dense = variants["dense"]
        assert dense["density"]["mean"] == dense["agreement"]["mean"] == 1.0 and dense["kl"]["mean"] == 0.0
        assert variants["none"]["density"]["mean"] < 1 and variants["none"]["kl"]["mean"] > 0
        assert "difference" not in variants["none"]["kl"] and "within_1pct" not in next(iter(dense.values()))
    entry = summary["qa/tiny"]["none"]["f1"]
    assert entry["within_1pct"] is None and entry["difference_ci95"][0] <= entry["difference"]
    assert json.dumps(summary)


def test_all_tiles_answer_like_dense(llm: LLM, tasks: list[Task]) -> None:
    found = eval_answers(llm, tasks, ["all"], answer_tokens=6)
    text = {(o.task, o.id, o.variant): o.text for o in found.outcomes}
    assert all(text[t, i, "all"] == text[t, i, "dense"] for t, i, _ in text)
    assert {o.agreement for o in found.outcomes} == {1.0} and max(o.kl for o in found.outcomes) < 1e-6
    assert all(c.difference.mean == 0 for c in found.cells if c.metric == "f1")


def test_a_planted_answer_is_scored(llm: LLM, tasks: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(llm: LLM, item: Any, made: Any, most: int) -> str:
        assert most == item.answer_tokens == 24
        return item.answers[0] if made.report.used == "dense" else "nothing"

    monkeypatch.setattr(module, "_answer", planted)
    summary = eval_answers(llm, tasks, ["none"]).summary()
    assert summary["needle"]["dense"]["match_part"]["mean"] == summary["qa/tiny"]["dense"]["em"]["mean"] == 1.0
    assert summary["qa/tiny"]["none"]["f1"]["difference"] == -1.0


def test_answers_stop_at_a_line_but_not_at_an_empty_first_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = llm.tokenizer("\n\nlamp\nboat", add_special_tokens=False).input_ids
    monkeypatch.setattr(llm.runner, "decode", lambda *_: iter(tokens))
    (outcome,) = eval_answers(llm, [qa_task("tiny", [question(1)])], []).outcomes
    assert outcome.text == "lamp"


class TestLog:
    def run(self, llm: LLM, tasks: list[Task], path: Path, variants: tuple[str, ...] = VARIANTS, **more: Any) -> Any:
        return eval_answers(llm, tasks, variants, log=Log(path, settings_of(llm)), answer_tokens=2, **more)

    def test_nothing_is_done_twice(
        self, llm: LLM, tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "log" / "answers.jsonl"
        whole = self.run(llm, tasks, path)
        lines = path.read_bytes().splitlines(keepends=True)
        assert len(lines) == 1 + 12
        path.write_bytes(b"".join(lines[:6]) + lines[6][:9])  # killed in the second item, within a line
        counted = Counted(llm, monkeypatch)
        assert self.run(llm, tasks, path) == whole
        assert counted.asked == ["dense", "none"] + list(VARIANTS) * 2
        assert path.read_bytes().splitlines(keepends=True) == lines
        counted.asked.clear()
        assert self.run(llm, tasks, path) == whole and counted.asked == []

    def test_another_variant_needs_the_reference_only(
        self, llm: LLM, tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.run(llm, tasks[:1], tmp_path / "a", ("dense",))
        counted = Counted(llm, monkeypatch)
        found = self.run(llm, tasks[:1], tmp_path / "a", ("none",))
        assert counted.asked == ["dense", "none"] * 2
        assert all(o.kl > 0 for o in found.outcomes if o.variant == "none")

    def test_a_changed_question_is_asked_again(self, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run(llm, [qa_task("tiny", [question(1)])], tmp_path / "a", ("dense",))
        counted = Counted(llm, monkeypatch)
        self.run(llm, [qa_task("tiny", [question(1, 80)])], tmp_path / "a", ("dense",))
        assert counted.asked == ["dense"]

    def test_other_settings_are_refused(self, llm: LLM, tmp_path: Path) -> None:
        settings = settings_of(llm)
        Log(tmp_path / "a", settings)
        Log(tmp_path / "a", settings_of(llm))
        with pytest.raises(InvalidInput, match=r"another policy\. Give another file"):
            Log(tmp_path / "a", settings | {"policy": settings["policy"] | {"mass": 0.5}})
        (tmp_path / "b").write_text("hello\n")
        with pytest.raises(InvalidInput, match="not a log of answers"):
            Log(tmp_path / "b", {})

    def test_a_deadline_keeps_what_is_done(
        self, llm: LLM, tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = self.run(llm, tasks, tmp_path / "whole")
        clock = iter(range(0, 1000, 10))
        monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
        # starts at 0; items begin at 10 and 30 and take 10 each, so a third one would end at 60
        cut = self.run(llm, tasks, tmp_path / "cut", deadline_s=55)
        assert not cut.complete and cut.outcomes == whole.outcomes[:6]
        assert self.run(llm, tasks, tmp_path / "cut") == whole
        nothing = self.run(llm, tasks, tmp_path / "none", deadline_s=0)
        assert nothing.outcomes == () and nothing.summary() == {} and not nothing.complete


def test_what_does_not_fit_is_left_out_and_named(llm: LLM) -> None:
    found = eval_answers(llm, [qa_task("tiny", [question(9, 2000), question(1)])], ["none"], answer_tokens=1)
    assert found.skipped == ("qa/tiny: q9",) and {o.id for o in found.outcomes} == {"q1"} and found.complete


def test_names_are_checked_before_any_work(llm: LLM, tasks: list[Task]) -> None:
    with pytest.raises(InvalidInput, match="Did you mean 'stored'"):
        eval_answers(llm, tasks, ["stord"], note=lambda *_: pytest.fail("work was begun"))


class TestCells:
    def cell(self, values: list[float], dense: list[float]) -> Cell:
        return Cell("qa", "stored", "f1", tuple(values), tuple(dense))

    def test_within_one_percent(self) -> None:
        dense = [0.2, 0.8, 1.0, 0.5] * 25
        assert self.cell(dense, dense).within_1pct is True
        assert self.cell([0.995 * d for d in dense], dense).within_1pct is True
        assert self.cell([0.98 * d for d in dense], dense).within_1pct is False
        lost = [0.2, 0.8, 0.0, *dense[3:]]
        assert self.cell(lost, dense).within_1pct is False, "one whole answer of a hundred is 1.6 % of 0.625"
        assert self.cell([*lost, *dense * 19], dense * 20).within_1pct is True, "one of two thousand"

    def test_no_claim_from_few_questions_or_nothing(self) -> None:
        assert self.cell([1.0] * 29, [1.0] * 29).within_1pct is None
        assert self.cell([0.0] * 50, [0.0] * 50).within_1pct is None

    def test_rows_rise_and_hold_the_mean(self) -> None:
        cell = self.cell([0.0, 1.0, 0.5, 0.3], [1.0, 1.0, 0.5, 0.1])
        low, mean, high = cell.row()
        assert low < mean < high and mean == pytest.approx(0.45)
        low, mean, high = cell.row(difference=True)
        assert low < mean < high and mean == pytest.approx(-0.2)
        assert self.cell([0.1] * 3, [0.1] * 3).row() == pytest.approx((0.1, 0.1, 0.1))


def test_rows_name_what_they_hold(llm: LLM) -> None:
    found = eval_answers(llm, [qa_task("tiny", [question(1), question(2)])], ["none"], answer_tokens=1)
    rows = list(found.rows())
    assert [(r[1], r[2]) for r in rows if r[2].startswith("f1")] == [
        ("dense", "f1_mean"),
        ("none", "f1_mean"),
        ("none", "f1_minus_dense_mean"),
    ]
    assert {r[4] for r in rows if r[2] == "kl_mean"} == {"nat"} and {r[0] for r in rows} == {"qa/tiny"}
