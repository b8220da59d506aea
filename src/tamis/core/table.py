"""A folder of named byte tables on disk (LMDB): many readers, one writer, a commit is all or nothing.

Knows bytes and names, not what they mean. A process killed at any instant loses only what it had not committed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from tamis.core.lmdb_file import REBUILD, Changes, TableFile

__all__ = ["REBUILD", "Changes", "MemoryTables", "TableFile", "Tables", "close_tables", "delete_tables", "open_tables"]


class Tables(Protocol):
    """What both the file and its in-memory stand-in can do."""

    path: Path | None

    def read(self, table: str, key: bytes) -> bytes | None: ...
    def read_many(self, table: str, keys: Iterable[bytes]) -> list[bytes | None]: ...
    def items(self, table: str) -> Iterator[tuple[bytes, bytes]]: ...
    def keys(self, table: str) -> list[bytes]: ...
    def write(self, changes: Changes) -> None: ...
    def add(self, table: str, key: bytes, value: bytes) -> bytes: ...
    def close(self) -> None: ...


class MemoryTables:
    """The same verbs over dictionaries: nothing on disk, gone when dropped."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._tables: dict[str, dict[bytes, bytes]] = {}
        self._lock = threading.Lock()

    def read(self, table: str, key: bytes) -> bytes | None:
        """The value, or None."""
        return self._tables.get(table, {}).get(key)

    def read_many(self, table: str, keys: Iterable[bytes]) -> list[bytes | None]:
        """The value of each key, or None."""
        with self._lock:
            return [self._tables.get(table, {}).get(k) for k in keys]

    def items(self, table: str) -> Iterator[tuple[bytes, bytes]]:
        """All pairs in key order, as they stand now."""
        with self._lock:
            pairs = sorted(self._tables.get(table, {}).items())
        yield from pairs

    def keys(self, table: str) -> list[bytes]:
        """All keys in order."""
        with self._lock:
            return sorted(self._tables.get(table, {}))

    def write(self, changes: Changes) -> None:
        """Set {table: {key: value}}; a value of None deletes."""
        with self._lock:
            for name, pairs in changes.items():
                table = self._tables.setdefault(name, {})
                for key, value in pairs.items():
                    if value is None:
                        table.pop(key, None)
                    else:
                        table[key] = value

    def add(self, table: str, key: bytes, value: bytes) -> bytes:
        """Set `value` under `key` unless the key is taken; the value that stands there afterwards."""
        with self._lock:
            return self._tables.setdefault(table, {}).setdefault(key, value)

    def close(self) -> None:
        """Nothing to release."""


_open: dict[Path, TableFile] = {}
_users: dict[Path, int] = {}
_open_lock = threading.Lock()


def _after_fork() -> None:
    # The parent's handles and locks are not the child's: it drops them and opens its own.
    global _open_lock
    _open_lock = threading.Lock()
    for held in _open.values():
        held.abandon()
    _open.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork)


def open_tables(path: Path | str, *, readonly: bool = False) -> TableFile:
    """The process's one handle on the store at `path` (LMDB must not be opened twice in a process).

    Each call needs one `close_tables`; the last one closes the files.
    """
    path = Path(path).absolute()
    with _open_lock:
        held = _open.get(path)
        if held is not None and not held.is_current():  # deleted or replaced underneath
            held.close()
            held = None
        if held is None:
            held = _open[path] = TableFile(path, readonly=readonly)
            _users[path] = 0
        elif not readonly and held.readonly:
            held.allow_writes()
        _users[path] += 1
        return held


def close_tables(path: Path | str) -> None:
    """Give back one use of the process's handle on `path`; nothing happens if there is none."""
    path = Path(path).absolute()
    with _open_lock:
        if path not in _open:
            return
        _users[path] -= 1
        if _users[path] <= 0:
            _open.pop(path).close()


def delete_tables(path: Path | str) -> None:
    """Delete the store at `path`, sound or not, and no other file of the folder."""
    path = Path(path).absolute()
    with _open_lock:
        held = _open.pop(path, None)
        if held is not None:
            held.close()
        for name in ("data.mdb", "lock.mdb"):
            (path / name).unlink(missing_ok=True)
