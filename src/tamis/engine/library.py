"""Documents that requests name by id: their texts, kept in tables, and their keys and values, warmed and pinned.

Every document has an owner, and nobody sees another's: not by id, and not by what is stored of it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tamis.cache.document import Wanted
from tamis.cache.keys import DOCUMENTS, DocumentKey, namespaced
from tamis.core.errors import CacheFull, InvalidInput, TamisError
from tamis.core.log import logger
from tamis.core.table import MemoryTables, Tables, close_tables, open_tables
from tamis.corpus.stored import (
    NAME,
    TABLE,
    StoredDocument,
    check_same,
    missing,
    namespace_of,
    new_document,
    packed,
    row_of,
    unpacked,
)
from tamis.engine.finding import Finder, Found
from tamis.engine.service import Engine

if TYPE_CHECKING:
    from tamis.engine.knowledge import KnowledgeBase

__all__ = ["NAME", "Library", "StoredDocument", "namespace_of"]
log = logger("engine")
PIN_SHARE = 0.5  # of all pages: the others stay for requests


class Library:
    """The documents of all owners, and the passages of an index, which are everybody's to read.

    Safe to use from many threads; `warm`, `pin` and `delete` wait for the engine.
    """

    def __init__(self, engine: Engine, path: str | Path | None = None, index: KnowledgeBase | None = None) -> None:
        self.engine, self._finder = engine, Finder(index)
        self._versions: Counter[str] = Counter()  # of each owner's documents
        self._tables: Tables = MemoryTables() if path is None else open_tables(path)
        self._path = path
        self._lock = threading.RLock()
        self._documents: dict[tuple[str, str], StoredDocument] = {}
        for _, value in self._tables.items(TABLE):
            owner, document = unpacked(value)
            self._documents[owner, document.id] = document
        self._pin_again()

    def put(self, owner: str, text: str, *, title: str = "", name: str | None = None) -> StoredDocument:
        """Add a document; its id is `name`, or made of what it says. The same again changes nothing.

        Raises InvalidInput for an empty text, for a name that is none, and for one that is taken by another text.
        """
        made = new_document(title, text, len(self.engine.llm.template.document_tokens(title, text)), name)
        with self._lock:
            known = self._documents.get((owner, made.id))
            if known is None:
                return self._keep(owner, made)
            check_same(known, made)
            return known

    def get(self, owner: str, name: str) -> StoredDocument:
        """One document, or a passage of the index. Raises NothingFound, also for another owner's."""
        with self._lock:
            found = self._documents.get((owner, name))
        if found is None and (passage := self._finder.passage(name)) is not None:
            n_tokens = len(self.engine.llm.template.document_tokens(passage.title, passage.text))
            return StoredDocument(name, passage.title, passage.text, 0, n_tokens)
        return found or missing(name)

    def search(self, owner: str, question: str, k: int, *, within: str | None = None) -> Sequence[Found]:
        """The k of the owner's documents and the index's passages that fit best; see `Finder.search`."""

        def documents() -> dict[str, tuple[str, str]]:
            with self._lock:
                return {name: (d.title, d.text) for (who, name), d in self._documents.items() if who == owner}

        version = self._versions[owner]  # of what stands there now, or of less
        return self._finder.search(owner, question, k, within=within, version=version, documents=documents)

    def list(self, owner: str, *, after: str = "", limit: int = 100) -> tuple[Sequence[StoredDocument], bool]:
        """The owner's documents by id, from behind `after` on; and whether there are more."""
        with self._lock:
            names = sorted(name for who, name in self._documents if who == owner and name > after)
            return [self._documents[owner, name] for name in names[:limit]], len(names) > limit

    def tokens(self, document: StoredDocument) -> tuple[int, ...]:
        """What stands for it in a prompt."""
        return self.engine.llm.template.document_tokens(document.title, document.text)

    def warm(self, owner: str, name: str) -> str:
        """Have its keys and values computed and stored now; the tier that had them, or "computed".

        Raises CacheFull if they do not fit.
        """
        tokens = self.tokens(self.get(owner, name))
        return self.engine.call(lambda: self._warm(owner, tokens, pin=False)).result()

    def pin(self, owner: str, name: str) -> StoredDocument:
        """Keep its keys and values in the fastest tier until `unpin`; pinning twice is once."""
        with self._lock:
            document = self._own(owner, name)
            tokens = self.tokens(document)
            if document.pinned:
                return document
            self._check_pins(len(tokens))
            self.engine.call(lambda: self._warm(owner, tokens, pin=True)).result()
            return self._keep(owner, replace(document, pinned=True))

    def unpin(self, owner: str, name: str) -> StoredDocument:
        """Let its keys and values be evicted again."""
        with self._lock:
            document = self._own(owner, name)
            if not document.pinned:
                return document
            tokens = self.tokens(document)
            self.engine.call(lambda: self._unpin(owner, tokens)).result()
            return self._keep(owner, replace(document, pinned=False))

    def delete(self, owner: str, name: str) -> None:
        """Forget a document and what is stored of it. Requests that read it finish with it."""
        with self._lock:
            document = self.unpin(owner, name)
            del self._documents[owner, name]
            self._versions[owner] += 1
            self._tables.write({TABLE: {row_of(owner, name): None}})
            mine = [d for (who, _), d in self._documents.items() if who == owner]
            if all((d.title, d.text) != (document.title, document.text) for d in mine):
                key = self._key(owner, self.tokens(document))
                self.engine.reuse.store.cache.drop([key])

    def tier(self, owner: str, document: StoredDocument) -> str | None:
        """Where its keys and values lie now, if they are stored."""
        return self.engine.reuse.store.cache.where([self._key(owner, self.tokens(document))])[0]

    def close(self) -> None:
        """Let go of the tables."""
        if self._path is not None:
            close_tables(self._path)

    def _keep(self, owner: str, document: StoredDocument) -> StoredDocument:
        self._tables.write({TABLE: {row_of(owner, document.id): packed(owner, document)}})
        self._documents[owner, document.id] = document
        self._versions[owner] += 1
        return document

    def _own(self, owner: str, name: str) -> StoredDocument:
        """One that was put; an index stays as it was made."""
        return self._documents.get((owner, name)) or missing(name)

    def _key(self, owner: str, tokens: Sequence[int]) -> DocumentKey:
        return self.engine.reuse.store.key(tokens, _namespace(owner))

    def _check_pins(self, n_tokens: int) -> None:
        pool, pinned = self.engine.pool, self.engine.memory.pinned_pages
        most = int(PIN_SHARE * pool.allocator.n_pages)
        if pinned + pool.pages_for(n_tokens) > most:
            raise InvalidInput(
                f"the document takes {pool.pages_for(n_tokens)} pages, {pinned} are pinned and {most} may be. Unpin "
                "another document, or give the cache more bytes."
            )

    def _warm(self, owner: str, tokens: Sequence[int], *, pin: bool) -> str:
        """In the engine's thread."""
        store = self.engine.reuse.store
        held = store.hold([tokens], namespace=_namespace(owner))
        try:
            if held.documents[0] is None:
                raise CacheFull("; ".join(held.reasons), needed_bytes=0, available_bytes=0)
            if pin:
                store.cache.pin([Wanted(self._key(owner, tokens), len(tokens))])
                self.engine.memory.pinned_pages += self.engine.pool.pages_for(len(tokens))
            return held.origins[0]
        finally:
            held.close()
            store.save()

    def _unpin(self, owner: str, tokens: Sequence[int]) -> None:
        self.engine.reuse.store.cache.unpin([self._key(owner, tokens)])
        self.engine.memory.pinned_pages -= self.engine.pool.pages_for(len(tokens))

    def _pin_again(self) -> None:
        for (owner, name), document in list(self._documents.items()):
            if not document.pinned:
                continue
            self._documents[owner, name] = replace(document, pinned=False)
            try:
                self.pin(owner, name)
            except TamisError as e:
                log.warning("document %s is not pinned any more: %s", name, e)


def _namespace(owner: str) -> str:
    return namespaced(DOCUMENTS, namespace_of(owner))
