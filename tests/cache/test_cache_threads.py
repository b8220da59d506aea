"""Many threads, one copy: no document is computed twice at a time, no error reaches the wrong caller, nothing hangs."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_kit import Injected, counting, intact, payload, tiers, wanted

from tamis.cache.document import Payload, Wanted
from tamis.cache.store import DocumentCache
from tamis.core.errors import CacheFull, CacheTimeout

JOIN_S = 60.0


def together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run all at once; what each returned or raised, in order. A thread that hangs fails the test."""
    results: list[Any] = [None] * len(jobs)
    gate = threading.Barrier(len(jobs))

    def run(i: int) -> None:
        gate.wait()
        try:
            results[i] = jobs[i]()
        except Exception as e:
            results[i] = e

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), "a thread hangs"
    return results


def test_one_missing_document_is_computed_once() -> None:
    cache, calls = DocumentCache(counting(100)), Counter[str]()

    def compute(row: Wanted) -> Payload:
        calls[str(row.key)] += 1
        time.sleep(0.05)
        return Payload(row.n_tokens)

    def job() -> int:
        with cache.get([Wanted("a", 10)], compute) as lease:
            return lease.documents[0].n_tokens

    assert together([job] * 8) == [10] * 8
    assert calls == {"a": 1}
    seen = cache.statistics()
    assert (seen.computed, seen.shared + seen.tiers["t0"].hits) == (1, 7)
    cache.check()


def test_when_one_fails_the_next_tries_and_each_gets_its_own_error() -> None:
    cache, order, lock = DocumentCache(counting(100)), [], threading.Lock()

    def job(number: int) -> Any:
        def compute(row: Wanted) -> Payload:
            time.sleep(0.02)
            with lock:
                order.append(number)
                if len(order) <= 3:
                    raise Injected(str(number))
            return Payload(row.n_tokens)

        cache.get([Wanted("a", 10)], compute).close()
        return "served"

    results = together([lambda n=n: job(n) for n in range(6)])  # type: ignore[misc]
    failed = [i for i, r in enumerate(results) if isinstance(r, Injected)]
    assert sorted(failed) == sorted(order[:3]) and all(str(results[i]) == str(i) for i in failed)
    assert results.count("served") == 3 and len(order) == 4
    cache.check()


def test_requests_that_want_each_others_documents_do_not_deadlock() -> None:
    cache = DocumentCache(counting(1000))

    def job(names: str) -> None:
        def slow(row: Wanted) -> Payload:
            time.sleep(0.002)
            return Payload(row.n_tokens)

        for _ in range(20):
            cache.get([Wanted(name, 10) for name in names], slow).close()
            cache.drop(names[:2])

    assert together([lambda n=n: job(n) for n in ("abcd", "dcba", "badc", "cdab")]) == [None] * 4  # type: ignore[misc]
    cache.check()


def test_a_waiter_gives_up_in_time_and_the_leader_is_not_disturbed() -> None:
    cache, started, go_on = DocumentCache(counting(30)), threading.Event(), threading.Event()

    def slow(row: Wanted) -> Payload:
        started.set()
        assert go_on.wait(JOIN_S)
        return Payload(row.n_tokens)

    def leader() -> str:
        cache.get([Wanted("a", 10)], slow).close()
        return "served"

    def waiter() -> None:
        assert started.wait(JOIN_S)
        try:
            cache.get([Wanted("b", 10), Wanted("a", 10)], lambda row: Payload(row.n_tokens), timeout_s=0.05)
        finally:
            go_on.set()

    served, late = together([leader, waiter])
    assert served == "served" and isinstance(late, CacheTimeout)
    cache.check()
    assert cache.statistics().tiers["t0"].pinned_bytes == 0 and cache.where("ab") == ["t0", "t0"]


def test_room_reserved_by_a_running_request_is_not_given_away() -> None:
    cache, started, go_on = DocumentCache(counting(30)), threading.Event(), threading.Event()

    def slow(row: Wanted) -> Payload:
        started.set()
        assert go_on.wait(JOIN_S)
        return Payload(row.n_tokens)

    def second() -> None:
        assert started.wait(JOIN_S)
        try:
            cache.get([Wanted("c", 20)], lambda row: Payload(row.n_tokens))
        finally:
            go_on.set()

    first, refused = together([lambda: cache.get([Wanted("a", 10), Wanted("b", 10)], slow).close(), second])
    assert first is None and isinstance(refused, CacheFull) and refused.available_bytes == 10
    cache.check()


@pytest.mark.parametrize("policy", ["lru", "gdsf"])
def test_many_threads_on_real_tiers(policy: str, tmp_path: Path) -> None:
    made = tiers(tmp_path, device=14)
    cache = DocumentCache(made, policy=policy)
    running, most, lock = Counter[Any](), [0], threading.Lock()

    def job(seed: int) -> Counter[str]:
        rng, seen = random.Random(seed), Counter[str]()

        def compute(row: Wanted) -> Payload:
            with lock:
                running[row.key] += 1
                most[0] = max(most[0], running[row.key])
            try:
                if rng.random() < 0.15:
                    raise Injected("compute")
                return payload(row)
            finally:
                with lock:
                    running[row.key] -= 1

        for _ in range(120):
            rows = [wanted(rng.randrange(25)) for _ in range(rng.randint(1, 3))]
            try:
                with cache.get(rows, compute, timeout_s=JOIN_S) as lease:
                    assert intact(made[0], lease)
                    seen["served"] += 1
            except (Injected, CacheFull) as e:
                seen[type(e).__name__] += 1
            if rng.random() < 0.1:
                cache.drop([rows[0].key])
            if rng.random() < 0.05:
                cache.check()
        return seen

    results = together([lambda s=s: job(s) for s in range(5)])  # type: ignore[misc]
    assert all(isinstance(r, Counter) for r in results), results
    assert sum(r["served"] for r in results) > 200 and most[0] == 1
    cache.check()
    assert cache.statistics().tiers["device"].pinned_bytes == 0
    cache.close()
