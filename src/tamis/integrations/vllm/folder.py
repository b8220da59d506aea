"""Named tensors of documents in a folder that several processes share: a file is whole, or not there.

A file is written under a temporary name, forced to the disk, then renamed. Its first HEADER_BYTES are a safetensors
header padded with blanks; the metadata names the format, the address, the part of the model and a checksum over header
and data. Whoever makes room holds the folder's lock for as long as it takes to count and to delete; a temporary file
has its final size from the start and is locked while it is written, so that what it takes counts, and what a killed
process left is told from what is being written. Knows bytes and tensors, not keys and values.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from itertools import count
from pathlib import Path
from typing import IO, Any

import torch

from tamis.cache.keys import DocumentKey
from tamis.cache.tiers.disk import HEADER_BYTES
from tamis.core.dtypes import IN_FILES, name_of
from tamis.core.errors import InvalidInput, NotCached, PoolFull, StoreDamaged
from tamis.core.log import logger

FORMAT = "tamis-shelf"
VERSION = 1
SUFFIX, TEMPORARY, PIN = ".safetensors", ".tmp", ".pin"
_LENGTH = struct.Struct("<Q")
_TORCH: dict[str, torch.dtype] = {said: getattr(torch, name) for name, said in IN_FILES.items()}
_numbers = count()
log = logger("vllm")


@dataclass(frozen=True)
class Header:
    """What a file says about itself. `notes` are the writer's own words; tensors: name to (dtype, shape), in order."""

    namespace: str
    digest: bytes
    n_tokens: int
    notes: Mapping[str, str]
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    checksum: int
    size_bytes: int


@dataclass(frozen=True)
class Listed:
    """A document in the folder: all parts of it together."""

    namespace: str
    digest: bytes
    n_tokens: int
    size_bytes: int
    pinned: bool
    whole: bool


