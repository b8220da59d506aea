"""A collection of documents that is kept: files in, passages out. Knows paths and passages, not how they are ranked."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tamis.core.errors import DocumentUnreadable, InvalidInput, NothingFound
from tamis.core.table import MemoryTables, TableFile, Tables, close_tables, open_tables
from tamis.corpus.find import Skipped, absolute, find_files, fixed_part
from tamis.corpus.lock import writer_lock
from tamis.corpus.passages import CUTTER_VERSION, DEFAULT_TARGET_TOKENS, Passage, cut
from tamis.corpus.read import READER_VERSION, check_suffix, parse
from tamis.corpus.records import (
    PASSAGES,
    Batch,
    FileRecord,
    check_format,
    file_records,
    passage_record,
    read_passage,
    read_record,
)
from tamis.corpus.retrieve import Hit, Retriever, fingerprint, open_retriever

CLOCK_STEP_NS = 100_000_000
"""A file written this shortly before it was read may change again within one step of its clock: compare its bytes."""

REASONS_SHOWN = 5

Progress = Callable[[int, int, str], None]
"""(files done, files in all, path of the file just done)"""


@dataclass(frozen=True)
class AddReport:
    """What `Corpus.add_files` did.

    `sources`: every given file that the corpus now answers from. `read`: those read and cut this time. `skipped`:
    files without passages, with reasons. `ignored`: suffix → files passed over in folders. Passages are counted once
    however many files share them.
    """

    sources: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    ignored: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    passages_new: int = 0
    passages_removed: int = 0

    @property
    def unchanged(self) -> int:
        """How many files were as they are kept already."""
        return len(self.sources) - len(self.read)


class Corpus:
    """Files and their passages, kept in the folder `path` (None: in memory, gone with the object).

    A source is a file's absolute path. A passage that stands in several files is kept once and knows all of them.
    """

    def __init__(self, path: Path | str | None = None, *, readonly: bool = False) -> None:
        self.path = None if path is None else absolute(path)
        self._tables: Tables
        if self.path is None:
            self._tables = MemoryTables()
            self._lock: Any = nullcontext
        else:
            tables: TableFile = open_tables(self.path, readonly=readonly)
            self._tables = tables
            self._lock = partial(writer_lock, self.path)
        self._retrievers: dict[tuple[str, str], tuple[str, Retriever]] = {}
        check_format(self._tables)

    def add_files(
        self,
        paths: Sequence[Path | str],
        *,
        count: Callable[[str], int],
        target_tokens: int = DEFAULT_TARGET_TOKENS,
        count_name: str = "",
        on_progress: Progress | None = None,
    ) -> AddReport:
        """Reads, cuts and keeps the files behind `paths` (files, folders, globs); unchanged ones are left as they are.

        A file is unchanged when its size and time, else its bytes, are those kept, and it was cut in the same way:
        `target_tokens`, `count_name` (name what stands behind `count`, for example the tokenizer's hash) and the
        versions of reader and cutter. Finished files are committed every quarter of a second and on any exception,
        so an interrupted call can be repeated and goes on where it stopped.
        Raises `InvalidInput` for a path that does not exist, `NothingFound` when no given file can be read.
        """
        _as_list(paths)
        found = find_files(paths)
        cutting = f"r{READER_VERSION} c{CUTTER_VERSION} t{target_tokens} {count_name}"
        batch = Batch(self._tables, self._lock)
        skipped = list(found.skipped)
        sources: list[str] = []
        read: list[str] = []
        warnings: list[str] = []
        try:
            for done, file in enumerate(found.files, 1):
                record, changed = self._add(
                    file, cutting, batch, partial(cut, count=count, target_tokens=target_tokens)
                )
                if record.problem:
                    skipped.append(Skipped(record.source, record.problem))
                else:
                    sources.append(record.source)
                    warnings += record.warnings
                    if changed:
                        read.append(record.source)
                batch.commit_if_due()
                if on_progress is not None:
                    on_progress(done, len(found.files), record.source)
        finally:
            batch.commit()
        report = AddReport(
            sources=tuple(sources),
            read=tuple(read),
            skipped=tuple(skipped),
            ignored=found.ignored,
            warnings=tuple(warnings),
            passages_new=batch.passages_new,
            passages_removed=batch.passages_removed,
        )
        if not sources:
            raise NothingFound(_nothing(paths, report))
        return report

    def sync(
        self,
        paths: Sequence[Path | str],
        *,
        count: Callable[[str], int],
        target_tokens: int = DEFAULT_TARGET_TOKENS,
        count_name: str = "",
        on_progress: Progress | None = None,
    ) -> AddReport:
        """`prune`, then `add_files`: afterwards the corpus holds of `paths` what is there now."""
        removed = self.prune(paths)
        there = [p for p in paths if absolute(p).exists() or fixed_part(p) != absolute(p)]
        if not there:
            raise NothingFound(f"none of {_shown(paths)} exists. Give files, folders or globs.")
        report = self.add_files(
            there, count=count, target_tokens=target_tokens, count_name=count_name, on_progress=on_progress
        )
        return replace(
            report,
            removed=removed.removed,
            passages_removed=report.passages_removed + removed.passages_removed,
        )

    def prune(self, paths: Sequence[Path | str]) -> AddReport:
        """Forgets files under `paths` that do not exist any more. Of a glob, the folder before its first `*` counts."""
        _as_list(paths)
        tops = [fixed_part(path) for path in paths]
        gone = [
            record.source
            for record in file_records(self._tables)
            if any(Path(record.source).is_relative_to(top) for top in tops) and not Path(record.source).exists()
        ]
        batch = Batch(self._tables, self._lock)
        for source in gone:
            batch.remove(source)
        batch.commit()
        return AddReport(removed=tuple(gone), passages_removed=batch.passages_removed)

    def remove(self, path: Path | str) -> int:
        """Forgets one file, or all files in one folder, and returns how many. The files themselves stay."""
        top = absolute(path)
        known = [r.source for r in file_records(self._tables) if Path(r.source).is_relative_to(top)]
        batch = Batch(self._tables, self._lock)
        for source in known:
            batch.remove(source)
        batch.commit()
        return len(known)

    def sources(self) -> list[str]:
        """The files that have passages, in order of their paths."""
        return [record.source for record in file_records(self._tables) if record.passages]

    def places(self, passage_id: str) -> list[Passage]:
        """The passage once per file it stands in, in order of their paths; empty when it is not kept."""
        record = read_passage(self._tables, _key(passage_id))
        return [] if record is None else [record.passage(source) for source in sorted(record.places)]

    def get(self, passage_id: str, *, within: Collection[str] | None = None) -> Passage | None:
        """The passage with that id (32 hex digits), as found in the first of its files (that is in `within`)."""
        return next((p for p in self.places(passage_id) if within is None or p.source in within), None)

    def passages(self, *, within: Collection[str] | None = None) -> Iterator[Passage]:
        """Every passage once, in order of ids; with `within`, those that stand in one of these sources."""
        for _, value in list(self._tables.items(PASSAGES)):
            record = passage_record(value)
            source = min((s for s in record.places if within is None or s in within), default=None)
            if source is not None:
                yield record.passage(source)

    def ids(self, *, within: Collection[str] | None = None) -> list[str]:
        """The ids of `passages(within=within)` in the same order, without reading them."""
        if within is None:
            return [key.hex() for key in self._tables.keys(PASSAGES)]
        records = (read_record(self._tables, source) for source in within)
        return sorted({passage for record in records if record is not None for passage in record.passages})

    def search(
        self,
        question: str,
        k: int = 8,
        *,
        within: Collection[str] | None = None,
        retriever: str = "bm25",
        **options: Any,
    ) -> list[Hit]:
        """The `k` best passages for `question`, best first; from the sources in `within` alone, if given.

        Empty when nothing matches. Raises `UnknownName` for a retriever that does not exist, `Unavailable` for one
        that is not installed, `InvalidInput` for `k` below 1. `options` go to the retriever (`model=` for embedding).
        """
        if k < 1:
            raise InvalidInput(f"k is {k}; ask for 1 passage or more.")
        now = fingerprint(self.ids())
        name = (retriever, repr(sorted(options.items())))
        kept = self._retrievers.get(name)
        if kept is None or kept[0] != now:
            kept = self._retrievers[name] = (now, open_retriever(retriever, self, folder=self.path, **options))
        sources = None if within is None else frozenset(str(absolute(source)) for source in within)
        return kept[1].search(question, k, within=sources)

    def close(self) -> None:
        """Releases the store; a corpus in memory is left as it is."""
        if self.path is not None:
            close_tables(self.path)

    def __len__(self) -> int:
        """The number of different passages."""
        return len(self._tables.keys(PASSAGES))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _add(
        self, file: Path, cutting: str, batch: Batch, cutter: Callable[..., list[Passage]]
    ) -> tuple[FileRecord, bool]:
        """(what is now kept of `file`, whether it had to be read and cut)."""
        source = str(file)
        old = read_record(self._tables, source)
        if old is not None and old.cutting != cutting:
            old = None
        try:
            check_suffix(file)
            seen_ns = time.time_ns()
            info = file.stat()
            same = old is not None and (old.size, old.mtime_ns) == (info.st_size, info.st_mtime_ns)
            if old is not None and same and old.mtime_ns + CLOCK_STEP_NS < old.seen_ns:
                return old, False
            if not file.is_file():
                raise DocumentUnreadable(f"{file} is not a regular file. Give files, folders or globs.")
            data = file.read_bytes()
        except DocumentUnreadable as e:
            return FileRecord(source, 0, 0, 0, "", cutting, problem=str(e)), False
        except OSError as e:
            # What was kept stays: a file that cannot be opened just now has not changed.
            return FileRecord(source, 0, 0, 0, "", cutting, problem=f"{file} cannot be opened ({e.strerror})."), False
        digest = blake2b(data, digest_size=16).hexdigest()
        record = FileRecord(source, info.st_size, info.st_mtime_ns, seen_ns, digest, cutting)
        if old is not None and old.digest == digest:
            record = replace(record, passages=old.passages, problem=old.problem, warnings=old.warnings)
            batch.touch(record)
            return record, False
        passages: list[Passage] = []
        try:
            text = parse(file, data)
            passages = cutter(text)
            record = replace(record, passages=tuple(dict.fromkeys(p.id for p in passages)), warnings=text.warnings)
        except DocumentUnreadable as e:
            record = replace(record, problem=str(e))
        batch.put(record, passages)
        return record, True


def _as_list(paths: object) -> None:
    if isinstance(paths, (str, Path)):
        raise InvalidInput(f"paths is the single path {str(paths)!r}; give a list: [{str(paths)!r}].")


def _key(passage_id: str) -> bytes:
    try:
        key = bytes.fromhex(passage_id)
    except ValueError:
        key = b""
    if len(key) != 16:
        raise InvalidInput(f"{passage_id!r} is no passage id; one is 32 hex digits, as `Passage.id` gives.")
    return key


def _shown(paths: Sequence[Path | str]) -> str:
    return ", ".join(str(p) for p in paths[:REASONS_SHOWN]) or "no paths at all"


def _nothing(paths: Sequence[Path | str], report: AddReport) -> str:
    reasons = [s.reason for s in report.skipped[:REASONS_SHOWN]]
    if len(report.skipped) > REASONS_SHOWN:
        reasons.append(f"{len(report.skipped) - REASONS_SHOWN} more files could not be read.")
    if report.ignored:
        reasons.append("Passed over: " + ", ".join(f"{n} {suffix}" for suffix, n in report.ignored.items()) + ".")
    return " ".join([f"no readable document in {_shown(paths)}.", *reasons])
