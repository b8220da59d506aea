"""The cache that requests use: documents from whichever tier has them, computed once if none has. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tamis.cache.document import Lease, Payload, Wanted
from tamis.cache.evict import Policy, new_policy
from tamis.cache.flight import Compute, Desk, Request
from tamis.cache.shelves import Shelf, Shelves
from tamis.cache.tiers.base import Entry, Tier
from tamis.core.errors import CacheFull, InvalidInput, NotCached, PoolFull

TIMEOUT_S = 300.0
NewPolicy = str | Callable[[], Policy]


@dataclass(frozen=True)
class TierStatistics:
    """One tier now: documents and bytes, of which in use; and so far: what it served, and what left it and how."""

    documents: int
    used_bytes: int
    pinned_bytes: int
    budget_bytes: int
    hit_tokens: int
    hits: int
    evictions: int
    evicted_bytes: int
    demotions: int  # copies that arrived here from a faster tier
    failed_demotions: int  # copies that should have, and found no room or failed
    expired: int
    damaged: int


@dataclass(frozen=True)
class CacheStatistics:
    """Tokens and documents of all requests served so far; a document counts once a request.

    computed: by the request itself; shared: by another one meanwhile; the rest were hits, listed by tier.
    """

    tiers: Mapping[str, TierStatistics]
    computed_tokens: int
    computed: int
    shared_tokens: int
    shared: int
    refusals: int
    timeouts: int

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that no request had to wait for being computed by itself; 0 before the first."""
        hits = sum(tier.hit_tokens for tier in self.tiers.values()) + self.shared_tokens
        return hits / total if (total := hits + self.computed_tokens) else 0.0


