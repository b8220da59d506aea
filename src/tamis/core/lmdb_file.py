"""One LMDB environment as named byte tables: checked before it is mapped, locked with a time limit, safe to grow.

Knows one folder; `table` keeps the one handle a process may have on it.
A file is checked before LMDB maps it, because LMDB follows page numbers in a damaged file without looking.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast

import lmdb
from lmdb.verify import VerifyError, verify

from tamis.core.errors import InvalidInput, NothingFound, StoreBusy, StoreDamaged, Unavailable

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    Transaction = lmdb.Transaction[bytes]

MAX_TABLES = 16
MAX_READERS = 512
MAX_KEY_BYTES = 511
WAIT_S = 30.0
CHECK_WAIT_S = 2.0
CHECK_TRIES = 5
GROW_STEP_BYTES = 64 << 20
# Address space only: the file grows as it is written, so that a store need not be remapped under its readers.
# Windows allocates what is mapped.
MAP_BYTES = 1 << 38 if sys.platform != "win32" else GROW_STEP_BYTES
REBUILD = "run `tamis index --rebuild`"
Changes = dict[str, dict[bytes, bytes | None]]


class TableFile:
    """One LMDB environment. Open it once per process and path (`open_tables`); close it when done.

    `wait_s` is how long a commit waits for another process's commit before it gives up with StoreBusy.
    Raises NothingFound (read-only and there is no store), StoreDamaged, InvalidInput (the path is not a folder).
    """

    def __init__(
        self, path: Path, *, readonly: bool = False, wait_s: float = WAIT_S, map_bytes: int = MAP_BYTES
    ) -> None:
        self.path: Path | None = path
        self.readonly = readonly
        self._folder = path
        self._wait_s = wait_s
        self._map_bytes = map_bytes
        self._lock = threading.RLock()
        self._idle = threading.Condition()
        self._active = 0
        self._closed = False
        self._pid = os.getpid()
        self._tables: dict[str, lmdb._Database] = {}
        if path.exists() and not path.is_dir():
            raise InvalidInput(f"{path} is a file; a store is a folder. Give the path of a folder.")
        if not self._data.exists():
            if readonly:
                raise NothingFound(f"there is no store at {path}. Give the path of one, or run `tamis index` first.")
            _create(path, wait_s)
        if not readonly:
            _require_permission(self._folder)
        self._check()
        self._env = self._map(map_bytes)

    def close(self) -> None:
        """Release the files; later calls raise Unavailable."""
        with self._lock:
            self._closed = True
            self._env.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's environment without touching its files."""
        self._env.close()

    def read(self, table: str, key: bytes) -> bytes | None:
        """The committed value, or None."""
        return self.read_many(table, [key])[0]

    def read_many(self, table: str, keys: Iterable[bytes]) -> list[bytes | None]:
        """The committed value of each key, or None, all from one snapshot."""
        with self._reading(table) as (txn, db):
            return [txn.get(k, db=db) if db and k else None for k in keys]

    def items(self, table: str) -> Iterator[tuple[bytes, bytes]]:
        """All committed pairs in key order, from one snapshot."""
        with self._reading(table) as (txn, db):
            if db:
                yield from txn.cursor(db=db)

    def keys(self, table: str) -> list[bytes]:
        """All committed keys in order."""
        with self._reading(table) as (txn, db):
            return list(txn.cursor(db=db).iternext(keys=True, values=False)) if db else []

    def write(self, changes: Changes) -> None:
        """Commit {table: {key: value}} in one transaction, durable on return; a value of None deletes.

        Keys are 1 to 511 bytes. Raises StoreBusy when this handle is read-only, another process keeps the writer's
        lock, or the disk refuses; what was committed before stays.
        """
        for key in (k for pairs in changes.values() for k in pairs):
            if not 1 <= len(key) <= MAX_KEY_BYTES:
                raise InvalidInput(f"a key of {len(key)} bytes; allowed are 1 to {MAX_KEY_BYTES}.")
        self._writing(changes, lambda txn, handles: _apply(txn, handles, changes))

    def add(self, table: str, key: bytes, value: bytes) -> bytes:
        """Commit `value` under `key` unless the key is taken; the value that stands there afterwards."""
        found: list[bytes] = []

        def put_if_absent(txn: Transaction, handles: dict[str, lmdb._Database]) -> None:
            held = txn.get(key, db=handles[table])
            found[:] = [value if held is None else held]
            if held is None:
                txn.put(key, value, db=handles[table])

        self._writing([table], put_if_absent)
        return found[0]

    def allow_writes(self) -> None:
        """Turn a read-only handle into a writing one, in place. Raises StoreBusy if the files may not be written."""
        with self._lock:
            self._alive()
            _require_permission(self._folder)
            with self._quiet():
                self._env.close()
                self._tables.clear()
                self.readonly = False
                self._env = self._map(self._map_bytes)

    def is_current(self) -> bool:
        """Whether the files at the path are still the ones that this handle has open."""
        try:
            stat = self._data.stat()
        except FileNotFoundError:
            return False
        return (stat.st_dev, stat.st_ino) == self._identity

    @property
    def _data(self) -> Path:
        return self._folder / "data.mdb"

    def _check(self) -> None:
        try:
            problems = _problems(self._folder, self._wait_s)
        except VerifyError as e:
            problems = [str(e)]
        except OSError as e:
            raise StoreBusy(f"{self._data} could not be read ({e}). Check its permissions.") from e
        if problems:
            raise self._damaged(f"{problems[0]}" + (f", and {len(problems) - 1} more" if len(problems) > 1 else ""))

    def _map(self, map_bytes: int) -> lmdb.Environment:
        stat = self._data.stat()
        self._identity = (stat.st_dev, stat.st_ino)
        floor = stat.st_size + GROW_STEP_BYTES
        sizes = [map_bytes] if map_bytes <= floor else [map_bytes, floor]  # the smaller if address space is rationed
        for size in sizes:
            try:
                env = lmdb.open(
                    str(self._folder),
                    map_size=max(size, stat.st_size),
                    max_dbs=MAX_TABLES,
                    readonly=self.readonly,
                    lock=os.access(self._folder, os.W_OK) or (self._folder / "lock.mdb").exists(),
                    max_readers=MAX_READERS,
                    create=False,
                )
                env.reader_check()  # slots of killed readers would keep old pages from being used again
                return env
            except lmdb.MemoryError as e:
                if size == sizes[-1]:
                    raise Unavailable(f"{self.path} cannot be mapped: {size} bytes of address space refused.") from e
            except lmdb.Error as e:
                if "already open" in str(e):
                    raise StoreBusy(f"{self.path} is open in this process already; get it from `open_tables`.") from e
                raise self._damaged(e) from e
        raise AssertionError("one of the sizes returns or raises")

    def _writing(self, tables: Iterable[str], change: Callable[[Transaction, dict[str, lmdb._Database]], None]) -> None:
        if self.readonly:
            raise StoreBusy(f"{self.path} was opened read-only; open it for writing to change it.")
        with self._lock, _writer_lock(self._folder, self._wait_s):
            while True:
                self._alive()
                try:
                    handles = {name: self._handle(name, create=True) for name in tables}
                    with self._env.begin(write=True) as txn:
                        change(txn, handles)
                    return
                except lmdb.MapFullError:
                    self._resize(self._env.info()["map_size"] * 2)
                except lmdb.MapResizedError:  # another process grew the file
                    self._resize(0)
                except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError) as e:
                    raise self._damaged(e) from e
                except lmdb.Error as e:
                    advice = "Nothing was changed; free some disk space and rerun."
                    raise StoreBusy(f"{self.path} could not be written ({e}). {advice}") from e

    def _table(self, name: str) -> lmdb._Database | None:
        """The handle of a table, opened in another transaction than the one that will use it; None if there is none."""
        with self._lock:
            self._alive()
            if name in self._tables:
                return self._tables[name]
            try:
                with self._env.begin() as txn:
                    self._env.open_db(name.encode(), txn=txn, create=False)  # may say that there is none, lock-free
                return self._handle(name, create=False)
            except lmdb.NotFoundError:
                return None
            except lmdb.MapResizedError:
                self._resize(0)
                return self._table(name)
            except lmdb.ReadersFullError as e:
                raise self._crowded() from e
            except lmdb.Error as e:
                raise self._damaged(e) from e

    def _handle(self, name: str, *, create: bool) -> lmdb._Database:
        if name not in self._tables:
            # Where the environment can write, the binding opens a lasting handle in a write transaction only.
            with nullcontext() if create or self.readonly else _writer_lock(self._folder, self._wait_s):
                self._tables[name] = self._env.open_db(name.encode(), create=create)
        return self._tables[name]

    def _resize(self, size: int) -> None:
        with self._quiet():
            self._env.set_mapsize(size)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        # Remapping while a transaction of this process reads the old map would crash it.
        with self._idle:
            if not self._idle.wait_for(lambda: self._active == 0, self._wait_s):
                raise StoreBusy(f"{self.path} has to be remapped while it is being read here. Finish reading first.")
            yield

    @contextmanager
    def _reading(self, table: str) -> Iterator[tuple[Transaction, lmdb._Database | None]]:
        txn, db = self._begin_read(table)
        try:
            yield txn, db
        except lmdb.Error as e:
            self._alive()
            raise self._damaged(e) from e
        finally:
            txn.abort()
            with self._idle:
                self._active -= 1
                self._idle.notify_all()

    def _begin_read(self, table: str) -> tuple[Transaction, lmdb._Database | None]:
        while True:
            db = self._table(table)
            try:
                with self._idle:
                    if db is not self._tables.get(table):  # remapped since, or just made by another thread
                        continue
                    txn = self._env.begin()
                    self._active += 1
                    return txn, db
            except lmdb.MapResizedError:
                with self._lock:
                    self._resize(0)
            except lmdb.ReadersFullError as e:
                raise self._crowded() from e
            except lmdb.Error as e:
                self._alive()
                raise self._damaged(e) from e

    def _alive(self) -> None:
        if self._pid != os.getpid():
            raise Unavailable(f"{self.path} was opened before this process was forked. Open it again here.")
        if self._closed:
            raise Unavailable(f"{self.path} was closed. Open it again.")

    def _crowded(self) -> StoreBusy:
        return StoreBusy(f"{self.path} has {MAX_READERS} readers already. Close some and try again.")

    def _damaged(self, reason: object) -> StoreDamaged:
        return StoreDamaged(f"{self.path} is not a sound store ({reason}). To make it anew, {REBUILD}.")


