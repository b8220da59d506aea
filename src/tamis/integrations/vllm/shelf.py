"""Documents' keys and values that outlive a request, a replica and a restart: in host memory and in a shared folder.

Built on the cache's tiers: what is read stays in a `host_tier` of exactly host_bytes, least recently used first out;
the folder (`folder.py`) is what several processes share. Where there is a folder it alone says what exists, so that a
document deleted by one process is gone for all. Knows tensors by layer, not vLLM.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

import torch

from tamis.cache.document import Payload, Wanted
from tamis.cache.keys import DOCUMENTS, DocumentKey
from tamis.cache.selfindex.documents import encode_document
from tamis.cache.spec import KVSpec
from tamis.cache.store import DocumentCache
from tamis.cache.tiers.base import Tier
from tamis.cache.tiers.host import host_tier
from tamis.core.dtypes import name_of
from tamis.core.errors import CacheFull, InvalidInput, NotCached, PoolFull, StoreDamaged
from tamis.core.log import logger
from tamis.core.registry import unknown
from tamis.integrations.vllm.folder import Listed, SharedFolder
from tamis.kernels.selfindex import Layout, Records, Tables, dequantised
from tamis.prompt.segments import ID_BYTES

PAYLOADS = ("auto", "bf16", "selfindex")
DISK_BYTES = 16 << 30
log = logger("vllm")


class Shelf:
    """Documents of one model. Safe to use from many threads, and from many processes on one directory.

    directory    shared by replicas and restarts; None: host memory alone
    host_bytes   of host memory for what was read or saved, page-locked where CUDA is; 0: none
    fingerprint  16 bytes that change with the model (`keys.fingerprint_digest`), or their 32 hex digits
    namespace    where documents lie unless a call names another one; one namespace never sees another's
    payload      how files keep them: "auto" as they come, "bf16" rounded to bfloat16, "selfindex" in the self-indexing
                 form (head_dim 64 or 128, about a fifth of the bytes, lossy). What is loaded has the dtype that was
                 saved, and the same bits from every tier.
    disk_bytes   of the directory, files being written and other models' included
    part, parts  which share of the model's layers and heads this process holds, of how many (tensor and pipeline
                 parallelism): a document is there when all parts of it are
    """

    def __init__(
        self,
        directory: Path | str | None,
        host_bytes: int,
        fingerprint: bytes | str,
        namespace: str = DOCUMENTS,
        payload: str = "auto",
        *,
        disk_bytes: int = DISK_BYTES,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        if payload not in PAYLOADS:
            raise InvalidInput(unknown("payload", payload, list(PAYLOADS)))
        if directory is None and (payload != "auto" or not host_bytes):
            raise InvalidInput("no directory: give host_bytes and payload='auto', or a directory to keep files in.")
        if host_bytes < 0:
            raise InvalidInput(f"host_bytes is {host_bytes}; give 0 or more bytes.")
        self.namespace, self.payload = namespace or DOCUMENTS, payload
        self.fingerprint = _sixteen(fingerprint, "model's fingerprint")
        self.counts: Counter[str] = Counter()  # saved, loaded_host, loaded_disk, damaged, full: documents so far
        self.folder: SharedFolder | None = None
        if directory is not None:
            root = Path(directory).expanduser()
            self.folder = SharedFolder(root, self.fingerprint, budget_bytes=disk_bytes, part=part[0], parts=part[1])
        self._host_bytes = host_bytes
        self._tier: Tier | None = None  # both made when the first document shows the shape
        self._cache: DocumentCache | None = None
        self._layers: tuple[int, ...] = ()
        self._pinned: set[DocumentKey] = set()
        self._lock = threading.Lock()

    def address(self, key: bytes | str, namespace: str | None = None) -> DocumentKey:
        """The whole address of a document id (`prompt.segments.document_id`: 16 bytes, or their 32 hex digits)."""
        return DocumentKey(namespace or self.namespace, self.fingerprint, _sixteen(key, "document's key"))

    def has(self, key: bytes | str, namespace: str | None = None) -> bool:
        """Whether the document is there, all parts of it. Another process may take it away any time after."""
        address = self.address(key, namespace)
        if self.folder is not None:
            return self.folder.has(address)
        return self._cache is not None and self._cache.where([address])[0] is not None

    def save(self, key: bytes | str, layers: Mapping[int, torch.Tensor], namespace: str | None = None) -> bool:
        """Keep a document: by layer number its keys, turned at local positions, and values [2, Hkv, n, D].

        One that is there stays as it is. Returns whether it is kept now: no room or a failing disk is logged, not
        raised, because the request that computed the document needs neither.
        """
        address = self.address(key, namespace)
        if self.has(key, namespace):
            return True
        names, payload = _payload_of(layers)
        self._open_host(names, payload.keys)
        try:
            if self.folder is not None:
                tensors, notes = encoded(payload, self.payload)
                self.folder.write(address, payload.n_tokens, tensors, notes | {"layers": ",".join(map(str, names))})
            if self._cache is not None and self.payload == "auto":
                # what another form gives back has other bits, and has to have them from the first load on
                self._cache.put([(address, payload)])
        except (PoolFull, CacheFull, OSError) as e:
            if self.folder is None or not self.folder.has(address):
                self.counts["full"] += 1
                log.warning("%s is not kept: %s", address, e)
                return False
        self.counts["saved"] += 1
        return True

    def load(self, key: bytes | str, namespace: str | None = None) -> dict[int, torch.Tensor]:
        """A document as it was saved, in host memory: by layer number [2, Hkv, n, D], copies.

        Raises NotCached if it is not there, StoreDamaged if its file cannot be trusted (it is not there any more then).
        """
        with self.hold(key, namespace) as payload:
            pairs = torch.stack([payload.keys, payload.values], 1)
            return dict(zip(self._layers, pairs, strict=True))

    @contextmanager
    def hold(self, key: bytes | str, namespace: str | None = None) -> Iterator[Payload]:
        """A document in place: pieces (keys, values) [layers, Hkv, m, D] of consecutive tokens, page-locked where CUDA
        is, to be copied from while the context is open and never written to. Raises as `load`."""
        address = self.address(key, namespace)
        read: list[Payload] = []

        def compute(_: Wanted) -> Payload:
            read.append(self._read(address))
            return read[0]

        lease = None
        try:
            n_tokens = self._looked_up(address)
            if self._cache is not None:
                with suppress(PoolFull, CacheFull):  # larger than the host's memory, or beside what is in use
                    lease = self._cache.get([Wanted(address, n_tokens)], compute)
            if lease is None and not read:
                compute(Wanted(address, n_tokens))
        except (NotCached, StoreDamaged) as e:
            self.counts["damaged"] += isinstance(e, StoreDamaged)
            if self._cache is not None:
                self._cache.drop([address])
            raise
        self.counts["loaded_disk" if read else "loaded_host"] += 1
        if lease is None or self._tier is None:
            yield read[0]
            return
        with lease:
            yield self._tier.medium.read(lease.documents[0].pages, n_tokens)

    def documents(self) -> list[Listed]:
        """What is kept, in every namespace of this model."""
        if self.folder is not None:
            return self.folder.documents()
        entries = [] if self._tier is None else list(self._tier.entries.values())
        held = [(e, e.key) for e in entries if isinstance(e.key, DocumentKey)]
        return [Listed(k.namespace, k.digest, e.n_tokens, e.size_bytes, k in self._pinned, True) for e, k in held]

    def delete(self, key: bytes | str, namespace: str | None = None) -> bool:
        """Forget a document, for every process if there is a directory; whether it was there."""
        address = self.address(key, namespace)
        self.unpin(key, namespace)
        held = self._cache is not None and self._cache.drop([address])[0]
        return held if self.folder is None else self.folder.drop(address)

    def pin(self, key: bytes | str, namespace: str | None = None) -> None:
        """Never let it make way for others, for any process if there is a directory. Raises NotCached."""
        address = self.address(key, namespace)
        if self.folder is not None:
            self.folder.pin(address)
            return
        n_tokens = self._looked_up(address)
        with self._lock:
            if address not in self._pinned and self._cache is not None:
                self._cache.pin([Wanted(address, n_tokens)])
                self._pinned.add(address)

    def unpin(self, key: bytes | str, namespace: str | None = None) -> bool:
        """Let it make way again; whether it was pinned."""
        address = self.address(key, namespace)
        if self.folder is not None:
            return self.folder.unpin(address)
        with self._lock:
            if address not in self._pinned or self._cache is None:
                return False
            self._cache.unpin([address])
            self._pinned.discard(address)
            return True

    def pinned(self, key: bytes | str, namespace: str | None = None) -> bool:
        """Whether the document never makes way."""
        address = self.address(key, namespace)
        return address in self._pinned if self.folder is None else self.folder.pinned(address)

    def close(self) -> None:
        """Let go of the host memory. Files stay."""
        with self._lock:
            cache, self._cache, self._tier = self._cache, None, None
        if cache is not None:
            cache.close()

    def _looked_up(self, address: DocumentKey) -> int:
        """Tokens of a document that is there. Raises NotCached or StoreDamaged."""
        if self.folder is not None:
            return self.folder.header(address).n_tokens
        entry = None if self._tier is None else self._tier.entries.get(address)
        if entry is None:
            raise NotCached(f"{address} is not in host memory; it has to be computed.")
        return entry.n_tokens

    def _read(self, address: DocumentKey) -> Payload:
        """From the folder."""
        if self.folder is None:
            raise NotCached(f"{address} is not in host memory any more; it has to be computed.")
        header, tensors = self.folder.read(address)
        try:
            names = tuple(map(int, header.notes["layers"].split(",")))
            payload = decoded(tensors, header.notes)
            self._open_host(names, payload.keys)
        except (KeyError, ValueError, TypeError) as e:
            with suppress(OSError):
                self.folder.drop(address)
            raise StoreDamaged(f"{address} is not as this Tamis writes it ({e}), and is deleted.") from e
        return payload

    def _open_host(self, names: tuple[int, ...], keys: torch.Tensor) -> None:
        """The host's memory, once a document shows what a token takes. Raises InvalidInput if another one differs."""
        with self._lock:
            if self._layers and names != self._layers:
                raise InvalidInput(f"layers {names}; the documents before had {self._layers}.")
            self._layers = names
            if self._host_bytes and self._cache is None:
                layers, heads, _, width = keys.shape
                spec = KVSpec(layers, heads, width, name_of(keys.dtype))
                self._tier = host_tier(spec, self._host_bytes)
                self._cache = DocumentCache([self._tier])


