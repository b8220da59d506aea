"""Requests of one HTTP request on their way through the engine: submitted together, listened to, ended in time.

The engine's thread hands events over to the event loop. Whoever stops listening, or takes too long, is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from tamis.core.errors import Cancelled
from tamis.engine.library import Library
from tamis.engine.request import End, Event, Failed, Piece, Request
from tamis.engine.service import Engine
from tamis.server.errors import Told, TooLate
from tamis.server.keys import KeyRing
from tamis.server.metrics import Metrics
from tamis.server.settings import ServerSettings


@dataclass(frozen=True)
class Serving:
    """What all parts of a server share."""

    engine: Engine
    library: Library
    settings: ServerSettings
    keys: KeyRing
    metrics: Metrics


@dataclass
class Runs:
    """The choices of one HTTP request. `arrived_s`: by `time.monotonic`."""

    serving: Serving
    arrived_s: float = field(default_factory=time.monotonic)
    ends: dict[int, End] = field(default_factory=dict)
    _numbers: list[int] = field(default_factory=list)
    _events: asyncio.Queue[tuple[int, Event]] = field(default_factory=asyncio.Queue)
    _last_s: dict[int, float] = field(default_factory=dict)
    _left: bool = False

    async def start(self, make: Callable[[], Sequence[Request]]) -> None:
        """Make the requests (texts become tokens: not on the event loop) and submit all of them, or none."""
        loop = asyncio.get_running_loop()

        def listener(i: int) -> Callable[[Event], None]:
            return lambda event: _hand_over(loop, self._events, (i, event))

        def submit() -> None:
            for i, request in enumerate(make()):
                self._numbers.append(self.serving.engine.submit(request, listener(i)))
            if self._left:  # the client was gone before this thread was done
                self.cancel()

        try:
            await asyncio.to_thread(submit)
        except BaseException:
            self.cancel()
            raise

    async def events(self) -> AsyncIterator[tuple[int, Piece | End]]:
        """(choice, event) until all have ended. Raises what one of them failed with, and TooLate; the rest is ended."""
        end_s = self.arrived_s + self.serving.settings.timeout_s
        try:
            while len(self.ends) < len(self._numbers):
                try:
                    i, event = await asyncio.wait_for(self._events.get(), end_s - time.monotonic())
                except TimeoutError as e:
                    raise TooLate(
                        f"the request took longer than {self.serving.settings.timeout_s:g} s and was ended. Ask for "
                        "fewer tokens, or try again when the server has less to do."
                    ) from e
                if isinstance(event, Failed):
                    raise event.error
                self._measure(i, event)
                yield i, event
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End what is still running. Nothing happens to what has ended."""
        self._left = True
        for i, number in enumerate(self._numbers):
            if i not in self.ends:
                self.serving.engine.cancel(number, "its client is gone")

    def failed(self, error: Exception) -> Told:
        """What the client is told of an error, which is counted."""
        told = Told.of(error)
        self.serving.metrics.failed("shutdown" if isinstance(error, Cancelled) else told.code or "error")
        return told

    def _measure(self, i: int, event: Piece | End) -> None:
        metrics, now = self.serving.metrics, time.monotonic()
        if isinstance(event, End):
            self.ends[i] = event
            metrics.ended(event, now - self.arrived_s)
        elif i in self._last_s:
            metrics.next_token(now - self._last_s[i])
        else:
            metrics.first_token(now - self.arrived_s)
        self._last_s[i] = now


def _hand_over(
    loop: asyncio.AbstractEventLoop, events: asyncio.Queue[tuple[int, Event]], item: tuple[int, Event]
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(events.put_nowait, item)
