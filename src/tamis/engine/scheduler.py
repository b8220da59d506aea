"""Who computes what in the next step: a queue with classes, a budget of tokens, and pages that never run short.

Pure Python: knows counts of tokens and pages, not models, tensors or text. `Memory` does what is decided here. Not
thread-safe: one thread submits, plans and ends.

A step is one token for every request that is decoding, and parts of prompts in what is left of the budget. Prompts
are taken strictly in order of class and arrival, so that first tokens come in that order too. A request waits until
its own pages are free, then grows page by page; when none is free, the youngest of the lowest class is parked and goes
on later from where it was. Nothing is admitted that could not finish alone.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tamis.core.checks import check_fields
from tamis.core.errors import Busy, InvalidInput

RECENT = 32  # ended requests from which the pace is estimated
LONGEST_RETRY_S, FIRST_RETRY_S = 600, 1


class Memory(Protocol):
    """Where requests keep their keys and values. Counts are pages."""

    def capacity(self) -> int:
        """What one request may have when no other has any."""

    def free(self) -> int:
        """What `take` can hand out now."""

    def take(self, number: int, pages: int) -> bool:
        """Give a request so many more pages; a parked one also its contents back. False: nothing was changed."""

    def park(self, number: int) -> None:
        """Keep a request's contents elsewhere, and let its pages go."""

    def drop(self, number: int) -> None:
        """Let go of all that a request has."""


@dataclass(frozen=True)
class Limits:
    """max_running   requests in one step
    max_waiting   requests that wait, at most: more are refused
    step_tokens   of one step, prompts and new tokens together; a part of a prompt that is longer goes alone
    page_tokens   of one page
    age_s         seconds after which a request counts as one class higher, so that no class waits for ever
    """

    max_running: int = 32
    max_waiting: int = 256
    step_tokens: int = 1024
    page_tokens: int = 128
    age_s: float = 30.0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("max_running", "max_waiting", "step_tokens", "page_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; give 1 or more.")
        if self.age_s <= 0:
            raise InvalidInput(f"age_s is {self.age_s}; give more than 0 seconds.")