def encoded(payload: Payload, form: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A document as the tensors of a file, and the notes that `decoded` needs."""
    keys, values = payload.keys, payload.values
    notes = {"form": form, "dtype": name_of(keys.dtype)}
    if form != "selfindex":
        dtype = torch.bfloat16 if form == "bf16" else keys.dtype
        return {"keys": keys.to(dtype), "values": values.to(dtype)}, notes
    layout = Layout(keys.shape[-1])
    parts = [encode_document(k, v, layout) for k, v in zip(keys, values, strict=True)]
    tensors = {name: torch.stack([getattr(p, name) for p in parts]) for name in ("exact", "keys", "values")}
    for kind in (Records, Tables):
        for f in fields(kind):
            tensors[f"{kind.__name__}.{f.name}"] = torch.stack(
                [getattr(getattr(p, kind.__name__.lower()), f.name) for p in parts]
            )
    return tensors, notes


def decoded(tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> Payload:
    """What `encoded` made of a document, in its dtype. Raises KeyError, ValueError or TypeError if it did not."""
    dtype: torch.dtype = getattr(torch, notes["dtype"])
    if notes["form"] != "selfindex":
        return Payload.of(tensors["keys"].to(dtype), tensors["values"].to(dtype))
    records = Records(*(tensors[f"Records.{f.name}"] for f in fields(Records)))
    tables = Tables(*(tensors[f"Tables.{f.name}"] for f in fields(Tables)))
    width = tensors["keys"].shape[-1]
    where = tensors["exact"][..., None].expand(*tensors["exact"].shape, width)
    keys, values = dequantised(records, tables, Layout(width))
    whole = [t.to(dtype).scatter(-2, where, tensors[n].to(dtype)) for n, t in (("keys", keys), ("values", values))]
    return Payload.of(*whole)


def _payload_of(layers: Mapping[int, torch.Tensor]) -> tuple[tuple[int, ...], Payload]:
    names = tuple(sorted(layers))
    shapes = {tuple(t.shape) for t in layers.values()}
    shape = next(iter(shapes), ())
    if len(shapes) != 1 or len(shape) != 4 or shape[0] != 2 or not shape[2]:
        raise InvalidInput(f"layers of shapes {sorted(shapes)}; expected [2, Hkv, n, D], the same for each layer.")
    keys, values = torch.stack([layers[n].detach().cpu() for n in names]).unbind(1)
    return names, Payload.of(keys, values)


def _sixteen(given: bytes | str, what: str) -> bytes:
    try:
        made = bytes.fromhex(given) if isinstance(given, str) else given
    except ValueError:
        made = b""
    if len(made) != ID_BYTES:
        raise InvalidInput(f"the {what} is {given!r}; expected {ID_BYTES} bytes or {2 * ID_BYTES} hex digits.")
    return made
