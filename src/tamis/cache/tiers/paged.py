"""What device and host share: documents in pages of an allocator. Needs no torch to import."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from tamis.cache.allocator import PageAllocator
from tamis.cache.document import Payload
from tamis.cache.spec import pages_of
from tamis.cache.tiers.base import Medium

if TYPE_CHECKING:
    import torch

Pages = tuple[int, ...]


class Paged(Medium):
    """Claims pages; those of a settled document are cached, those of one being written are owned by its request."""

    def __init__(self, name: str, allocator: PageAllocator, *, page: int, page_bytes: int) -> None:
        self.name = name
        self.allocator = allocator
        self.page = page
        self.page_bytes = page_bytes
        self.budget_bytes = allocator.n_pages * page_bytes

    def bytes_of(self, n_tokens: int) -> int:
        """Whole pages."""
        return pages_of(n_tokens, self.page) * self.page_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of free pages: those that requests took from the same allocator are not."""
        return self.allocator.n_free * self.page_bytes

    def claim(self, key: Hashable, n_tokens: int) -> Pages:
        """Allocate its pages. Raises PoolFull."""
        return self.allocator.allocate(pages_of(n_tokens, self.page))

    def settle(self, body: Pages) -> None:
        """The pages are cached from now on."""
        self.allocator.settle(body)

    def copied(self, payload: Payload) -> Payload:
        """Contiguous copies, on the same device."""
        import torch

        keys, values = (torch.cat(tensors, dim=2) for tensors in zip(*payload.pieces, strict=True))
        return Payload.of(keys, values)

    def release(self, body: Pages) -> None:
        """Release the pages: a page that a request retained stays until that request releases it."""
        self.allocator.release(body)

    def check(self, bodies: Sequence[Pages], others: Iterable[Sequence[int]] = ()) -> None:
        """Every reference on every page must be explained by a document or by others."""
        self.allocator.check([*bodies, *others])


def pieces_of(n_tokens: int, page: int, views: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Payload:
    """The first n_tokens of pages (keys, values), each [layers, Hkv, page, D], as one piece a page, not copied."""
    ends = [min(page, n_tokens - number * page) for number in range(len(views))]
    return Payload(n_tokens, tuple((k[:, :, :m], v[:, :, :m]) for (k, v), m in zip(views, ends, strict=True)))
