"""Ten thousand random operations with faults: after each one every page is free, owned or cached, exactly once."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cache_kit import Faults, Injected, counting, intact, payload, tiers, wanted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tamis.cache.allocator import PageAllocator
from tamis.cache.document import Lease, Payload, Wanted
from tamis.cache.store import DocumentCache, RequestPages
from tamis.cache.tiers.base import Entry, Tier
from tamis.core.errors import BrokenInvariant, CacheFull, NotCached

OPERATIONS, EXAMPLES = 1000, 10
EXPECTED = (Injected, OSError, CacheFull, NotCached)


class Machine:
    """Random operations on a cache; knows only what it holds itself."""

    def __init__(self, made: list[Tier], rng: random.Random, faults: Faults, *, policy: str, tensors: bool) -> None:
        self.cache = DocumentCache(made, policy=policy, clock=self.tick, cost=lambda n: n * n + 1.0)
        self.made, self.rng, self.faults, self.tensors = made, rng, faults, tensors
        self.leases: list[Lease] = []
        self.owned: list[RequestPages] = []
        self.pinned: list[Wanted] = []
        self.done = Counter[str]()
        self.time = 0.0

    def tick(self) -> float:
        self.time += 0.5
        return self.time

    def rows(self, most: int = 4) -> list[Wanted]:
        return [wanted(min(int(self.rng.expovariate(0.12)), 40)) for _ in range(self.rng.randint(1, most))]

    def compute(self, row: Wanted) -> Payload:
        self.faults.maybe(Injected("compute"))
        return payload(row) if self.tensors else Payload(row.n_tokens)

    def step(self) -> None:
        verbs: list[tuple[int, Callable[[], None]]] = [
            (40, self.get), (30, self.close), (6, self.put), (6, self.drop), (5, self.own), (5, self.disown),
            (3, self.pin), (4, self.unpin), (4, self.persist), (1, self.cache.clear),
        ]  # fmt: skip
        (verb,) = self.rng.choices([v for _, v in verbs], [w for w, _ in verbs])
        try:
            verb()
            self.done[verb.__name__] += 1
        except EXPECTED as e:
            self.done[type(e).__name__] += 1

    def get(self) -> None:
        lease = self.cache.get(self.rows(), self.compute if self.rng.random() < 0.9 else None, timeout_s=5)
        self.leases.append(lease)

    def close(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.rng.randrange(len(self.leases)))
            assert not self.tensors or intact(self.made[0], lease), "a leased document has changed"
            lease.close()

    def put(self) -> None:
        self.cache.put([(row.key, self.compute(row)) for row in self.rows(2)])

    def drop(self) -> None:
        self.cache.drop([row.key for row in self.rows()])

    def own(self) -> None:
        if self.owned and self.rng.random() < 0.5:
            self.owned[-1].extend(self.rng.randint(1, 12))
        else:
            self.owned.append(self.cache.own(self.rng.randint(1, 20)))

    def disown(self) -> None:
        if self.owned:
            self.owned.pop(self.rng.randrange(len(self.owned))).close()

    def pin(self) -> None:
        rows = self.rows(1)
        self.cache.pin(rows, self.compute)
        self.pinned += rows

    def unpin(self) -> None:
        if self.pinned:
            self.cache.unpin([self.pinned.pop(self.rng.randrange(len(self.pinned))).key])

    def persist(self) -> None:
        self.cache.persist([row.key for row in self.rows(2)])

    def finish(self) -> None:
        """Give everything back: all bytes that are then still in use are documents that nobody holds."""
        self.faults.share = 0.0
        for lease in self.leases:
            assert not self.tensors or intact(self.made[0], lease)
            lease.close()
        for pages in self.owned:
            pages.close()
        for row in self.pinned:
            self.cache.unpin([row.key])
        self.cache.check()
        assert all(tier.pinned_bytes == 0 for tier in self.cache.statistics().tiers.values())
        self.cache.clear()
        self.cache.check()
        assert all(tier.medium.free_bytes == tier.medium.budget_bytes for tier in self.made)
        self.cache.close()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(["lru", "gdsf"]))
def test_ten_thousand_operations_with_faults(seed: int, policy: str) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        made, faults = tiers(Path(folder), device=14, host=10), Faults(rng, patched)
        machine = Machine(made, rng, faults, policy=policy, tensors=True)
        faults.everywhere(made)
        for _ in range(OPERATIONS):
            faults.share = 0.05 if rng.random() < 0.5 else 0.0
            machine.step()
            faults.share = 0.0
            machine.cache.check()
        machine.finish()
        assert faults.thrown > 20 and machine.done["get"] > 100, machine.done


def test_ten_thousand_operations_in_the_simulators_tiers() -> None:
    rng = random.Random(7)
    with pytest.MonkeyPatch.context() as patched:
        made, faults = counting(100, 80, 300), Faults(rng, patched)
        machine = Machine(made, rng, faults, policy="gdsf", tensors=False)
        faults.everywhere(made)
        for _ in range(10_000):
            faults.share = 0.05 if rng.random() < 0.5 else 0.0
            machine.step()
            faults.share = 0.0
            machine.cache.check()
        machine.finish()
        assert machine.done["get"] > 1000 and faults.thrown > 200, machine.done


def forgets_to_free(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PageAllocator.release

    def release(self: PageAllocator, pages: Sequence[int]) -> None:
        real(self, pages[1:])

    monkeypatch.setattr(PageAllocator, "release", release)


def forgets_a_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    from tamis.cache.shelves import Shelf

    def hold(self: Shelf, entry: Entry, times: int = 1) -> None:
        entry.pins += times

    monkeypatch.setattr(Shelf, "hold", hold)


def forgets_to_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    def cancel(self: Tier, entry: Entry) -> None:
        self._unfindable.discard(entry)
        self.used_bytes -= entry.size_bytes

    monkeypatch.setattr(Tier, "cancel", cancel)


def forgets_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    from tamis.cache.shelves import Shelf

    def drop(self: Shelf, key: Any, *, evicted: bool = False) -> bool:
        return self.tier.drop([key])[0]

    monkeypatch.setattr(Shelf, "drop", drop)


def forgets_leases_of_dropped_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Tier, key: Any) -> bool:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self._free(entry)
        return entry is not None

    monkeypatch.setattr(Tier, "_forget", forget)


MUTATIONS = (
    forgets_to_free,
    forgets_a_hold,
    forgets_to_cancel,
    forgets_the_policy,
    forgets_leases_of_dropped_documents,
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda f: f.__name__)
def test_a_planted_bug_is_found(mutation: Callable[[pytest.MonkeyPatch], None], tmp_path: Path) -> None:
    rng = random.Random(3)
    with pytest.MonkeyPatch.context() as patched:
        made, faults = tiers(tmp_path, device=14, host=10), Faults(rng, patched)
        machine = Machine(made, rng, faults, policy="lru", tensors=True)
        mutation(patched)
        faults.everywhere(made)
        with pytest.raises((BrokenInvariant, AssertionError)):
            for _ in range(OPERATIONS):
                faults.share = 0.05
                machine.step()
                faults.share = 0.0
                machine.cache.check()
        machine.cache.close()
