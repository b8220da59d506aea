"""Documents as safetensors files in a folder of their own: whole, or not there.

A file is written under a temporary name, forced to the disk, then renamed: a process killed at any instant loses only
what it had not committed. Layout: a header of HEADER_BYTES (length, JSON padded with blanks), then `keys` and
`values` [layers, Hkv, n, D]. The metadata names the format, the address, the model's fingerprint and a checksum.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tamis.cache.document import Payload
from tamis.cache.keys import DOCUMENTS, PREFIXES, DocumentKey, PrefixKey
from tamis.cache.spec import KVSpec
from tamis.cache.tiers.base import Medium, Tier
from tamis.core.dtypes import IN_FILES
from tamis.core.errors import BrokenInvariant, InvalidInput, PoolFull, StoreBusy, StoreDamaged
from tamis.core.log import logger

if TYPE_CHECKING:
    import torch

FORMAT = "tamis-kv"
VERSION = 1
HEADER_BYTES = 4096  # a disk page: the tensors behind it are aligned, and a file's size needs no writing to be known
ASIDE = "aside"
_LENGTH = struct.Struct("<Q")
_NAME = re.compile(r"[0-9a-f]{32}(?:-(\d+))?\.safetensors")
_KINDS: dict[str, type[DocumentKey] | type[PrefixKey]] = {DOCUMENTS: DocumentKey, PREFIXES: PrefixKey}
log = logger("cache")
Key = DocumentKey | PrefixKey


@dataclass(frozen=True)
class Body:
    """One document's file. `copy` is above 0 while an older file of the same document is still being read."""

    key: Key
    n_tokens: int
    copy: int = 0

    @property
    def stem(self) -> str:
        """Its name without the suffix."""
        return f"{self.key.name}-{self.copy}" if self.copy else self.key.name

    @property
    def file(self) -> str:
        """Its final name."""
        return f"{self.stem}.safetensors"

    @property
    def temporary(self) -> str:
        """Its name while it is written."""
        return f"{self.stem}.tmp"


