"""What is asked and how it is scored: a task is a row of items, each a question with its documents and its metrics.

Knows text and question sets; not models. Items are made when they are asked for: a long task need not fit in memory.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from tamis.core.errors import InvalidInput, NothingFound
from tamis.eval.metrics import exact_match, token_f1
from tamis.eval.questions import Passage, Question, load_questions

if TYPE_CHECKING:
    from tamis.engine.template import Template
    from tamis.prompt.segments import Prompt

ANSWER_TOKENS = 24
SHORT = "Give only the answer, in as few words as possible."


def match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in the prediction, case ignored (RULER, arXiv 2404.06654)."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


def match_part(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if any of the answers occurs in the prediction, case ignored, else 0.0 (RULER's question answering)."""
    return float(any(answer.lower() in prediction.lower() for answer in answers))


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "f1": token_f1,
    "em": exact_match,
    "match_all": match_all,
    "match_part": match_part,
}


@dataclass(frozen=True)
class Item:
    """One question of a task.

    id              unique within the task
    answers         accepted answers, or for "match_all" the parts of the one answer
    metrics         names in METRICS, the main one first
    answer_tokens   new tokens at most
    stop            texts that end the answer
    """

    task: str
    id: str
    question: str
    docs: tuple[Passage, ...]
    answers: tuple[str, ...]
    metrics: tuple[str, ...]
    answer_tokens: int = ANSWER_TOKENS
    stop: tuple[str, ...] = ("\n",)

    def prompt(self, template: Template) -> Prompt:
        """The prompt: prefix, documents in their order, question."""
        return template.prompt(self.question, document_tokens(template, self.docs))

    def score(self, prediction: str) -> dict[str, float]:
        """Every metric of the item, 0..1."""
        return {name: METRICS[name](prediction, self.answers) for name in self.metrics}

    @property
    def digest(self) -> str:
        """32 hex digits of everything that a score depends on besides the model."""
        docs = [[d.title, d.text] for d in self.docs]
        parts = [self.question, docs, self.answers, self.metrics, self.answer_tokens, self.stop]
        return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Task:
    """`size` items under one name such as "qa/hotpotqa_10doc"; `make(i)` gives item i, the same one every time."""

    name: str
    size: int
    make: Callable[[int], Item]

    @property
    def kind(self) -> str:
        """The part of the name before the first slash."""
        return self.name.partition("/")[0]


def interleave(tasks: Sequence[Task]) -> Iterator[Item]:
    """All items, every task's first one first: a run that is cut short has asked about the same of each."""
    for i in takewhile(lambda i: any(i < task.size for task in tasks), count()):
        for task in tasks:
            if i < task.size:
                yield task.make(i)


def question_files(paths: Sequence[str | Path]) -> list[Path]:
    """The question sets that files and folders name: a folder stands for its .jsonl files, sorted by name.

    Raises NothingFound for a path that does not exist and for a folder without any.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            raise NothingFound(f"{path} holds no .jsonl file. Give a question set, or a folder of some.")
        files += found
    for file in files:
        if not file.is_file():
            raise NothingFound(f"there is no question set at {file}. Give the path of a .jsonl file or a folder.")
    return list(dict.fromkeys(files))


@dataclass(frozen=True)
class Fill:
    """Prompts of `tokens` tokens: questions get passages of other questions, see `filled`."""

    template: Template
    tokens: int


def qa_task(name: str, questions: Sequence[Question], limit: int | None = None, fill: Fill | None = None) -> Task:
    """Token F1 and exact match on the first `limit` questions, with their own passages in their given order or,
    with `fill`, among those of the other questions (the task's name then ends in the length)."""
    name = f"qa/{name}" if fill is None else f"qa/{name}/{fill.tokens}"

    def make(i: int) -> Item:
        q = questions[i]
        asked = f"{q.question} {SHORT}"
        docs = q.docs if fill is None else filled(fill.template, questions, i, fill.tokens, asked)
        return Item(name, q.id, asked, docs, q.answers, ("f1", "em"))

    return Task(name, len(questions[:limit]), make)


def qa_tasks(files: Sequence[Path], limit: int | None = None, fill: Fill | None = None) -> list[Task]:
    """One task per question set, with its first `limit` questions. Raises what `load_questions` does."""
    return [qa_task(file.stem, load_questions(file), limit, fill) for file in files]


def filled(
    template: Template, questions: Sequence[Question], index: int, tokens: int, asked: str | None = None
) -> tuple[Passage, ...]:
    """Passages for a prompt of at most `tokens` tokens that asks question `index` (or `asked`, its wording), mixed by a
    fixed seed.

    Its own passages come first, those with the answer before the others, then those of the next questions; the passage
    that would go beyond `tokens` is the first to be left out. Raises InvalidInput if not one passage fits, or if all
    passages of the set are too few.
    """
    question = questions[index]
    own = [question.docs[g] for g in question.gold]
    own += [d for i, d in enumerate(question.docs) if i not in question.gold]
    others = [d for q in (*questions[index + 1 :], *questions[:index]) for d in q.docs]
    room = tokens - len(template.prompt(asked or question.question, []).tokens)
    chosen: list[Passage] = []
    for passage in dict.fromkeys((*own, *others)):
        length = len(template.document_tokens(passage.title, passage.text))
        if length > room:
            break
        room -= length
        chosen += [passage] if length else []
    else:
        raise InvalidInput(
            f"the passages of {len(questions)} questions end {room} tokens before {tokens}; give more questions."
        )
    if not chosen:
        raise InvalidInput(f"no passage of question {question.id!r} fits into {tokens} tokens; give more tokens.")
    random.Random(question.id).shuffle(chosen)
    return tuple(chosen)


def document_tokens(template: Template, docs: Sequence[Passage]) -> list[tuple[int, ...]]:
    """The tokens of each document that holds any."""
    tokens = (template.document_tokens(d.title, d.text) for d in docs)
    return [t for t in tokens if t]


def prompt_tokens(template: Template, question: str, docs: Sequence[Passage]) -> int:
    """Tokens of the whole prompt."""
    return len(template.prompt(question, []).tokens) + sum(map(len, document_tokens(template, docs)))
