"""Needle in a haystack: one fact at a chosen depth of a long text, asked for at the end.

The haystack is a row of passages, so that most documents of two items are the same and are indexed once. Knows text
and a tokenizer's template; not models.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from tamis.core.errors import InvalidInput, NothingFound
from tamis.eval.questions import Passage
from tamis.eval.tasks import SHORT, Item, Task, prompt_tokens

if TYPE_CHECKING:
    from tamis.engine.template import Template

DEPTHS = (0.1, 0.5, 0.9)
DOCUMENT_TOKENS = 384
LENGTH_SLACK = 0.02  # share of the wanted tokens by which a prompt may fall short

_ADJECTIVES = (
    "amber ancient arctic autumn bitter blazing bold brave breezy brisk broken bronze calm careful cheerful clever "
    "cloudy copper coral cosmic crimson crisp curious dapper dawn deep desert distant dusty eager early elder electric "
    "emerald faded famous fearless fierce floral foggy forgotten frosty gentle giant gilded golden graceful granite "
    "hidden hollow humble icy idle indigo iron ivory jolly keen lively lonely lucky lunar marble mellow mighty misty "
    "modest noble northern olive patient polar proud quiet rapid restless royal rustic scarlet secret silent silver "
    "sleepy solar stormy sturdy sunny swift tidy velvet violet wandering wild winter wooden"
)
_NOUNS = (
    "acorn anchor anvil apron arrow badger balcony banner barrel basket beacon beetle bicycle blanket blossom boulder "
    "bracelet bridge bucket butter cabin camel candle canoe canyon carpet castle cavern cedar chapel chimney cinnamon "
    "clarinet clover cobbler compass cottage cradle cricket crystal dagger dolphin dragon drummer eagle ember engine "
    "falcon feather ferry fiddle flagon forest fountain galaxy garden garnet glacier goblet guitar hammer harbor "
    "harvest hazel helmet heron hunter island jacket jasmine jungle kettle kingdom kitchen ladder lagoon lantern "
    "lemon lighthouse lizard locket magnet mango maple meadow mirror monkey mountain museum napkin needle nettle "
    "notebook oasis orchard otter oyster paddle palace panther parrot pebble pencil pepper piano pillow pirate planet "
    "pocket prairie puzzle pyramid quarry rabbit raven ribbon river rocket saddle sailor sapphire shadow shovel "
    "sparrow spiral spoon squirrel statue summit temple thimble thunder tiger tower trumpet tulip tunnel turtle "
    "valley village violin walnut whistle willow window wizard zebra"
)
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()

_WORDS = re.compile(r"\s+(?=\S)")
_SENTENCES = re.compile(r"(?<=[.!?])\s+(?=\S)|\n\s*(?=\S)")


@dataclass(frozen=True)
class Context:
    """What a context is filled from.

    passages   in order; the last one that is needed is cut to fit, at a word border
    inserts    (depth 0..1, sentence) to put between two sentences of the passages
    padding    if given, the last passage is cut between sentences, and words of this fill what that leaves
    """

    passages: Sequence[Passage]
    inserts: Sequence[tuple[float, str]] = ()
    padding: str = ""

    def fill(self, template: Template, question: str, n_tokens: int) -> tuple[Passage, ...]:
        """Documents that make a prompt of `n_tokens`, or up to 2 % fewer.

        Raises NothingFound if the passages do not suffice, InvalidInput if the question and inserts alone are too long.
        """
        room = n_tokens - prompt_tokens(template, question, ())
        room -= sum(template.count(f" {sentence}") for _, sentence in self.inserts)
        if room < n_tokens / 2:
            raise InvalidInput(f"{n_tokens} tokens leave {room} for the context; give at least twice as many.")
        while True:
            docs = insert(self._take(template, room), self.inserts)
            over = prompt_tokens(template, question, docs) - n_tokens
            if over <= 0:
                break
            room -= over
        if -over > LENGTH_SLACK * n_tokens:
            raise NothingFound(
                f"the haystack gives a prompt of {n_tokens + over} tokens; {n_tokens} were asked for. "
                "Give more text, or ask for fewer tokens."
            )
        return docs

    def _take(self, template: Template, room: int) -> list[Passage]:
        """The first passages of together at most `room` tokens."""
        taken: list[Passage] = []
        for passage in self.passages:
            size = len(template.document_tokens(passage.title, passage.text))
            if size > room:
                last = self._cut(template, passage, room)
                return [*taken, last] if last.text.strip() else taken
            taken.append(passage)
            room -= size
        return taken

    def _cut(self, template: Template, passage: Passage, room: int) -> Passage:
        """The beginning of `passage` that fits."""

        def longest(head: str, text: str, pattern: re.Pattern[str]) -> str:
            ends = borders(text, pattern)
            fits = bisect_right(
                ends, room, key=lambda end: len(template.document_tokens(passage.title, head + text[:end]))
            )
            return text[: ends[fits - 1]].rstrip() if fits else ""

        if not self.padding:
            return replace(passage, text=longest("", passage.text, _WORDS))
        kept = longest("", passage.text, _SENTENCES)
        head = f"{kept}\n" if kept else ""
        return replace(passage, text=(head + longest(head, self.padding, _WORDS)).rstrip())


def borders(text: str, pattern: re.Pattern[str]) -> list[int]:
    """0, the place behind each match of `pattern`, and the text's length."""
    return sorted({0, *(m.end() for m in pattern.finditer(text)), len(text)})


