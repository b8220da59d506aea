"""What to evict: pure decisions over sizes, ages and costs. Knows no bytes, no clocks, no threads. Needs no torch.

A policy is told what happened and when (`now`, seconds of any clock) and answers with data; who asks carries it out.
All verbs take O(log n). Another policy is a file with a class like these and a line below.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from tamis.core.errors import InvalidInput
from tamis.core.registry import Registry

POLICIES = Registry("eviction policy")
POLICIES.add("lru", "tamis.cache.evict:Lru")
POLICIES.add("gdsf", "tamis.cache.evict:Gdsf")
POLICIES.add("ttl", "tamis.cache.evict:Ttl")


def new_policy(name: str, **options: Any) -> Policy:
    """A fresh policy by name, with its own options (`ttl_s` of "ttl"). Raises UnknownName."""
    policy: Policy = POLICIES.get(name)(**options)
    return policy


@dataclass(frozen=True)
class Decision:
    """What to evict, worst first, and how many bytes that frees. Empty if all there is to evict is not enough."""

    victims: tuple[Hashable, ...]
    freed_bytes: int
    enough: bool


class Policy(Protocol):
    """Ranks the documents of one tier. A pinned one is never a victim; pins are not counted here."""

    @property
    def evictable_bytes(self) -> int: ...
    def add(self, key: Hashable, *, size_bytes: int, cost: float, now: float) -> None: ...
    def touch(self, key: Hashable, now: float) -> None: ...
    def remove(self, key: Hashable, *, evicted: bool = False) -> None: ...
    def pin(self, key: Hashable) -> None: ...
    def unpin(self, key: Hashable) -> None: ...
    def victims(self, need_bytes: int, now: float) -> Decision: ...
    def expired(self, now: float) -> tuple[Hashable, ...]: ...
    def __contains__(self, key: object) -> bool: ...
    def __len__(self) -> int: ...


@dataclass(slots=True)
class Item:
    """What a policy knows of a document. `order` counts its uses among all uses and breaks ties."""

    size_bytes: int
    cost: float
    rank: float = 0.0
    order: int = 0
    uses: int = 0
    pinned: bool = False
    queued: int = -1  # the order under which the heap holds it; -1: not at all


class Ranked:
    """Evicts what has the lowest rank, of equals what was used longest ago; subclasses say what a rank is.

    A heap whose outdated rows are skipped when they come up, and swept when they are the majority.
    """

    def __init__(self) -> None:
        self._items: dict[Hashable, Item] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._orders = 0
        self._evictable = 0

    def rank(self, item: Item, now: float) -> float:
        """The rank of an item that is used now."""
        raise NotImplementedError

    def on_evicted(self, item: Item) -> None:
        """Learn from an eviction; by default nothing."""

    @property
    def evictable_bytes(self) -> int:
        """Bytes of everything that is not pinned."""
        return self._evictable

    def add(self, key: Hashable, *, size_bytes: int, cost: float, now: float) -> None:
        """Enter a document of `size_bytes` that costs `cost` (any unit, one for all) to make again."""
        assert key not in self._items, f"{key} is entered twice"
        if size_bytes < 1 or not cost >= 0:
            raise InvalidInput(f"{key} has {size_bytes} bytes and cost {cost}; allowed are 1 or more, and 0 or more.")
        item = self._items[key] = Item(size_bytes, cost)
        self._evictable += size_bytes
        self._use(key, item, now)

    def touch(self, key: Hashable, now: float) -> None:
        """Note a use."""
        self._use(key, self._items[key], now)

    def remove(self, key: Hashable, *, evicted: bool = False) -> None:
        """Forget a document; `evicted` if `victims` named it, not if it was dropped for another reason."""
        item = self._items.pop(key)
        if not item.pinned:
            self._evictable -= item.size_bytes
        if evicted:
            self.on_evicted(item)
        if len(self._heap) > 2 * len(self._items) + 64:
            self._sweep()

    def pin(self, key: Hashable) -> None:
        """Spare a document until `unpin`; a second pin changes nothing."""
        item = self._items[key]
        if not item.pinned:
            item.pinned = True
            self._evictable -= item.size_bytes

    def unpin(self, key: Hashable) -> None:
        """End `pin`: its rank is that of its last use."""
        item = self._items[key]
        if item.pinned:
            item.pinned = False
            self._evictable += item.size_bytes
            self._queue(key, item)

    def victims(self, need_bytes: int, now: float) -> Decision:
        """The worst documents whose bytes sum to `need_bytes` or more. Changes nothing but the heap's tidiness."""
        if need_bytes > self._evictable:
            return Decision((), 0, enough=False)
        chosen: list[tuple[float, int, Hashable]] = []
        freed = 0
        for row in self._worst():
            if freed >= need_bytes:
                break
            heapq.heappop(self._heap)
            chosen.append(row)
            freed += self._items[row[2]].size_bytes
        for row in chosen:
            heapq.heappush(self._heap, row)
        return Decision(tuple(key for _, _, key in chosen), freed, enough=True)

    def expired(self, now: float) -> tuple[Hashable, ...]:
        """Documents that are to go even if there is room: here none."""
        return ()

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def _use(self, key: Hashable, item: Item, now: float) -> None:
        item.uses += 1
        item.order = self._orders
        self._orders += 1
        item.rank = self.rank(item, now)
        if not item.pinned:
            self._queue(key, item)

    def _queue(self, key: Hashable, item: Item) -> None:
        if item.queued != item.order:
            item.queued = item.order
            heapq.heappush(self._heap, (item.rank, item.order, key))
            if len(self._heap) > 2 * len(self._items) + 64:
                self._sweep()

    def _worst(self) -> Iterator[tuple[float, int, Hashable]]:
        """The top of the heap again and again, outdated rows removed; the caller pops what it takes."""
        while self._heap:
            _, order, key = row = self._heap[0]
            item = self._items.get(key)
            if item is not None and item.order == order and not item.pinned:
                yield row
                continue
            heapq.heappop(self._heap)
            if item is not None and item.queued == order:
                item.queued = -1

    def _sweep(self) -> None:
        self._heap = [(i.rank, i.order, key) for key, i in self._items.items() if not i.pinned]
        heapq.heapify(self._heap)
        for item in self._items.values():
            item.queued = -1 if item.pinned else item.order