class SharedFolder:
    """Documents of one model, at most budget_bytes together with those of other models below `root`.

    part, parts   which share of the model's layers and heads this process holds, of how many: each writes its own file,
                  and a document is there when all of them are
    The least recently read documents make way, pinned ones never. Safe to use from many threads and processes.
    """

    def __init__(self, root: Path, fingerprint: bytes, *, budget_bytes: int, part: int = 0, parts: int = 1) -> None:
        if budget_bytes <= HEADER_BYTES:
            raise InvalidInput(f"a folder of {budget_bytes} bytes; a file's header alone takes {HEADER_BYTES}.")
        if not 0 <= part < parts:
            raise InvalidInput(f"part {part} of {parts}; allowed are 0 to {parts - 1}.")
        self.root, self.fingerprint, self.budget_bytes = root, fingerprint, budget_bytes
        self.part, self.parts = part, parts
        self.folder = root / fingerprint.hex()
        self.folder.mkdir(parents=True, exist_ok=True)

    def has(self, key: DocumentKey) -> bool:
        """Whether every part's file is there. What is in them is verified when they are read."""
        try:
            return all((self.folder / self._file(key, part)).exists() for part in range(self.parts))
        except OSError as e:  # the folder may not be entered, or its disk is gone
            log.warning("%s counts as missing: %s", key, e)
            return False

    def write(
        self, key: DocumentKey, n_tokens: int, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]
    ) -> None:
        """Store this part of a document. Raises PoolFull if pinned documents and running writes leave no room."""
        # the widest first, so that every tensor is aligned without gaps, which the format does not allow
        ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        size = HEADER_BYTES + sum(t.nbytes for t in ordered.values())
        path, file = self._claim(key, size)
        try:
            with file:
                data = [_bytes(t) for t in ordered.values()]
                text = self._text(key, n_tokens, notes, ordered)
                checksum = zlib.crc32(_packed(text))
                for piece in data:
                    checksum = zlib.crc32(piece, checksum)
                file.write(_packed(text, checksum))
                for piece in data:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
                os.replace(path, self.folder / self._file(key, self.part))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        _sync(self.folder)

    def header(self, key: DocumentKey) -> Header:
        """Of this part's file, its data unread. Raises NotCached, or StoreDamaged (and the file is gone)."""
        with self._opened(key) as (_, header):
            return header

    def read(self, key: DocumentKey) -> tuple[Header, dict[str, torch.Tensor]]:
        """This part, every byte verified. Raises NotCached, or StoreDamaged (and the file is gone)."""
        with self._opened(key) as (file, header):
            data = torch.empty(header.size_bytes - HEADER_BYTES, dtype=torch.uint8)
            view = data.numpy().data
            got = file.readinto(view)
            file.seek(0)
            text = _unpacked(file.read(HEADER_BYTES))[0]
            if got != len(view) or zlib.crc32(view, zlib.crc32(_packed(text))) != header.checksum:
                raise StoreDamaged("its bytes do not match their checksum.")
            with suppress(OSError):
                os.utime(file.fileno())  # the least recently read makes way
        found, at = {}, 0
        for name, (dtype, shape) in header.tensors.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            found[name] = data[at : at + size].view(dtype).view(shape)
            at += size
        return header, found

    def drop(self, key: DocumentKey) -> bool:
        """Delete every part's file, and the pin; whether there was one."""
        found = False
        for path in [*self.folder.glob(f"{key.name}*{SUFFIX}"), self._pin(key)]:
            with suppress(FileNotFoundError):
                path.unlink()
                found = True
        return found

    def pin(self, key: DocumentKey) -> None:
        """Never delete it to make room. Raises NotCached if it is not there."""
        with self._locked():
            if not self.has(key):
                raise NotCached(f"{key} is not in {self.folder}; compute and save it before pinning it.")
            self._pin(key).touch()

    def unpin(self, key: DocumentKey) -> bool:
        """Let it make way again; whether it was pinned."""
        try:
            self._pin(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def pinned(self, key: DocumentKey) -> bool:
        """Whether it is never deleted to make room."""
        return self._pin(key).exists()

    def documents(self) -> list[Listed]:
        """This model's documents, the oldest first. Unreadable files are left out."""
        found: dict[str, list[tuple[Header, int]]] = {}
        for path in _by_age(self.folder.glob(f"*{SUFFIX}")):
            try:
                with open(path, "rb", buffering=0) as file:
                    header, size = self._checked(file), os.fstat(file.fileno()).st_size
            except (OSError, StoreDamaged):
                continue
            found.setdefault(_document(path), []).append((header, size))
        return [
            Listed(
                rows[0][0].namespace,
                rows[0][0].digest,
                rows[0][0].n_tokens,
                sum(size for _, size in rows),
                (self.folder / f"{name}{PIN}").exists(),
                all((self.folder / self._name(name, part)).exists() for part in range(self.parts)),
            )
            for name, rows in found.items()
        ]

    def used_bytes(self) -> int:
        """Of all models' files below the root, those that are being written included."""
        return sum(size for _, size, _ in _files(self.root))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The folder's lock, of all processes and threads."""
        with open(self.root / "shelf.lock", "ab") as file:
            _flock(file)
            yield

    def _claim(self, key: DocumentKey, size: int) -> tuple[Path, IO[bytes]]:
        path = self.folder / f"{self._file(key, self.part)}.{os.getpid()}-{next(_numbers)}{TEMPORARY}"
        self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have cleared the directory meanwhile
        with self._locked():
            self._make_room(key, size)
            file = open(path, "xb")  # noqa: SIM115 - its writer closes it
            try:
                file.truncate(size)
                _flock(file)
            except BaseException:
                file.close()
                path.unlink(missing_ok=True)
                raise
        return path, file

    def _make_room(self, key: DocumentKey, size: int) -> None:
        """Delete left temporary files and the oldest documents until `size` fits. Called with the lock."""
        files = [f for f in _files(self.root) if f[0].suffix != TEMPORARY or not _left(f[0])]
        used = sum(s for _, s, _ in files)
        groups: dict[tuple[Path, str], list[tuple[Path, int, int]]] = {}
        for row in files:
            if row[0].suffix == SUFFIX:
                groups.setdefault((row[0].parent, _document(row[0])), []).append(row)
        mine = (self.folder, key.name)
        free = [g for g in groups if g != mine and not (g[0] / f"{g[1]}{PIN}").exists()]
        if used - sum(s for g in free for _, s, _ in groups[g]) + size > self.budget_bytes:
            raise PoolFull(
                f"{key} takes {size} bytes; pinned documents and those being written leave too little of the "
                f"{self.budget_bytes} of {self.root}. Unpin some, or give the shelf more disk_bytes."
            )
        for group in sorted(free, key=lambda g: max(age for _, _, age in groups[g])):
            if used + size <= self.budget_bytes:
                return
            for path, taken, _ in groups[group]:
                path.unlink(missing_ok=True)
                used -= taken

    @contextmanager
    def _opened(self, key: DocumentKey) -> Iterator[tuple[FileIO, Header]]:
        path = self.folder / self._file(key, self.part)
        try:
            with open(path, "rb", buffering=0) as file:
                header = self._checked(file)
                if (header.namespace, header.digest) != (key.namespace, key.digest):
                    raise StoreDamaged("it belongs to another document.")
                yield file, header
        except FileNotFoundError:
            raise NotCached(f"{key} is not in {self.folder}; it has to be computed.") from None
        except StoreDamaged as e:
            try:
                path.unlink(missing_ok=True)
                done = "is deleted"
            except OSError as why:
                done = f"cannot be deleted ({why}): do that by hand"
            log.warning("%s %s, its document is to be computed again: %s", path.name, done, e)
            raise StoreDamaged(f"{path} cannot be used, and {done}: {e} Compute its document again.") from e
        except OSError as e:
            raise StoreDamaged(f"{path} cannot be read ({e}). Compute its document again.") from e

    def _checked(self, file: FileIO) -> Header:
        """What the header says. Raises StoreDamaged if it is cut, foreign, or of another version, model or part."""
        try:
            text, checksum = _unpacked(file.read(HEADER_BYTES))
            meta = dict(text.pop("__metadata__"))
            said = {name: meta.pop(name) for name in ("format", "version", "fingerprint", "part", "parts")}
            tensors = {n: (_TORCH[t["dtype"]], tuple(map(int, t["shape"]))) for n, t in text.items()}
            size = HEADER_BYTES + sum(torch.Size(s).numel() * d.itemsize for d, s in tensors.values())
            namespace, digest = str(meta.pop("namespace")), bytes.fromhex(meta.pop("digest"))
            header = Header(namespace, digest, int(meta.pop("tokens")), meta, tensors, checksum, size)
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as e:
            raise StoreDamaged(f"its header cannot be read ({type(e).__name__}: {e}).") from e
        wanted = {"format": FORMAT, "version": str(VERSION), "fingerprint": self.fingerprint.hex()}
        if wrong := {n: (said[n], v) for n, v in wanted.items() if said[n] != v}:
            raise StoreDamaged(f"it has other {', '.join(f'{n} {a} (not {b})' for n, (a, b) in wrong.items())}.")
        if int(said["parts"]) != self.parts:
            raise StoreDamaged(f"it is of a model in {said['parts']} parts, this one has {self.parts}.")
        if os.fstat(file.fileno()).st_size != size:
            raise StoreDamaged(f"it has {os.fstat(file.fileno()).st_size} bytes, {size} were written.")
        return header

    def _text(
        self, key: DocumentKey, n_tokens: int, notes: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        meta = {
            "format": FORMAT,
            "version": str(VERSION),
            "fingerprint": self.fingerprint.hex(),
            "part": str(self.part),
            "parts": str(self.parts),
            "namespace": key.namespace,
            "digest": key.digest.hex(),
            "tokens": str(n_tokens),
            **notes,
        }
        text: dict[str, Any] = {"__metadata__": meta}
        at = 0
        for name, t in tensors.items():
            kind = IN_FILES[name_of(t.dtype)]
            text[name] = {"dtype": kind, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
            at += t.nbytes
        return text

    def _file(self, key: DocumentKey, part: int) -> str:
        return self._name(key.name, part)

    def _name(self, document: str, part: int) -> str:
        return f"{document}.{part}of{self.parts}{SUFFIX}"

    def _pin(self, key: DocumentKey) -> Path:
        return self.folder / f"{key.name}{PIN}"


def _packed(text: Mapping[str, Any], checksum: int = 0) -> bytes:
    """The file's first HEADER_BYTES; the checksum covers them with a checksum of 0."""
    full = {**text, "__metadata__": {**text["__metadata__"], "crc32": f"{checksum:08x}"}}
    packed, room = json.dumps(full, separators=(",", ":")).encode(), HEADER_BYTES - _LENGTH.size
    if len(packed) > room:
        raise InvalidInput(f"a header of {len(packed)} bytes, {room} fit. Give the namespace a shorter name.")
    return _LENGTH.pack(room) + packed.ljust(room)


def _unpacked(data: bytes) -> tuple[dict[str, Any], int]:
    """The header's text without its checksum, and the checksum. Raises ValueError unless it was written so."""
    text = json.loads(data[_LENGTH.size :])
    checksum = int(text["__metadata__"].pop("crc32"), 16)
    if _packed(text, checksum) != data:
        raise ValueError("it is not as it was written")
    return text, checksum


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _document(path: Path) -> str:
    return path.name.split(".", 1)[0]


def _files(root: Path) -> list[tuple[Path, int, int]]:
    """(path, bytes, age) of every document's and temporary file below the root."""
    found = []
    for path in root.glob("*/*"):
        if path.suffix in (SUFFIX, TEMPORARY):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append((path, status.st_size, status.st_mtime_ns))
    return found


def _by_age(paths: Iterator[Path]) -> Sequence[Path]:
    def age(path: Path) -> int:
        try:
            return path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    return sorted(paths, key=age)


def _left(path: Path) -> bool:
    """Whether the process that wrote a temporary file is gone; if so, so is the file now."""
    try:
        with open(path, "rb") as file:
            _flock(file, wait=False)
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    return True


def _flock(file: IO[bytes], *, wait: bool = True) -> None:
    """Lock an open file until it is closed. Raises BlockingIOError if another has it and `wait` is off.

    Where there are no such locks, nobody is kept out and nothing counts as left.
    """
    try:
        import fcntl
    except ImportError:
        if not wait:
            raise BlockingIOError from None
        return
    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
