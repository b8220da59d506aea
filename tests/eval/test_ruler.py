"""RULER: every answer follows from the context alone, found by a solver that knows only the task's description."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from tamis.core.errors import InvalidInput, NothingFound
from tamis.engine.template import Template
from tamis.eval.questions import Passage, Question
from tamis.eval.ruler import NIAH, NOISE, QA, RULER, Ruler, ruler_tasks
from tamis.eval.tasks import Item
from tiny_chat import tiny_tokenizer

TEMPLATE = Template(tiny_tokenizer())
HAYSTACK = [
    Passage(f"Station {i}", " ".join(f"The boat of station {i} lifts {j} stores on Monday." for j in range(12)))
    for i in range(60)
]
QUESTIONS = [
    Question(
        f"q{i}",
        f"What does the keeper of lamp {i} eat?",
        (f"bread {i}x",),
        tuple(
            Passage(
                f"Lamp {i}.{j}", f"The keeper of lamp {i} eats bread {i}x. " * (j < 1 + i % 2) + f"Sea {i} {j}. " * 30
            )
            for j in range(5)
        ),
        tuple(range(1 + i % 2)),
    )
    for i in range(12)
]
LENGTHS = (2500, 6000)


def ruler(n_tokens: int = 2500, seed: int = 0) -> Ruler:
    return Ruler(TEMPLATE, n_tokens, HAYSTACK, QUESTIONS, seed)


def context(item: Item) -> str:
    return "\n".join(d.text for d in item.docs)


def find_facts(item: Item) -> list[str]:
    facts = re.findall(r"The secret (?:number|uuid) of (\S+) is (\S+)\.", context(item))
    return [value for key, value in facts if re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", item.question)]


def follow_variables(item: Item) -> list[str]:
    (goal,) = re.findall(r"\d{5}", item.question)
    value: dict[str, str] = {}
    for name, right in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", context(item)):
        value[name] = value.get(right, right)
    return [name for name, v in value.items() if v == goal]


def most_common(item: Item, n: int) -> list[str]:
    words = Counter(w for w in context(item).split() if not re.fullmatch(r"\d+\.|\.\.\.", w))
    ranked = words.most_common()
    assert ranked[n - 1][1] > ranked[n][1], "the last one that counts stands apart"
    return [w for w, _ in ranked[:n]]


def read_up(item: Item) -> list[str]:
    (lamp,) = re.findall(r"lamp (\d+)", item.question)
    return re.findall(rf"keeper of lamp {lamp} eats (.*?)\.", context(item))[:1]


SOLVERS: dict[str, Callable[[Item], list[str]]] = {
    **dict.fromkeys(NIAH, find_facts),
    "vt": follow_variables,
    "cwe": lambda item: most_common(item, 10),
    "fwe": lambda item: most_common(item, 3),
    **dict.fromkeys(QA, read_up),
}


def test_there_are_thirteen() -> None:
    assert len(RULER) == 13 and set(SOLVERS) == set(RULER)


@pytest.mark.parametrize("n_tokens", LENGTHS)
@pytest.mark.parametrize("name", RULER)
def test_answers_follow_from_the_context(name: str, n_tokens: int) -> None:
    if name in QA and n_tokens == max(LENGTHS):
        n_tokens = 4000  # the questions hold no more text
    (task,) = ruler_tasks(ruler(n_tokens), [name], size=2)
    assert task.name == f"ruler/{name}/{n_tokens}" and task.size == 2
    for i in range(task.size):
        item = task.make(i)
        assert sorted(SOLVERS[name](item)) == sorted(item.answers)
        assert not any(answer in item.question for answer in item.answers)
        size = len(item.prompt(TEMPLATE).tokens)
        assert 0.98 * n_tokens <= size <= n_tokens
        assert len(item.docs) > 2
        (metric,) = item.metrics
        assert metric == ("match_part" if name in QA else "match_all")
        assert item.score(" ".join(item.answers)) == {metric: 1.0} and item.score("") == {metric: 0.0}


@pytest.mark.parametrize(
    ("name", "facts", "answers"),
    [("niah_single_1", 1, 1), ("niah_multikey_1", 4, 1), ("niah_multivalue", 4, 4), ("niah_multiquery", 4, 4)],
)
def test_numbers_of_needles(name: str, facts: int, answers: int) -> None:
    item = ruler().task(name, 1).make(0)
    assert context(item).count("The secret number of") == facts and len(item.answers) == answers
    assert item.score(item.answers[0]) == {"match_all": 1 / answers}


@pytest.mark.parametrize("name", ["niah_multikey_2", "niah_multikey_3"])
def test_needles_among_needles(name: str) -> None:
    lines = "\n".join(d.text for d in ruler().task(name, 1).make(0).docs).split("\n")
    lines = [line for line in lines if line not in " ".join([NOISE] * 4)]
    assert len(lines) > 10 and all(re.fullmatch(r"The secret \w+ of \S+ is \S+\.", line) for line in lines)
    assert len({line.split(" of ")[1].split(" is ")[0] for line in lines}) == len(lines), "one value per key"


def test_variables_come_in_order_with_four_hops() -> None:
    item = ruler().task("vt", 1).make(0)
    hops = re.findall(r"VAR (\w+) = VAR (\w+)\.", context(item))
    assert [before for _, before in hops] == list(item.answers[:-1]) and len(hops) == 4


@pytest.mark.parametrize(("n_tokens", "often", "seldom"), [(2500, 6, 1), (6000, 30, 3)])
def test_word_counts(n_tokens: int, often: int, seldom: int) -> None:
    item = ruler(n_tokens).task("cwe", 1).make(0)
    numbered = re.findall(r"(\d+)\. (\S+)", context(item))
    assert [int(n) for n, _ in numbered] == list(range(1, len(numbered) + 1))
    counts = Counter(w for _, w in numbered)
    assert sorted(counts.values())[-11:] == [seldom] + [often] * 10 and min(counts.values()) == seldom
    assert all(sum(a in word for word in counts) == 1 for a in item.answers), "no answer inside another word"


def test_frequencies_are_zipfs() -> None:
    item = ruler(6000).task("fwe", 1).make(0)
    counts = Counter(context(item).split()).most_common(4)
    assert counts[0][0] == "..." and [w for w, _ in counts[1:]] == list(item.answers)
    for rank in (2, 3, 4):
        assert counts[rank - 1][1] == pytest.approx(counts[0][1] / rank**2, abs=1.01)


def test_qa_takes_the_questions_of_its_kind() -> None:
    made = ruler()
    assert {len(q.gold) for q in made.qa_questions("qa_1")} == {1}
    assert {len(q.gold) for q in made.qa_questions("qa_2")} == {2}
    assert made.task("qa_1", 100).size == 6
    for q in made.qa_questions("qa_2")[:2]:
        docs = made.task("qa_2", 6).make(made.qa_questions("qa_2").index(q)).docs
        assert all(q.docs[g] in docs for g in q.gold) and len(set(docs)) == len(docs)


def test_the_seed_decides() -> None:
    def digests(seed: int) -> list[str]:
        return [t.make(0).digest for t in ruler_tasks(ruler(seed=seed), size=1)]

    assert digests(3) == digests(3)
    assert len({*digests(3), *digests(4)}) == 2 * len(RULER)


def test_errors() -> None:
    with pytest.raises(InvalidInput, match="Did you mean 'niah_single_1'"):
        ruler().task("niah_single1", 1)
    with pytest.raises(NothingFound, match="several passages answer"):
        Ruler(TEMPLATE, 2500, HAYSTACK, QUESTIONS[:1]).task("qa_2", 1)
    with pytest.raises(InvalidInput, match="do not hold the shortest list"):
        ruler(600).task("cwe", 1).make(0)
    with pytest.raises(InvalidInput, match="do not hold the passages"):
        long = Question("long", "Which?", ("x",), (Passage("", "x " * 400), Passage("", "y " * 1500)), (0, 1))
        Ruler(TEMPLATE, 1500, HAYSTACK, [long]).task("qa_2", 1).make(0)
