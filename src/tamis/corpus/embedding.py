"""Retrieval by meaning: cosine similarity of sentence embeddings. Needs sentence-transformers, loaded on use."""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tamis.core.errors import ModelNotFound, Unavailable
from tamis.corpus.passages import Passage
from tamis.corpus.retrieve import Hit, PassageStore, best

log = logging.getLogger(__name__)

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


class Embedding:
    """Vectors of all passages of `store`; `model` is a local folder or a name that sentence-transformers knows.

    Vectors are saved in `folder` per model, each with its passage's id, so only new passages are embedded. Every
    passage gets a score (cosine, in [-1, 1]), so a search is empty only when there are no passages.
    Raises `Unavailable` without sentence-transformers, `ModelNotFound` when it cannot load `model`.
    """

    def __init__(self, store: PassageStore, *, folder: Path | None = None, model: str | Path = DEFAULT_MODEL) -> None:
        try:
            library = importlib.import_module("sentence_transformers")
        except ImportError as e:
            raise Unavailable(
                f"the retriever 'embedding' needs sentence-transformers ({e}). Run `pip install sentence-transformers`,"
                " or use the retriever 'bm25'."
            ) from e
        try:
            self._model = library.SentenceTransformer(str(model))
        except (OSError, ValueError) as e:
            raise ModelNotFound(
                f"sentence-transformers cannot load {str(model)!r} ({e}). Give a local folder or a model's full name."
            ) from e
        self._store = store
        passages = list(store.passages())
        self._ids = [p.id for p in passages]
        name = "embedding-" + blake2b(str(model).encode("utf-8"), digest_size=8).hexdigest() + ".npz"
        self._vectors = self._embed(passages, None if folder is None else folder / name)

    def search(self, question: str, k: int, *, within: AbstractSet[str] | None = None) -> list[Hit]:
        """See `Retriever.search`."""
        if not self._ids:
            return []
        scores = (self._vectors @ self._encode([question])[0]).tolist()
        places = range(len(self._ids))
        if within is not None:
            allowed = set(self._store.ids(within=within))
            places_in = [i for i in places if self._ids[i] in allowed]
        else:
            places_in = list(places)
        return best(self._store, [self._ids[i] for i in places_in], [scores[i] for i in places_in], k, within)

    def _encode(self, texts: list[str]) -> Any:
        """float32 [len(texts), width], each row of length 1."""
        return self._model.encode(
            texts, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
        ).astype("float32")

    def _embed(self, passages: list[Passage], path: Path | None) -> Any:
        """float32 [passages, width] in the order of the ids; rows saved before are used again."""
        import numpy as np

        saved = {} if path is None else _load(path)
        new = [p for i, p in zip(self._ids, passages, strict=True) if i not in saved]
        if new:
            rows = self._encode([f"{p.title}\n{p.text}".strip() for p in new])
            saved.update(zip((p.id for p in new), rows, strict=True))
        if not self._ids:
            return None
        vectors = np.stack([saved[i] for i in self._ids])
        if path is not None and (new or len(saved) != len(self._ids)):
            _save(path, self._ids, vectors)
        return vectors


def _load(path: Path) -> dict[str, Any]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(zip(file["ids"].tolist(), file["vectors"], strict=True))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, EOFError) as e:
        log.info("the vectors at %s are damaged (%s: %s) and will be made anew", path, type(e).__name__, e)
        return {}


def _save(path: Path, ids: list[str], vectors: Any) -> None:
    import numpy as np

    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".embedding-", delete=False) as file:
            np.savez(file, ids=np.array(ids), vectors=vectors)
        os.replace(file.name, path)
    except OSError as e:
        log.info("the embeddings are used without being saved at %s (%s)", path, e)
