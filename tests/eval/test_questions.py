"""Reading question sets, and saying which line is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tamis.core.errors import DocumentUnreadable, InvalidInput, NothingFound
from tamis.eval.questions import Passage, Question, load_questions


def values(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": "q1",
        "question": "Who?",
        "answers": ["Ann", "Anne"],
        "docs": [{"title": "T", "text": "Ann did."}, {"title": "", "text": "Not Bob."}],
        "gold": [0],
    }
    return {k: v for k, v in (fields | changes).items() if v is not None}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8")
    return path


def test_reads_questions_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", values(), "", values(id="q2", gold=[], question="Wo – \u2028 ü?"))
    first, second = load_questions(path)
    docs = (Passage("T", "Ann did."), Passage("", "Not Bob."))
    assert first == Question("q1", "Who?", ("Ann", "Anne"), docs, (0,))
    assert second.id == "q2" and second.gold == () and second.question == "Wo – \u2028 ü?"


def test_separators_inside_a_string_do_not_end_the_line(tmp_path: Path) -> None:
    line = json.dumps(values(question="one\u2028two\x85three"), ensure_ascii=False)
    assert load_questions(write(tmp_path / "set.jsonl", line))[0].question == "one\u2028two\x85three"


def test_windows_files(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(values()).encode() + b"\r\n")
    assert len(load_questions(path)) == 1


def test_gold_and_title_may_be_left_out(tmp_path: Path) -> None:
    found = load_questions(write(tmp_path / "set.jsonl", values(gold=None, docs=[{"text": "x"}])))
    assert found[0].gold == () and found[0].docs == (Passage("", "x"),)


def test_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", values(), values(id="q2"), "not read any more")
    assert [q.id for q in load_questions(path, 1)] == ["q1"]
    assert [q.id for q in load_questions(path, 2)] == ["q1", "q2"]
    with pytest.raises(InvalidInput, match="limit is 0"):
        load_questions(path, 0)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Question.from_dict(values()).id = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"id": "q2"', r"delimiter"),
        ("[1]", r"\[1\] is not an object"),
        (values(id=None), "id is missing; expected text"),
        (values(id=7), "id is 7; expected text"),
        (values(question="  "), "question is '  '"),
        (values(answers="Ann"), "answers is 'Ann'; expected a list"),
        (values(answers=[]), "at least one entry"),
        (values(answers=["Ann", ""]), r"answers\[1\] is ''"),
        (values(docs=None), "docs is missing; expected a list"),
        (values(docs=[]), "at least one entry"),
        (values(docs=[{"text": "x"}, "y"]), r"docs\[1\] is 'y'; expected an object"),
        (values(docs=[{"title": "x"}]), r"docs\[0\].text is missing"),
        (values(gold=[2]), r"gold holds 2; allowed are numbers of docs, 0 to 1"),
        (values(gold=[True]), "gold holds True"),
        (values(gold=["T"]), "gold holds 'T'"),
        (values() | {"answer": "Ann"}, "unknown field 'answer'. Did you mean 'answers'"),
        (values(id="q0"), "id 'q0' stands on line 1 too"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, line: Any, says: str) -> None:
    path = write(tmp_path / "set.jsonl", values(id="q0"), "", line)
    with pytest.raises(InvalidInput, match=f"set.jsonl, line 3: .*{says}"):
        load_questions(path)


def test_files_that_hold_no_questions(tmp_path: Path) -> None:
    with pytest.raises(NothingFound, match="there is no question set at"):
        load_questions(tmp_path / "none.jsonl")
    with pytest.raises(NothingFound, match="there is no question set at"):
        load_questions(tmp_path)
    with pytest.raises(NothingFound, match="holds no question"):
        load_questions(write(tmp_path / "empty.jsonl", "", ""))
    (tmp_path / "latin.jsonl").write_bytes("ü".encode("latin-1"))
    with pytest.raises(DocumentUnreadable, match="not UTF-8"):
        load_questions(tmp_path / "latin.jsonl")
