"""The five verbs mean the same in every tier, and budgets hold to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_kit import MODEL, PAGE, SPEC, Injected, counting, payload, same, tiers, wanted

from tamis.cache.document import Payload
from tamis.cache.tiers.accounting import accounting_tier
from tamis.cache.tiers.base import State, Tier
from tamis.cache.tiers.disk import HEADER_BYTES, Disk, disk_tier
from tamis.cache.tiers.host import Host, host_tier
from tamis.core.errors import BrokenInvariant, InvalidInput, NotCached, PoolFull, Unavailable

Make = Callable[[int], Tier]
KINDS = ("device", "host", "disk", "counting")


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """A tier that holds so many documents of one full page."""
    made: list[Tier] = []

    def build(n: int) -> Tier:
        made.append(
            {
                "device": lambda: tiers(tmp_path, device=n)[0],
                "host": lambda: host_tier(SPEC, n * SPEC.page_bytes(PAGE), page=PAGE, pinned=False),
                "disk": lambda: disk_tier(tmp_path / "d", SPEC, MODEL, n * (HEADER_BYTES + SPEC.page_bytes(PAGE))),
                "counting": lambda: accounting_tier("counting", 8 * n, lambda tokens: tokens),
            }[request.param]()
        )
        return made[-1]

    yield build
    for tier in made:
        tier.medium.close()


def page(number: int) -> tuple[Any, Payload]:
    """A key, and a payload of one page."""
    keys, values = torch.full((2, *SPEC.shape(PAGE)), float(number)).unbind(0)
    return wanted(number).key, Payload.of(keys, values)


def content(payload: Payload | None) -> float | None:
    """The number that `page` was given, or the length alone where no tensors are kept."""
    if payload is None:
        return None
    return float(payload.keys.mean()) if payload.pieces else -1.0


def test_the_five_verbs(make: Make) -> None:
    tier = make(3)
    items = [page(i) for i in range(3)]
    keys = [key for key, _ in items]
    assert tier.has(keys) == [False] * 3 and tier.get(keys) == [None] * 3
    tier.put(items[:2])
    assert tier.has(keys) == [True, True, False]
    assert [content(p) for p in tier.get(keys)] in ([0.0, 1.0, None], [-1.0, -1.0, None])
    with tier.pin(keys[:2]) as lease:
        assert [d.key for d in lease] == keys[:2] and len(lease) == 2
        assert tier.drop(keys) == [True, True, False]
        assert tier.has(keys) == [False] * 3
        assert tier.used_bytes == 2 * tier.medium.bytes_of(PAGE)
        tier.check()
    assert tier.used_bytes == 0 and tier.medium.free_bytes == tier.medium.budget_bytes
    tier.check()
    assert not lease.open
    lease.close()
    with pytest.raises(NotCached, match=f"not in tier {tier.name!r}"):
        tier.pin(keys[:1])


def test_a_full_tier_refuses_the_whole_batch(make: Make) -> None:
    tier = make(3)
    tier.put([page(0), page(1)])
    with pytest.raises(PoolFull, match="are free"):
        tier.put([page(2), page(3)])
    tier.check()
    assert len(tier.entries) == 2
    tier.put([page(1), page(2)])
    assert len(tier.entries) == 3 and tier.medium.free_bytes == 0
    assert tier.used_bytes == tier.medium.budget_bytes


def test_a_document_dropped_in_use_can_come_back(make: Make) -> None:
    tier = make(3)
    tier.put([page(1)])
    lease = tier.pin([page(1)[0]])
    tier.drop([page(1)[0]])
    tier.put([page(1)])
    tier.check()
    assert tier.used_bytes == 2 * tier.medium.bytes_of(PAGE)
    lease.close()
    tier.check()
    assert content(tier.get([page(1)[0]])[0]) in (1.0, -1.0)
    assert tier.used_bytes == tier.medium.bytes_of(PAGE)


@pytest.mark.parametrize("verb", ["claim", "write", "settle"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_failure_anywhere_leaves_nothing(make: Make, verb: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make(3)
    real, calls = getattr(tier.medium, verb), iter(range(99))

    def failing(*arguments: Any) -> Any:
        if next(calls) == at:
            raise Injected(verb)
        return real(*arguments)

    monkeypatch.setattr(tier.medium, verb, failing)
    with pytest.raises(Injected):
        tier.put([page(0), page(1)])
    assert not tier.entries and tier.used_bytes == 0
    tier.check()


def test_every_length_round_trips(make: Make) -> None:
    tier = make(8)
    for number in range(25):
        row = wanted(number)
        tier.put([(row.key, payload(row))])
        (got,) = tier.get([row.key])
        assert got is not None and got.n_tokens == row.n_tokens
        assert not got.pieces or same(got, payload(row))
        tier.drop([row.key])
    tier.check()


def test_what_get_gave_is_a_copy(make: Make) -> None:
    tier = make(1)
    tier.put([page(1)])
    (got,) = tier.get([page(1)[0]])
    tier.drop([page(1)[0]])
    tier.put([page(2)])
    assert content(got) in (1.0, -1.0)


@pytest.mark.parametrize("other", ["host", "disk", "device"])
def test_pieces_of_any_cut_become_one_document(other: str, tmp_path: Path) -> None:
    row = wanted(4)  # 21 tokens
    whole = payload(row)
    cuts = [(0, 3), (3, 13), (13, 20), (20, 21)]
    pieces = tuple((whole.keys[:, :, a:b], whole.values[:, :, a:b]) for a, b in cuts)
    tier = next(t for t in tiers(tmp_path) if t.name == other)
    tier.put([(row.key, Payload(21, pieces))])
    assert same(tier.get([row.key])[0], whole)


def test_the_host_hands_out_views_page_by_page_inside() -> None:
    tier = host_tier(SPEC, 4 * SPEC.page_bytes(PAGE) + 1, page=PAGE, pinned=False)
    assert isinstance(tier.medium, Host) and tier.medium.arena.nbytes == tier.medium.budget_bytes
    row = wanted(4)
    tier.put([(row.key, payload(row))])
    inside = tier.medium.read(tier.entries[row.key].body, row.n_tokens)
    assert len(inside.pieces) == 3 and all(k.untyped_storage().data_ptr() for k, _ in inside.pieces)
    arena = tier.medium.arena.untyped_storage().data_ptr()
    assert all(k.untyped_storage().data_ptr() == arena for k, _ in inside.pieces)
    assert same(inside, payload(row))


def test_wrong_payloads_are_refused(tmp_path: Path) -> None:
    for tier in tiers(tmp_path):
        for bad in (Payload(4), Payload.of(*torch.randn(2, 3, 2, 4, 4).unbind(0))):
            with pytest.raises(InvalidInput):
                tier.put([(wanted(1).key, bad)])
        tier.check()
        with pytest.raises(InvalidInput, match="0 tokens"):
            tier.reserve(wanted(1).key, 0)


def test_pinned_memory_without_a_device_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(Unavailable, match="no CUDA device"):
        host_tier(SPEC, 10**6, pinned=True)


@pytest.mark.parametrize("name", ["device", "host"])
def test_made_under_inference_mode_or_from_a_graph_it_stays_plain_memory(name: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        tier = next(t for t in tiers(tmp_path) if t.name == name)
        keys, values = torch.randn(2, *SPEC.shape(5)).unbind(0)
    tier.put([(wanted(1).key, Payload.of(keys, values))])
    tier.drop([wanted(1).key])
    leaf = torch.randn(2, *SPEC.shape(5), requires_grad=True)
    tier.put([(wanted(1).key, Payload.of(*leaf.unbind(0)))])
    (got,) = tier.get([wanted(1).key])
    assert got is not None and not got.keys.requires_grad and torch.equal(got.keys, leaf[0])


@pytest.mark.gpu
def test_pinned_memory_is_exact_and_arrives_on_the_device(tmp_path: Path) -> None:
    host = host_tier(SPEC, 5 * SPEC.page_bytes(PAGE), page=PAGE)
    assert isinstance(host.medium, Host) and host.medium.arena.is_pinned()
    from tamis.cache.pool import PagePool
    from tamis.cache.tiers.device import device_tier

    device = device_tier(PagePool(SPEC, 6, device="cuda", page=PAGE))
    row = wanted(4)
    host.put([(row.key, payload(row))])
    entry = host.entries[row.key]
    device.put([(row.key, host.medium.read(entry.body, row.n_tokens))])
    (got,) = device.get([row.key])
    assert got is not None and got.keys.is_cuda and torch.equal(got.keys.cpu(), payload(row).keys)


def test_check_sees_books_that_lie() -> None:
    (tier,) = counting(100)
    tier.put([("a", Payload(10)), ("b", Payload(5))])
    tier.check()
    tier.used_bytes += 1
    with pytest.raises(BrokenInvariant, match="counts 16 bytes"):
        tier.check()
    tier.used_bytes -= 1
    tier.entries["a"].state = State.LEAVING
    with pytest.raises(BrokenInvariant, match="leaving"):
        tier.check()
    tier.entries["a"].state = State.KEPT
    tier.medium.release(3)
    with pytest.raises(BrokenInvariant, match="claimed"):
        tier.check()


def test_check_sees_a_page_that_nobody_explains(tmp_path: Path) -> None:
    tier = tiers(tmp_path)[0]
    taken = tier.medium.allocator.allocate(1)  # type: ignore[attr-defined]
    with pytest.raises(BrokenInvariant, match="its holders are 0"):
        tier.check()
    tier.check(others=[taken])


def test_disk_budgets_are_checked_against_the_folder(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path, SPEC, MODEL, 50_000)
    assert isinstance(tier.medium, Disk)
    tier.put([page(1)])
    tier.check()
    (file,) = tmp_path.glob("*.safetensors")
    assert file.stat().st_size == tier.medium.bytes_of(PAGE)
    (tmp_path / f"{'0' * 32}.safetensors").write_bytes(b"x")
    with pytest.raises(BrokenInvariant, match="belong to no document"):
        tier.check()
