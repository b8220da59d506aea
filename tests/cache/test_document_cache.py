"""Requests get all of their documents or none, from the fastest tier; what is evicted goes down, not away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_kit import MODEL, PAGE, SPEC, Injected, counting, intact, payload, pool, tiers, wanted

from tamis.cache.document import Payload, Wanted
from tamis.cache.evict import Lru, Ttl
from tamis.cache.store import DocumentCache
from tamis.cache.tiers.base import Tier
from tamis.cache.tiers.device import device_tier
from tamis.cache.tiers.disk import disk_tier
from tamis.core.errors import (
    BrokenInvariant,
    CacheFull,
    CacheTimeout,
    InvalidInput,
    NotCached,
    UnknownName,
)


class Clock:
    """Seconds that pass when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def real(tmp_path: Path) -> Iterator[tuple[DocumentCache, list[Tier]]]:
    """Twelve pages on the device, eight on the host, a disk for all."""
    made = tiers(tmp_path, disk=400_000)
    cache = DocumentCache(made)
    yield cache, made
    cache.check()
    cache.close()


def lengths(row: Wanted) -> Payload:
    return Payload(row.n_tokens)


def doc(name: str, n_tokens: int = 10) -> Wanted:
    return Wanted(name, n_tokens)


def fetch(cache: DocumentCache, *names: str, compute: Any = lengths) -> None:
    cache.get([doc(name) for name in names], compute).close()


def test_one_copy_for_all_requests(real: tuple[DocumentCache, list[Tier]]) -> None:
    cache, made = real
    rows = [wanted(4), wanted(1), wanted(4)]
    with cache.get(rows, payload) as first, cache.get(rows[:1], None) as second:
        assert first.documents[0] is not None and first.documents[0] == first.documents[2] == second.documents[0]
        assert len(first.documents[0].pages) == 3 and intact(made[0], first) and intact(made[0], second)
    seen = cache.statistics()
    assert (seen.computed, seen.tiers["device"].hits) == (2, 1)
    assert (seen.computed_tokens, seen.tiers["device"].hit_tokens) == (21 + 6, 21)
    assert seen.hit_rate == 21 / 48


def test_evicted_documents_come_back_from_below(real: tuple[DocumentCache, list[Tier]]) -> None:
    cache, made = real
    rows = [wanted(i) for i in range(25)]
    for row in rows:
        with cache.get([row], payload) as lease:
            assert intact(made[0], lease)
        cache.check()
    places = cache.where([row.key for row in rows])
    assert set(places) == {"device", "host", "disk"}

    def never(row: Wanted) -> Payload:
        raise AssertionError(f"{row} was lost")

    for row in reversed(rows):
        with cache.get([row], never) as lease:
            assert intact(made[0], lease)
        cache.check()
    seen = cache.statistics()
    assert seen.tiers["host"].hits and seen.tiers["disk"].hits and seen.computed == 25
    assert seen.tiers["host"].demotions and seen.tiers["disk"].demotions and seen.tiers["device"].evicted_bytes


def test_what_lies_below_already_is_not_copied_again() -> None:
    cache = DocumentCache(counting(10, 100))
    for name in "abababab":
        fetch(cache, name)
    seen = cache.statistics()
    assert (seen.tiers["t0"].evictions, seen.tiers["t1"].demotions, seen.tiers["t1"].hits) == (7, 2, 6)
    cache.check()


def test_documents_of_a_request_never_evict_each_other() -> None:
    cache = DocumentCache(counting(30, 100))
    fetch(cache, "a", "b", "c")
    with cache.get([doc("c"), doc("d"), doc("a")], lengths):
        assert cache.where(["a", "b", "c", "d"]) == ["t0", "t1", "t0", "t0"]


def test_too_many_documents_are_refused_with_the_bytes_and_nothing_changes() -> None:
    cache = DocumentCache(counting(35, 100))
    fetch(cache, "a")
    with pytest.raises(CacheFull, match=r"needs 40 bytes of tier 't0' and 35 of 35 are available") as error:
        fetch(cache, "b", "c", "d", "e")
    assert (error.value.needed_bytes, error.value.available_bytes) == (40, 35)
    assert cache.where("abcde") == ["t0", None, None, None, None]
    with (
        cache.get([doc("x"), doc("y")], lengths) as held,
        pytest.raises(CacheFull, match=r"20 bytes .* 15 of 35 are available, the rest is in use"),
    ):
        fetch(cache, "b", "c")
    assert not held.open
    fetch(cache, "b", "c")
    assert cache.statistics().refusals == 2
    cache.check()


