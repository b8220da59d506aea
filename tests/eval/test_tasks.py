"""Tasks: metrics by name, items that know what they depend on, question files, an even order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tamis.core.errors import InvalidInput, NothingFound
from tamis.engine.template import Template
from tamis.eval.questions import Passage, Question
from tamis.eval.tasks import (
    ANSWER_TOKENS,
    METRICS,
    SHORT,
    Fill,
    Item,
    Task,
    interleave,
    match_all,
    match_part,
    prompt_tokens,
    qa_task,
    qa_tasks,
    question_files,
)
from tamis.prompt.segments import Kind
from tiny_chat import tiny_tokenizer

ITEM = Item("qa/x", "1", "Where?", (Passage("T", "The lamp."), Passage("", " ")), ("the lamp", "Lamp"), ("f1", "em"))


def line(number: int) -> str:
    doc = {"title": "Lamp", "text": f"Lamp {number} burns."}
    return json.dumps({"id": f"q{number}", "question": "What burns?", "answers": [f"lamp {number}"], "docs": [doc]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, n in (("b", 3), ("a", 2)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(line, range(n))))
    (tmp_path / "notes.txt").write_text("not a set")
    return tmp_path


def test_string_matches() -> None:
    assert match_all("LAMP and crane", ["lamp", "Crane", "boat"]) == pytest.approx(2 / 3)
    assert match_part("a lamp", ["crane", "Lamp"]) == 1.0 and match_part("a boat", ["crane"]) == 0.0


def test_scores_by_name() -> None:
    assert ITEM.score("a lamp") == {"f1": 1.0, "em": 1.0}
    assert replace(ITEM, metrics=tuple(METRICS)).score("lamp and boat")["match_all"] == 0.5


def test_a_digest_follows_everything_but_the_name() -> None:
    changed = [
        replace(ITEM, question="When?"),
        replace(ITEM, docs=ITEM.docs[::-1]),
        replace(ITEM, answers=("lamp",)),
        replace(ITEM, metrics=("em",)),
        replace(ITEM, answer_tokens=3),
        replace(ITEM, stop=()),
    ]
    assert len({ITEM.digest, *(i.digest for i in changed)}) == 7
    assert replace(ITEM, id="2", task="qa/y").digest == ITEM.digest


def test_the_prompt_and_its_length() -> None:
    template = Template(tiny_tokenizer())
    prompt = ITEM.prompt(template)
    assert [s.kind for s in prompt.segments] == [Kind.PREFIX, Kind.DOCUMENT, Kind.QUESTION]
    assert prompt_tokens(template, ITEM.question, ITEM.docs) == len(prompt.tokens)


def test_every_task_gets_its_turn() -> None:
    tasks = [
        Task(name, n, lambda i, name=name: replace(ITEM, task=name, id=str(i))) for name, n in (("a", 1), ("b", 3))
    ]
    assert [(i.task, i.id) for i in interleave(tasks)] == [("a", "0"), ("b", "0"), ("b", "1"), ("b", "2")]
    assert list(interleave([])) == []


def test_a_folder_stands_for_its_sets(folder: Path) -> None:
    files = question_files([folder, folder / "a.jsonl"])
    assert [f.name for f in files] == ["a.jsonl", "b.jsonl"]
    tasks = qa_tasks(files, limit=2)
    assert [(t.name, t.size) for t in tasks] == [("qa/a", 2), ("qa/b", 2)]
    item = tasks[0].make(1)
    assert (item.id, item.answers, item.answer_tokens, item.stop) == ("q1", ("lamp 1",), ANSWER_TOKENS, ("\n",))
    assert item.question.startswith("What burns? ") and item.metrics == ("f1", "em")


def test_missing_sets_are_told(tmp_path: Path) -> None:
    with pytest.raises(NothingFound, match=r"holds no \.jsonl"):
        question_files([tmp_path])
    with pytest.raises(NothingFound, match="no question set at"):
        question_files([tmp_path / "a.jsonl"])
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(InvalidInput, match="line 1"):
        qa_tasks(question_files([tmp_path]))


class TestFill:
    """Prompts filled with other questions' passages."""

    def test_own_passages_stay_and_the_length_holds(self, llm):
        questions = [
            Question(f"q{i}", f"what is {i}?", ("x",), tuple(Passage(f"t{i}{j}", "word " * 12) for j in range(3)), (1,))
            for i in range(6)
        ]
        item = qa_task("tiny", questions, 2, Fill(llm.template, 700)).make(0)
        assert item.task == "qa/tiny/700"
        assert set(questions[0].docs) <= set(item.docs)
        assert len(item.docs) > 3
        assert len(item.prompt(llm.template).tokens) <= 700
        assert item == qa_task("tiny", questions, 2, Fill(llm.template, 700)).make(0)

    def test_the_gold_passage_is_the_last_to_go(self, llm):
        docs = tuple(Passage(f"t{j}", "word " * 12) for j in range(3))
        questions = [Question("q", "what?", ("x",), docs, (2,))]
        room = len(llm.template.prompt(f"what? {SHORT}", []).tokens) + len(
            llm.template.document_tokens("t2", docs[2].text)
        )
        assert qa_task("tiny", questions, None, Fill(llm.template, room)).make(0).docs == (docs[2],)

    def test_too_few_passages_is_an_error(self, llm):
        questions = [Question("q", "what?", ("x",), (Passage("t", "word"),), (0,))]
        with pytest.raises(InvalidInput, match="give more questions"):
            qa_task("tiny", questions, None, Fill(llm.template, 500)).make(0)
