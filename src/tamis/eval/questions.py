"""Question sets: one JSON object a line, a question with its answers and the passages to answer it from.

    {"id": "q1", "question": "…?", "answers": ["…"], "docs": [{"title": "…", "text": "…"}], "gold": [0]}

Knows the file format; not models, prompts or metrics.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tamis.core.errors import DocumentUnreadable, InvalidInput, NothingFound
from tamis.core.registry import unknown

_FIELDS = ("id", "question", "answers", "docs", "gold")


@dataclass(frozen=True)
class Passage:
    """One document of a question; the title may be empty."""

    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question, its accepted answers (one or more), its passages in order, and which of them (by number) answer it.

    `gold` may be empty: not every set says.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    docs: tuple[Passage, ...]
    gold: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, values: Any) -> Question:
        """Check and take one parsed line. Raises InvalidInput that names the field."""
        if not isinstance(values, dict):
            raise InvalidInput(f"{_short(values)} is not an object with the fields {', '.join(_FIELDS)}.")
        for name in values:
            if name not in _FIELDS:
                raise InvalidInput(unknown("field", str(name), list(_FIELDS)))
        docs = tuple(_passage(d, i) for i, d in enumerate(_list(values, "docs")))
        answers = tuple(_text(a, f"answers[{i}]") for i, a in enumerate(_list(values, "answers")))
        gold = tuple(_list(values, "gold")) if "gold" in values else ()
        if not answers or not docs:
            raise InvalidInput("answers and docs must hold at least one entry each.")
        for g in gold:
            if type(g) is not int or not 0 <= g < len(docs):
                raise InvalidInput(f"gold holds {g!r}; allowed are numbers of docs, 0 to {len(docs) - 1}.")
        return cls(_text(values.get("id"), "id"), _text(values.get("question"), "question"), answers, docs, gold)


def load_questions(path: Path | str, limit: int | None = None) -> list[Question]:
    """The questions of a .jsonl file in order, the first `limit` of them; blank lines are passed over.

    Raises NothingFound (no such file, or no question in it), DocumentUnreadable (not UTF-8) or InvalidInput, which
    names the file, the line and what is wrong with it.
    """
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit is {limit}; give 1 or more, or None for all questions.")
    questions: list[Question] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(_lines(Path(path)), 1):
        if not line.strip():
            continue
        if limit is not None and len(questions) == limit:
            break
        try:
            question = Question.from_dict(json.loads(line))
        except ValueError as e:
            raise InvalidInput(f"{path}, line {number}: {e}") from e
        if question.id in line_of:
            raise InvalidInput(
                f"{path}, line {number}: id {question.id!r} stands on line {line_of[question.id]} too; "
                "results are kept by id, so give each question its own."
            )
        line_of[question.id] = number
        questions.append(question)
    if not questions:
        raise NothingFound(f"{path} holds no question. Give a file with one JSON object a line.")
    return questions


def _lines(path: Path) -> list[str]:
    try:
        # not splitlines(): JSON may hold U+2028 and its like inside a string
        return path.read_text(encoding="utf-8-sig").split("\n")
    except (FileNotFoundError, IsADirectoryError) as e:
        raise NothingFound(f"there is no question set at {path}. Give the path of a .jsonl file.") from e
    except UnicodeDecodeError as e:
        raise DocumentUnreadable(f"{path} is not UTF-8 text ({e}). Convert it first.") from e


def _list(values: dict[str, Any], name: str) -> list[Any]:
    found = values.get(name)
    if not isinstance(found, list):
        raise InvalidInput(f"{name} is {_short(found)}; expected a list.")
    return found


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidInput(f"{name} is {_short(value)}; expected text that is not empty.")
    return value


def _passage(value: Any, number: int) -> Passage:
    if not isinstance(value, dict) or not isinstance(value.get("title", ""), str):
        raise InvalidInput(f"docs[{number}] is {_short(value)}; expected an object with title and text.")
    return Passage(value.get("title", ""), _text(value.get("text"), f"docs[{number}].text"))


def _short(value: Any) -> str:
    shown = "missing" if value is None else repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
