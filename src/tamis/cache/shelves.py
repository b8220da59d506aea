"""Tiers in order, each with its policy: eviction downwards, and the sums over all. Not thread-safe, needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from tamis.cache.evict import Policy
from tamis.cache.tiers.base import Entry, State, Tier
from tamis.core.errors import BrokenInvariant, CacheFull, InvalidInput, PoolFull, StoreDamaged
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

    def below(self, key: Hashable) -> tuple[Shelf, Entry] | None:
        """Where a document lies under the first tier, fastest first."""
        for shelf in self.all[1:]:
            if (entry := shelf.tier.entries.get(key)) is not None:
                return shelf, entry
        return None

    def make_room(self, needed_bytes: int, *, level: int = 0, what: str = "this request") -> None:
        """Evict from a tier, to the next ones, until needed_bytes are free. Raises CacheFull, with nothing evicted."""
        shelf = self.all[level]
        medium = shelf.tier.medium
        short = needed_bytes - medium.free_bytes
        if short <= 0:
            return
        victims = shelf.victims(short)
        if victims is None:
            available = medium.free_bytes + shelf.policy.evictable_bytes
            raise CacheFull(
                f"{what} needs {needed_bytes} bytes of tier {shelf.tier.name!r} and {available} of "
                f"{medium.budget_bytes} are available, the rest is in use. Use fewer documents, try again when other "
                "requests are done, or give the tier more bytes.",
                needed_bytes=needed_bytes,
                available_bytes=available,
            )
        for key in victims:
            entry = shelf.tier.entries[key]
            self.copy_down(entry, level)
            shelf.drop(key, evicted=True)
            self.counts.evictions[shelf.tier.name] += 1
            self.counts.evicted_bytes[shelf.tier.name] += entry.size_bytes

    def copy_down(self, entry: Entry, level: int, *, to: int | None = None) -> bool:
        """Make sure that a document of tier `level` lies in a slower one (`to`, or the first that takes it).

        A tier that has it already costs no copy; one that has no room, or fails, is passed over. Returns whether one
        has it now.
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
                copy = shelf.tier.reserve(entry.key, entry.n_tokens)
            except (CacheFull, PoolFull, OSError) as e:
                log.debug("%s does not go to %s: %s", entry.key, shelf.tier.name, e)
                self.counts.failed_demotions[shelf.tier.name] += 1
                continue
            try:
                shelf.tier.medium.write(copy.body, source.read(entry.body, entry.n_tokens))
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
