"""A session on pages that were taken beforehand and may be exchanged, and a prefill that leaves its keys in pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from tamis.attention.hook import Job
from tamis.attention.reuse import ReuseEngine, Session
from tamis.attention.reuse_layout import Layout, OwnPages
from tamis.attention.reuse_pass import Ground, put
from tamis.attention.reuse_store import Held
from tamis.cache.pool import PagePool
from tamis.cache.store import RequestPages
from tamis.engine.request import Request
from tamis.select.scene import DocumentBits


class PagedSession(Session):
    """A session whose pages were taken beforehand, and may be exchanged for others."""

    def __init__(
        self,
        given: RequestPages,
        engine: ReuseEngine,
        request: Request,
        layout: Layout,
        held: Held,
        *,
        bits: Sequence[DocumentBits | None] = (),
    ) -> None:
        self._given = given
        super().__init__(engine, request.prompt, request.policy, layout, held, room_tokens=0, bits=bits)

    def _own(self, room_tokens: int) -> tuple[Ground, OwnPages]:
        pool, self._handles.own = self.engine.store.pool, self._given
        pages = OwnPages.of(self.layout.spans(self.read_own), self._given.pages, self.layout.page)
        return Ground(pool, pool, self.engine.rotary.angles), pages

    def add(self, pages: Sequence[int]) -> None:
        """More pages for tokens to come."""
        self.pages.spare += pages

    def let_go(self) -> None:
        """The pages are others' now."""
        self._handles.own = None

    def move(self, was: Sequence[int], own: RequestPages, stored: Iterator[tuple[int, ...]]) -> None:
        """The own pages `was` are those of `own` now, in the same order; `stored`: pages of each stored piece."""
        place = dict(zip(was, own.pages, strict=False))
        pages = self.pages
        pages.pages, pages.spare = [place[p] for p in pages.pages], [place[p] for p in pages.spare]
        pages.spare += own.pages[len(was) :]
        pieces = tuple(replace(p, stored=next(stored)) if p.stored else p for p in self.layout.pieces)
        self.layout, self._handles.own = Layout(pieces, self.layout.page), own


class KeepingJob:
    """A job over a whole prompt that also puts its keys and values into pages."""

    def __init__(self, job: Job, pool: PagePool, page: torch.Tensor, slot: torch.Tensor) -> None:
        self.job, self.pool, self.page, self.slot = job, pool, page, slot

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Job.attend`."""
        put(self.pool, layer, self.page, self.slot, k, v)
        return self.job.attend(layer, q, k, v, scale)
