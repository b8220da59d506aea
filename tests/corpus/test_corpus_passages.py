"""The cutter: nothing lost, limits kept, lines and titles right."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.core.errors import InvalidInput
from tamis.corpus import Text, cut
from tamis.corpus.headings import find_headings

ALPHABET = st.sampled_from(
    [*"ab. \n", "\n\n", "# ", "## A\n", "- ", "```\n", "。", "語", "é", "👩‍🚀", "===\n", "\t", "word ", "\u2028"]
)
TEXTS = st.lists(ALPHABET, max_size=120).map("".join)
MARKUPS = st.sampled_from(["plain", "markdown", "rst"])
UNBREAKABLE = re.compile(r"[^\s語]*語?")


def words(text: str) -> int:
    return len(text.split())


def characters(text: str) -> int:
    return len(text.encode())


def dense(text: str) -> str:
    return "".join(text.split())


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, markup=MARKUPS, limit=st.integers(1, 40), count=st.sampled_from([words, characters]))
def test_nothing_is_lost_limits_hold_and_lines_are_right(text, markup, limit, count):
    passages = cut(Text("x", text, "", markup), count=count, target_tokens=limit)
    assert "".join(dense(p.text) for p in passages) == dense(text)
    lines = text.split("\n")
    for p in passages:
        assert count(p.text) <= limit or UNBREAKABLE.fullmatch(p.text.strip()), p
        quoted = "\n".join(lines[p.first_line - 1 : p.last_line])
        assert p.text in quoted
        assert dense(lines[p.first_line - 1]) and dense(lines[p.last_line - 1])
    for before, after in itertools.pairwise(passages):
        assert before.last_line <= after.first_line


def test_a_heading_path_is_the_title_and_headings_stay_with_their_text():
    text = "# Guide\n\n## Setup\n\n" + "one " * 30 + "\n\n## Use\n\n### Daily\n\n" + "two " * 30 + "\n"
    passages = cut(Text("g.md", text, "", "markdown"), count=words, target_tokens=50)
    assert [(p.title, p.first_line, p.last_line) for p in passages] == [
        ("Guide > Setup", 1, 5),
        ("Guide > Use > Daily", 7, 11),
    ]


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("markdown", "## A\n===\n"),
        ("markdown", "```\n\n```\n===\n"),
        ("markdown", "---\n\n---\n===\n"),
        ("rst", "Top\n===\nSub\n===\n"),
    ],
)
def test_a_line_is_of_one_heading_alone(markup, text):
    headings = find_headings(text.split("\n"), markup)
    assert all(a.last <= b.first for a, b in itertools.pairwise(headings)) and len(headings) <= 1
    passages = cut(Text("x", text, "", markup), count=words, target_tokens=1)
    assert "".join(dense(p.text) for p in passages) == dense(text)


def test_short_neighbours_share_a_passage_under_their_common_heading():
    text = "# Guide\n\n## A\n\nshort\n\n## B\n\nbrief\n\n# Other\n\nelse\n"
    passages = cut(Text("g.md", text, "", "markdown"), count=words, target_tokens=100)
    assert [p.title for p in passages] == ["Guide", "Other"]
    assert "short" in passages[0].text and "brief" in passages[0].text


def test_no_heading_is_left_alone_before_a_long_paragraph():
    text = "# A long heading of words\n\n" + "word " * 500
    passages = cut(Text("g.md", text, "", "markdown"), count=words, target_tokens=50)
    assert "word" in passages[0].text
    assert all(words(p.text) <= 50 for p in passages)


def test_code_fences_and_front_matter_hold_no_headings():
    text = "---\ntitle: x\n---\n\n# Real\n\n```sh\n# a comment\n```\n\ntext\n"
    (passage,) = cut(Text("g.md", text, "", "markdown"), count=words, target_tokens=1000)[1:]
    assert passage.title == "Real"
    assert "# a comment" in passage.text


@pytest.mark.parametrize(
    ("markup", "text"),
    [("markdown", "Top\n===\n\nx\n\nSub\n---\n\nbody\n"), ("rst", "===\nTop\n===\n\nx\n\nSub\n~~~\n\nbody\n")],
)
def test_underlined_headings(markup, text):
    passages = cut(Text("g", text, "", markup), count=words, target_tokens=4)
    assert passages[-1].title == "Top > Sub"


def test_a_files_own_title_comes_first_unless_its_heading_repeats_it():
    text = Text("g.html", "# Boats\n\nx", "Handbook", "markdown")
    assert cut(text, count=words)[0].title == "Handbook > Boats"
    assert cut(Text("g.html", "# Boats\n\nx", "Boats | Skerra", "markdown"), count=words)[0].title == "Boats"


def test_indented_code_keeps_its_indentation():
    text = "Intro.\n\n    if x:\n        y()\n"
    passages = cut(Text("g.md", text, "", "markdown"), count=words, target_tokens=3)
    assert passages[1].text.startswith("    if")


def test_borders_are_sentences_before_words():
    text = "One two three four. Five six seven eight. Nine ten eleven twelve."
    passages = cut(Text("x", text), count=words, target_tokens=9)
    assert [p.text[-1] for p in passages] == [".", "."]


def test_the_id_depends_on_title_and_text_alone():
    a = cut(Text("a", "same text"), count=words)[0]
    b = cut(Text("b", "\n\nsame text"), count=words)[0]
    c = cut(Text("b", "same text", "title"), count=words)[0]
    assert a.id == b.id != c.id
    assert re.fullmatch("[0-9a-f]{32}", a.id)
    assert (a.place, b.place) == ("a:1", "b:3")


@pytest.mark.parametrize("unit", ["word ", "word. ", "word\n", "word\n\n", "語", "w"], ids=repr)
def test_five_megabytes_are_cut_in_seconds_with_few_counts(unit):
    text = unit * (5_000_000 // len(unit))
    calls = 0

    def count(piece: str) -> int:
        nonlocal calls
        calls += 1
        return len(piece) // 4 + 1

    began = time.perf_counter()
    passages = cut(Text("x", text), count=count)
    assert time.perf_counter() - began < 5
    assert calls < 120_000
    assert sum(len(dense(p.text)) for p in passages) == len(dense(text))


def test_a_limit_below_one_is_refused():
    with pytest.raises(InvalidInput, match="target_tokens is 0"):
        cut(Text("x", "a"), count=words, target_tokens=0)
