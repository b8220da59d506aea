"""Documents that requests name by id: whose they are, what they say, and the table they lie in.

Every document has an owner, and nobody finds another's. Knows texts and names, not keys, values or prompts.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from tamis.core.errors import InvalidInput, NothingFound
from tamis.core.table import MemoryTables, Tables, close_tables, open_tables

TABLE = "engine.documents"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED = ("search",)  # a path of the server


@dataclass(frozen=True)
class StoredDocument:
    """One document. `created`: seconds since 1970; `tokens`: how many it has in a prompt."""

    id: str
    title: str
    text: str
    created: int
    tokens: int
    pinned: bool = False

    def shown(self) -> dict[str, Any]:
        """What servers say of it, without its text."""
        return {
            "id": self.id, "object": "document", "title": self.title, "created": self.created, "tokens": self.tokens
        }  # fmt: skip


def new_document(title: str, text: str, n_tokens: int, name: str | None = None) -> StoredDocument:
    """A document put now; its id is `name`, or made of what it says. Raises InvalidInput for an empty text, and for a
    name that is none."""
    if name is not None and (not NAME.fullmatch(name) or name in RESERVED):
        raise InvalidInput(
            f"document id {name!r}; use 1 to 64 letters, digits, '.', '_' and '-', but not {', '.join(RESERVED)}."
        )
    if not n_tokens:
        raise InvalidInput("the document's text is empty; give some.")
    digest = hashlib.blake2b(json.dumps([title, text]).encode(), digest_size=16).hexdigest()
    return StoredDocument(name or f"doc-{digest}", title, text, int(time.time()), n_tokens)


def check_same(known: StoredDocument, made: StoredDocument) -> None:
    """Raises InvalidInput if a document of that id says something else."""
    if (known.title, known.text) != (made.title, made.text):
        raise InvalidInput(f"document {made.id!r} holds another text. Delete it first, or use another id.")


def missing(name: str) -> NoReturn:
    """Raises NothingFound for an id."""
    raise NothingFound(f"there is no document with the id {name!r}. Put it first, or give its text, not an id.")


def namespace_of(owner: str) -> str:
    """The name under which an owner's keys and values are stored; "" is everybody where there are no keys."""
    return hashlib.blake2b(owner.encode(), digest_size=16).hexdigest() if owner else ""


def row_of(owner: str, name: str) -> bytes:
    """Where a document lies in the table."""
    return hashlib.blake2b(owner.encode(), digest_size=16).digest() + name.encode()


def packed(owner: str, document: StoredDocument) -> bytes:
    """What lies there."""
    return json.dumps([owner, asdict(document)]).encode()


def unpacked(value: bytes) -> tuple[str, StoredDocument]:
    """The inverse of `packed`."""
    owner, fields = json.loads(value)
    return owner, StoredDocument(**fields)


class SharedTexts:
    """Documents' texts in tables that several processes write: nothing is held in memory. None: in this process's."""

    def __init__(self, path: Path | str | None) -> None:
        self._path = path
        self._tables: Tables = MemoryTables() if path is None else open_tables(path)
        self._lock = threading.Lock()

    def put(self, owner: str, document: StoredDocument) -> StoredDocument:
        """Add a document; the one that is there if it says the same. Raises InvalidInput if it does not."""
        found = unpacked(self._tables.add(TABLE, row_of(owner, document.id), packed(owner, document)))[1]
        check_same(found, document)
        return found

    def get(self, owner: str, name: str) -> StoredDocument:
        """One document. Raises NothingFound, also for another owner's."""
        value = self._tables.read(TABLE, row_of(owner, name))
        return missing(name) if value is None else unpacked(value)[1]

    def list(self, owner: str, *, after: str = "", limit: int = 100) -> tuple[Sequence[StoredDocument], bool]:
        """The owner's documents by id, from behind `after` on; and whether there are more."""
        head = row_of(owner, "")
        rows = sorted(key for key in self._tables.keys(TABLE) if key.startswith(head) and key > head + after.encode())
        values = self._tables.read_many(TABLE, rows[:limit])
        return [unpacked(value)[1] for value in values if value is not None], len(rows) > limit

    def delete(self, owner: str, name: str) -> StoredDocument:
        """Forget a document; what it was. Raises NothingFound."""
        with self._lock:
            document = self.get(owner, name)
            self._tables.write({TABLE: {row_of(owner, name): None}})
            return document

    def same(self, owner: str, document: StoredDocument) -> bool:
        """Whether another document of the owner says the same, and so has the same keys and values."""
        every = (unpacked(value) for _, value in self._tables.items(TABLE))
        wanted = (owner, document.title, document.text)
        return any((who, d.title, d.text) == wanted and d.id != document.id for who, d in every)

    def close(self) -> None:
        """Let go of the tables."""
        if self._path is not None:
            close_tables(self._path)
