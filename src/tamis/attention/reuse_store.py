"""A model's stored documents: found in the cache, or computed alone, several to a pass, and kept there.

Joins the model, the page pool and the cache; knows token ids, not prompts. A document is computed as the paper does
it (LazyAttention): alone, without the prompt's prefix, its first token at position 0.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tamis.attention.hook import Switch
from tamis.attention.offline import pack_tokens_of, packed_forward, packs
from tamis.cache.document import DocumentKV, Lease, Payload, Wanted
from tamis.cache.keys import DOCUMENTS, DocumentKey
from tamis.cache.pool import PagePool
from tamis.cache.spec import KVSpec
from tamis.cache.store import DocumentCache
from tamis.cache.tiers.device import device_tier
from tamis.cache.tiers.disk import disk_tier
from tamis.cache.tiers.host import host_tier
from tamis.core.checks import check_fields
from tamis.core.errors import CacheFull, CacheTimeout, InvalidInput, PoolFull
from tamis.kernels import dispatch
from tamis.model.family import geometry

PACK_TOKENS = 8192  # of one pass over missing documents: their keys of all layers are held until it ends
DISK_BYTES = 16 << 30
DEVICE_SHARE = 0.4  # of what is free on a GPU at first use
HOST_SHARE = 0.125  # of the memory of a machine without one
CONTEXTS = 8  # of the model, at most, where no budget is given: more is only worth it if someone asks


@dataclass(frozen=True)
class CacheSettings:
    """Bytes that stored documents may take. A request's own tokens come out of the first budget too.

    cache_bytes   on the model's device; None: a share of the free memory, at most 8 contexts of the model
    host_bytes    in (page-locked) host memory, for what the device evicts; 0: none
    cache_dir     folder of a disk tier, which outlives the process; None: none
    disk_bytes    of that folder
    """

    cache_bytes: int | None = None
    host_bytes: int = 0
    cache_dir: str | Path | None = None
    disk_bytes: int = DISK_BYTES

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("cache_bytes", "host_bytes", "disk_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidInput(f"{name} is {value}; give 0 or more bytes.")

    def device_bytes(self, spec: KVSpec, context_tokens: int, device: torch.device) -> int:
        """The first budget, in bytes; at least one page where none was given."""
        if self.cache_bytes is not None:
            return self.cache_bytes
        free = int(_free_bytes(device) * (DEVICE_SHARE if device.type == "cuda" else HOST_SHARE))
        return max(spec.page_bytes(), min(free, CONTEXTS * context_tokens * spec.token_bytes))


@dataclass
class Held:
    """The documents of one request, in its order: None where one is to be computed by the request.

    origins   the tier that had each, "computed" (now, and stored), or "" for None
    reasons   why documents are not held
    """

    documents: list[DocumentKV | None]
    origins: list[str]
    leases: list[Lease] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Let go of all of them."""
        while self.leases:
            self.leases.pop().close()