class State(Enum):
    """Where a request is. A parked one waits like a new one, but goes on from where it was."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Work:
    """One request as the scheduler sees it.

    priority     its class, 0 first
    parts        tokens that each part of its prompt costs, in order; each is done in one go
    start_pages  pages that its prompt takes
    start_room   tokens that fit behind the prompt into those
    most_pages   with all its new tokens
    """

    number: int
    priority: int
    parts: deque[int]
    start_pages: int
    start_room: int
    most_pages: int
    submitted_s: float = 0.0
    state: State = State.WAITING
    pages: int = 0  # it has, or had when it was parked
    room: int = 0  # tokens that still fit into them
    new_tokens: int = 0

    def __lt__(self, other: Work) -> bool:
        return self.number < other.number


@dataclass(frozen=True)
class Step:
    """What to do now, in this order. `parts`: (request, part of its prompt), `last` if it was the last one.

    refused: requests that can no longer be helped, because pages are kept for good by others; they have ended.
    """

    resumed: tuple[int, ...] = ()
    parts: tuple[tuple[int, bool], ...] = ()
    decode: tuple[int, ...] = ()
    parked: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.parts or self.decode)


@dataclass
class _Plan:
    """A step in the making."""

    now: float
    resumed: list[int] = field(default_factory=list)
    parts: list[tuple[int, bool]] = field(default_factory=list)
    decode: list[int] = field(default_factory=list)
    parked: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    def made(self) -> Step:
        still = [n for n in self.resumed if n not in self.parked]
        return Step(tuple(still), tuple(self.parts), tuple(self.decode), tuple(self.parked), tuple(self.refused))


class Scheduler:
    """Takes requests (`submit`), says what the next step computes (`plan`), lets requests go (`end`)."""

    def __init__(
        self, memory: Memory, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.memory, self.limits, self.clock = memory, limits or Limits(), clock
        self.preemptions = 0
        self._works: dict[int, Work] = {}
        self._waiting: dict[int, list[Work]] = {}  # by class, in order of arrival
        self._running: dict[int, Work] = {}
        self._ends: deque[float] = deque(maxlen=RECENT)
        self._next = 0
        self._blocked = False  # no admission until a request lets pages go

    @property
    def n_running(self) -> int:
        """Requests that have pages."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Requests that have none, parked ones among them."""
        return sum(map(len, self._waiting.values()))

    def state(self, number: int) -> State:
        """Of a request; ENDED also for one that never was."""
        work = self._works.get(number)
        return State.ENDED if work is None else work.state

    def retry_after_s(self) -> int:
        """Whole seconds until a place in the queue is likely free, from the pace of the last requests."""
        if len(self._ends) < 2 or self._ends[-1] <= self._ends[0]:
            return FIRST_RETRY_S
        each_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        places = 1 + self.n_waiting - self.limits.max_waiting
        return min(LONGEST_RETRY_S, max(FIRST_RETRY_S, math.ceil(each_s * places)))

    def submit(
        self, parts: Sequence[int], *, priority: int = 0, start_pages: int, start_room: int, most_pages: int
    ) -> int:
        """Queue a request (see `Work`); its number. Raises Busy if the queue is full, InvalidInput if it never fits."""
        if not parts or min(parts) < 0 or priority < 0 or start_room < 0 or not 1 <= start_pages <= most_pages:
            raise InvalidInput(
                f"parts {list(parts)}, priority {priority}, start_pages {start_pages}, start_room {start_room}, "
                f"most_pages {most_pages}; give 1 or more parts, and pages from 1, the most not below the first."
            )
        if most_pages > (capacity := self.memory.capacity()):
            raise InvalidInput(
                f"the request may need {most_pages} pages of {self.limits.page_tokens} tokens and the cache has "
                f"{capacity}. Give fewer documents or a smaller max_tokens, or give the cache more bytes."
            )
        if self.n_waiting >= self.limits.max_waiting:
            after = self.retry_after_s()
            raise Busy(
                f"{self.n_waiting} requests wait and no more may (max_waiting). Try again in {after} s.",
                retry_after_s=after,
            )
        number, self._next = self._next, self._next + 1
        work = Work(number, priority, deque(parts), start_pages, start_room, most_pages, self.clock())
        self._works[number] = work
        self._queue(work)
        return number

    def end(self, number: int) -> bool:
        """A request is done, cancelled or failed: let go of all it has. False if it has ended already."""
        work = self._works.pop(number, None)
        if work is None:
            return False
        if self._running.pop(number, None) is None:
            self._waiting[work.priority].remove(work)
        self.memory.drop(number)
        work.state, self._blocked = State.ENDED, False
        self._ends.append(self.clock())
        return True

    def replan(self, number: int, parts: Sequence[int], room: int) -> None:
        """What is left of a running request's prompt, and the tokens that fit behind it, are known better now."""
        if (work := self._running.get(number)) is not None:
            work.parts, work.room = deque(parts), room

    def restart(self, number: int, parts: Sequence[int]) -> bool:
        """A running request found no room for what it needs: it lets go of everything and begins anew, once another
        request has let pages go. False, and it has ended, if no other could."""
        if len(self._running) == 1:
            self.end(number)
            return False
        work = self._running.pop(number)
        self.memory.drop(number)
        work.parts, work.pages, work.room, work.new_tokens, work.state = deque(parts), 0, 0, 0, State.WAITING
        self._blocked = True
        self._queue(work)
        return True

    def plan(self) -> Step:
        """The next step. What it names counts as done: parts are used up, new tokens have their places."""
        plan = _Plan(self.clock())
        self._grow(plan)
        self._admit(plan)
        self._prompts(plan)
        return plan.made()

    def rank(self, work: Work, now: float) -> int:
        """The class that a request counts as: its own, or a higher one because of the time it is here."""
        return max(0, work.priority - int((now - work.submitted_s) / self.limits.age_s))

    def _queue(self, work: Work) -> None:
        insort(self._waiting.setdefault(work.priority, []), work)

    def _in_order(self, now: float) -> list[Work]:
        return sorted(self._running.values(), key=lambda w: (self.rank(w, now), w.number))

    def _grow(self, plan: _Plan) -> None:
        """A place for one more token of every request that is decoding, in order; the last may be parked for it."""
        order = self._in_order(plan.now)
        for work in order:
            if work.parts or work.state is not State.RUNNING:
                continue
            if not work.room and not self._one_page(work, order, plan):
                continue
            work.room -= 1
            work.new_tokens += 1
            plan.decode.append(work.number)

    def _one_page(self, work: Work, order: list[Work], plan: _Plan) -> bool:
        while not self.memory.take(work.number, 1):
            others = [w for w in reversed(order) if w.state is State.RUNNING]
            if len(others) == 1:
                self.end(work.number)
                plan.refused.append(work.number)
                return False
            self._park(others[0], plan)
            if others[0] is work:
                return False
        work.pages += 1
        work.room += self.limits.page_tokens
        return True

    def _park(self, work: Work, plan: _Plan) -> None:
        """Take a running request's pages; it waits at the place of its arrival."""
        del self._running[work.number]
        self.memory.park(work.number)
        work.state, self._blocked = State.PARKED, False
        self._queue(work)
        self.preemptions += 1
        plan.parked.append(work.number)

    def _admit(self, plan: _Plan) -> None:
        """Let the first in the queue in as long as there is room, or someone of a lower class who can make some."""
        while (work := self._head(plan.now)) is not None and not self._blocked:
            parked = work.state is State.PARKED
            need = work.pages if parked else work.start_pages
            if not self._make_room(work, need, plan) or not self.memory.take(work.number, need):
                if not self._running:
                    self.end(work.number)
                    plan.refused.append(work.number)
                    continue
                return
            self._waiting[work.priority].remove(work)
            self._running[work.number] = work
            work.state = State.RUNNING
            if parked:
                plan.resumed.append(work.number)
            else:
                work.pages, work.room = need, work.start_room

    def _head(self, now: float) -> Work | None:
        heads = (works[0] for works in self._waiting.values() if works)
        return min(heads, key=lambda w: (self.rank(w, now), w.number), default=None)

    def _make_room(self, work: Work, need: int, plan: _Plan) -> bool:
        """Whether there is a place and pages for `work`, parking requests of lower classes where that is enough."""
        if self._fits(need, 0, 0):
            return True
        rank, busy, freed = self.rank(work, plan.now), {*plan.decode, *plan.resumed}, 0
        youngest_first = reversed(self._in_order(plan.now))
        lower = [w for w in youngest_first if self.rank(w, plan.now) > rank and w.number not in busy]
        for n, victim in enumerate(lower, 1):
            freed += victim.pages
            if self._fits(need, n, freed):
                for one in lower[:n]:
                    self._park(one, plan)
                return True
        return False

    def _fits(self, need: int, fewer: int, freed: int) -> bool:
        """Whether `need` pages are there beside one for each running request, so that growing parks nobody at once."""
        running = len(self._running) - fewer
        return running < self.limits.max_running and self.memory.free() + freed >= need + running

    def _prompts(self, plan: _Plan) -> None:
        """Parts of prompts, in order; nobody's before those of who came first in its class."""
        left = self.limits.step_tokens - len(plan.decode)
        for work in self._in_order(plan.now):
            while work.parts:
                if work.parts[0] > left and plan.parts:
                    return
                left -= work.parts.popleft()
                plan.parts.append((work.number, not work.parts))
                if left <= 0:
                    return
