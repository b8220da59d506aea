"""How files and passages are written to tables, and a batch of changes to them. Knows bytes, not files' content.

Tables: `files` (key: 16-byte hash of the path), `passages` (key: 16-byte passage id), `corpus` (one format record).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

from tamis.core.errors import StoreMismatch
from tamis.core.table import Tables
from tamis.corpus.passages import Passage

FILES, PASSAGES, FORMAT = "files", "passages", "corpus"
FORMAT_VERSION = 1

COMMIT_AFTER_S = 0.25
COMMIT_AFTER_FILES = 512


@dataclass(frozen=True)
class FileRecord:
    """What is known of one file. `problem` says why it holds no passages, `passages` are ids (hex) in reading order."""

    source: str
    size: int
    mtime_ns: int
    seen_ns: int
    digest: str
    cutting: str
    passages: tuple[str, ...] = ()
    problem: str = ""
    warnings: tuple[str, ...] = ()


@dataclass
class PassageRecord:
    """One passage and every place it stands: {source: (first_line, last_line)}."""

    title: str
    text: str
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def passage(self, source: str) -> Passage:
        """The passage as found in `source`."""
        first, last = self.places[source]
        return Passage(self.text, self.title, source, first, last)


def file_key(source: str) -> bytes:
    """Paths can be longer than a table's keys may be, so their hash is the key."""
    return blake2b(source.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def read_record(tables: Tables, source: str) -> FileRecord | None:
    """The record of the file `source`, if it was ever read."""
    value = tables.read(FILES, file_key(source))
    return None if value is None else _file(value)


def file_records(tables: Tables) -> list[FileRecord]:
    """Every file's record, ordered by path."""
    return sorted((_file(value) for _, value in tables.items(FILES)), key=lambda record: record.source)


def read_passage(tables: Tables, key: bytes) -> PassageRecord | None:
    """The passage with id `key` (16 bytes), if it is kept."""
    value = tables.read(PASSAGES, key)
    return None if value is None else passage_record(value)


def passage_record(value: bytes) -> PassageRecord:
    """A row of the table `passages`."""
    fields = _unpack(value)
    return PassageRecord(fields["title"], fields["text"], {s: (a, b) for s, (a, b) in fields["places"].items()})


def check_format(tables: Tables) -> None:
    """Raises `StoreMismatch` when the tables were written in another format."""
    value = tables.read(FORMAT, b"format")
    if value is not None and int(value) != FORMAT_VERSION:
        raise StoreMismatch(
            f"the corpus has format {int(value)}, this version of Tamis reads format {FORMAT_VERSION}."
            " Delete the store and run `tamis index` again."
        )


def _file(value: bytes) -> FileRecord:
    fields = _unpack(value)
    return FileRecord(**{**fields, "passages": tuple(fields["passages"]), "warnings": tuple(fields["warnings"])})


def _pack(fields: dict[str, Any]) -> bytes:
    # Paths that are not UTF-8 come as lone surrogates, hence the error handler.
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _unpack(value: bytes) -> Any:
    return json.loads(value.decode("utf-8", "surrogatepass"))


class Batch:
    """Changes to several files, committed together: whole files only, so a kill never leaves half of one.

    The writer's lock is held from the first change to the commit, since passages shared by files are read, changed
    and written back.
    """

    def __init__(self, tables: Tables, lock: Callable[[], AbstractContextManager[None]]) -> None:
        self.passages_new = 0
        self.passages_removed = 0
        self._tables = tables
        self._lock = lock
        self._held: AbstractContextManager[None] | None = None
        self._files: dict[str, FileRecord | None] = {}
        self._passages: dict[bytes, PassageRecord | None] = {}
        self._kept: dict[bytes, bool] = {}
        self._began_s = 0.0
        self._whole = True

    def put(self, record: FileRecord, passages: list[Passage]) -> None:
        """`record` and its passages in place of what was kept for that file."""
        self._whole = False
        self._take_out(record.source)
        for passage in passages:
            key = bytes.fromhex(passage.id)
            kept = self._passage(key)
            if kept is None:
                kept = self._passages[key] = PassageRecord(passage.title, passage.text)
            kept.places.setdefault(record.source, (passage.first_line, passage.last_line))
        self._files[record.source] = record
        self._whole = True

    def touch(self, record: FileRecord) -> None:
        """`record` in place of the file's old one, which has the same passages."""
        self._begin()
        self._files[record.source] = record

    def remove(self, source: str) -> bool:
        """Forgets a file; False when it was not known."""
        self._whole = False
        known = self._take_out(source)
        if known:
            self._files[source] = None
        self._whole = True
        return known

    def commit_if_due(self) -> None:
        """Commits when enough has gathered; a kill loses at most what came after."""
        if len(self._files) >= COMMIT_AFTER_FILES or (
            self._files and time.monotonic() - self._began_s > COMMIT_AFTER_S
        ):
            self.commit()

    def commit(self) -> None:
        """Writes all gathered changes in one transaction and lets the lock go.

        Writes nothing when the last change was interrupted half way.
        """
        if self._held is None:
            return
        try:
            if self._whole:
                self._write()
        finally:
            self._files, self._passages, self._kept = {}, {}, {}
            held, self._held = self._held, None
            held.__exit__(None, None, None)

    def _write(self) -> None:
        passages: dict[bytes, bytes | None] = {}
        for key, record in self._passages.items():
            alive = record is not None and bool(record.places)
            if not alive and not self._kept[key]:
                continue
            passages[key] = _pack(asdict(record)) if record is not None and alive else None
            self.passages_new += alive and not self._kept[key]
            self.passages_removed += not alive
        files = {file_key(s): None if r is None else _pack(asdict(r)) for s, r in self._files.items()}
        self._tables.write({PASSAGES: passages, FILES: files, FORMAT: {b"format": str(FORMAT_VERSION).encode("ascii")}})

    def _begin(self) -> None:
        if self._held is None:
            held = self._lock()
            held.__enter__()
            self._held = held
            self._began_s = time.monotonic()

    def _take_out(self, source: str) -> bool:
        self._begin()
        old = self._files[source] if source in self._files else read_record(self._tables, source)
        if old is None:
            return False
        for hexed in old.passages:
            kept = self._passage(bytes.fromhex(hexed))
            if kept is not None:
                kept.places.pop(source, None)
        return True

    def _passage(self, key: bytes) -> PassageRecord | None:
        if key not in self._passages:
            self._passages[key] = read_passage(self._tables, key)
            self._kept[key] = self._passages[key] is not None
        return self._passages[key]