@dataclass
class KeepJob:
    """Dense attention of packed documents that keeps their keys and values."""

    lengths: Sequence[int]
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Job.attend`."""
        self.keys.append(k)
        self.values.append(v)
        return dispatch.packed_causal_attention(q, k, v, scale, self.lengths)

    def payloads(self) -> list[Payload]:
        """Of each document, views into what was kept."""
        keys, values = torch.stack(self.keys), torch.stack(self.values)
        ends = list(itertools.accumulate(self.lengths))
        return [
            Payload.of(keys[:, :, e - n : e], values[:, :, e - n : e]) for n, e in zip(self.lengths, ends, strict=True)
        ]


class DocumentStore:
    """The cache of one model and how it is filled. Safe to use from many threads; `lock` guards the model's passes."""

    def __init__(
        self, model: Any, switch: Switch, fingerprint: bytes, *, settings: CacheSettings, lock: threading.RLock
    ) -> None:
        self.model, self.switch, self.fingerprint, self.lock = model, switch, fingerprint, lock
        weight = next(model.parameters())
        shape = geometry(model.config)
        spec = KVSpec.of(shape, weight.dtype)
        budget = settings.device_bytes(spec, shape.context_tokens, weight.device)
        self.pool = PagePool.of(shape, weight.dtype, weight.device, byte_budget=budget)
        tiers = [device_tier(self.pool)]
        if settings.host_bytes:
            tiers.append(host_tier(spec, settings.host_bytes))
        self.persistent = settings.cache_dir is not None
        if settings.cache_dir is not None:
            folder = Path(settings.cache_dir).expanduser() / fingerprint.hex()
            folder.mkdir(parents=True, exist_ok=True)
            tiers.append(disk_tier(folder, spec, fingerprint, settings.disk_bytes))
        self.cache = DocumentCache(tiers)
        self.passes = 0  # over missing documents
        self._ready: dict[Hashable, Payload] = {}  # computed in a pass with others, and not yet asked for
        self._handed: Counter[Hashable] = Counter()  # computed and on the way into the cache
        self._unsaved: set[Hashable] = set()

    def key(self, tokens: Sequence[int], namespace: str = DOCUMENTS) -> DocumentKey:
        """The address of a document; in another `namespace` the same tokens are another document."""
        return DocumentKey.of(tokens, self.fingerprint, namespace)

    def hold(self, documents: Sequence[Sequence[int]], *, compute: bool = True, namespace: str = DOCUMENTS) -> Held:
        """Keep documents (token ids) in place. Missing ones are computed and stored, or left out without `compute`.

        Those that do not fit beside what is in use, or that another request takes too long to compute, are left out
        with the reason; nothing is raised and nothing hangs.
        """
        keys = [self.key(d, namespace) for d in documents]
        found = self.cache.where(keys)
        held = Held([None] * len(keys), [""] * len(keys))
        chosen = [i for i, tier in enumerate(found) if compute or tier is not None]
        if len(chosen) < len(keys):
            n = len(keys) - len(chosen)
            held.reasons.append(f"{n} documents are not stored and computed in place, as missing='inline' asks")
        tokens: dict[Hashable, Sequence[int]] = dict(zip(keys, documents, strict=True))
        try:
            self._hold(held, chosen, keys, found, tokens)
        except (CacheFull, PoolFull, CacheTimeout):
            for i in chosen:  # one by one: some may fit
                try:
                    self._hold(held, [i], keys, found, tokens)
                except (CacheFull, PoolFull, CacheTimeout) as e:
                    held.reasons.append(f"document {i + 1} ({len(documents[i])} tokens) is computed in place: {e}")
        except BaseException:
            held.close()
            raise
        return held

    def save(self) -> int:
        """Copy what was computed since the last call to the disk tier, if there is one; how many are there now."""
        with self.lock:
            unsaved, self._unsaved = self._unsaved, set()
        return sum(self.cache.persist(unsaved)) if self.persistent else 0

    def close(self) -> None:
        """Save, and let go of the disk tier's folder."""
        self.save()
        self.cache.close()

    def _hold(
        self,
        held: Held,
        chosen: Sequence[int],
        keys: Sequence[DocumentKey],
        found: Sequence[str | None],
        tokens: dict[Hashable, Sequence[int]],
    ) -> None:
        if not chosen:
            return
        wanted = [Wanted(keys[i], len(tokens[keys[i]])) for i in chosen]
        computed: Counter[Hashable] = Counter()
        mine: set[Hashable] = set()

        def compute(row: Wanted) -> Payload:
            computed[row.key] += 1
            with self.lock:
                self._handed[row.key] += 1
                return self._computed(row, [w for w in wanted if w.key not in computed], tokens, mine)

        try:
            lease = self.cache.get(wanted, compute)
        finally:
            with self.lock:
                self._handed -= computed
                for key in mine:  # what no request asked for
                    self._ready.pop(key, None)
        held.leases.append(lease)
        for i, document in zip(chosen, lease.documents, strict=True):
            held.documents[i] = document
            held.origins[i] = found[i] or "computed"
        with self.lock:
            self._unsaved.update(computed)

    def _computed(
        self,
        row: Wanted,
        others: Sequence[Wanted],
        tokens: dict[Hashable, Sequence[int]],
        mine: set[Hashable],
    ) -> Payload:
        """The document `row`, in one pass with those of `others` that are missing too and fit. Called with the lock."""
        if (ready := self._ready.pop(row.key, None)) is not None:
            return ready
        rest = list(dict.fromkeys(others))
        places = self.cache.where([w.key for w in rest])
        known = self._ready.keys() | self._handed.keys()
        missing = [w for w, tier in zip(rest, places, strict=True) if tier is None and w.key not in known]
        room = min(pack_tokens_of(self.pool.keys.device), PACK_TOKENS) - row.n_tokens
        near = next(packs([w.n_tokens for w in missing], room), []) if missing and room > 0 else []
        pack = [row, *(missing[i] for i in near if missing[i].n_tokens <= room)]
        job = KeepJob([w.n_tokens for w in pack])
        packed_forward(self.model, self.switch, [tokens[w.key] for w in pack], job)
        assert len(job.keys) == self.pool.spec.n_layers, f"layers did not reach the job: {self.switch.refused}"
        self.passes += 1
        payloads = job.payloads()
        for other, payload in zip(pack[1:], payloads[1:], strict=True):
            self._ready[other.key] = payload
            mine.add(other.key)
        return payloads[0]


def settings_of(choices: dict[str, Any]) -> CacheSettings:
    """Takes the cache's settings out of `choices`, which keeps the rest."""
    names = list(CacheSettings.__dataclass_fields__)
    return CacheSettings(**{name: choices.pop(name) for name in names if name in choices})


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