class RequestPages:
    """Bytes of the first tier that a request owns for its own tokens; a context manager, and safe to close twice."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._entries: list[Entry] = []

    @property
    def pages(self) -> tuple[int, ...]:
        """Page numbers in order of allocation; empty in tiers without pages."""
        return tuple(page for entry in self._entries for page in entry.document.pages)

    def extend(self, n_tokens: int) -> tuple[int, ...]:
        """Own whole further pages for n_tokens more; the new pages. Evicts documents that are not in use.

        Raises CacheFull, owning what was owned before.
        """
        top = self._desk.shelves.top.tier
        size = top.medium.bytes_of(n_tokens)
        with self._desk.shelves.room(lambda: size):
            self._desk.shelves.make_room(size, what=f"a request of {n_tokens} tokens")
            entry = top.reserve(("request", id(self), len(self._entries)), n_tokens)
            self._entries.append(entry)
            return entry.document.pages

    def close(self) -> None:
        """Give everything back."""
        with self._desk.lock:
            while self._entries:
                self._desk.shelves.top.tier.cancel(self._entries.pop())

    def __enter__(self) -> RequestPages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DocumentCache:
    """Documents in tiers from fast to slow, one policy object per tier; safe to use from many threads.

    policy   a name of `evict.POLICIES`, or what makes a fresh policy; or one of these for each tier
    clock    seconds, for the policies; cost(n_tokens) is what computing a document costs, in any one unit
    A request uses documents of the first tier; missing ones are copied up from where they lie, and stay there, so that
    evicting them later costs no copy. What the first tier evicts goes to the next one that takes it.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        policy: NewPolicy | Sequence[NewPolicy] = "lru",
        clock: Callable[[], float] = time.monotonic,
        cost: Callable[[int], float] = float,
    ) -> None:
        each = [policy] * len(tiers) if isinstance(policy, str) or callable(policy) else list(policy)
        if len(each) != len(tiers):
            raise InvalidInput(f"{len(each)} policies for {len(tiers)} tiers; give one for all, or one for each.")
        fresh = [new_policy(p) if isinstance(p, str) else p() for p in each]
        self._desk = Desk(Shelves([Shelf(t, p, clock, cost) for t, p in zip(tiers, fresh, strict=True)]))
        self._pinned: dict[Hashable, list[Entry]] = {}
        self._closed = False

    def get(self, wanted: Iterable[Wanted], compute: Compute | None = None, *, timeout_s: float = TIMEOUT_S) -> Lease:
        """Hold the documents in the first tier, in the order given (twice the same is one copy), until the lease ends.

        What is in no tier is computed by compute(Wanted) -> Payload, in this thread; if another request computes it
        already, this one waits at most timeout_s for it, and tries itself if that one fails. All or nothing. Raises
        CacheFull (they do not fit beside what is in use), CacheTimeout, NotCached (no compute given), and whatever
        this request's own compute raises.
        """
        rows = [Wanted(*row) for row in wanted]
        held = self._acquire(rows, compute, timeout_s)
        return Lease([held[row.key].document for row in rows], lambda: self._let_go(held))

    def put(self, items: Iterable[tuple[Hashable, Payload]], *, timeout_s: float = TIMEOUT_S) -> None:
        """Store computed documents in the first tier, all or none; those there already stay as they are."""
        payloads = dict(items)
        wanted = [Wanted(key, payload.n_tokens) for key, payload in payloads.items()]
        self._let_go(self._acquire(wanted, lambda row: payloads[row.key], timeout_s, counted=False))

    def where(self, keys: Iterable[Hashable]) -> list[str | None]:
        """The fastest tier of each document, None if it is in none. Nothing is promised for the time after."""
        with self._desk.lock:
            shelves = self._desk.shelves.all
            return [next((s.tier.name for s in shelves if key in s.tier.entries), None) for key in keys]

    def pin(self, wanted: Iterable[Wanted], compute: Compute | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        """Keep documents in the first tier until as many `unpin`s; brings them there as `get` does."""
        held = self._acquire([Wanted(*row) for row in wanted], compute, timeout_s)
        with self._desk.lock:
            for key, entry in held.items():
                self._pinned.setdefault(key, []).append(entry)

    def unpin(self, keys: Iterable[Hashable]) -> None:
        """End one `pin` of each document. Raises NotCached, with nothing changed, if one is not pinned."""
        with self._desk.lock:
            keys = list(dict.fromkeys(keys))
            if loose := [str(key) for key in keys if key not in self._pinned]:
                raise NotCached(f"{', '.join(loose)} not pinned; unpin a document once for each time it was pinned.")
            for key in keys:
                entries = self._pinned[key]
                self._desk.shelves.top.let_go(entries.pop())
                if not entries:
                    del self._pinned[key]

    def drop(self, keys: Iterable[Hashable]) -> list[bool]:
        """Forget documents in every tier; whether each was in any. One in use keeps its bytes until its last lease."""
        self._check_open()
        with self._desk.lock:
            return [self._desk.shelves.drop(key) for key in keys]

    def clear(self) -> None:
        """Forget every document in every tier."""
        self._check_open()
        with self._desk.lock:
            self.drop([key for shelf in self._desk.shelves.all for key in list(shelf.tier.entries)])

    def persist(self, keys: Iterable[Hashable]) -> list[bool]:
        """Copy documents to the slowest tier, so that they outlive the process; whether each is there now."""
        self._check_open()
        return [self._persist(key) for key in keys]

    def own(self, n_tokens: int) -> RequestPages:
        """Pages of the first tier for a request's own tokens, at documents' expense. Raises CacheFull."""
        self._check_open()
        pages = RequestPages(self._desk)
        pages.extend(n_tokens)
        return pages

    def statistics(self) -> CacheStatistics:
        """A snapshot."""
        with self._desk.lock:
            counts = self._desk.shelves.counts
            return CacheStatistics(
                tiers={shelf.tier.name: self._tier_statistics(shelf) for shelf in self._desk.shelves.all},
                computed_tokens=counts.tokens["computed"],
                computed=counts.documents["computed"],
                shared_tokens=counts.tokens["shared"],
                shared=counts.documents["shared"],
                refusals=counts.refusals,
                timeouts=counts.timeouts,
            )

    def check(self, others: Iterable[Sequence[int]] = ()) -> None:
        """Raise BrokenInvariant unless every page is free, owned or cached exactly once, and all sums and pins agree.

        others: pages that were allocated from the pool past this cache.
        """
        with self._desk.lock:
            self._desk.shelves.check(others)

    def close(self) -> None:
        """Let go of the disk tier's folder. Documents in memory are lost unless `persist` copied them.

        What is held stays readable; nothing can be asked for, stored or dropped any more. Safe to call twice.
        """
        with self._desk.shelves.moving():
            self._closed = True  # another process may own the folder from here on
            for shelf in self._desk.shelves.all:
                shelf.tier.medium.close()

    def _acquire(
        self, rows: Sequence[Wanted], compute: Compute | None, timeout_s: float, *, counted: bool = True
    ) -> dict[Hashable, Entry]:
        self._check_open()
        if not timeout_s >= 0:
            raise InvalidInput(f"timeout_s is {timeout_s}; allowed is 0 or more seconds.")
        wanted: dict[Hashable, int] = {}
        for key, n_tokens in rows:
            if n_tokens < 1 or wanted.setdefault(key, n_tokens) != n_tokens:
                raise InvalidInput(f"{key} is wanted with {n_tokens} tokens; allowed is 1 or more, one length a key.")
        request = Request(self._desk, compute, timeout_s=timeout_s)
        try:
            request.run(wanted)
        except (CacheFull, PoolFull):
            with self._desk.lock:
                self._desk.shelves.counts.refusals += 1
            raise
        if counted:
            with self._desk.lock:
                counts = self._desk.shelves.counts
                for key, origin in request.origin.items():
                    counts.tokens[origin] += wanted[key]
                    counts.documents[origin] += 1
        return request.held

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInput("this cache was closed; open another one on the same folder.")

    def _let_go(self, held: Mapping[Hashable, Entry]) -> None:
        with self._desk.lock:
            for entry in held.values():
                self._desk.shelves.top.let_go(entry)

    def _persist(self, key: Hashable) -> bool:
        shelves = self._desk.shelves
        last = len(shelves.all) - 1
        with shelves.moving():
            for level, shelf in enumerate(shelves.all):
                if (entry := shelf.tier.entries.get(key)) is not None:
                    if level == last:
                        return True
                    shelf.hold(entry)
                    try:
                        return shelves.copy_down(entry, level, to=last)
                    finally:
                        shelf.let_go(entry)
            return False

    def _tier_statistics(self, shelf: Shelf) -> TierStatistics:
        name, counts = shelf.tier.name, self._desk.shelves.counts
        fields: dict[str, Any] = {
            f: getattr(counts, f)[name]
            for f in ("evictions", "evicted_bytes", "demotions", "failed_demotions", "expired", "damaged")
        }
        return TierStatistics(
            documents=len(shelf.tier.entries),
            used_bytes=shelf.tier.used_bytes,
            pinned_bytes=shelf.tier.used_bytes - shelf.policy.evictable_bytes,
            budget_bytes=shelf.tier.medium.budget_bytes,
            hit_tokens=counts.tokens[name],
            hits=counts.documents[name],
            **fields,
        )
