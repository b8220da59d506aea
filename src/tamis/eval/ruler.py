"""The 13 tasks of RULER (arXiv 2404.06654, section 3 and the configurations of its appendix), made from a seed.

Same structure, numbers and metrics; own wording, own words, and any text for the essays. Three differences: the context
is cut into documents, no solved example and no beginning of the answer is given, and the question answering tasks take
their questions from given sets (qa_1: those that one passage answers, qa_2: those that need several).
"""

from __future__ import annotations

import math
import random
import string
import uuid
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from tamis.core.errors import InvalidInput, NothingFound
from tamis.core.registry import unknown
from tamis.eval.needle import ADJECTIVES, LENGTH_SLACK, NOUNS, Context, pack, rotated
from tamis.eval.questions import Passage, Question
from tamis.eval.tasks import SHORT, Item, Task, prompt_tokens

if TYPE_CHECKING:
    from tamis.engine.template import Template

NOISE = "The kettle is on the stove. The door is shut. Rain falls on the roof. Nobody is in a hurry."
MANY_TOKENS = 4096  # from here on the word lists repeat their words as often as the paper's
HOPS = 4
COMMON_WORDS = 10
COMMON_REPEATS = ((6, 1), (30, 3))  # of common and other words, below and from MANY_TOKENS on
CODE_LETTERS = 6
TOKENS_PER_CODE_WORD = 50  # tokens of context per word of the coded vocabulary
NIAH_TOKENS, VT_TOKENS, CWE_TOKENS, FWE_TOKENS, QA_TOKENS = 128, 64, 120, 50, 32


@dataclass(frozen=True)
class Niah:
    """One retrieval task. haystack: "noise" (one line repeated), "text", or "needles" (more of the same kind)."""

    haystack: str
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1


NIAH = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("text"),
    "niah_single_3": Niah("text", value="uuid"),
    "niah_multikey_1": Niah("text", keys=4),
    "niah_multikey_2": Niah("needles"),
    "niah_multikey_3": Niah("needles", key="uuid", value="uuid"),
    "niah_multivalue": Niah("text", values=4),
    "niah_multiquery": Niah("text", keys=4, queries=4),
}
QA = {"qa_1": (1, 1), "qa_2": (2, 1 << 30)}  # how many passages hold the answer
RULER = (*NIAH, "vt", "cwe", "fwe", *QA)


