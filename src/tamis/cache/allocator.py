"""Who holds which page of a pool; knows page numbers, not what lies in them. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tamis.core.errors import BrokenInvariant, InvalidInput, PoolFull


class PageAllocator:
    """Counts references of pages 0 .. n_pages - 1. Each page is free, owned by requests, or cached, exactly once.

    A page is handed out as owned, with one reference; `settle` makes it cached (part of a stored document); it is
    free again when its last reference is released. Every verb changes all of its pages or none, in O(1) per page.
    Not thread-safe: whoever shares one holds a lock.
    """

    def __init__(self, n_pages: int) -> None:
        if n_pages < 1:
            raise InvalidInput(f"a pool of {n_pages} pages; allowed is 1 or more. Give the pool more bytes.")
        self.n_pages = n_pages
        self._free = list(range(n_pages - 1, -1, -1))
        self._references = [0] * n_pages
        self._cached = bytearray(n_pages)
        self._n_cached = 0
        self._n_references = 0  # kept beside the list, so that check() sees a page that a verb forgot

    @property
    def n_free(self) -> int:
        """Pages that `allocate` can hand out."""
        return len(self._free)

    @property
    def n_cached(self) -> int:
        """Pages of stored documents."""
        return self._n_cached

    @property
    def n_owned(self) -> int:
        """Pages of requests."""
        return self.n_pages - len(self._free) - self._n_cached

    def references(self, page: int) -> int:
        """How often `page` is held; 0 if it is free."""
        return self._references[page]

    def allocate(self, n: int) -> tuple[int, ...]:
        """Take `n` free pages, owned, one reference each. Raises PoolFull, with nothing taken, if fewer are free."""
        if n < 0:
            raise InvalidInput(f"{n} pages were asked for; allowed is 0 or more.")
        if n > len(self._free):
            raise PoolFull(
                f"{n} pages were asked for and {len(self._free)} of {self.n_pages} are free ({self.n_owned} owned by "
                f"requests, {self.n_cached} cached). Release or evict some, or make the pool larger."
            )
        cut = len(self._free) - n
        pages = tuple(reversed(self._free[cut:]))
        del self._free[cut:]
        self._n_references += n
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """Add one reference to each page. Raises InvalidInput, with nothing changed, if one of them is free."""
        self._require_held(pages)
        self._n_references += len(pages)
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take one reference from each page; those without any are free.

        Raises InvalidInput, with nothing changed, if a page is released more often than it is held.
        """
        self._require_held(pages)
        self._n_references -= len(pages)
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                self._n_cached -= self._cached[page]
                self._cached[page] = 0
                self._free.append(page)

    def settle(self, pages: Sequence[int]) -> None:
        """Make owned pages cached. Raises InvalidInput, with nothing changed, if one is free or cached already."""
        self._require_held(pages)
        if again := [p for p in pages if self._cached[p]] or _twice(pages):
            raise InvalidInput(f"pages {again} are cached already or named twice; settle owned pages once.")
        for page in pages:
            self._cached[page] = 1
        self._n_cached += len(pages)

    def _require_held(self, pages: Sequence[int]) -> None:
        wanted: Iterable[tuple[int, int]]
        wanted = ((p, 1) for p in pages) if len(set(pages)) == len(pages) else Counter(pages).items()
        for page, times in wanted:
            held = self._references[page] if 0 <= page < self.n_pages else 0
            if held < times:
                raise InvalidInput(
                    f"page {page} was named {times} times and is held {held} times; a page may be released as often "
                    f"as it was allocated or retained, and pages are 0 to {self.n_pages - 1}. Nothing was changed."
                )

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Raise BrokenInvariant unless every page is free, owned or cached, exactly once, and the counts agree.

        `holders`, if given, are the pages of each one that holds a reference: they must explain every reference.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise BrokenInvariant(f"pages {_twice(self._free)} are free more than once.")
        for page, held in enumerate(self._references):
            if held < 0 or (page in free) != (held == 0):
                raise BrokenInvariant(f"page {page} has {held} references and is {'' if page in free else 'not '}free.")
            if self._cached[page] and not held:
                raise BrokenInvariant(f"page {page} is cached and free.")
        if sum(self._references) != self._n_references:
            raise BrokenInvariant(f"{sum(self._references)} references on pages, {self._n_references} handed out.")
        if sum(self._cached) != self._n_cached:
            raise BrokenInvariant(f"{sum(self._cached)} pages are marked cached, {self._n_cached} counted.")
        if holders is None:
            return
        explained = Counter(page for pages in holders for page in pages)
        for page, held in enumerate(self._references):
            if explained[page] != held:
                raise BrokenInvariant(f"page {page} has {held} references; its holders are {explained[page]}.")


def _twice(pages: Sequence[int]) -> list[int]:
    return [page for page, n in Counter(pages).items() if n > 1]
