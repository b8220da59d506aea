"""Rank passages for a question, and say how well they support an answer. Knows passages, not where they are kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from tamis.core.registry import Registry
from tamis.corpus.passages import Passage

RETRIEVERS = Registry("retriever")
RETRIEVERS.add("bm25", "tamis.corpus.bm25:Bm25")
RETRIEVERS.add("embedding", "tamis.corpus.embedding:Embedding")


@dataclass(frozen=True)
class Hit:
    """A passage found, its score (larger is better, comparable within one search only) and its rank from 0."""

    passage: Passage
    score: float
    rank: int


class PassageStore(Protocol):
    """What a retriever needs of a corpus: a fixed order of ids and the passages behind them."""

    def ids(self, *, within: Collection[str] | None = None) -> list[str]: ...
    def passages(self, *, within: Collection[str] | None = None) -> Iterator[Passage]: ...
    def get(self, passage_id: str, *, within: Collection[str] | None = None) -> Passage | None: ...


class Retriever(Protocol):
    """Ranks the passages a store held when the retriever was opened.

    Built as `creator(store, folder=..., **options)`; `folder` is where an index may be saved, None for nowhere.
    """

    def search(self, question: str, k: int, *, within: AbstractSet[str] | None = None) -> list[Hit]:
        """The best `k` or fewer, best first; only passages that stand in a source in `within`, if given."""
        ...


def fingerprint(ids: Sequence[str]) -> str:
    """32 hex digits that depend on which passages there are and on nothing else."""
    return blake2b("".join(ids).encode("ascii"), digest_size=16).hexdigest()


def open_retriever(name: str, store: PassageStore, *, folder: Path | None, **options: Any) -> Retriever:
    """The retriever `name` over what `store` holds now. Raises `UnknownName`, or `Unavailable` if not installed."""
    retriever: Retriever = RETRIEVERS.get(name)(store, folder=folder, **options)
    return retriever


def best(
    store: PassageStore, ids: Sequence[str], scores: Sequence[float], k: int, within: AbstractSet[str] | None
) -> list[Hit]:
    """Hits for the `k` largest of `scores` (finite; `scores[i]` belongs to `ids[i]`), ties in order of ids."""
    order = sorted(range(len(ids)), key=lambda i: (-scores[i], ids[i]))
    hits: list[Hit] = []
    for i in order:
        passage = store.get(ids[i], within=within)
        if passage is not None:  # None: taken out of the store since it was indexed
            hits.append(Hit(passage, float(scores[i]), len(hits)))
            if len(hits) == k:
                break
    return hits


def support(answer_text: str, passages: Sequence[Passage]) -> list[float]:
    """How much of an answer's wording each passage contains, in [0, 1] and in the order of `passages`.

    The share of the answer's distinct words (lower case, English stop words left out) that stand in the passage or
    its title, each weighted by log(1 + n / passages with the word), so that a word all passages share decides little
    and a word in none counts fully against all. Lexical only: a paraphrase is not recognised, a negation not noticed.
    All zeros for an answer without such words.
    """
    from tamis.corpus.words import question_words, text_words

    wanted = set(question_words(answer_text))
    found = [wanted.intersection(words) for words in text_words([f"{p.title}\n{p.text}" for p in passages])]
    weight = {w: math.log(1 + len(found) / max(1, sum(w in words for words in found))) for w in sorted(wanted)}
    total = sum(weight.values())
    return [sum(weight[w] for w in sorted(words)) / total if total else 0.0 for words in found]