@dataclass(frozen=True)
class Made:
    """What a generator gives: the item without its names."""

    question: str
    docs: tuple[Passage, ...]
    answers: tuple[str, ...]
    answer_tokens: int
    metric: str = "match_all"
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ruler:
    """Makes items whose whole prompt has `n_tokens`, or up to 2 % fewer.

    haystack    passages for the essays, and where the word lists take their words from
    questions   for qa_1 and qa_2
    """

    template: Template
    n_tokens: int
    haystack: Sequence[Passage]
    questions: Sequence[Question] = ()
    seed: int = 0

    def task(self, name: str, size: int) -> Task:
        """One of RULER with `size` items, fewer for qa where there are fewer questions.

        Raises InvalidInput for another name, NothingFound for qa without questions of its kind.
        """
        if name not in RULER:
            raise InvalidInput(unknown("RULER task", name, list(RULER)))
        full = f"ruler/{name}/{self.n_tokens}"
        if name in QA:
            size = min(size, len(self.qa_questions(name)))

        def make(i: int) -> Item:
            m = self._make(name, random.Random(f"{self.seed} {full} {i}"), i)
            return Item(full, f"{self.seed}-{i}", m.question, m.docs, m.answers, (m.metric,), m.answer_tokens, m.stop)

        return Task(full, size, make)

    def _make(self, name: str, draw: random.Random, i: int) -> Made:
        if name in NIAH:
            return self.niah(draw, NIAH[name])
        if name in QA:
            return self.qa(draw, self.qa_questions(name)[i])
        return {"vt": self.vt, "cwe": self.cwe, "fwe": self.fwe}[name](draw)

    def niah(self, draw: random.Random, spec: Niah) -> Made:
        """Retrieval: `spec.values` facts for each of `spec.keys` keys, `spec.queries` of the keys asked for."""
        fact = f"The secret {spec.value} of {{}} is {{}}."
        among = self._needles(draw, fact, spec) if spec.haystack == "needles" else 0
        names = _distinct(draw, spec.key, spec.keys + among)
        values = _distinct(draw, spec.value, len(names) * spec.values)
        of = {k: values[i * spec.values : (i + 1) * spec.values] for i, k in enumerate(names)}
        keys = names[: spec.keys]
        asked = draw.sample(keys, spec.queries)
        listed = " and ".join(asked) if len(asked) < 3 else f"{', '.join(asked[:-1])} and {asked[-1]}"
        question = (
            f"What are all the secret {spec.value}s of {listed} in the passages? List every one of them."
            if spec.values * spec.queries > 1
            else f"What is the secret {spec.value} of {listed} in the passages?"
        )
        facts = [fact.format(k, v) for k in keys for v in of[k]]
        draw.shuffle(facts)
        inserts = list(zip(sorted(draw.sample(range(101), len(facts))), facts, strict=True))
        padding = ""
        if spec.haystack == "needles":
            padding = " ".join([NOISE] * 4)  # a fact must not be cut in two
            others = [fact.format(k, of[k][0]) for k in names[spec.keys :]]
            passages = pack(others, self.template, "\n")
        else:
            passages = rotated(self.haystack, draw) if spec.haystack == "text" else self.noise()
        context = Context(passages, [(at / 100, f) for at, f in inserts], padding)
        docs = context.fill(self.template, question, self.n_tokens)
        return Made(question, docs, tuple(v for k in asked for v in of[k]), NIAH_TOKENS)

    def vt(self, draw: random.Random) -> Made:
        """Variable tracking: one value handed on over four hops, hidden in order in noise; name all five variables."""
        names = _distinct(draw, "variable", HOPS + 1)
        value = str(draw.randrange(10_000, 100_000))
        chain = [f"VAR {names[0]} = {value}."]
        chain += [f"VAR {name} = VAR {before}." for before, name in pairwise(names)]
        question = (
            f"Which variables have the value {value}, directly or through other variables? "
            f"There are {len(names)}. List their names."
        )
        depths = sorted(draw.sample(range(101), len(chain)))
        inserts = [(at / 100, line) for at, line in zip(depths, chain, strict=True)]
        docs = Context(self.noise(), inserts).fill(self.template, question, self.n_tokens)
        return Made(question, docs, tuple(names), VT_TOKENS)

    def cwe(self, draw: random.Random) -> Made:
        """Common words: a numbered list in which ten words stand ten times as often (six times in short lists)."""
        question = "The passages are one numbered list of words. Which ten words appear most often in it? List them."
        often, seldom = COMMON_REPEATS[self.n_tokens >= MANY_TOKENS]
        words = self.vocabulary()
        draw.shuffle(words)
        words = _apart(words, COMMON_WORDS)
        seed = draw.random()

        def docs(n_words: int) -> tuple[Passage, ...]:
            entries = words[:COMMON_WORDS] * often + words[COMMON_WORDS:n_words] * seldom
            random.Random(seed).shuffle(entries)
            return tuple(pack([f"{i}. {word}" for i, word in enumerate(entries, 1)], self.template))

        made = self._largest(docs, question, 2 * COMMON_WORDS, len(words))
        return Made(question, made, tuple(words[:COMMON_WORDS]), CWE_TOKENS)

    def fwe(self, draw: random.Random) -> Made:
        """Frequent words: coded words with Zipf frequencies of exponent 2, of which the first rank is dots."""
        question = (
            "The passages are one text in coded words. Which three words appear most often in it, not counting the "
            "dots? List them."
        )
        words = ["...", *_distinct(draw, "code", max(8, self.n_tokens // TOKENS_PER_CODE_WORD) - 1)]
        seed = draw.random()

        def docs(n_words: int) -> tuple[Passage, ...]:
            share = n_words * 6 / math.pi**2  # zeta(2) makes the ranks' shares sum to 1
            text = [w for rank, w in enumerate(words, 1) for _ in range(int(share / rank**2))]
            random.Random(seed).shuffle(text)
            return tuple(pack(text, self.template))

        # 80 words are the fewest whose fourth and fifth rank differ by one or more
        made = self._largest(docs, question, 80, 2 * self.n_tokens)
        return Made(question, made, tuple(words[1:4]), FWE_TOKENS)

    def qa(self, draw: random.Random, question: Question) -> Made:
        """Question answering: the passages that answer, the question's other ones, then others' until it is full."""
        gold = list(dict.fromkeys(question.docs[i] for i in question.gold))
        own = [d for i, d in enumerate(question.docs) if i not in question.gold]
        others = [d for q in self.questions for d in q.docs]
        draw.shuffle(others)
        asked = f"{question.question} {SHORT}"
        passages = list(dict.fromkeys([*gold, *own, *others]))
        docs = list(Context(passages).fill(self.template, asked, self.n_tokens))
        if docs[: len(gold)] != gold:
            raise InvalidInput(
                f"{self.n_tokens} tokens do not hold the passages that answer question {question.id!r}; give more."
            )
        draw.shuffle(docs)
        return Made(asked, tuple(docs), question.answers, QA_TOKENS, "match_part", ("\n",))

    def qa_questions(self, name: str) -> list[Question]:
        """The questions that a qa task may use. Raises NothingFound if there are none."""
        low, high = QA[name]
        found = [q for q in self.questions if low <= len(set(q.gold)) <= high]
        if not found:
            what = "one passage" if high == 1 else "several passages"
            raise NothingFound(f"{name} needs questions that {what} answer ('gold'); give a set that has some.")
        return found

    def _needles(self, draw: random.Random, fact: str, spec: Niah) -> int:
        """How many facts surely fill the context; no two of them may have one key."""
        (key,), (value,) = _distinct(draw, spec.key, 1), _distinct(draw, spec.value, 1)
        return int(1.3 * self.n_tokens / self.template.count(fact.format(key, value))) + 1

    def noise(self) -> list[Passage]:
        """Enough of the same line."""
        each = self.template.count(f" {NOISE}")
        return pack([NOISE] * (self.n_tokens // each + 1), self.template, "\n")

    def vocabulary(self) -> list[str]:
        """Words of 4 to 10 letters: the haystack's and ours, and pairs of ours where those are too few."""
        own = [*ADJECTIVES, *NOUNS]
        found = {w for p in self.haystack for w in p.text.lower().split() if w.isalpha() and w.isascii()}
        words = sorted({*own, *(w for w in found if 4 <= len(w) <= 10)})
        if len(words) < self.n_tokens // 3:
            words += [f"{a}-{n}" for a in ADJECTIVES for n in NOUNS]
        return words

    def _largest(
        self, docs: Callable[[int], tuple[Passage, ...]], question: str, low: int, high: int
    ) -> tuple[Passage, ...]:
        """`docs(n)` for the largest n in [low, high] whose prompt fits."""

        def size(n: int) -> int:
            return prompt_tokens(self.template, question, docs(n))

        n = low + bisect_right(range(low, high + 1), self.n_tokens, key=size) - 1
        if n < low:
            raise InvalidInput(f"{self.n_tokens} tokens do not hold the shortest list ({size(low)}); give more.")
        made = docs(n)
        if n == high and prompt_tokens(self.template, question, made) < (1 - LENGTH_SLACK) * self.n_tokens:
            raise NothingFound(f"there are not enough words for {self.n_tokens} tokens; give a longer haystack.")
        return made


def ruler_tasks(ruler: Ruler, names: Sequence[str] = RULER, *, size: int) -> list[Task]:
    """The named tasks in order, of `size` items each. Raises what `Ruler.task` does."""
    return [ruler.task(name, size) for name in names]


def _distinct(draw: random.Random, kind: str, n: int) -> list[str]:
    """`n` different names or values: word ("amber-anvil"), number (7 digits), uuid, variable (5 capitals), code."""
    if kind == "word" and n > len(ADJECTIVES) * len(NOUNS):
        raise InvalidInput(f"{n} different keys are more than the {len(ADJECTIVES) * len(NOUNS)} there are.")
    make: Callable[[], str] = {
        "word": lambda: f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}",
        "number": lambda: str(draw.randrange(10**6, 10**7)),
        "uuid": lambda: str(uuid.UUID(int=draw.getrandbits(128), version=4)),
        "variable": lambda: "".join(draw.choices(string.ascii_uppercase, k=5)),
        "code": lambda: "".join(draw.choices(string.ascii_lowercase, k=CODE_LETTERS)),
    }[kind]
    found: dict[str, None] = {}
    while len(found) < n:
        found[make()] = None
    return list(found)


def _apart(words: list[str], n: int) -> list[str]:
    """The words, first `n` of which none is part of another: an answer must not be found inside another word."""
    text = " ".join(words)
    first = list(islice((w for w in words if text.count(w) == 1), n))
    chosen = set(first)
    return [*first, *(w for w in words if w not in chosen)]