class Disk(Medium):
    """Files of one model in one folder, by one process at a time.

    Files with another fingerprint, shape or format version, and damaged ones, are moved to the folder `aside`, with a
    line in the log, and count as missing. They still count against the budget, and are the first to be deleted.
    """

    def __init__(self, folder: Path, spec: KVSpec, fingerprint: bytes, budget_bytes: int) -> None:
        if budget_bytes <= HEADER_BYTES:
            raise InvalidInput(f"a disk budget of {budget_bytes} bytes; a file's header alone takes {HEADER_BYTES}.")
        self.name = "disk"
        self.folder = folder
        self.spec = spec
        self.fingerprint = fingerprint
        self.budget_bytes = budget_bytes
        (folder / ASIDE).mkdir(parents=True, exist_ok=True)
        self._lock = _locked(folder)
        self._used = 0
        self._stems: set[str] = set()
        self._aside = {p: p.stat().st_size for p in sorted((folder / ASIDE).iterdir(), key=_age)}
        for path in folder.glob("*.tmp"):
            path.unlink()  # a process was killed while it wrote this; nobody was told that it was stored
        self._found = self._scan()
        self._trim(0)

    def bytes_of(self, n_tokens: int) -> int:
        """The file's size: header and tensors."""
        return HEADER_BYTES + n_tokens * self.spec.token_bytes

    @property
    def free_bytes(self) -> int:
        """What is not claimed; files set aside make way."""
        return self.budget_bytes - self._used

    def claim(self, key: Hashable, n_tokens: int) -> Body:
        """Count a document in. Raises PoolFull, or InvalidInput if the key is not of this folder's model."""
        if not isinstance(key, DocumentKey | PrefixKey) or key.fingerprint != self.fingerprint:
            raise InvalidInput(
                f"{key} cannot be kept in {self.folder}: it takes DocumentKey and PrefixKey of the model with "
                f"fingerprint {self.fingerprint.hex()}. Give each model a folder of its own."
            )
        size = self.bytes_of(n_tokens)
        if size > self.free_bytes:
            raise PoolFull(
                f"{key} takes {size} bytes and {self.free_bytes} of {self.budget_bytes} are free in {self.folder}. "
                "Evict some, or give the disk tier more bytes."
            )
        body = next(b for i in count() if (b := Body(key, n_tokens, i)).stem not in self._stems)
        for path in (self.folder / body.temporary, self.folder / body.file):
            if path in self._aside:  # it could not be deleted before, and must not be taken for what comes now
                path.unlink(missing_ok=True)
                del self._aside[path]
        self._trim(size)
        self._used += size
        self._stems.add(body.stem)
        return body

    def write(self, body: Body, payload: Payload) -> None:
        """Write and force to the disk, under the temporary name, then rename. Raises OSError."""
        self._require(body, payload)
        with open(self.folder / body.temporary, "wb") as file:
            file.write(bytes(HEADER_BYTES))
            checksum = 0
            for tensors in zip(*payload.pieces, strict=True):
                for layer in range(self.spec.n_layers):
                    checksum = _append(file, [t[layer] for t in tensors], self.spec.dtype, checksum)
            file.seek(0)
            file.write(self._header(body, checksum))
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.folder / body.temporary, self.folder / body.file)
        _sync_folder(self.folder)

    def settle(self, body: Body) -> None:
        """Nothing left to do: `write` is where a disk may take its time."""

    def read(self, body: Body, n_tokens: int) -> Payload:
        """Read the whole file and verify every byte of it. Raises StoreDamaged."""
        import torch

        path = self.folder / body.file
        data = torch.empty(n_tokens * self.spec.token_bytes, dtype=torch.uint8)
        view = data.numpy().data
        try:
            with open(path, "rb") as file:
                header = file.read(HEADER_BYTES)
                got = file.readinto(view)
                more = file.read(1)
        except OSError as e:
            raise StoreDamaged(f"{path} cannot be read ({e}); its document has to be computed again.") from e
        if got != len(view) or more or header != self._header(body, zlib.crc32(view)):
            raise StoreDamaged(
                f"{path} is damaged: its {'bytes do not match their checksum' if got == len(view) else 'end is cut'}. "
                "Its document has to be computed again."
            )
        keys, values = data.view(getattr(torch, self.spec.dtype)).view(2, *self.spec.shape(n_tokens)).unbind(0)
        return Payload.of(keys, values)

    def release(self, body: Body) -> None:
        """Delete the file, whichever name it has. One that cannot be deleted counts as set aside."""
        size = self.bytes_of(body.n_tokens)
        self._used -= size
        self._stems.discard(body.stem)
        for path in (self.folder / body.temporary, self.folder / body.file):
            try:
                path.unlink(missing_ok=True)
            except OSError as e:
                log.warning("%s cannot be deleted (%s); it is tried again when its bytes are needed.", path, e)
                self._aside[path] = size

    def set_aside(self, body: Body) -> None:
        """Move the file to the folder `aside`."""
        self._used -= self.bytes_of(body.n_tokens)
        self._stems.discard(body.stem)
        self._move_aside(self.folder / body.file)

    def found(self) -> list[tuple[Hashable, int, Any]]:
        """What earlier processes stored, oldest first."""
        return [(body.key, body.n_tokens, body) for body in self._found]

    def check(self, bodies: Sequence[Body], others: Iterable[Sequence[int]] = ()) -> None:
        """Compare the sums, and the budget with what is in the folder."""
        total = sum(self.bytes_of(body.n_tokens) for body in bodies)
        if total != self._used:
            raise BrokenInvariant(f"{self._used} bytes claimed in {self.folder}; its documents take {total}.")
        known = {name for body in bodies for name in (body.file, body.temporary)} | {p.name for p in self._aside}
        files = [p for p in self.folder.rglob("*") if p.suffix in (".safetensors", ".tmp")]
        if strange := [p.name for p in files if p.name not in known and _ours(p)]:
            raise BrokenInvariant(f"{self.folder} holds {strange}, which belong to no document.")
        size = sum(_size(p) for p in files if p.name in known)
        if size > self.budget_bytes:
            raise BrokenInvariant(f"{self.folder} takes {size} bytes, its budget is {self.budget_bytes}.")

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def _require(self, body: Body, payload: Payload) -> None:
        shape = self.spec.shape(body.n_tokens)
        shapes = [list(t.shape) for piece in payload.pieces for t in piece]
        wrong = [s for s in shapes if (*s[:2], s[3]) != (*shape[:2], shape[3])]
        if not shapes or wrong or payload.n_tokens != body.n_tokens:
            raise InvalidInput(f"keys and values {shapes or 'are missing'}; {body.key} takes {list(shape)} of each.")

    def _header(self, body: Body, checksum: int) -> bytes:
        """The file's first HEADER_BYTES, wholly decided by what it holds: a changed byte is seen by comparing."""
        half = body.n_tokens * self.spec.token_bytes // 2
        tensor = {"dtype": IN_FILES[self.spec.dtype], "shape": self.spec.shape(body.n_tokens)}
        key = body.key
        text = {
            "__metadata__": {
                "format": FORMAT,
                "version": str(VERSION),
                "kind": key.kind,
                "namespace": key.namespace,
                "fingerprint": key.fingerprint.hex(),
                "digest": key.digest.hex(),
                "crc32": f"{checksum:08x}",
            },
            "keys": tensor | {"data_offsets": [0, half]},
            "values": tensor | {"data_offsets": [half, 2 * half]},
        }
        packed = json.dumps(text, separators=(",", ":")).encode()
        room = HEADER_BYTES - _LENGTH.size
        assert len(packed) <= room, "a namespace is short enough for the header"
        return _LENGTH.pack(room) + packed.ljust(room)

    def _scan(self) -> list[Body]:
        """The folder's sound files, oldest first; the others are moved aside."""
        bodies: dict[Key, Body] = {}
        for path in sorted((p for p in self.folder.iterdir() if _NAME.fullmatch(p.name)), key=_age):
            try:
                body = self._opened(path)
            except (StoreDamaged, OSError) as e:
                log.warning("%s is treated as missing: %s", path.name, e)
                self._move_aside(path)
                continue
            self._used += self.bytes_of(body.n_tokens)
            self._stems.add(body.stem)
            if body.key in bodies:
                self.release(bodies.pop(body.key))  # it was being replaced when the process ended
            bodies[body.key] = body
        while self._used > self.budget_bytes:
            self.release(bodies.pop(next(iter(bodies))))  # the budget is smaller than it was when they were stored
        return list(bodies.values())

    def _opened(self, path: Path) -> Body:
        """What a file's header says. Raises StoreDamaged if this folder cannot use it; its data is not read."""
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
        try:
            text = json.loads(header[_LENGTH.size :])
            meta, shape = text["__metadata__"], text["keys"]["shape"]
            version, fingerprint = int(meta["version"]), bytes.fromhex(meta["fingerprint"])
            key = _KINDS[meta["kind"]](meta["namespace"], fingerprint, bytes.fromhex(meta["digest"]))
            named = _NAME.fullmatch(path.name)
            body = Body(key, int(shape[2]), int((named and named[1]) or 0))
            checksum = int(meta["crc32"], 16)
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise StoreDamaged(f"its header cannot be read ({type(e).__name__}: {e}).") from e
        if meta["format"] != FORMAT or version != VERSION:
            raise StoreDamaged(f"it has format {meta['format']} {version}; this Tamis reads {FORMAT} {VERSION}.")
        if fingerprint != self.fingerprint:
            raise StoreDamaged(
                f"it was made by the model with fingerprint {fingerprint.hex()}, this folder is of "
                f"{self.fingerprint.hex()}. Give each model a folder of its own."
            )
        if body.n_tokens < 1 or path.name != body.file or header != self._header(body, checksum):
            raise StoreDamaged(f"its header does not fit its name, or keys and values of {self.spec}.")
        if path.stat().st_size != self.bytes_of(body.n_tokens):
            raise StoreDamaged(f"it has {path.stat().st_size} bytes, {self.bytes_of(body.n_tokens)} were written.")
        return body

    def _move_aside(self, path: Path) -> None:
        target = self.folder / ASIDE / path.name
        try:
            size = path.stat().st_size
            self._aside.pop(target, None)  # a second file of that name takes the place of the first
            os.replace(path, target)
            self._aside[target] = size
            self._trim(0)
        except FileNotFoundError:
            log.warning("%s is gone.", path)
        except OSError as e:
            log.warning("%s cannot be moved aside (%s).", path, e)
            self._aside.update({p: p.stat().st_size for p in (path, target) if p.exists()})

    def _trim(self, need_bytes: int) -> None:
        """Delete files set aside, oldest first, until `need_bytes` more fit beside the rest."""
        for path in list(self._aside):
            if self._used + need_bytes + sum(self._aside.values()) <= self.budget_bytes:
                return
            path.unlink(missing_ok=True)
            del self._aside[path]


