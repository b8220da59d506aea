"""Policies against naive ones that look at everything, at every step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable
from typing import Any

import pytest

from tamis.cache.evict import POLICIES, Gdsf, Lru, Policy, Ttl, new_policy
from tamis.core.errors import InvalidInput, UnknownName


class Naive:
    """Keeps rows [bytes, cost, uses, rank, last use] and sorts them whenever it is asked."""

    def __init__(self, rank: Callable[[Naive, list[float], float], float]) -> None:
        self.rows: dict[Hashable, list[float]] = {}
        self.pinned: set[Hashable] = set()
        self.age = 0.0
        self.uses = 0
        self._rank = rank

    def use(self, key: Hashable, now: float, size: int = 0, cost: float = 0.0) -> None:
        row = self.rows.setdefault(key, [size, cost, 0, 0.0, 0])
        row[2] += 1
        row[3] = self._rank(self, row, now)
        self.uses += 1
        row[4] = self.uses

    def order(self) -> list[Hashable]:
        return sorted((k for k in self.rows if k not in self.pinned), key=lambda k: (self.rows[k][3], self.rows[k][4]))

    def victims(self, need: int) -> tuple[Hashable, ...] | None:
        chosen: list[Hashable] = []
        for key in self.order():
            if sum(self.rows[k][0] for k in chosen) >= need:
                break
            chosen.append(key)
        return tuple(chosen) if sum(self.rows[k][0] for k in chosen) >= need else None


RANKS: dict[str, tuple[dict[str, Any], Callable[[Naive, list[float], float], float]]] = {
    "lru": ({}, lambda _, row, now: 0.0),
    "gdsf": ({}, lambda naive, row, now: naive.age + row[2] * row[1] / row[0]),
    "ttl": ({"ttl_s": 50.0}, lambda _, row, now: now + 50.0),
}


@pytest.mark.parametrize("name", list(RANKS))
@pytest.mark.parametrize("seed", range(3))
def test_like_a_naive_one(name: str, seed: int) -> None:
    rng = random.Random(seed)
    options, rank = RANKS[name]
    policy, naive, now = new_policy(name, **options), Naive(rank), 0.0
    for _ in range(2500):
        now += rng.choice([0.0, 1.0])
        key = rng.randrange(40)
        if key not in naive.rows:
            size, cost = rng.randint(1, 20), rng.choice([0.0, 1.0, 7.5])
            policy.add(key, size_bytes=size, cost=cost, now=now)
            naive.use(key, now, size, cost)
            continue
        step(rng.choice(["touch", "touch", "pin", "unpin", "drop", "evict"]), key, policy, naive, now, rng)
        loose = [k for k in naive.rows if k not in naive.pinned]
        assert policy.evictable_bytes == sum(naive.rows[k][0] for k in loose) and len(policy) == len(naive.rows)
        if name == "ttl":
            gone = tuple(k for k in naive.order() if naive.rows[k][3] <= now)
            assert policy.expired(now) == gone
        else:
            assert policy.expired(now) == ()


def step(verb: str, key: Hashable, policy: Policy, naive: Naive, now: float, rng: random.Random) -> None:
    """One operation on both."""
    if verb == "touch":
        policy.touch(key, now)
        naive.use(key, now)
    elif verb == "pin":
        policy.pin(key)
        naive.pinned.add(key)
    elif verb == "unpin":
        policy.unpin(key)
        naive.pinned.discard(key)
    elif verb == "drop":
        policy.remove(key)
        naive.rows.pop(key)
        naive.pinned.discard(key)
    else:
        need = rng.randint(0, 150)
        decision = policy.victims(need, now)
        assert decision == policy.victims(need, now), "a decision changes nothing"
        assert decision.enough == (naive.victims(need) is not None)
        if decision.enough:
            assert decision.victims == naive.victims(need)
            assert decision.freed_bytes == sum(naive.rows[k][0] for k in decision.victims)
        for victim in decision.victims[:2]:
            policy.remove(victim, evicted=True)
            naive.age = max(naive.age, naive.rows.pop(victim)[3])


def test_gdsf_keeps_what_is_used_often_and_dear_to_make() -> None:
    policy = Gdsf()
    for key, size, cost in (("often", 10, 10.0), ("dear", 10, 50.0), ("large", 100, 100.0), ("once", 10, 10.0)):
        policy.add(key, size_bytes=size, cost=cost, now=0.0)
    for _ in range(3):
        policy.touch("often", 0.0)
    assert policy.victims(105, 0.0).victims == ("large", "once")
    policy.remove("once", evicted=True)
    assert policy.age == 1.0


def test_gdsf_forgets_old_fame() -> None:
    policy = Gdsf()
    policy.add("star", size_bytes=1, cost=1.0, now=0.0)
    for _ in range(9):
        policy.touch("star", 0.0)
    for i in range(30):
        policy.add(i, size_bytes=1, cost=1.0, now=0.0)
        (victim,) = policy.victims(1, 0.0).victims
        policy.remove(victim, evicted=True)
        if victim == "star":
            break
    assert "star" not in policy


def test_a_document_lives_on_from_when_it_was_stored_if_so_wished() -> None:
    policy = Ttl(10.0, since_use=False)
    policy.add("a", size_bytes=1, cost=1.0, now=0.0)
    policy.touch("a", 9.0)
    assert policy.expired(9.9) == () and policy.expired(10.0) == ("a",)
    policy.pin("a")
    assert policy.expired(99.0) == ()
    policy.unpin("a")
    assert policy.expired(99.0) == ("a",)


def test_names_and_options() -> None:
    assert list(POLICIES) == ["lru", "gdsf", "ttl"]
    with pytest.raises(UnknownName, match=r"'lfu'.*gdsf"):
        new_policy("lfu")
    with pytest.raises(InvalidInput, match="ttl_s is 0"):
        new_policy("ttl", ttl_s=0)
    with pytest.raises(InvalidInput, match="cost -1"):
        Lru().add("a", size_bytes=1, cost=-1.0, now=0.0)


def test_many_operations_stay_cheap_and_small() -> None:
    policy, rng = Lru(), random.Random(1)
    started = time.process_time()
    for i in range(60_000):
        key = rng.randrange(3000)
        if key in policy:
            policy.pin(key)
            policy.touch(key, float(i))
            policy.unpin(key)
        else:
            if len(policy) >= 2000:
                policy.remove(policy.victims(1, float(i)).victims[0], evicted=True)
            policy.add(key, size_bytes=1, cost=1.0, now=float(i))
    assert len(policy._heap) <= 2 * len(policy) + 65
    assert time.process_time() - started < 20.0