def _apply(txn: Transaction, handles: dict[str, lmdb._Database], changes: Changes) -> None:
    for name, pairs in changes.items():
        for key, value in pairs.items():
            if value is None:
                txn.delete(key, db=handles[name])
            else:
                txn.put(key, value, db=handles[name])


def _require_permission(folder: Path) -> None:
    if not (os.access(folder, os.W_OK) and os.access(folder / "data.mdb", os.W_OK)):
        raise StoreBusy(f"{folder} may not be written by this user. Change its permissions, or only read it.")


def _create(folder: Path, wait_s: float) -> None:
    # Made beside and renamed, so that an empty or half-written data.mdb always means damage.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _writer_lock(folder, wait_s):
            if (folder / "data.mdb").exists():
                return
            fresh = folder / ".tamis-new"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            lmdb.open(str(fresh), map_size=1 << 20, max_dbs=MAX_TABLES).close()
            os.replace(fresh / "data.mdb", folder / "data.mdb")
            shutil.rmtree(fresh, ignore_errors=True)
    except (OSError, lmdb.Error) as e:
        raise StoreBusy(f"{folder} could not be created ({e}). Check the disk space and permissions.") from e


def _problems(folder: Path, wait_s: float) -> list[str]:
    check = cast(Callable[[str], list[str]], verify)
    if os.access(folder, os.W_OK):
        try:
            with _writer_lock(folder, min(wait_s, CHECK_WAIT_S)):
                return check(str(folder))
        except StoreBusy:
            pass
    # Writers cannot be kept out, so pages may change while they are walked: only a fault that stays is damage.
    for _ in range(CHECK_TRIES - 1):
        if not check(str(folder)):
            return []
    return check(str(folder))


@contextmanager
def _writer_lock(folder: Path, wait_s: float) -> Iterator[None]:
    """Hold the folder's writer lock; LMDB's own would wait for a stopped process for ever. Freed at process death."""
    if sys.platform == "win32":
        yield
        return
    try:
        handle = os.open(folder / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as e:
        raise StoreBusy(f"{folder} cannot be locked for writing ({e}). Check its permissions and disk space.") from e
    try:
        end = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise StoreBusy(
                        f"{folder} is being written by another process, for {wait_s:g} s now. Stop it, or wait."
                    ) from None
                time.sleep(0.002)
        yield
    finally:
        os.close(handle)