def insert(docs: Sequence[Passage], inserts: Sequence[tuple[float, str]]) -> tuple[Passage, ...]:
    """`docs` with every sentence at its depth, a share of all characters, moved to the nearest border of sentences.

    Sentences that meet at one border keep the order of their depths.
    """
    if not docs:
        return ()
    starts = [0, *accumulate(len(d.text) for d in docs)]
    places: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for depth, sentence in sorted(inserts, key=lambda pair: pair[0]):
        goal = depth * starts[-1]
        i = min(bisect_right(starts, goal), len(docs)) - 1
        within = borders(docs[i].text, _SENTENCES)
        places[i].append((min(within, key=lambda b: abs(b - (goal - starts[i]))), sentence))
    return tuple(replace(d, text=_spliced(d.text, places[i])) if i in places else d for i, d in enumerate(docs))


def _spliced(text: str, places: list[tuple[int, str]]) -> str:
    parts, at = [], 0
    for border, sentence in places:
        parts += [text[at:border].rstrip(), sentence]
        at = border
    parts.append(text[at:])
    lines = "\n" in text  # a needle in a list or in code stands on a line of its own
    return ("\n" if lines else " ").join(p for p in parts if p)


def pack(units: Sequence[str], template: Template, separator: str = " ") -> list[Passage]:
    """Units in order, joined, as untitled passages of about 384 tokens."""
    whole = separator.join(units)
    limit = DOCUMENT_TOKENS * len(whole) / max(1, template.count(whole))
    passages: list[Passage] = []
    group: list[str] = []
    size = 0
    for unit in units:
        if group and size + len(unit) > limit:
            passages.append(Passage("", separator.join(group)))
            group, size = [], 0
        group.append(unit)
        size += len(unit) + len(separator)
    return [*passages, Passage("", separator.join(group))] if group else passages


def rotated(passages: Sequence[Passage], draw: random.Random) -> list[Passage]:
    """The passages from a drawn one on, and round to the one before it."""
    start = draw.randrange(len(passages)) if passages else 0
    return [*passages[start:], *passages[:start]]


def needle_tasks(
    template: Template,
    haystack: Sequence[Passage],
    lengths: Sequence[int],
    *,
    size: int,
    depths: Sequence[float] = DEPTHS,
    seed: int = 0,
) -> list[Task]:
    """One task per length (tokens of the whole prompt) and depth, of `size` items each.

    The answer counts if it holds the seven digits that stand in the needle, once in the whole context.
    Raises InvalidInput for a depth outside 0..1.
    """
    for depth in depths:
        if not 0 <= depth <= 1:
            raise InvalidInput(f"depth is {depth}; allowed are shares of the context, 0 to 1.")

    def task(n_tokens: int, depth: float) -> Task:
        name = f"needle/{n_tokens}/{depth:g}"

        def make(i: int) -> Item:
            draw = random.Random(f"{seed} {name} {i}")
            passages = rotated(haystack, draw)
            key = f"{draw.choice(ADJECTIVES)} {draw.choice(NOUNS)}"
            value = fresh_number(draw, passages)
            question = f"What is the code of the {key}? {SHORT}"
            context = Context(passages, [(depth, f"The code of the {key} is {value}.")])
            docs = context.fill(template, question, n_tokens)
            return Item(name, f"{seed}-{i}", question, docs, (value,), ("match_part",))

        return Task(name, size, make)

    return [task(n_tokens, depth) for n_tokens in lengths for depth in depths]


def fresh_number(draw: random.Random, passages: Sequence[Passage]) -> str:
    """Seven digits that stand in none of the passages."""
    while True:
        value = str(draw.randrange(10**6, 10**7))
        if not any(value in p.text for p in passages):
            return value
