"""Streams and events of a device, simulated: work in any order that the events allow.

A stand-in for CUDA's where there is none. What is right in every order is right on a device; what needs a wait that is
not there goes wrong in some order, which a test can find.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tamis.core.errors import BrokenInvariant


@dataclass
class Event:
    """Happens when all work handed to its stream before it is done."""

    done: bool = False


@dataclass
class Stream:
    """Work in the order in which it was handed in."""

    name: str
    _work: deque[Callable[[], None] | tuple[str, Event]] = field(default_factory=deque)

    def run(self, work: Callable[[], None]) -> None:
        """Hand in work."""
        self._work.append(work)

    def record(self) -> Event:
        """An event that happens after the work handed in so far."""
        event = Event()
        self._work.append(("record", event))
        return event

    def wait(self, event: Event) -> None:
        """Work handed in from now on begins after `event`."""
        self._work.append(("wait", event))

    @property
    def ready(self) -> bool:
        """Whether the next piece of work may run."""
        if not self._work:
            return False
        first = self._work[0]
        return not (isinstance(first, tuple) and first[0] == "wait" and not first[1].done)

    @property
    def idle(self) -> bool:
        """Whether all work is done."""
        return not self._work

    def advance(self) -> None:
        """Do the next piece of work."""
        first = self._work.popleft()
        if not isinstance(first, tuple):
            first()
        elif first[0] == "record":
            first[1].done = True


def run_all(streams: list[Stream], chance: random.Random | None = None) -> None:
    """Do all work, choosing by `chance` among streams that may go on (None: the first one).

    Raises BrokenInvariant if they wait for each other.
    """
    while not all(stream.idle for stream in streams):
        ready = [stream for stream in streams if stream.ready]
        if not ready:
            waiting = ", ".join(stream.name for stream in streams if not stream.idle)
            raise BrokenInvariant(f"the streams {waiting} wait for events that nothing will bring about.")
        (chance.choice(ready) if chance else ready[0]).advance()