def test_a_document_held_from_below_is_not_evicted_there_meanwhile() -> None:
    """Making room above pushes documents down into the tier that the wanted one has to be read from."""
    cache = DocumentCache(counting(20, 20))
    for name in "abcd":
        fetch(cache, name)
    assert cache.where("abcd") == ["t1", "t1", "t0", "t0"]
    with cache.get([doc("a"), doc("b")]) as lease:
        assert [d.key for d in lease] == ["a", "b"]
    cache.check()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_failing_compute_leaves_nothing_held(at: int, real: tuple[DocumentCache, list[Tier]]) -> None:
    cache, made = real
    rows = [wanted(i) for i in (6, 1, 2, 7)]
    cache.get(rows[3:], payload).close()

    def failing(row: Wanted) -> Payload:
        if row == rows[at]:
            raise Injected("compute")
        return payload(row)

    with pytest.raises(Injected):
        cache.get(rows, failing)
    cache.check()
    assert cache.where([row.key for row in rows[:3]]) == ["device"] * at + [None] * (3 - at)
    assert cache.statistics().tiers["device"].pinned_bytes == 0
    with cache.get(rows, payload) as lease:
        assert intact(made[0], lease)


def test_a_compute_of_the_wrong_length() -> None:
    cache = DocumentCache(counting(100))
    with pytest.raises(InvalidInput, match="3 tokens were computed for a; it has 10"):
        cache.get([doc("a")], lambda _: Payload(3))
    cache.check()


def test_a_request_that_waits_for_itself_times_out() -> None:
    cache = DocumentCache(counting(100))

    def recursive(row: Wanted) -> Payload:
        cache.get([row], lengths, timeout_s=0.01)
        return lengths(row)

    with pytest.raises(CacheTimeout, match=r"has not finished a \(10 tokens\) within 0.01 s"):
        cache.get([doc("a")], recursive)
    cache.check()
    assert cache.statistics().timeouts == 1
    fetch(cache, "a")


def test_nothing_to_compute_with() -> None:
    cache = DocumentCache(counting(100))
    fetch(cache, "a")
    with pytest.raises(NotCached, match="b is in no tier"):
        cache.get([doc("a"), doc("b")])
    cache.check()
    assert cache.statistics().tiers["t0"].pinned_bytes == 0


def test_damaged_files_are_computed_again(real: tuple[DocumentCache, list[Tier]], tmp_path: Path) -> None:
    cache, made = real
    row = wanted(4)
    cache.put([(row.key, payload(row))])
    assert cache.persist([row.key]) == [True]
    made[0].check()
    cache._desk.shelves.top.drop(row.key)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(NotCached):
        cache.get([row])
    cache.check()
    assert list((tmp_path / "aside").iterdir()) and cache.statistics().tiers["disk"].damaged == 1
    with cache.get([row], payload) as lease:
        assert intact(made[0], lease)


def test_a_damaged_copy_falls_back_to_the_next_tier(real: tuple[DocumentCache, list[Tier]], monkeypatch: Any) -> None:
    from tamis.core.errors import StoreDamaged

    cache, made = real
    row = wanted(4)
    for tier in made[1:]:
        tier.put([(row.key, payload(row))])
        shelf = next(s for s in cache._desk.shelves.all if s.tier is tier)
        shelf.policy.add(row.key, size_bytes=tier.medium.bytes_of(row.n_tokens), cost=1.0, now=0.0)
    monkeypatch.setattr(made[1].medium, "read", lambda *_: (_ for _ in ()).throw(StoreDamaged("bits")))
    with cache.get([row]) as lease:
        assert intact(made[0], lease)
    assert cache.where([row.key]) == ["device"] and cache.statistics().tiers["disk"].hits == 1


def test_documents_survive_the_process_if_persisted(tmp_path: Path) -> None:
    rows = [wanted(i) for i in range(5)]
    first = DocumentCache(tiers(tmp_path))
    first.put([(row.key, payload(row)) for row in rows])
    assert first.persist([*(row.key for row in rows), "never seen"]) == [True] * 5 + [False]
    first.check()
    first.close()
    made = tiers(tmp_path)
    second = DocumentCache(made)
    with second.get(rows) as lease:
        assert intact(made[0], lease)
    second.check()
    second.close()


