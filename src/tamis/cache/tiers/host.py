"""Documents in host memory: one arena, allocated once and page-locked where CUDA is, so that budgets hold exactly."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from tamis.cache.allocator import PageAllocator
from tamis.cache.document import Payload
from tamis.cache.spec import PAGE_TOKENS, KVSpec, pages_in
from tamis.cache.tiers.base import Tier
from tamis.cache.tiers.paged import Paged, Pages, pieces_of
from tamis.core.errors import InvalidInput, Unavailable


class Host(Paged):
    """arena [pages, 2, layers, Hkv, page, D]: a page's keys and its values are contiguous, one copy each to a GPU."""

    def __init__(self, spec: KVSpec, budget_bytes: int, *, page: int = PAGE_TOKENS, pinned: bool | None = None) -> None:
        page_bytes = spec.page_bytes(page)
        super().__init__("host", PageAllocator(pages_in(budget_bytes, page_bytes)), page=page, page_bytes=page_bytes)
        self.spec = spec
        shape = (self.allocator.n_pages, 2, spec.n_layers, spec.n_kv_heads, page, spec.head_dim)
        with torch.inference_mode(False):  # made under inference mode, it could not be written to outside of it
            self.arena = torch.empty(shape, dtype=getattr(torch, spec.dtype))
        self.pinned = torch.cuda.is_available() if pinned is None else pinned
        if self.pinned:
            unlock = _page_lock(self.arena)
            # bound to this object, not to the tensor: what torch hands out for a storage is a passing wrapper
            weakref.finalize(self, unlock, self.arena.data_ptr()).atexit = False

    def write(self, body: Pages, payload: Payload) -> None:
        """Copy the pieces into the pages."""
        self._require(payload)
        at = 0
        for k, v in payload.pieces:
            for start in range(0, k.shape[2], step := self.page):
                # a piece may start inside a page, so its tokens are laid page by page of the document
                self._lay(body, at + start, k[:, :, start : start + step], v[:, :, start : start + step])
            at += k.shape[2]

    def read(self, body: Pages, n_tokens: int) -> Payload:
        """One piece a page, views into the arena: valid while the document is held."""
        return pieces_of(n_tokens, self.page, [(self.arena[p, 0], self.arena[p, 1]) for p in body])

    def _lay(self, body: Pages, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        number, slot = divmod(start, self.page)
        first = min(self.page - slot, k.shape[2])
        for which, t in enumerate((k, v)):
            self.arena[body[number], which, :, :, slot : slot + first].copy_(t[:, :, :first])
            if first < t.shape[2]:
                self.arena[body[number + 1], which, :, :, : t.shape[2] - first].copy_(t[:, :, first:])

    def _require(self, payload: Payload) -> None:
        shape = self.spec.shape(payload.n_tokens)
        for k, v in payload.pieces:
            if tuple(k.shape) != (*shape[:2], k.shape[2], shape[3]) or k.shape != v.shape:
                raise InvalidInput(
                    f"keys {list(k.shape)} and values {list(v.shape)}; this tier takes {list(shape)} in pieces."
                )
        if not payload.pieces:
            raise InvalidInput("a length without keys and values came to the host tier; give Payload.of(keys, values).")


def host_tier(spec: KVSpec, budget_bytes: int, *, page: int = PAGE_TOKENS, pinned: bool | None = None) -> Tier:
    """A tier in host memory, at most budget_bytes; pinned: page-lock it, by default if there is a CUDA device.

    Raises Unavailable if it cannot be page-locked.
    """
    return Tier(Host(spec, budget_bytes, page=page, pinned=pinned))


def _page_lock(tensor: torch.Tensor) -> Callable[[int], object]:
    """Page-lock a tensor in place; returns what undoes it, given its address.

    `pin_memory` would round the size up to a power of two, past the budget.
    """
    if not torch.cuda.is_available():
        raise Unavailable("pinned host memory was asked for and there is no CUDA device. Use pinned=None or False.")
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if code:
        raise Unavailable(
            f"{tensor.nbytes} bytes of host memory could not be page-locked (CUDA error {code}). Give the host tier "
            "fewer bytes, or use pinned=False."
        )
    undo: Callable[[int], object] = runtime.cudaHostUnregister
    return undo
