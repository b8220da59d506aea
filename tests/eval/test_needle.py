"""Haystacks: the right length, the needle once and where it was asked for, the same items from the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tamis.core.errors import InvalidInput, NothingFound
from tamis.engine.template import Template
from tamis.eval.needle import (
    ADJECTIVES,
    DEPTHS,
    DOCUMENT_TOKENS,
    NOUNS,
    Context,
    fresh_number,
    insert,
    needle_tasks,
    pack,
)
from tamis.eval.questions import Passage
from tamis.eval.tasks import Item, prompt_tokens
from tiny_chat import tiny_tokenizer

TEMPLATE = Template(tiny_tokenizer())
HAYSTACK = [
    Passage(f"Station {i}", " ".join(f"The boat of station {i} lifts {j} stores on Monday." for j in range(12)))
    for i in range(40)
]


def needle_of(item: Item) -> tuple[int, int, int]:
    """(times that the value stands in the context, tokens before the document text up to it, tokens of all text)."""
    whole = "\n".join(d.text for d in item.docs)
    (value,) = item.answers
    return whole.count(value), TEMPLATE.count(whole[: whole.index("The code of")]), TEMPLATE.count(whole)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("length", [1500, 3000])
def test_once_at_its_depth(length: int, depth: float) -> None:
    (task,) = needle_tasks(TEMPLATE, HAYSTACK, [length], size=3, depths=[depth])
    assert task.name == f"needle/{length}/{depth:g}" and task.kind == "needle"
    for i in range(task.size):
        item = task.make(i)
        times, before, total = needle_of(item)
        assert times == 1 and item.answers[0] not in item.question
        assert before / total == pytest.approx(depth, abs=0.05)
        size = len(item.prompt(TEMPLATE).tokens)
        assert 0.98 * length <= size <= length


def test_documents_are_passages_of_the_haystack() -> None:
    (task,) = needle_tasks(TEMPLATE, HAYSTACK, [3000], size=1, depths=[0.5])
    docs = task.make(0).docs
    assert len(docs) > 4 and sum(d not in HAYSTACK for d in docs) == 2, "the one with the needle, and the cut one"
    assert HAYSTACK[(HAYSTACK.index(docs[0]) + 1) % len(HAYSTACK)] == docs[1], "in their order"


def test_the_seed_decides() -> None:
    def items(seed: int) -> list[Item]:
        tasks = needle_tasks(TEMPLATE, HAYSTACK, [1500], size=2, seed=seed)
        return [t.make(i) for t in tasks for i in range(t.size)]

    assert items(1) == items(1)
    assert len({i.digest for i in items(1)} | {i.digest for i in items(2)}) == 12


def test_what_counts_as_an_answer() -> None:
    (task,) = needle_tasks(TEMPLATE, HAYSTACK, [1500], size=1, depths=[0.1])
    item = task.make(0)
    assert item.score(f"It is {item.answers[0]}.") == {"match_part": 1.0}
    assert item.score(item.answers[0][:-1]) == {"match_part": 0.0}


def test_a_depth_outside_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"depth is 1\.1"):
        needle_tasks(TEMPLATE, HAYSTACK, [1500], size=1, depths=[1.1])


def test_a_short_haystack_is_told() -> None:
    (task,) = needle_tasks(TEMPLATE, HAYSTACK[:3], [3000], size=1, depths=[0.5])
    with pytest.raises(NothingFound, match="3000 were asked for"):
        task.make(0)


def test_no_room_is_told() -> None:
    with pytest.raises(InvalidInput, match="at least twice as many"):
        Context(HAYSTACK).fill(TEMPLATE, "Where is the lamp? " * 30, 400)


def test_inserts_keep_their_order_and_stand_between_sentences() -> None:
    docs = [Passage("", "One is here. Two is there."), Passage("", "A line\nAnother line\nA third")]
    inserts = [(0.9, "E."), (0.25, "B."), (0.26, "C."), (0.0, "A."), (1.0, "F."), (0.6, "D.")]
    first, second = insert(docs, inserts)
    assert first.text == "A. One is here. B. C. Two is there."
    assert second.text == "A line\nD.\nAnother line\nE.\nA third\nF."
    assert insert([], inserts) == ()


def test_packing_loses_nothing() -> None:
    units = [f"{i}. lamp" for i in range(500)]
    passages = pack(units, TEMPLATE)
    assert " ".join(p.text for p in passages) == " ".join(units)
    sizes = [TEMPLATE.count(p.text) for p in passages]
    assert len(passages) > 5 and max(sizes) < 1.2 * DOCUMENT_TOKENS and min(sizes[:-1]) > 0.8 * DOCUMENT_TOKENS
    assert pack([], TEMPLATE) == []


def test_padding_leaves_sentences_whole() -> None:
    docs = Context(HAYSTACK, padding="z " * 60).fill(TEMPLATE, "Where?", 2500)
    kept, _, padding = docs[-1].text.rpartition("\n")
    assert kept.endswith("Monday.") and set(padding) == {"z", " "}
    assert 2490 <= prompt_tokens(TEMPLATE, "Where?", docs) <= 2500


def test_a_number_is_not_in_the_text() -> None:
    taken = str(random.Random(5).randrange(10**6, 10**7))
    assert fresh_number(random.Random(5), []) == taken
    assert fresh_number(random.Random(5), [Passage("", f"It is {taken}.")]) != taken


@pytest.mark.parametrize("words", [ADJECTIVES, NOUNS])
def test_words_are_plain_and_differ(words: Sequence[str]) -> None:
    assert len(set(words)) == len(words) and all(w.isalpha() and w.islower() for w in words)
