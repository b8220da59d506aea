"""One request for documents: all of them held, or none. Missing ones are loaded or computed once, whoever asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tamis.cache.document import Payload, Wanted
from tamis.cache.shelves import Shelf, Shelves
from tamis.cache.tiers.base import Entry, State
from tamis.core.errors import CacheTimeout, InvalidInput, NotCached, StoreDamaged
from tamis.core.log import logger

Compute = Callable[[Wanted], Payload]
COMPUTED = "computed"
SHARED = "shared"
log = logger("cache")


class Outcome(Enum):
    """How a flight ended, if it did."""

    FLYING = "flying"
    LANDED = "landed"
    FAILED = "failed"


@dataclass(eq=False)
class Flight:
    """A document on its way into the first tier: led by one request, awaited by others."""

    ready: threading.Condition
    source: tuple[Shelf, Entry] | None
    entry: Entry | None = None
    waiters: int = 0
    outcome: Outcome = Outcome.FLYING

    def over(self) -> bool:
        """Whether it landed or failed."""
        return self.outcome is not Outcome.FLYING


@dataclass
class Desk:
    """What all requests share; the lock guards the rest, and is not held while documents are computed or copied."""

    shelves: Shelves
    flights: dict[Hashable, Flight] = field(default_factory=dict)

    @property
    def lock(self) -> threading.RLock:
        """That of the shelves."""
        return self.shelves.lock


class Request:
    """Claims, makes and awaits documents. On any error `undo` gives back everything it holds or has reserved.

    A request finishes what it leads before it waits for others, so that no two can wait for each other.
    """

    def __init__(self, desk: Desk, compute: Compute | None, *, timeout_s: float) -> None:
        self._desk = desk
        self._compute = compute
        self._timeout_s = self._left_s = timeout_s
        self.held: dict[Hashable, Entry] = {}
        self.origin: dict[Hashable, str] = {}
        self._led: dict[Hashable, Flight] = {}
        self._joined: dict[Hashable, Flight] = {}

    def run(self, wanted: Mapping[Hashable, int]) -> None:
        """Hold every document of {key: tokens}; timeout_s bounds all waiting for other requests, not our own work."""
        try:
            while wanted:
                self._claim(wanted)
                self._make()
                wanted = self._await(wanted)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Let go of everything, fail what was led, leave what was joined."""
        top = self._desk.shelves.top
        with self._desk.lock:
            for key, flight in self._led.items():
                if flight.entry is not None:
                    top.tier.cancel(flight.entry)
                self._release_source(flight)
                del self._desk.flights[key]
                flight.outcome = Outcome.FAILED
                flight.ready.notify_all()
            for flight in self._joined.values():
                if flight.outcome is Outcome.LANDED and flight.entry is not None:
                    top.let_go(flight.entry)
                flight.waiters -= 1
            for entry in self.held.values():
                top.let_go(entry)
            self._led, self._joined, self.held = {}, {}, {}

    def _claim(self, wanted: Mapping[Hashable, int]) -> None:
        """Hold what is there, join what is on its way, reserve room for the rest.

        All under one lock, which is let go of only while what must make room is copied to a slower tier. Before that
        a request that needs such room waits for the others that do, so that no two refuse each other.
        """
        shelves, top = self._desk.shelves, self._desk.shelves.top
        size = top.tier.medium.bytes_of

        def missing() -> int:
            shelves.expire()
            known = (top.tier.entries, self._desk.flights)
            return sum(size(n) for key, n in wanted.items() if not any(key in there for there in known))

        with shelves.room(missing, self._left_s) as waited_s:
            self._left_s = max(0.0, self._left_s - waited_s)
            for key, n_tokens in wanted.items():
                entry = top.tier.entries.get(key)
                if entry is not None:
                    _same_length(entry, n_tokens)
                    top.hold(entry)
                    self.held[key] = entry
                    top.touch(entry)
                    self.origin[key] = top.tier.name
                elif key in self._desk.flights:
                    flight = self._desk.flights[key]
                    flight.waiters += 1
                    self._joined[key] = flight
                else:
                    self._lead(key, n_tokens)
            shelves.make_room(sum(size(wanted[key]) for key in self._led))
            for key, flight in self._led.items():
                flight.entry = top.tier.reserve(key, wanted[key])

    def _lead(self, key: Hashable, n_tokens: int) -> None:
        source = self._desk.shelves.below(key)
        if source is not None:
            _same_length(source[1], n_tokens)
            source[0].hold(source[1])  # or making room above could evict it below
        elif self._compute is None:
            raise _not_cached(key)
        self._led[key] = self._desk.flights[key] = Flight(threading.Condition(self._desk.lock), source)

    def _make(self) -> None:
        """Load or compute what this request leads, one after the other, outside the lock."""
        top = self._desk.shelves.top
        for key, flight in list(self._led.items()):
            entry = flight.entry
            assert entry is not None, "room is reserved before a flight starts"
            origin = self._write(entry, flight)
            with self._desk.lock:
                top.commit(entry)
                top.hold(entry, 1 + flight.waiters)
                flight.outcome = Outcome.LANDED
                flight.ready.notify_all()
                del self._desk.flights[key], self._led[key]
                self.held[key] = entry
                self.origin[key] = origin
                self._release_source(flight)

    def _write(self, entry: Entry, flight: Flight) -> str:
        """Fill the reserved entry from the fastest tier that has it, else by computing; where it came from."""
        medium = self._desk.shelves.top.tier.medium
        while flight.source is not None:
            shelf, kept = flight.source
            try:
                payload = shelf.tier.medium.read(kept.body, kept.n_tokens)
            except StoreDamaged as e:
                log.warning("%s is treated as missing in %s: %s", entry.key, shelf.tier.name, e)
                self._next_source(flight)
                continue
            medium.write(entry.body, payload)
            return shelf.tier.name
        if self._compute is None:
            raise _not_cached(entry.key)
        payload = self._compute(Wanted(entry.key, entry.n_tokens))
        if payload.n_tokens != entry.n_tokens:
            raise InvalidInput(
                f"{payload.n_tokens} tokens were computed for {entry.key}; it has {entry.n_tokens}; give all."
            )
        medium.write(entry.body, payload)
        return COMPUTED

    def _next_source(self, flight: Flight) -> None:
        """Set the damaged source aside and turn to the next one below it, if there is any."""
        with self._desk.lock:
            assert flight.source is not None, "there was a source that is damaged"
            shelf, kept = flight.source
            flight.source = None
            shelf.let_go(kept)
            if kept.state is State.KEPT:
                self._desk.shelves.counts.damaged[shelf.tier.name] += 1
                shelf.set_aside(kept)
            source = self._desk.shelves.below(kept.key)
            if source is not None:
                source[0].hold(source[1])
                flight.source = source

    def _release_source(self, flight: Flight) -> None:
        if flight.source is not None:
            shelf, kept = flight.source
            flight.source = None
            if kept.state is State.KEPT:
                shelf.touch(kept)
            shelf.let_go(kept)

    def _await(self, wanted: Mapping[Hashable, int]) -> dict[Hashable, int]:
        """Wait for what others lead; the documents whose flight failed, for this request to try itself."""
        failed: dict[Hashable, int] = {}
        for key, flight in list(self._joined.items()):
            with self._desk.lock:
                started = time.monotonic()
                if not flight.ready.wait_for(flight.over, timeout=self._left_s):
                    self._desk.shelves.counts.timeouts += 1
                    raise CacheTimeout(
                        f"another request has not finished {key} ({wanted[key]} tokens) within {self._timeout_s:g} s. "
                        "Raise the timeout, or try again; nothing is held."
                    )
                self._left_s = max(0.0, self._left_s - (time.monotonic() - started))
                del self._joined[key]
                flight.waiters -= 1
                if flight.outcome is Outcome.LANDED:
                    assert flight.entry is not None, "a flight that landed has its entry"
                    self.held[key] = flight.entry  # the leader holds it once for each who waits
                    self.origin[key] = SHARED
                    _same_length(flight.entry, wanted[key])
                else:
                    failed[key] = wanted[key]
        return failed


def _same_length(entry: Entry, n_tokens: int) -> None:
    if entry.n_tokens != n_tokens:
        raise InvalidInput(
            f"{entry.key} is stored with {entry.n_tokens} tokens and was asked for with {n_tokens}; a key is the "
            "address of its tokens, so make it from exactly those."
        )


def _not_cached(key: Hashable) -> NotCached:
    return NotCached(f"{key} is in no tier. Give `compute`, or put it there first.")
