"""Records on disk or in memory, keyed by document: batched, checked on the way out, bound to one spec.

Knows records and the spec they share, not how they came about. Many readers and one writer at a time, across processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tamis.core.errors import InvalidInput, NothingFound, StoreDamaged, StoreMismatch, TamisError
from tamis.core.table import REBUILD, Changes, MemoryTables, Tables, close_tables, delete_tables, open_tables
from tamis.index.record import HEADER_BYTES, Record, dump, load
from tamis.index.spec import IndexSpec

STORE_FORMAT = 1
RECORDS = "index.records"
META = "index.meta"
SPEC_KEY = b"spec"


@dataclass(frozen=True)
class Problem:
    """One record that cannot be used, and why."""

    document_id: bytes
    reason: str


@dataclass(frozen=True)
class StoreStats:
    """What a store holds. Sizes in bytes; a record is its header and its payload."""

    documents: int
    tokens: int
    record_bytes: int
    payload_bytes: int
    bytes_per_token: float
    bytes_per_layer_head_1024_tokens: float


class RecordStore:
    """The records of one index. Made by `RecordStore.open`; close it, or use it in a `with` block."""

    def __init__(self, tables: Tables, spec: IndexSpec) -> None:
        self._tables = tables
        self.spec = spec
        self._digest = spec.digest
        self._closed = False

    @classmethod
    def open(
        cls,
        path: Path | str | None,
        spec: IndexSpec | None,
        *,
        create: bool = True,
        readonly: bool = False,
        rebuild: bool = False,
    ) -> RecordStore:
        """Open the store at `path`, a folder; None keeps it in memory.

        spec      what the records must have been made with; None takes whatever the store says
        create    make the store if there is none
        readonly  only read, and never create
        rebuild   if the store is damaged or has another spec, drop its records instead of raising. A damaged file
                  is deleted whole.

        Raises NothingFound, StoreMismatch (the message names every differing field), StoreDamaged or StoreBusy.
        """
        if path is None:
            if spec is None:
                raise InvalidInput("a store in memory needs a spec. Give one.")
            return cls(MemoryTables(), spec)
        if (readonly or not create) and not (Path(path) / "data.mdb").exists():
            raise NothingFound(f"there is no store at {path}. Give the path of one, or run `tamis index` first.")
        if rebuild and readonly:
            raise InvalidInput("rebuild changes the store and readonly forbids it. Choose one.")
        try:
            tables = open_tables(path, readonly=readonly)
        except StoreDamaged:
            if not rebuild:
                raise
            delete_tables(path)
            tables = open_tables(path)
        try:
            return cls(tables, _agreed_spec(tables, spec, may_write=create and not readonly, rebuild=rebuild))
        except BaseException:
            close_tables(path)
            raise

    def has(self, ids: Iterable[bytes]) -> list[bool]:
        """For each document id, whether a record is stored under it (not whether it is sound)."""
        return [v is not None for v in self._tables.read_many(RECORDS, ids)]

    def get(self, ids: Iterable[bytes]) -> list[Record | None]:
        """The record of each document, or None, from one snapshot.

        Raises StoreDamaged if one cannot be read or belongs to another document, StoreMismatch if to another spec.
        """
        ids = list(ids)
        found = self._tables.read_many(RECORDS, ids)
        return [None if data is None else self._checked(key, data) for key, data in zip(ids, found, strict=True)]

    def put(self, records: Sequence[Record]) -> None:
        """Store all records in one commit, durable on return; a document that is already there is replaced."""
        changes: dict[bytes, bytes | None] = {}
        for record in records:
            if record.spec_digest != self._digest or not self._fits(record):
                raise StoreMismatch(
                    f"record {record.document_id.hex()} was made with another spec than this store's. "
                    "Observe the document again with the store's spec."
                )
            changes[record.document_id] = dump(record)
        if changes:
            self._tables.write({RECORDS: changes})

    def remove(self, ids: Iterable[bytes]) -> None:
        """Forget documents in one commit; unknown ids are ignored."""
        gone: dict[bytes, bytes | None] = dict.fromkeys(ids)
        if gone:
            self._tables.write({RECORDS: gone})

    def ids(self) -> list[bytes]:
        """All document ids, in byte order."""
        return self._tables.keys(RECORDS)

    def verify(self) -> list[Problem]:
        """Read every record through: its checksum, that it lies under its own key, that it fits the spec."""
        problems = []
        for key, data in self._tables.items(RECORDS):
            try:
                self._checked(key, data).bits()
            except TamisError as e:
                problems.append(Problem(key, str(e)))
        return problems

    def stats(self) -> StoreStats:
        """Count documents, tokens and bytes. Reads every record; raises StoreDamaged at the first bad one."""
        documents = tokens = size = 0
        for key, data in self._tables.items(RECORDS):
            documents, tokens, size = documents + 1, tokens + self._checked(key, data).n_tokens, size + len(data)
        per_token = size / tokens if tokens else 0.0
        return StoreStats(
            documents=documents,
            tokens=tokens,
            record_bytes=size,
            payload_bytes=size - documents * HEADER_BYTES,
            bytes_per_token=per_token,
            bytes_per_layer_head_1024_tokens=per_token * 1024 / (self.spec.n_layers * self.spec.n_heads),
        )

    def close(self) -> None:
        """Release the files, once; the store must not be used afterwards."""
        if self._tables.path is not None and not self._closed:
            close_tables(self._tables.path)
        self._closed = True

    def __len__(self) -> int:
        return len(self.ids())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _checked(self, key: bytes, data: bytes) -> Record:
        record = load(data)
        if record.document_id != key:
            raise StoreDamaged(
                f"the record under {key.hex()} is that of {record.document_id.hex()}. To make it anew, {REBUILD}."
            )
        if record.spec_digest != self._digest or not self._fits(record):
            raise StoreMismatch(f"record {key.hex()} was made with another spec than the store's. {_REMEDY}")
        return record

    def _fits(self, record: Record) -> bool:
        spec = self.spec
        return (record.n_layers, record.n_heads, record.tile) == (spec.n_layers, spec.n_heads, spec.tile)


_REMEDY = f"Use what the store was made with, give another folder, or {REBUILD}."


def _agreed_spec(tables: Tables, spec: IndexSpec | None, *, may_write: bool, rebuild: bool) -> IndexSpec:
    """The stored spec if it equals `spec`; `spec`, written down, if none is stored yet or the old one may go."""
    stored = tables.read(META, SPEC_KEY)
    if stored is None:
        if tables.keys(RECORDS) and not rebuild:
            raise StoreDamaged(f"{tables.path} holds records but not what they were made with. {_REMEDY}")
        if spec is None or not may_write:
            raise NothingFound(f"{tables.path} holds no index yet. Run `tamis index` first.")
        if rebuild:
            _forget(tables)
        stored = tables.add(META, SPEC_KEY, _spec_bytes(spec))
    try:
        held = _read_spec(stored, tables.path)
    except StoreDamaged:
        if not rebuild or spec is None:
            raise
        held = None
    if spec is None or held == spec:
        assert held is not None, "a spec that cannot be read was raised above"
        return held
    if rebuild:
        _forget(tables, _spec_bytes(spec))
        return spec
    differences = "; ".join(held.difference(spec)) if held is not None else "all of it"
    raise StoreMismatch(f"{tables.path} was made for something else (store against request): {differences}. {_REMEDY}")


def _forget(tables: Tables, spec: bytes | None = None) -> None:
    changes: Changes = {RECORDS: dict.fromkeys(tables.keys(RECORDS)), META: {SPEC_KEY: spec}}
    tables.write(changes)


def _spec_bytes(spec: IndexSpec) -> bytes:
    return json.dumps({"format": STORE_FORMAT, "spec": spec.as_dict()}, indent=1).encode()


def _read_spec(data: bytes, path: Any) -> IndexSpec:
    try:
        values = json.loads(data)
        version, spec = int(values["format"]), values["spec"]
        if version <= STORE_FORMAT:
            return IndexSpec.from_dict(spec)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise StoreDamaged(f"{path} does not say what it was made with ({e}). {_REMEDY}") from e
    raise StoreDamaged(
        f"{path} has format {version} and was written by a newer Tamis; this one reads up to {STORE_FORMAT}. "
        f"Update Tamis, or {REBUILD}."
    )
