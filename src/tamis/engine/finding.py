"""Which documents fit a question: those that an owner put, and the passages of an index made beforehand.

Ranks by wording (BM25). Knows texts and owners, not what is stored of their keys and values.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tamis.core.errors import InvalidInput
from tamis.corpus import Passage, support
from tamis.corpus.bm25 import Bm25
from tamis.corpus.passages import cut
from tamis.corpus.read import Text

if TYPE_CHECKING:
    from tamis.engine.knowledge import KnowledgeBase

PLACES = ("documents", "index")
SNIPPET_WORDS = 48
MOST_OWNERS = 32  # whose word counts are kept
MOST_HITS = 100


@dataclass(frozen=True)
class Found:
    """A document that fits. `score`: larger is better; of documents and of the index, each by its own counts of words.

    place: where it comes from, "documents" or "index"; source: the file of a passage of the index.
    """

    id: str
    title: str
    text: str
    score: float
    place: str
    source: str = ""

    def snippet(self, question: str) -> str:
        """The part of it that holds the most of the question's words."""
        parts = cut(Text("", self.text), count=lambda s: len(s.split()), target_tokens=SNIPPET_WORDS)
        scores = support(question, parts)
        best = max(range(len(parts)), key=lambda i: (scores[i], -i))
        return parts[best].text.strip()


class Shelf:
    """Documents by id as what BM25 ranks: (title, text) of each. Equal ones are one passage."""

    def __init__(self, documents: Mapping[str, tuple[str, str]]) -> None:
        self._passages: dict[str, Passage] = {}
        self.names: dict[str, str] = {}  # the first of those with the same text
        for name, (title, text) in sorted(documents.items()):
            passage = Passage(text, title, name, 1, 1)
            if self.names.setdefault(passage.id, name) == name:
                self._passages[passage.id] = passage

    def ids(self, *, within: Collection[str] | None = None) -> list[str]:
        """See `PassageStore`."""
        return sorted(self._passages)

    def passages(self, *, within: Collection[str] | None = None) -> Iterator[Passage]:
        """See `PassageStore`."""
        return (self._passages[i] for i in sorted(self._passages))

    def get(self, passage_id: str, *, within: Collection[str] | None = None) -> Passage | None:
        """See `PassageStore`."""
        return self._passages.get(passage_id)


class Finder:
    """Word counts of each owner's documents, made when they are first needed after a change."""

    def __init__(self, index: KnowledgeBase | None = None) -> None:
        self.index = index
        self._lock = threading.Lock()
        self._made: OrderedDict[str, tuple[int, Shelf, Bm25]] = OrderedDict()

    def passage(self, name: str) -> Passage | None:
        """A passage of the index by its id."""
        if self.index is None or len(name) != 32 or set(name) - set("0123456789abcdef"):
            return None
        return self.index.corpus.get(name)

    def search(
        self,
        owner: str,
        question: str,
        k: int,
        *,
        within: str | None,
        version: int,
        documents: Callable[[], Mapping[str, tuple[str, str]]],
    ) -> Sequence[Found]:
        """The k best, best first; none that shares no word with the question. within: one of PLACES, None: both.

        documents: gives the owner's, (title, text) by id, of this version or a later one; version: another number after
        each change of theirs.
        """
        if not 1 <= k <= MOST_HITS or within not in (None, *PLACES):
            raise InvalidInput(f"k is {k}, within {within!r}; allowed are 1 to {MOST_HITS}, and {PLACES} or None.")
        found: list[Found] = []
        if within != "index":
            with self._lock:
                shelf, ranks = self._counts(owner, version, documents)
                hits = ranks.search(question, k)
            for hit in hits:
                p = hit.passage
                found.append(Found(shelf.names[p.id], p.title, p.text, hit.score, "documents"))
        if within != "documents" and self.index is not None:
            with self._lock:
                hits = self.index.corpus.search(question, k)
            for hit in hits:
                p = hit.passage
                place = p.place.rpartition("/")[2]  # folders of the server's machine are nobody's business
                found.append(Found(p.id, p.title, p.text, hit.score, "index", place))
        return sorted(found, key=lambda f: -f.score)[:k]

    def _counts(
        self, owner: str, version: int, documents: Callable[[], Mapping[str, tuple[str, str]]]
    ) -> tuple[Shelf, Bm25]:
        known = self._made.get(owner)
        if known is None or known[0] != version:
            shelf = Shelf(documents())
            known = self._made[owner] = (version, shelf, Bm25(shelf))
        self._made.move_to_end(owner)
        while len(self._made) > MOST_OWNERS:
            self._made.popitem(last=False)
        return known[1], known[2]
