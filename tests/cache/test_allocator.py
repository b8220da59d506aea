"""Pages are free, owned or cached, exactly once; a verb that forgets a page is found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.cache.allocator import PageAllocator
from tamis.core.errors import BrokenInvariant, InvalidInput, PoolFull


def test_pages_go_round() -> None:
    pages = PageAllocator(5)
    a, b = pages.allocate(2), pages.allocate(3)
    assert sorted(a + b) == [0, 1, 2, 3, 4] and pages.n_free == 0 and pages.n_owned == 5
    pages.settle(b)
    assert (pages.n_owned, pages.n_cached) == (2, 3)
    pages.retain(b)
    pages.release(b)
    assert pages.n_cached == 3 and pages.references(b[0]) == 1
    pages.release(b)
    assert (pages.n_free, pages.n_owned, pages.n_cached) == (3, 2, 0)
    pages.check([a])
    assert pages.allocate(0) == ()


def test_a_full_pool_takes_nothing() -> None:
    pages = PageAllocator(3)
    held = pages.allocate(2)
    with pytest.raises(PoolFull, match=r"2 pages were asked for and 1 of 3 are free.*Release or evict"):
        pages.allocate(2)
    pages.check([held])
    assert pages.n_free == 1


@pytest.mark.parametrize("bad", [(0, 0), (0, 2), (-1,), (3,), (0, 1, 1)])
def test_misuse_changes_nothing(bad: tuple[int, ...]) -> None:
    pages = PageAllocator(3)
    held = pages.allocate(2)
    assert held == (0, 1)
    with pytest.raises(InvalidInput, match="Nothing was changed"):
        pages.release(bad)
    pages.check([held])
    with pytest.raises(InvalidInput):
        pages.settle(bad)
    pages.check([held])


def test_settling_twice_and_bad_sizes() -> None:
    pages = PageAllocator(3)
    held = pages.allocate(2)
    pages.settle(held)
    with pytest.raises(InvalidInput, match="cached already"):
        pages.settle(held)
    for make in (lambda: PageAllocator(0), lambda: pages.allocate(-1)):
        with pytest.raises(InvalidInput, match="allowed is"):
            make()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release", "settle"]), st.integers(0, 7)), max_size=80)
)
def test_any_sequence_keeps_the_books(operations: list[tuple[str, int]]) -> None:
    pages = PageAllocator(9)
    holders: list[tuple[int, ...]] = []
    for name, number in operations:
        if name == "allocate":
            try:
                holders.append(pages.allocate(number))
            except PoolFull:
                assert number > pages.n_free
        elif holders:
            held = holders[number % len(holders)]
            if name == "retain":
                pages.retain(held)
                holders.append(held)
            elif name == "release":
                pages.release(holders.pop(number % len(holders)))
            else:
                try:
                    pages.settle(held)
                except InvalidInput as e:
                    assert "cached already" in str(e)
        pages.check(holders)
        assert pages.n_free + pages.n_owned + pages.n_cached == 9


class ForgetsAReference(PageAllocator):
    """A mutation: the first page of a release keeps its reference."""

    def release(self, pages: Sequence[int]) -> None:
        super().release(pages)
        self._references[pages[0]] += 1


class ForgetsToFree(PageAllocator):
    """A mutation: a released page does not become free."""

    def release(self, pages: Sequence[int]) -> None:
        super().release(pages)
        self._free.pop()


class FreesTwice(PageAllocator):
    """A mutation: a page is handed to the free list twice."""

    def release(self, pages: Sequence[int]) -> None:
        super().release(pages)
        self._free.append(pages[0])


class SkipsAPage(PageAllocator):
    """A mutation that is consistent in itself: the last page is not released at all."""

    def release(self, pages: Sequence[int]) -> None:
        super().release(pages[:-1])


class ForgetsToUncache(PageAllocator):
    """A mutation: freed pages stay marked as cached."""

    def release(self, pages: Sequence[int]) -> None:
        super().release(pages)
        self._cached[pages[0]] = 1


@pytest.mark.parametrize("kind", [ForgetsAReference, ForgetsToFree, FreesTwice, SkipsAPage, ForgetsToUncache])
def test_check_finds_a_release_that_forgets(kind: type[PageAllocator]) -> None:
    pages = kind(6)
    held, gone = pages.allocate(2), pages.allocate(3)
    pages.settle(gone)
    pages.check([held, gone])
    pages.release(gone)
    with pytest.raises(BrokenInvariant):
        pages.check([held])