def test_a_failing_disk_costs_a_copy_not_the_request(
    real: tuple[DocumentCache, list[Tier]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import os

    cache, _ = real
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    for number in range(25):
        cache.get([wanted(number)], payload).close()
    cache.check()
    assert cache.statistics().tiers["disk"].failed_demotions and "no space left" in caplog.text


def test_pins_keep_documents_and_count() -> None:
    cache = DocumentCache(counting(20, 50))
    cache.pin([doc("a")], lengths)
    cache.pin([doc("a")], lengths)
    for name in "bcde":
        fetch(cache, name)
    assert cache.where("a") == ["t0"]
    with pytest.raises(NotCached, match="x not pinned"):
        cache.unpin(["a", "x"])
    cache.unpin("a")
    with pytest.raises(CacheFull):
        fetch(cache, "f", "g")
    cache.unpin("a")
    fetch(cache, "f", "g")
    assert cache.where("a") == ["t1"]
    cache.check()


def test_dropping_in_use_keeps_the_pages_until_the_last_lease(real: tuple[DocumentCache, list[Tier]]) -> None:
    cache, made = real
    row = wanted(4)
    first, second = cache.get([row], payload), cache.get([row])
    assert cache.drop([row.key, "other"]) == [True, False]
    assert cache.where([row.key]) == [None] and intact(made[0], first)
    with cache.get([row], payload) as third:
        assert third.documents[0].pages != first.documents[0].pages
        first.close()
        first.close()
        cache.check()
        assert intact(made[0], second) and intact(made[0], third)
        assert made[0].used_bytes == 6 * SPEC.page_bytes(PAGE)
    second.close()
    assert made[0].used_bytes == 3 * SPEC.page_bytes(PAGE)
    cache.clear()
    assert made[0].used_bytes == 0 and cache.where([row.key]) == [None]


def test_requests_take_pages_at_the_expense_of_documents(real: tuple[DocumentCache, list[Tier]]) -> None:
    cache, made = real
    for number in range(5):
        cache.get([wanted(number)], payload).close()
    with cache.own(40) as mine:
        assert len(mine.pages) == 5 and len(mine.extend(9)) == 2 and len(mine.pages) == 7
        cache.check()
        allocator = made[0].medium.allocator  # type: ignore[attr-defined]
        assert allocator.n_owned == 7 and allocator.n_cached + allocator.n_free == 5
        with pytest.raises(CacheFull, match="a request of 80 tokens needs"):
            mine.extend(80)
        assert len(mine.pages) == 7
    assert allocator.n_owned == 0
    mine.close()


def test_pages_taken_past_the_cache_are_named_to_check() -> None:
    pages = pool(4)
    cache = DocumentCache([device_tier(pages)])
    taken = pages.allocator.allocate(2)
    with pytest.raises(BrokenInvariant):
        cache.check()
    cache.check(others=[taken])
    with pytest.raises(CacheFull):
        cache.get([wanted(4)], payload)


def test_time_to_live() -> None:
    clock = Clock()
    cache = DocumentCache(counting(100, 100), policy=lambda: Ttl(10.0), clock=clock)
    fetch(cache, "a", "b")
    held = cache.get([doc("b")])
    clock.now = 11.0
    fetch(cache, "c")
    assert cache.where("abc") == [None, "t0", "t0"] and cache.statistics().tiers["t0"].expired == 1
    held.close()
    fetch(cache, "c")
    assert cache.where("b") == [None]
    cache.check()


def test_frequency_counts_under_gdsf() -> None:
    cache = DocumentCache(counting(20), policy="gdsf")
    for name in "aaab":
        fetch(cache, name)
    fetch(cache, "c")
    assert cache.where("abc") == ["t0", None, "t0"]


def test_each_tier_can_have_its_own_policy() -> None:
    clock = Clock()
    cache = DocumentCache(counting(10, 100), policy=[lambda: Ttl(10.0), "lru"], clock=clock)
    fetch(cache, "a")
    fetch(cache, "b")
    clock.now = 11.0
    fetch(cache, "c")
    assert cache.where("abc") == ["t1", None, "t0"]
    with pytest.raises(InvalidInput, match="1 policies for 2 tiers"):
        DocumentCache(counting(10, 100), policy=["lru"])


def test_a_cost_that_fails_changes_nothing() -> None:
    def cost(n_tokens: int) -> float:
        raise Injected("cost")

    cache = DocumentCache(counting(20), cost=cost)
    with pytest.raises(Injected):
        fetch(cache, "a")
    cache.check()


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    cache = DocumentCache(counting(100))
    fetch(cache, "a")
    for rows in ([doc("a", 9)], [doc("b", 1), doc("b", 2)], [doc("b", 0)]):
        with pytest.raises(InvalidInput):
            cache.get(rows, lengths)
        cache.check()
    with pytest.raises(InvalidInput, match="timeout_s"):
        cache.get([doc("a")], timeout_s=-1)
    with pytest.raises(InvalidInput, match="no name twice"):
        DocumentCache([])
    with pytest.raises(UnknownName, match="lru"):
        DocumentCache(counting(10), policy="lfu")
    assert DocumentCache(counting(10), policy=Lru).get([]).documents == ()


def test_the_disk_alone_is_a_cache_too(tmp_path: Path) -> None:
    cache = DocumentCache([disk_tier(tmp_path, SPEC, MODEL, 20_000)])
    for number in range(10):
        cache.get([wanted(number)], payload).close()
        cache.check()
    assert cache.statistics().tiers["disk"].evictions
    cache.close()


def test_a_closed_cache_writes_and_computes_nothing(real: tuple[DocumentCache, list[Tier]], tmp_path: Path) -> None:
    cache, _ = real
    a, b = wanted(0), wanted(1)
    cache.put([(a.key, payload(a))])
    lease = cache.get([a])
    assert cache.persist([a.key]) == [True]
    before = sorted(str(p) for p in tmp_path.rglob("*.safetensors"))
    cache.close()
    cache.close()
    for ask in (
        lambda: cache.persist([a.key]),
        lambda: cache.get([a], payload),
        lambda: cache.put([(b.key, payload(b))]),
        lambda: cache.pin([a], payload),
        lambda: cache.own(3),
        lambda: cache.drop([a.key]),
        cache.clear,
    ):
        with pytest.raises(InvalidInput, match="was closed"):
            ask()
    assert sorted(str(p) for p in tmp_path.rglob("*.safetensors")) == before
    lease.close()
