"""Documents that a model can be asked about: files and passages beside the bits observed of them, in one folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tamis.attention.offline import Indexer
from tamis.core.env import cache_dir
from tamis.core.errors import NothingFound
from tamis.core.table import MemoryTables, Tables, close_tables, open_tables
from tamis.corpus import AddReport, Corpus, Hit, Passage
from tamis.engine.template import Template
from tamis.index.record import document_id
from tamis.index.spec import IndexSpec

INDEXED = "engine.indexed"  # passage id -> document id of its tokens, so that known passages need no tokenizing


@dataclass(frozen=True)
class Added:
    """What `KnowledgeBase.add_files` did: the files' part, and how many passages were observed anew."""

    files: AddReport
    indexed: int


class KnowledgeBase:
    """A corpus and the SIFT records of its passages. Made by `LLM.corpus`."""

    def __init__(self, corpus: Corpus, indexer: Indexer, template: Template, tokenizer_name: str) -> None:
        self.corpus, self.indexer = corpus, indexer
        self.on_close: Callable[[], None] = lambda: None
        self._template, self._tokenizer_name = template, tokenizer_name
        self._closed = False
        self._tables: Tables = MemoryTables() if corpus.path is None else open_tables(corpus.path)

    def add_files(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        target_tokens: int | None = None,
        observe: bool = True,
        on_file: Callable[[int, int, str], None] | None = None,
        on_index: Callable[[int, int], None] | None = None,
    ) -> Added:
        """Read what is new or changed under `paths` (files, folders, globs), forget what vanished, observe what is new.

        Both steps commit as they go: after an interruption, the next call does only what is missing. Without `observe`
        no passage is observed, which costs as much as a dense prefill of all of them: for prompts that need no stored
        bits (`Policy.needs_records`). A later call makes what is missing.
        Raises NothingFound if no given file can be read.
        """
        given = [paths] if isinstance(paths, str | Path) else list(paths)
        options: dict[str, Any] = {} if target_tokens is None else {"target_tokens": target_tokens}
        report = self.corpus.sync(
            given, count=self._template.count, count_name=self._tokenizer_name, on_progress=on_file, **options
        )
        return Added(report, self.index(within=report.sources, on_progress=on_index) if observe else 0)

    def index(
        self, *, within: Collection[str] | None = None, on_progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Observe the passages (of these sources) that have no record yet. Returns how many were made."""
        ids = [bytes.fromhex(i) for i in self.corpus.ids(within=within)]
        known = self._tables.read_many(INDEXED, ids)
        stored = self.indexer.store.has([d if d is not None else b"\0" * 16 for d in known])
        todo = [i for i, d, there in zip(ids, known, stored, strict=True) if d is None or not there]
        passages = [p for i in todo if (p := self.corpus.get(i.hex())) is not None]
        tokens = [self.tokens(p) for p in passages]
        kept = [(bytes.fromhex(p.id), t) for p, t in zip(passages, tokens, strict=True) if t]
        made = self.indexer.index([t for _, t in kept], on_progress)
        if kept:
            self._tables.write({INDEXED: {i: document_id(t) for i, t in kept}})
        return made

    def search(self, question: str, k: int = 8, *, within: Collection[str] | None = None, **options: Any) -> list[Hit]:
        """The k passages that fit the question best (BM25), best first. Raises NothingFound if none does."""
        hits = self.corpus.search(question, k, within=within, **options)
        if not hits:
            n = len(self.corpus.ids(within=within))
            raise NothingFound(f"none of the {n} passages shares a word with the question. Ask in other words.")
        return hits

    def drop_unused(self) -> int:
        """Remove the records of passages that no file holds any more. Returns how many."""
        kept = {bytes.fromhex(i) for i in self.corpus.ids()}
        rows = dict(self._tables.items(INDEXED))
        gone = {i: d for i, d in rows.items() if i not in kept}
        used = {d for i, d in rows.items() if i in kept}
        self.indexer.store.remove(set(gone.values()) - used)
        if gone:
            self._tables.write({INDEXED: dict.fromkeys(gone)})
        return len(gone)

    def tokens(self, passage: Passage) -> tuple[int, ...]:
        """The tokens that stand for a passage in a prompt."""
        return self._template.document_tokens(passage.title, passage.text)

    def close(self) -> None:
        """Release the files. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        if self.corpus.path is not None:
            close_tables(self.corpus.path)
        self.corpus.close()
        self.indexer.store.close()
        self.on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def default_store(spec: IndexSpec) -> Path:
    """Where the documents of this model and these thresholds are kept when no store is named."""
    return cache_dir() / "stores" / hashlib.blake2b(spec.digest, digest_size=8).hexdigest()
