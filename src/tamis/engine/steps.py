"""What happens in a step: parts of prompts, one token of many requests, texts and ends told to who listens.

One thread's work. Others may look at `tickets` and use the scheduler while they hold the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tamis.attention.reuse import ReuseEngine
from tamis.core.errors import CacheFull, TamisError
from tamis.core.log import logger
from tamis.engine.batch import Batch
from tamis.engine.cached import CachedMember
from tamis.engine.cached_batch import CachedBatch
from tamis.engine.member import Member
from tamis.engine.request import End, Event, Failed, Listener, Piece, Usage
from tamis.engine.sampling import Scored, TextStream, draw_all
from tamis.engine.scheduler import Limits, Scheduler, Step

if TYPE_CHECKING:
    import torch

log = logger("engine")


@dataclass
class Ticket:
    """A request in the engine: what computes it, who listens, and when things happened (seconds)."""

    member: Member
    listener: Listener
    text: TextStream
    most: int
    submitted_s: float
    begun_s: float = 0.0
    first_s: float = 0.0


class PoolMemory:
    """The scheduler's memory: the pages of the documents' cache. See `scheduler.Memory`.

    pinned_pages: kept for documents that stay, whoever decides so; kept_pages: for steps, for as long as they run.
    """

    def __init__(self, reuse: ReuseEngine, tickets: dict[int, Ticket], kept_pages: int = 0) -> None:
        self.reuse, self.tickets, self.pinned_pages, self.kept_pages = reuse, tickets, 0, kept_pages

    @property
    def tier(self) -> Any:
        """Numbers of the cache's first tier."""
        return next(iter(self.reuse.store.cache.statistics().tiers.values()))

    def capacity(self) -> int:
        """See `Memory`."""
        return int(self.reuse.store.pool.allocator.n_pages) - self.pinned_pages - self.kept_pages

    def free(self) -> int:
        """See `Memory`."""
        tier = self.tier
        return int((tier.budget_bytes - tier.pinned_bytes) // self.reuse.store.pool.page_bytes)

    def take(self, number: int, pages: int) -> bool:
        """See `Memory`."""
        member = self.tickets[number].member
        return member.restore(pages) if member.parked else member.take(pages)

    def park(self, number: int) -> None:
        """See `Memory`."""
        self.tickets[number].member.park()

    def drop(self, number: int) -> None:
        """See `Memory`."""
        self.tickets[number].member.close()


class Steps:
    """The scheduler's decisions, carried out. `stop_tokens` end an answer; `exact`, `graphs`: see `Batch`."""

    def __init__(
        self,
        reuse: ReuseEngine,
        limits: Limits,
        lock: threading.Condition,
        stop_tokens: frozenset[int],
        *,
        exact: bool = True,
        graphs: bool = True,
    ) -> None:
        self.reuse, self.lock, self.stop_tokens = reuse, lock, stop_tokens
        self.tickets: dict[int, Ticket] = {}
        self.batch = Batch(reuse, exact=exact, graphs=graphs)
        self.cached = CachedBatch(reuse, exact=exact)
        self.memory = PoolMemory(reuse, self.tickets, kept_pages=int(self.batch.graphs.used))
        self.scheduler = Scheduler(self.memory, limits)

    def close(self) -> None:
        """No more steps: let go of what is kept for them."""
        self.batch.close()

    def run(self, step: Step) -> None:
        """Compute what a plan names, and tell who listens."""
        for number in step.refused:
            self._refuse(number)
        for number, _ in step.parts:
            try:
                self._part(number)
            except CacheFull as e:
                self._restart(number, e)
            except Exception as e:
                self.fail(number, e)
        with self.lock:
            for number in {n for n, _ in step.parts} & self.tickets.keys():
                member = self.tickets[number].member
                self.scheduler.replan(number, member.left, member.room)
        for group in self._groups([n for n in step.decode if n in self.tickets]):
            self._decode(group)

    def _groups(self, numbers: Sequence[int]) -> list[list[int]]:
        """Requests that decode in one pass: all over pages, all over caches of their own, and each that cannot."""
        paged: list[int] = []
        cached: list[int] = []
        lone: list[int] = []
        for number in numbers:
            member = self.tickets[number].member
            kind = paged if not isinstance(member, CachedMember) else cached if member.together else lone
            kind.append(number)
        return [group for group in (paged, cached, *([n] for n in lone)) if group]

    def _decode(self, numbers: Sequence[int]) -> None:
        """A token of each."""
        members = [self.tickets[n].member for n in numbers]
        try:
            logits, failed = self._logits(members)
            tokens = draw_all([m.sampler for m in members], logits)
        except Exception as e:
            for number in numbers:
                self.fail(number, e)
            return
        for i, (number, token) in enumerate(zip(numbers, tokens, strict=True)):
            if i in failed:
                self.fail(number, failed[i])
            else:
                self._push(number, token, logits[i])

    def _logits(self, members: Sequence[Member]) -> tuple[torch.Tensor, dict[int, Exception]]:
        """Behind the newest token of each of a group, and which of them failed alone."""
        cached = [m for m in members if isinstance(m, CachedMember)]
        if not cached:
            return self.batch.step(members), {}
        if not cached[0].together:
            return cached[0].step()[None], {}
        return self.cached.step(cached)

    def _part(self, number: int) -> None:
        ticket = self.tickets.get(number)
        if ticket is None or not ticket.member.left:  # ended, or found more of its prompt stored than was thought
            return
        ticket.begun_s = ticket.begun_s or time.monotonic()
        logits = ticket.member.run_part()
        if logits is not None:
            self._push(number, draw_all([ticket.member.sampler], logits[None])[0], logits)

    def _push(self, number: int, token: int, logits: torch.Tensor) -> None:
        """A new token: tell it, or the end."""
        ticket = self.tickets[number]
        member, first = ticket.member, not ticket.member.new
        member.new.append(token)
        if first:
            ticket.first_s = time.monotonic()
        if token in self.stop_tokens:
            self._end(number, "stop")
            return
        top = member.request.top
        scored = None if top is None else Scored.of(logits, token, top)
        text = ticket.text.push(token)
        self._tell(ticket, Piece(text, token, scored, member.report() if first else None))
        if ticket.text.stopped or len(member.new) == ticket.most:
            self._end(number, "stop" if ticket.text.stopped else "length")

    def _end(self, number: int, finish: str) -> None:
        ticket = self.tickets[number]
        member, now = ticket.member, time.monotonic()
        usage = Usage(len(member.request.prompt.tokens), member.cached_tokens, len(member.new))
        times = (ticket.begun_s - ticket.submitted_s, ticket.first_s - ticket.begun_s, now - ticket.first_s)
        event = End(ticket.text.finish(), finish, usage, member.report(), *times)
        self._forget(number)
        self._tell(ticket, event)

    def fail(self, number: int, error: Exception) -> None:
        """End a request with an error. Nothing happens if it has ended."""
        ticket = self.tickets.get(number)
        if ticket is None:
            return
        if not isinstance(error, TamisError):
            log.error("request %d failed: %s", number, type(error).__name__, exc_info=error)
        self._forget(number)
        self._tell(ticket, Failed(error))

    def _restart(self, number: int, error: CacheFull) -> None:
        ticket = self.tickets[number]
        ticket.member.restart()
        with self.lock:
            again = self.scheduler.restart(number, ticket.member.left)
        if not again:
            self.tickets.pop(number)
            self._tell(ticket, Failed(error))

    def _refuse(self, number: int) -> None:
        ticket = self.tickets.pop(number)
        what = "documents that are kept for good leave too few pages for this request. Unpin some, or ask for less."
        self._tell(ticket, Failed(CacheFull(what, needed_bytes=0, available_bytes=0)))

    def _forget(self, number: int) -> None:
        with self.lock:
            self.scheduler.end(number)
            self.tickets.pop(number)
        self.reuse.store.save()

    def _tell(self, ticket: Ticket, event: Event) -> None:
        try:
            ticket.listener(event)
        except Exception as e:
            log.error("a listener failed: %s", type(e).__name__, exc_info=e)
