"""The real cache with nothing in it: the serving cache's own store, policies and page allocator, over no tensors.

One budget holds all that a provider keeps: stored documents and what running requests own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from tamis.cache.allocator import PageAllocator
from tamis.cache.document import Lease, Payload, Wanted
from tamis.cache.evict import Policy, new_policy
from tamis.cache.spec import PAGE_TOKENS, pages_in, pages_of
from tamis.cache.store import CacheStatistics, DocumentCache, RequestPages
from tamis.cache.tiers.accounting import accounting_tier
from tamis.cache.tiers.base import Tier
from tamis.cache.tiers.paged import Paged, Pages

UNLIMITED = 1 << 62
DEVICE = "device"
HOST = "host"


@dataclass(frozen=True)
class PoolOptions:
    """budget_bytes of the device's pool, None for as much as is asked for; of host memory, 0 for none; policy by name,
    with its own options."""

    budget_bytes: int | None
    token_bytes: int
    policy: str = "lru"
    host_bytes: int = 0
    ttl_s: float | None = None


class _Pages(Paged):
    """Pages of the real allocator; payloads are lengths."""

    def write(self, body: Pages, payload: Payload) -> None:
        """Nothing to copy."""

    def read(self, body: Pages, n_tokens: int) -> Payload:
        """The length alone."""
        return Payload(n_tokens)


class Pool:
    """A `DocumentCache` whose room can be asked for before anything is changed."""

    def __init__(self, options: PoolOptions, *, clock: Callable[[], float], cost: Callable[[int], float]) -> None:
        self.page_bytes = options.token_bytes * PAGE_TOKENS
        self._device = _device_tier(options.budget_bytes, self.page_bytes)
        tiers = [self._device]
        if options.host_bytes:
            tiers.append(accounting_tier(HOST, options.host_bytes, self.bytes_of))
        policies: list[Policy] = []

        def fresh() -> Policy:
            policies.append(new_policy(options.policy, **({} if options.ttl_s is None else {"ttl_s": options.ttl_s})))
            return policies[-1]

        self.cache = DocumentCache(tiers, policy=fresh, clock=clock, cost=cost)
        self._policy = policies[0]
        self._has_host = len(tiers) > 1
        self.peak_bytes = 0
        self.peak_in_use_bytes = 0

    def bytes_of(self, n_tokens: int) -> int:
        """Whole pages."""
        return pages_of(n_tokens, PAGE_TOKENS) * self.page_bytes

    @property
    def available_bytes(self) -> int:
        """Free, or held by documents that nobody uses."""
        return self._device.medium.free_bytes + self._policy.evictable_bytes

    def fits(self, wanted: Iterable[Wanted], own_bytes: int) -> bool:
        """Whether all `wanted` can be held beside own_bytes more, evicting what is not in use."""
        need = own_bytes
        for key, n_tokens in wanted:
            entry = self._device.entries.get(key)
            if entry is None or not entry.pins:
                need += self.bytes_of(n_tokens)
        return need <= self.available_bytes

    def has(self, key: Hashable) -> bool:
        """Whether a document lies on the device."""
        return key in self._device.entries

    def places(self, wanted: Sequence[Wanted]) -> list[str | None]:
        """DEVICE, HOST or None for each."""
        if self._has_host:
            return self.cache.where(key for key, _ in wanted)
        return [DEVICE if key in self._device.entries else None for key, _ in wanted]

    def hold(self, wanted: Sequence[Wanted]) -> Lease:
        """Hold documents; what is in no tier is entered as computed."""
        return self.cache.get(wanted, _computed)

    def own(self, sizes: Sequence[int]) -> RequestPages:
        """Pages of a request's own, for segments of so many tokens, each in whole pages."""
        pages = self.cache.own(sizes[0])
        for n_tokens in sizes[1:]:
            pages.extend(n_tokens)
        return pages

    def note_peak(self) -> None:
        """Remember how much is used now, if it is the most so far."""
        used = self._device.used_bytes
        self.peak_bytes = max(self.peak_bytes, used)
        self.peak_in_use_bytes = max(self.peak_in_use_bytes, used - self._policy.evictable_bytes)

    def statistics(self) -> CacheStatistics:
        """The cache's own."""
        return self.cache.statistics()


def _device_tier(budget_bytes: int | None, page_bytes: int) -> Tier:
    if budget_bytes is None:
        # an allocator lists its pages, and there is no list without end
        return accounting_tier(DEVICE, UNLIMITED, lambda n: pages_of(n, PAGE_TOKENS) * page_bytes)
    allocator = PageAllocator(pages_in(budget_bytes, page_bytes))
    return Tier(_Pages(DEVICE, allocator, page=PAGE_TOKENS, page_bytes=page_bytes))


def _computed(wanted: Wanted) -> Payload:
    return Payload(wanted.n_tokens)
