"""Retrieval by wording: BM25 (Lucene's variant, k1 1.5, b 0.75) through bm25s. Knows words, not models."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from tamis.corpus.retrieve import Hit, PassageStore, best, fingerprint
from tamis.corpus.words import WORDS_VERSION, bm25s, question_words, text_words

log = logging.getLogger(__name__)

PREFIX = "bm25-"
ID_FILE = "passages.json"
LEFT_AFTER_S = 3600.0


class Bm25:
    """An index over all passages of `store`, saved in `folder` under an id of the passages it was made of.

    Another set of passages has another id, so a stale index is never used. One that is incomplete or damaged is made
    anew; one that cannot be saved is used for this process only.
    """

    def __init__(self, store: PassageStore, *, folder: Path | None = None) -> None:
        self._store = store
        self._ids = store.ids()
        self._index: Any = None
        if not self._ids:
            return
        if folder is not None:
            self._index = _load(folder, self._ids)
        if self._index is None:
            passages = list(store.passages())
            self._ids = [p.id for p in passages]  # another process may have added some since
            self._index = _build([f"{p.title}\n{p.text}" for p in passages])
            if folder is not None and self._index is not None:
                _save(self._index, folder, self._ids)

    def search(self, question: str, k: int, *, within: AbstractSet[str] | None = None) -> list[Hit]:
        """See `Retriever.search`. Passages that share no word with the question are never returned."""
        if self._index is None:
            return []
        words = self._index.get_tokens_ids(list(dict.fromkeys(question_words(question))))
        if not words:
            return []
        scores = self._index.get_scores_from_ids(words)
        matching = scores.nonzero()[0].tolist()
        if within is not None:
            allowed = set(self._store.ids(within=within))
            matching = [i for i in matching if self._ids[i] in allowed]
        return best(self._store, [self._ids[i] for i in matching], scores[matching].tolist(), k, within)


def _build(texts: list[str]) -> Any:
    words = text_words(texts)
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(w for text in words for w in text))}
    if not vocabulary:
        return None
    index = bm25s().BM25()
    ids = [[vocabulary[w] for w in text] for text in words]
    index.index((ids, vocabulary), create_empty_token=False, show_progress=False)
    return index


def _index_id(ids: list[str]) -> str:
    return f"{fingerprint(ids)}-{WORDS_VERSION}-{bm25s().__version__}"


def _save(index: Any, folder: Path, ids: list[str]) -> None:
    """Writes under a temporary name and renames, so that a reader sees all of an index or none; clears older ones."""
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=folder))
        try:
            index.save(temporary, show_progress=False)
            (temporary / ID_FILE).write_text(json.dumps({"id": _index_id(ids)}), encoding="utf-8")
            left_by_a_kill = [p for p in folder.glob(f".{PREFIX}*") if time.time() - p.stat().st_mtime > LEFT_AFTER_S]
            for old in [*folder.glob(f"{PREFIX}*"), *left_by_a_kill]:
                shutil.rmtree(old, ignore_errors=True)
            os.rename(temporary, folder / _name(ids))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as e:
        log.info("the BM25 index is used without being saved in %s (%s)", folder, e)


def _name(ids: list[str]) -> str:
    return PREFIX + fingerprint(ids)[:16]


def _load(folder: Path, ids: list[str]) -> Any:
    """The index saved for `ids`, or None when there is none that can be trusted."""
    path = folder / _name(ids)
    try:
        saved = json.loads((path / ID_FILE).read_text(encoding="utf-8"))["id"]
        index = bm25s().BM25.load(path, show_progress=False)
        scores = index.scores
        whole = (
            saved == _index_id(ids)
            and scores["num_docs"] == len(ids)
            and len(scores["indptr"]) == len(index.vocab_dict) + 1
            and len(scores["data"]) == len(scores["indices"]) == scores["indptr"][-1]
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError) as e:
        log.info("the BM25 index at %s is damaged (%s: %s) and will be made anew", path, type(e).__name__, e)
        return None
    return index if whole else None
