"""A disk that takes its time: requests whose documents are in place do not wait for it, and nothing is lost or kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_kit import MODEL, PAGE, SPEC, intact, payload, pool, same

from tamis.cache.document import Payload, Wanted
from tamis.cache.keys import DocumentKey
from tamis.cache.store import DocumentCache
from tamis.cache.tiers.base import Tier
from tamis.cache.tiers.device import device_tier
from tamis.cache.tiers.disk import Disk, disk_tier
from tamis.cache.tiers.host import host_tier
from tamis.core.errors import CacheTimeout

WAIT_S = 20.0


def row(number: int, pages: int = 1) -> Wanted:
    return Wanted(DocumentKey.of([number], MODEL), pages * PAGE)


class SlowDisk:
    """Holds every write until `go`; `begun` says that one has come so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        real = Disk.write

        def write(disk: Disk, body: Any, what: Payload) -> None:
            self.begun.set()
            assert self.go.wait(WAIT_S), "nobody let the disk go on"
            real(disk, body, what)

        monkeypatch.setattr(Disk, "write", write)


class Job:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.made: Any = None

        def run() -> None:
            try:
                self.made = call()
            except Exception as e:
                self.made = e

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def result(self, timeout_s: float = WAIT_S) -> Any:
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), "it waits for the disk"
        return self.made


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.go.set()


def cache_of(folder: Path, *, host_pages: int = 0) -> tuple[DocumentCache, list[Tier]]:
    """Three pages on the device, and documents 0 to 2 in them, the first the next to be evicted."""
    made = [device_tier(pool(3))]
    if host_pages:
        made.append(host_tier(SPEC, host_pages * SPEC.page_bytes(PAGE), page=PAGE, pinned=False))
    made.append(disk_tier(folder, SPEC, MODEL, 60_000))
    cache = DocumentCache(made)
    for number in range(3):
        cache.get([row(number)], payload).close()
    return cache, made


def test_a_hit_is_served_while_another_document_is_written(slow: SlowDisk, tmp_path: Path) -> None:
    cache, made = cache_of(tmp_path)
    evicting = Job(lambda: cache.get([row(3)], payload).close())
    assert slow.begun.wait(WAIT_S)

    def hits() -> str:
        with cache.get([row(1), row(2)]) as lease:
            assert intact(made[0], lease)
        cache.check()
        assert cache.where([row(0).key, row(3).key]) == ["device", None]
        return cache.statistics().tiers["device"].hits and "served"  # type: ignore[return-value]

    assert Job(hits).result(2.0) == "served"
    assert evicting.thread.is_alive(), "the disk was not waited for: the test shows nothing"
    slow.go.set()
    assert evicting.result() is None
    assert cache.where([row(n).key for n in range(4)]) == ["disk", "device", "device", "device"]
    cache.check()
    with cache.get([row(0)]) as lease:
        assert intact(made[0], lease)
    cache.close()


def test_the_one_being_written_can_be_read_and_then_stays(slow: SlowDisk, tmp_path: Path) -> None:
    cache, made = cache_of(tmp_path)
    evicting = Job(lambda: cache.get([row(3)], payload).close())
    assert slow.begun.wait(WAIT_S)
    lease = Job(lambda: cache.get([row(0)])).result(2.0)
    slow.go.set()
    assert evicting.result() is None
    assert intact(made[0], lease)
    # it came into use, so the next in line made room
    assert cache.where([row(n).key for n in range(4)]) == ["device", "disk", "device", "device"]
    assert same(made[1].get([row(0).key])[0], payload(row(0)))
    lease.close()
    cache.check()
    cache.close()


def test_what_is_dropped_while_it_is_written_leaves_no_file(slow: SlowDisk, tmp_path: Path) -> None:
    cache, made = cache_of(tmp_path)
    evicting = Job(lambda: cache.get([row(3)], payload).close())
    assert slow.begun.wait(WAIT_S)
    assert Job(lambda: cache.drop([row(0).key])).result(2.0) == [True]
    again = Job(lambda: cache.get([row(0)], payload).close())  # needs room as well, and waits for its turn
    again.thread.join(0.1)
    assert again.thread.is_alive()
    slow.go.set()
    assert evicting.result() is None and again.result() is None
    cache.check()
    assert cache.where([row(0).key]) == ["device"] and row(0).key not in made[1].entries
    assert len(list(tmp_path.glob("*.safetensors"))) == len(made[1].entries) == 1
    cache.close()


def test_requests_that_need_room_take_turns_and_are_both_served(slow: SlowDisk, tmp_path: Path) -> None:
    cache, made = cache_of(tmp_path)
    jobs = [Job(lambda n=n: cache.get([row(n)], payload)) for n in (3, 4)]  # type: ignore[misc]
    assert slow.begun.wait(WAIT_S)
    late = Job(lambda: cache.get([row(5)], payload, timeout_s=0.05)).result(2.0)
    assert isinstance(late, CacheTimeout) and cache.statistics().timeouts == 1
    cache.check()
    slow.go.set()
    leases = [job.result() for job in jobs]
    assert all(intact(made[0], lease) for lease in leases)
    assert cache.where([row(n).key for n in range(5)]) == ["disk", "disk", "device", "device", "device"]
    for lease in leases:
        lease.close()
    cache.check()
    assert cache.statistics().tiers["device"].pinned_bytes == 0
    cache.close()


def test_through_the_host_to_the_disk(slow: SlowDisk, tmp_path: Path) -> None:
    cache, made = cache_of(tmp_path, host_pages=1)
    cache.get([row(3)], payload).close()  # document 0 lies on the host now
    evicting = Job(lambda: cache.get([row(4)], payload).close())  # 1 follows, and 0 goes to the disk
    assert slow.begun.wait(WAIT_S)
    assert Job(lambda: cache.get([row(2), row(3)]).close()).result(2.0) is None
    assert Job(lambda: cache.drop([row(0).key, row(1).key])).result(2.0) == [True, True]
    cache.check()
    slow.go.set()
    assert evicting.result() is None
    cache.check()
    assert cache.where([row(0).key, row(1).key]) == [None, None] and not list(tmp_path.glob("*.safetensors"))
    assert all(tier.medium.free_bytes == tier.medium.budget_bytes for tier in made[1:])
    cache.close()


def test_saving_holds_up_nobody(slow: SlowDisk, tmp_path: Path) -> None:
    cache, made = cache_of(tmp_path)
    saving = Job(lambda: cache.persist([row(0).key, row(1).key]))
    assert slow.begun.wait(WAIT_S)
    assert Job(lambda: cache.get([row(0), row(2)]).close()).result(2.0) is None
    closing = Job(cache.close)  # not under the feet of the writer
    slow.go.set()
    assert saving.result() == [True, True] and closing.result() is None
    again = disk_tier(tmp_path, SPEC, MODEL, 60_000)
    assert [same(p, payload(row(n))) for n, p in enumerate(again.get([row(0).key, row(1).key]))] == [True, True]
    again.medium.close()
    assert made[0].used_bytes == 3 * SPEC.page_bytes(PAGE)


def test_a_failing_disk_gives_everything_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache, _ = cache_of(tmp_path)

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Disk, "write", full)
    cache.get([row(3)], payload).close()
    cache.check()
    seen = cache.statistics().tiers["disk"]
    assert (seen.failed_demotions, seen.used_bytes) == (1, 0) and cache.where([row(0).key]) == [None]
    cache.close()
