"""Which files a list of paths, folders and globs means. Looks at names and kinds, never inside a file."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tamis.core.errors import InvalidInput
from tamis.corpus.read import SUFFIXES

STORE_SUFFIX = ".tamis"


@dataclass(frozen=True)
class Skipped:
    """A file that was met and not used, and why (one sentence for a person)."""

    path: str
    reason: str


@dataclass(frozen=True)
class Found:
    """`files`: absolute, without repeats, in a stable order. `ignored`: suffix → files passed over in folders."""

    files: tuple[Path, ...]
    ignored: Mapping[str, int] = field(default_factory=dict)
    skipped: tuple[Skipped, ...] = ()


def find_files(paths: Sequence[Path | str]) -> Found:
    """The files behind `paths`: files as named, folders walked, globs (`docs/**/*.md`) expanded.

    Order: as given, and sorted by name within a folder or glob. Hidden files and folders and Tamis stores
    (`*.tamis`) are passed over; a folder reached twice through links is walked once. A file named outright is kept
    whatever its suffix (reading it says what is wrong); in folders and globs other suffixes are only counted.
    Raises `InvalidInput` for a path that does not exist or a glob without a match.
    """
    files: dict[Path, None] = {}
    ignored: Counter[str] = Counter()
    skipped: list[Skipped] = []
    for given in paths:
        path = absolute(given)
        if path.is_dir():
            found: Iterator[Path] = _walk(path, skipped)
        elif path.exists():
            files[path] = None
            continue
        else:
            found = iter(_matches(given, path))
        for file in found:
            if file.suffix.lower() in SUFFIXES:
                files[file] = None
            else:
                ignored[file.suffix.lower() or "(none)"] += 1
    return Found(tuple(files), dict(sorted(ignored.items())), tuple(skipped))


def absolute(path: Path | str) -> Path:
    """`path` with `~` and `..` resolved and links kept, so that one file has one name from any folder."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def fixed_part(path: Path | str) -> Path:
    """The folder or file that `path` names, or for a glob the part before its first pattern."""
    whole = absolute(path)
    if whole.exists() or not glob.has_magic(str(path)):
        return whole
    parts = whole.parts
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:first])


def _matches(given: Path | str, path: Path) -> list[Path]:
    if not glob.has_magic(str(given)):
        raise InvalidInput(f"{given} does not exist. Give files, folders or globs such as 'docs/**/*.md'.")
    matches = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
    files = [p for p in matches if p.is_file()]
    if not files:
        raise InvalidInput(f"no file matches {str(given)!r}. '**' matches folders of any depth, '*' one name.")
    return files


def _walk(top: Path, skipped: list[Skipped]) -> Iterator[Path]:
    seen: set[tuple[int, int]] = set()
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            info = folder.stat()
            entries = sorted(os.scandir(folder), key=lambda e: e.name)
        except OSError as e:
            skipped.append(Skipped(str(folder), f"the folder cannot be listed ({e.strerror})"))
            continue
        if (info.st_dev, info.st_ino) in seen:
            continue
        seen.add((info.st_dev, info.st_ino))
        shown = [e for e in entries if not e.name.startswith(".")]
        yield from (Path(e.path) for e in shown if e.is_file())
        # reversed, because the last one waiting is walked first
        waiting += [Path(e.path) for e in reversed(shown) if e.is_dir() and not e.name.endswith(STORE_SUFFIX)]
