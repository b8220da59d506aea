"""Streams of work and events between them: a CUDA device's, none at all, and simulated ones.

A simulated stream does its work in any order that the events allow. What is right in every order is right on a device;
what needs a wait that is not there goes wrong in some order, which a test can find.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tamis.core.errors import BrokenInvariant


class Queue(Protocol):
    """Takes work in order; its events are understood by queues of its kind."""

    def run(self, work: Callable[[], None]) -> None: ...

    def record(self) -> Any: ...

    def wait(self, event: Any) -> None: ...


class AtOnce:
    """A queue that does its work as it is handed in, for devices that have no streams."""

    def run(self, work: Callable[[], None]) -> None:
        """Do it."""
        work()

    def record(self) -> None:
        """All is done already."""

    def wait(self, event: Any) -> None:
        """Nothing to wait for."""


class DeviceStream:
    """A CUDA stream. stream: None is the one that is current when work is handed in."""

    def __init__(self, stream: Any | None = None) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        """Hand in what `work` launches."""
        with torch.cuda.stream(self._now):
            work()

    def record(self) -> Any:
        """An event that happens after the work handed in so far."""
        return self._now.record_event()

    def wait(self, event: Any) -> None:
        """Work handed in from now on begins after `event`."""
        self._now.wait_event(event)

    @property
    def _now(self) -> Any:
        return torch.cuda.current_stream() if self._stream is None else self._stream


@dataclass(frozen=True)
class Queues:
    """Where a step computes and where it copies. settle: called where the step's work must have been done, which only
    simulated streams need to be told. choose: where it chooses for the next layer; None: where it computes."""

    compute: Queue
    copy: Queue
    settle: Callable[[], None] = lambda: None
    choose: Queue | None = None

    @classmethod
    def of(cls, device: torch.device) -> Queues:
        """The device's own: on CUDA the current stream and two beside it."""
        if device.type != "cuda":
            return cls(AtOnce(), AtOnce())
        beside: Any = torch.cuda.Stream
        # few programs, before a grid that fills the device: else they would wait for its end
        copy, choose = (DeviceStream(beside(device, priority=-1)) for _ in range(2))
        return cls(DeviceStream(), copy, choose=choose)


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
