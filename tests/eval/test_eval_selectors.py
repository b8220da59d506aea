"""All selectors on the same questions: one value per question and metric, dense as the yardstick."""

from __future__ import annotations

import json

import pytest

from tamis.core.errors import ContextOverflow, InvalidInput
from tamis.engine.llm import LLM
from tamis.eval.questions import Passage, Question
from tamis.eval.selectors import DEFAULT_SELECTORS, Scores, eval_selectors


def question(number: int, words: int = 60) -> Question:
    docs = tuple(Passage(f"Station {i}", f"The crane {number * i} lifts stores. " * (words // 5)) for i in range(3))
    return Question(f"q{number}", "What lifts stores?", ("the crane",), docs)


QUESTIONS = [question(1), question(2, 90)]


def test_every_metric_of_every_selector(llm: LLM) -> None:
    steps: list[tuple[int, int]] = []
    scores = eval_selectors(llm, QUESTIONS, answer_tokens=3, note=lambda *step: steps.append(step))
    assert list(scores) == ["dense", *DEFAULT_SELECTORS] and steps == [(0, 2), (1, 2), (2, 2)]
    assert scores["dense"].density == [1.0, 1.0] and scores["dense"].kl == []
    for name in DEFAULT_SELECTORS:
        found = scores[name]
        for metric in ("density", "recall", "kl", "agreement", "f1", "em"):
            values = getattr(found, metric)
            assert len(values) == 2 and all(v >= 0 for v in values), (name, metric)
    assert max(scores["none"].density) < min(scores["stored"].density) <= 1
    assert json.dumps(scores["none"].summary())


def test_all_tiles_agree_with_dense(llm: LLM) -> None:
    scores = eval_selectors(llm, QUESTIONS, ["all"], answer_tokens=6)
    found = scores["all"]
    assert found.density == [1.0, 1.0] and found.agreement == [1.0, 1.0]
    assert max(found.kl) < 1e-6 and found.recall == pytest.approx([1.0, 1.0], abs=1e-4)
    assert (found.f1, found.em) == (scores["dense"].f1, scores["dense"].em)


def test_no_answers(llm: LLM) -> None:
    scores = eval_selectors(llm, QUESTIONS[:1], ["none"], answer_tokens=0)
    assert scores["none"].f1 == scores["dense"].em == [] and len(scores["none"].kl) == 1
    summary = scores["dense"].summary()
    assert set(summary) == {"density", "density_ci95"} and Scores().summary() == {}


@pytest.mark.parametrize(
    ("names", "says"), [(["all", "stord"], "Did you mean 'stored'"), ([""], "unknown selector"), (["dense"], "'dense'")]
)
def test_names_are_checked_before_any_work(llm: LLM, names: list[str], says: str) -> None:
    steps: list[int] = []
    with pytest.raises(InvalidInput, match=says):
        eval_selectors(llm, QUESTIONS, names, note=lambda *_: steps.append(1))
    assert steps == []


def test_a_name_given_twice_counts_once(llm: LLM) -> None:
    scores = eval_selectors(llm, QUESTIONS[:1], ["none", "none"], answer_tokens=0)
    assert len(scores["none"].density) == 1


def test_a_question_that_does_not_fit_is_named(llm: LLM) -> None:
    with pytest.raises(ContextOverflow, match=r"question 'q9'.*takes 1500"):
        eval_selectors(llm, [question(9, 2000)], ["none"], answer_tokens=0)
