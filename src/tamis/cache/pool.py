"""The keys and values of all layers in pages of fixed size, allocated once; knows slots, not documents or positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tamis.cache.allocator import PageAllocator
from tamis.cache.spec import PAGE_TOKENS, KVSpec, pages_in, pages_of
from tamis.core.errors import InvalidInput

if TYPE_CHECKING:
    from tamis.model.family import Geometry


class PagePool:
    """keys, values [layers, pages, Hkv, page, D] and the allocator of their pages.

    A page holds 1 .. page consecutive tokens of one segment; slots behind them are never read. Copies run on the
    current stream: readers on another stream wait for it themselves.
    """

    def __init__(
        self, spec: KVSpec, n_pages: int, *, device: torch.device | str = "cpu", page: int = PAGE_TOKENS
    ) -> None:
        if page < 1:
            raise InvalidInput(f"a page of {page} tokens; allowed is 1 or more, the kernels use {PAGE_TOKENS}.")
        self.spec = spec
        self.page = page
        self.allocator = PageAllocator(n_pages)
        self.page_bytes = spec.page_bytes(page)
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        shape = (spec.n_layers, n_pages, spec.n_kv_heads, page, spec.head_dim)
        with torch.inference_mode(False):  # made under inference mode, they could not be written to outside of it
            self.keys = torch.empty(shape, dtype=self.dtype, device=device)
            self.values = torch.empty(shape, dtype=self.dtype, device=device)

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        dtype: torch.dtype | str,
        device: torch.device | str = "cpu",
        *,
        n_pages: int | None = None,
        byte_budget: int | None = None,
        page: int = PAGE_TOKENS,
    ) -> PagePool:
        """A pool for a model: of `n_pages`, or of as many as `byte_budget` holds, never a byte more.

        Raises InvalidInput unless exactly one of the two is given and holds a page.
        """
        if (n_pages is None) == (byte_budget is None):
            raise InvalidInput(f"n_pages is {n_pages}, byte_budget {byte_budget}; give exactly one of them.")
        spec = KVSpec.of(geometry, dtype)
        if n_pages is None:
            assert byte_budget is not None, "one of the two is given"
            n_pages = pages_in(byte_budget, spec.page_bytes(page))
        return cls(spec, n_pages, device=device, page=page)

    @property
    def n_bytes(self) -> int:
        """Bytes of all pages."""
        return self.allocator.n_pages * self.page_bytes

    def pages_for(self, n_tokens: int) -> int:
        """Pages that `n_tokens` of one segment take."""
        return pages_of(n_tokens, self.page)

    def write(self, layer: int, pages: Sequence[int], k: torch.Tensor, v: torch.Tensor) -> None:
        """Put k, v [Hkv, n, D] of one layer into `pages`, from their first slot. Raises InvalidInput on other shapes.

        The pool's dtype is kept: other floating dtypes are rounded to it.
        """
        self._require(pages, k, v, self.spec.shape(k.shape[-2])[1:])
        for page, a, b in self._cuts(pages, 0, k.shape[1]):
            self.keys[layer, page, :, : b - a].copy_(k[:, a:b].detach())
            self.values[layer, page, :, : b - a].copy_(v[:, a:b].detach())

    def read(self, layer: int, pages: Sequence[int], n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the first `n_tokens` keys and values of `pages` in one layer, [Hkv, n, D], contiguous."""
        k, v = self._gather(self.keys[layer : layer + 1], self.values[layer : layer + 1], pages, n_tokens)
        return k[0], v[0]

    def write_tokens(self, pages: Sequence[int], k: torch.Tensor, v: torch.Tensor, *, start: int = 0) -> None:
        """Put k, v [layers, Hkv, n, D] of all layers into `pages`, from slot `start` of the segment on."""
        self._require(pages, k, v, self.spec.shape(k.shape[-2]), start=start)
        for page, a, b in self._cuts(pages, start, k.shape[2]):
            slot = (start + a) % self.page
            self.keys[:, page, :, slot : slot + b - a].copy_(k[:, :, a:b].detach())
            self.values[:, page, :, slot : slot + b - a].copy_(v[:, :, a:b].detach())

    def read_tokens(self, pages: Sequence[int], n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the first `n_tokens` keys and values of `pages` in all layers, [layers, Hkv, n, D], contiguous."""
        return self._gather(self.keys, self.values, pages, n_tokens)

    def fill(self, k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
        """Allocate the pages that k, v [layers, Hkv, n, D] take and write them; the pages are owned by the caller.

        Raises PoolFull or InvalidInput, with nothing taken.
        """
        pages = self.allocator.allocate(self.pages_for(k.shape[-2]))
        try:
            self.write_tokens(pages, k, v)
        except BaseException:
            self.allocator.release(pages)
            raise
        return pages

    def _cuts(self, pages: Sequence[int], start: int, n: int) -> list[tuple[int, int, int]]:
        """(page, a, b): tokens a .. b of the n given ones lie in that page, the first one in slot `start`."""
        cuts, a = [], 0
        while a < n:
            number, slot = divmod(start + a, self.page)
            b = min(n, a + self.page - slot)
            cuts.append((pages[number], a, b))
            a = b
        return cuts

    def _gather(
        self, keys: torch.Tensor, values: torch.Tensor, pages: Sequence[int], n: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 < n <= len(pages) * self.page:
            raise InvalidInput(f"{n} tokens of {len(pages)} pages of {self.page}; allowed are 1 to all of their slots.")
        index = torch.tensor(pages[: self.pages_for(n)], device=keys.device)

        def joined(t: torch.Tensor) -> torch.Tensor:
            # [layers, m, Hkv, page, D] -> [layers, Hkv, n, D]
            return t.index_select(1, index).transpose(1, 2).flatten(2, 3)[:, :, :n].contiguous()

        return joined(keys), joined(values)

    def _require(
        self, pages: Sequence[int], k: torch.Tensor, v: torch.Tensor, shape: tuple[int, ...], *, start: int = 0
    ) -> None:
        if tuple(k.shape) != shape or tuple(v.shape) != shape:
            raise InvalidInput(f"keys {list(k.shape)} and values {list(v.shape)}; this pool takes {list(shape)}.")
        if not (k.is_floating_point() and v.is_floating_point()):
            raise InvalidInput(f"keys are {k.dtype}, values {v.dtype}; give floating-point tensors.")
        if not 0 <= start <= start + shape[-2] <= len(pages) * self.page:
            raise InvalidInput(
                f"tokens {start} to {start + shape[-2]} do not fit {len(pages)} pages of {self.page}; give "
                f"{self.pages_for(start + shape[-2])} pages."
            )