def disk_tier(folder: Path | str, spec: KVSpec, fingerprint: bytes, budget_bytes: int) -> Tier:
    """A tier of files in `folder`, at most budget_bytes, of the model with this `keys.fingerprint_digest`.

    Raises StoreBusy if another process has the folder.
    """
    return Tier(Disk(Path(folder), spec, fingerprint, budget_bytes))


def _append(file: IO[bytes], pieces: list[torch.Tensor], dtype: str, checksum: int) -> int:
    """Write one layer's keys or values [Hkv, m, D] of all pieces as [Hkv, n, D]; the checksum so far."""
    import torch

    whole = torch.cat([p.to(device="cpu", dtype=getattr(torch, dtype)) for p in pieces], dim=1).contiguous()
    data = whole.reshape(-1).view(torch.uint8).numpy().data
    file.write(data)
    return zlib.crc32(data, checksum)


def _ours(path: Path) -> bool:
    return _NAME.fullmatch(path.with_suffix(".safetensors").name) is not None


def _size(path: Path) -> int:
    """Of a file, 0 if it was renamed or deleted since it was listed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _age(path: Path) -> tuple[int, str]:
    return path.stat().st_mtime_ns, path.name


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return  # a folder cannot be opened there, and a rename is durable without it
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _locked(folder: Path) -> IO[bytes]:
    """An open file that keeps other processes out until it is closed. Where there are no file locks it does not."""
    file = open(folder / "cache.lock", "ab")  # noqa: SIM115 - open as long as the tier is
    try:
        import fcntl
    except ImportError:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise StoreBusy(
            f"another process keeps documents in {folder}; two would exceed its budget. Close it, or use another."
        ) from None
    return file
