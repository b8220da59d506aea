"""Tiers in order, each with its policy: eviction downwards, and the sums over all. Needs no torch.

`Shelves.lock` guards everything here. What copies bytes between tiers lets go of it meanwhile, so that requests whose
documents are in place never wait for a disk; one thread at a time does that (`moving`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tamis.cache.evict import Policy
from tamis.cache.tiers.base import Entry, State, Tier
from tamis.core.errors import BrokenInvariant, CacheFull, CacheTimeout, InvalidInput, PoolFull, StoreDamaged
from tamis.core.log import logger

log = logger("cache")


@dataclass
class Counts:
    """What has happened so far. Tokens by where they came from: a tier's name, "computed", or "shared" (computed by
    another request meanwhile); evicted, demoted and lost documents by tier."""

    tokens: Counter[str] = field(default_factory=Counter)
    documents: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    evicted_bytes: Counter[str] = field(default_factory=Counter)
    demotions: Counter[str] = field(default_factory=Counter)
    expired: Counter[str] = field(default_factory=Counter)
    damaged: Counter[str] = field(default_factory=Counter)
    failed_demotions: Counter[str] = field(default_factory=Counter)
    refusals: int = 0
    timeouts: int = 0


class Shelf:
    """One tier and the policy that ranks its documents, kept in step."""

    def __init__(self, tier: Tier, policy: Policy, clock: Callable[[], float], cost: Callable[[int], float]) -> None:
        self.tier = tier
        self.policy = policy
        self._clock = clock
        self._cost = cost
        for entry in tier.entries.values():
            self._add(entry, cost(entry.n_tokens))

    def hold(self, entry: Entry, times: int = 1) -> None:
        """Pin a kept entry."""
        entry.pins += times
        if entry.pins:
            self.policy.pin(entry.key)

    def let_go(self, entry: Entry) -> None:
        """End one pin."""
        self.tier.unpin(entry)
        if not entry.pins and entry.state is State.KEPT:
            self.policy.unpin(entry.key)

    def touch(self, entry: Entry) -> None:
        """Note a use."""
        self.policy.touch(entry.key, self._clock())

    def commit(self, entry: Entry) -> None:
        """Make a written entry findable and rank it."""
        cost = self._cost(entry.n_tokens)  # may fail, and must do so before anything has changed
        self.tier.commit(entry)
        self._add(entry, cost)

    def drop(self, key: Hashable, *, evicted: bool = False) -> bool:
        """Forget a document; whether it was here."""
        if key in self.policy:
            self.policy.remove(key, evicted=evicted)
        return self.tier.drop([key])[0]

    def set_aside(self, entry: Entry) -> None:
        """Forget a damaged document."""
        if entry.pins:
            self.drop(entry.key)  # others read it: it goes with the last of them
            return
        self.policy.remove(entry.key)
        self.tier.set_aside(entry)

    def expired(self) -> tuple[Hashable, ...]:
        """What the policy wants gone."""
        return self.policy.expired(self._clock())

    def victims(self, short_bytes: int) -> tuple[Hashable, ...] | None:
        """What to evict to free short_bytes; None if that is impossible now."""
        decision = self.policy.victims(short_bytes, self._clock())
        return decision.victims if decision.enough else None

    def check(self, others: Iterable[Sequence[int]] = ()) -> None:
        """Raise BrokenInvariant unless tier and policy know the same documents and bytes."""
        self.tier.check(others)
        kept = self.tier.entries
        if len(kept) != len(self.policy) or any(key not in self.policy for key in kept):
            raise BrokenInvariant(
                f"the policy of {self.tier.name!r} ranks {len(self.policy)} of {len(kept)} documents."
            )
        loose = sum(entry.size_bytes for entry in kept.values() if not entry.pins)
        if loose != self.policy.evictable_bytes:
            raise BrokenInvariant(
                f"{loose} bytes of {self.tier.name!r} are not in use, its policy counts {self.policy.evictable_bytes}."
            )

    def _add(self, entry: Entry, cost: float) -> None:
        self.policy.add(entry.key, size_bytes=entry.size_bytes, cost=cost, now=self._clock())


class Shelves:
    """From the fastest tier to the slowest. A document may lie in several; the first is the one that requests use."""

    def __init__(self, shelves: Sequence[Shelf]) -> None:
        names = [shelf.tier.name for shelf in shelves]
        if not names or len(set(names)) != len(names):
            raise InvalidInput(f"tiers {names}; give at least one, from the fastest to the slowest, no name twice.")
        self.all = tuple(shelves)
        self.top = self.all[0]
        self.counts = Counts()
        self.lock = threading.RLock()
        self._gate = threading.Lock()  # taken before the lock, never while it is held

    def below(self, key: Hashable) -> tuple[Shelf, Entry] | None:
        """Where a document lies under the first tier, fastest first."""
        for shelf in self.all[1:]:
            if (entry := shelf.tier.entries.get(key)) is not None:
                return shelf, entry
        return None

    @contextmanager
    def moving(self, timeout_s: float = -1) -> Iterator[float]:
        """Be the only one who copies between tiers, and hold the lock; gives the seconds waited for another.

        Raises CacheTimeout if another takes longer than timeout_s (-1: wait on).
        """
        started = time.monotonic()
        if not self._gate.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            with self.lock:
                self.counts.timeouts += 1
            raise CacheTimeout(
                f"another request has not finished moving documents between tiers within {timeout_s:g} s. Raise the "
                "timeout, or try again; nothing is held."
            )
        try:
            with self.lock:
                yield time.monotonic() - started
        finally:
            self._gate.release()

    @contextmanager
    def room(self, needed_bytes: Callable[[], int], timeout_s: float = -1) -> Iterator[float]:
        """Hold the lock: as `moving` does if needed_bytes() are not free in the first tier, at once if they are."""
        with self.lock:
            if needed_bytes() <= self.top.tier.medium.free_bytes:
                yield 0.0
                return
        with self.moving(timeout_s) as waited_s:
            yield waited_s

    def make_room(self, needed_bytes: int, *, level: int = 0, what: str = "this request") -> None:
        """Evict from a tier, to the next ones, until needed_bytes are free. Call it `moving`, if they are not.

        Raises CacheFull, with nothing evicted unless documents came into use while others were copied.
        """
        shelf = self.all[level]
        medium = shelf.tier.medium
        while (short := needed_bytes - medium.free_bytes) > 0:
            victims = shelf.victims(short)
            if victims is None:
                available = medium.free_bytes + shelf.policy.evictable_bytes
                raise CacheFull(
                    f"{what} needs {needed_bytes} bytes of tier {shelf.tier.name!r} and {available} of "
                    f"{medium.budget_bytes} are available, the rest is in use. Use fewer documents, try again when "
                    "other requests are done, or give the tier more bytes.",
                    needed_bytes=needed_bytes,
                    available_bytes=available,
                )
            for key in victims:
                if medium.free_bytes < needed_bytes:
                    self._evict(key, level)

    def copy_down(self, entry: Entry, level: int, *, to: int | None = None) -> bool:
        """Make sure that a held document of tier `level` lies in a slower one (`to`, or the first that takes it).

        A tier that has it already costs no copy; one that has no room, or fails, is passed over. Returns whether one
        has it now; of a document that is dropped meanwhile no copy is kept. The lock is not held during the copy.
        """
        source = self.all[level].tier.medium
        for below in range(level + 1, len(self.all)) if to is None else (to,):
            shelf = self.all[below]
            kept = shelf.tier.entries.get(entry.key)
            if kept is not None:
                shelf.touch(kept)
                return True
            try:
                self.make_room(shelf.tier.medium.bytes_of(entry.n_tokens), level=below, what=f"eviction of {entry.key}")
                if not _kept(entry):
                    return False
                copy = shelf.tier.reserve(entry.key, entry.n_tokens)
            except (CacheFull, PoolFull, OSError) as e:
                log.debug("%s does not go to %s: %s", entry.key, shelf.tier.name, e)
                self.counts.failed_demotions[shelf.tier.name] += 1
                continue
            try:
                with self._unlocked():
                    shelf.tier.medium.write(copy.body, source.read(entry.body, entry.n_tokens))
                if not _kept(entry):
                    shelf.tier.cancel(copy)
                    return False
                shelf.commit(copy)
            except (OSError, StoreDamaged) as e:
                shelf.tier.cancel(copy)
                log.warning("%s could not be kept in %s: %s", entry.key, shelf.tier.name, e)
                self.counts.failed_demotions[shelf.tier.name] += 1
                continue
            except BaseException:
                shelf.tier.cancel(copy)
                raise
            self.counts.demotions[shelf.tier.name] += 1
            return True
        return False

    def expire(self) -> None:
        """Drop what the policies want gone, in every tier."""
        for shelf in self.all:
            for key in shelf.expired():
                shelf.drop(key)
                self.counts.expired[shelf.tier.name] += 1

    def drop(self, key: Hashable) -> bool:
        """Forget a document in every tier; whether it was in any."""
        found = [shelf.drop(key) for shelf in self.all]
        return any(found)

    def check(self, others: Iterable[Sequence[int]] = ()) -> None:
        """Raise BrokenInvariant unless all tiers are sound; others: pages allocated past the cache, in the first."""
        for shelf in self.all:
            shelf.check(others if shelf is self.top else ())

    def _evict(self, key: Hashable, level: int) -> None:
        """Copy a victim down and drop it, unless it came into use or was dropped meanwhile."""
        shelf = self.all[level]
        entry = shelf.tier.entries.get(key)
        if entry is None or entry.pins:
            return
        shelf.hold(entry)  # others may read it while it is copied, and drop it, but not take its bytes
        try:
            self.copy_down(entry, level)
        finally:
            shelf.let_go(entry)
        if _kept(entry) and not entry.pins:
            shelf.drop(key, evicted=True)
            self.counts.evictions[shelf.tier.name] += 1
            self.counts.evicted_bytes[shelf.tier.name] += entry.size_bytes

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()


def _kept(entry: Entry) -> bool:
    return entry.state is State.KEPT
