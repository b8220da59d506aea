"""Documents in pages of the pool that the kernels read."""

from __future__ import annotations

from tamis.cache.document import Payload
from tamis.cache.pool import PagePool
from tamis.cache.tiers.base import Tier
from tamis.cache.tiers.paged import Paged, Pages, pieces_of
from tamis.core.errors import InvalidInput


class Device(Paged):
    """The pages of a `PagePool`, shared with requests, which take theirs from the same allocator."""

    def __init__(self, pool: PagePool) -> None:
        super().__init__("device", pool.allocator, page=pool.page, page_bytes=pool.page_bytes)
        self.pool = pool

    def write(self, body: Pages, payload: Payload) -> None:
        """Copy the pieces into the pages, from whichever device they are on."""
        if not payload.pieces:
            raise InvalidInput(
                "a length without keys and values came to the device tier; give Payload.of(keys, values)."
            )
        at = 0
        for k, v in payload.pieces:
            self.pool.write_tokens(body, k, v, start=at)
            at += k.shape[2]

    def read(self, body: Pages, n_tokens: int) -> Payload:
        """One piece a page, views into the pool: valid while the document is held."""
        return pieces_of(n_tokens, self.page, [(self.pool.keys[:, p], self.pool.values[:, p]) for p in body])


def device_tier(pool: PagePool) -> Tier:
    """The tier of documents in `pool`."""
    return Tier(Device(pool))