class Lru(Ranked):
    """Evicts what was used longest ago."""

    def rank(self, item: Item, now: float) -> float:
        """The order of uses alone decides."""
        return 0.0


class Gdsf(Ranked):
    """Greedy-Dual-Size with frequency (Cherkasova, HPL-98-69): keeps what saves most cost per byte and is in use.

    Rank = age + uses * cost / bytes, where age is the highest rank evicted so far: what is not used any more is
    overtaken by newcomers however often it was used once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.age = 0.0

    def rank(self, item: Item, now: float) -> float:
        """Worth at this use."""
        return self.age + item.uses * item.cost / item.size_bytes

    def on_evicted(self, item: Item) -> None:
        """Raise the age to the victim's rank."""
        self.age = max(self.age, item.rank)


class Ttl(Ranked):
    """Documents go `ttl_s` seconds after their last use, or after they were stored; under pressure the oldest first."""

    def __init__(self, ttl_s: float, *, since_use: bool = True) -> None:
        if not ttl_s > 0:
            raise InvalidInput(f"ttl_s is {ttl_s}; allowed is any number of seconds above 0.")
        super().__init__()
        self.ttl_s = ttl_s
        self.since_use = since_use

    def rank(self, item: Item, now: float) -> float:
        """The second at which it expires."""
        return now + self.ttl_s if self.since_use or item.uses == 1 else item.rank

    def expired(self, now: float) -> tuple[Hashable, ...]:
        """All whose time is over, pinned ones spared until they are unpinned."""
        gone: list[tuple[float, int, Hashable]] = []
        for row in self._worst():
            if row[0] > now:
                break
            gone.append(heapq.heappop(self._heap))
        for row in gone:
            heapq.heappush(self._heap, row)
        return tuple(key for _, _, key in gone)
