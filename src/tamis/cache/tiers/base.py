"""A tier of the cache: five verbs (has, get, put, pin, drop) over a medium that holds the bytes. Needs no torch.

The medium moves and counts bytes; the tier knows which documents there are, and who uses them. What a tier evicts is
decided elsewhere: a full one refuses. Not thread-safe: `DocumentCache` holds the lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tamis.cache.document import DocumentKV, Lease, Payload
from tamis.core.errors import BrokenInvariant, InvalidInput, NotCached, StoreDamaged
from tamis.core.log import logger

log = logger("cache")


class Medium(ABC):
    """Holds the bytes of documents. A body is what the medium needs to find one: pages, a file, nothing."""

    name: str
    budget_bytes: int

    @abstractmethod
    def bytes_of(self, n_tokens: int) -> int:
        """Bytes that a document takes here, exactly."""

    @property
    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that `claim` can hand out."""

    @abstractmethod
    def claim(self, key: Hashable, n_tokens: int) -> Any:
        """Set the bytes of a document aside; its body. Raises PoolFull, with nothing taken, if they are not free."""

    @abstractmethod
    def write(self, body: Any, payload: Payload) -> None:
        """Fill a claimed body, for a disk durably. May run beside other calls, on other bodies."""

    @abstractmethod
    def settle(self, body: Any) -> None:
        """Note that a body was written. Quick: others wait for it."""

    @abstractmethod
    def read(self, body: Any, n_tokens: int) -> Payload:
        """What was written; views into the medium are allowed. May run beside other calls.

        Raises StoreDamaged if it cannot be trusted.
        """

    @abstractmethod
    def release(self, body: Any) -> None:
        """Give a body's bytes back, settled or not."""

    @abstractmethod
    def check(self, bodies: Sequence[Any], others: Iterable[Sequence[int]] = ()) -> None:
        """Raise BrokenInvariant unless exactly these bodies are claimed; others: pages claimed past the tier."""

    def copied(self, payload: Payload) -> Payload:
        """What `read` gave, free of views into the medium; by default it is already."""
        return payload

    def set_aside(self, body: Any) -> None:
        """Take a damaged body out of the way and give its bytes back."""
        self.release(body)

    def found(self) -> list[tuple[Hashable, int, Any]]:
        """(key, tokens, body) of what was there before this process, oldest first."""
        return []

    def close(self) -> None:
        """Let go of what belongs to the process: locks, files."""
        return None


class State(Enum):
    """A reserved entry cannot be found yet, a leaving one not any more; both take their bytes."""

    RESERVED = "reserved"
    KEPT = "kept"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Entry:
    """One document in one tier, and how many leases hold it."""

    key: Hashable
    n_tokens: int
    size_bytes: int
    body: Any
    pins: int = 0
    state: State = State.RESERVED

    @property
    def document(self) -> DocumentKV:
        """The document as its readers see it."""
        return DocumentKV(self.key, self.n_tokens, self.body if isinstance(self.body, tuple) else ())


class Tier:
    """The documents of one medium. `entries` are those that can be found, by key."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.name = medium.name
        self.entries: dict[Hashable, Entry] = {}
        self.used_bytes = 0
        self._unfindable: set[Entry] = set()  # reserved or leaving
        for key, n_tokens, body in medium.found():
            entry = Entry(key, n_tokens, medium.bytes_of(n_tokens), body, state=State.KEPT)
            self.entries[key] = entry
            self.used_bytes += entry.size_bytes

    def has(self, keys: Iterable[Hashable]) -> list[bool]:
        """Whether each document is here."""
        return [key in self.entries for key in keys]

    def get(self, keys: Iterable[Hashable]) -> list[Payload | None]:
        """Copies of the documents' keys and values, None for those not here or damaged (logged, moved aside)."""
        return [self._read(key) for key in keys]

    def put(self, items: Sequence[tuple[Hashable, Payload]]) -> None:
        """Store all of the documents or, on any error, none; those already here stay as they are (immutable).

        Raises PoolFull if they do not fit: nothing is evicted.
        """
        new = {key: payload for key, payload in items if key not in self.entries}
        made: list[Entry] = []
        try:
            for key, payload in new.items():
                made.append(self.reserve(key, payload.n_tokens))
            for entry in made:
                self.medium.write(entry.body, new[entry.key])
            for entry in made:
                self.commit(entry)
        except BaseException:
            for entry in made:
                self.cancel(entry) if entry.state is State.RESERVED else self.drop([entry.key])
            raise

    def pin(self, keys: Sequence[Hashable]) -> Lease:
        """Hold all of the documents in place until the lease ends. Raises NotCached, holding none, if any lacks."""
        if missing := [str(key) for key in keys if key not in self.entries]:
            raise NotCached(f"{', '.join(missing)} not in tier {self.name!r}; put it there before pinning it.")
        held = [self.entries[key] for key in keys]
        for entry in held:
            entry.pins += 1

        def end() -> None:
            for entry in held:
                self.unpin(entry)

        return Lease([entry.document for entry in held], end)

    def drop(self, keys: Iterable[Hashable]) -> list[bool]:
        """Forget documents; whether each was here. The bytes of one in use are freed when its last lease ends."""
        return [self._forget(key) for key in keys]

    def unpin(self, entry: Entry) -> None:
        """End one hold on an entry; the last one frees the bytes of one that was dropped meanwhile."""
        assert entry.pins > 0, f"{entry.key} is let go more often than it was held"
        entry.pins -= 1
        if not entry.pins and entry.state is State.LEAVING:
            self._free(entry)

    def reserve(self, key: Hashable, n_tokens: int) -> Entry:
        """Set bytes aside for a document that is still to be written. Raises PoolFull."""
        if n_tokens < 1:
            raise InvalidInput(f"{key} has {n_tokens} tokens; allowed is 1 or more.")
        entry = Entry(key, n_tokens, self.medium.bytes_of(n_tokens), self.medium.claim(key, n_tokens))
        self._unfindable.add(entry)
        self.used_bytes += entry.size_bytes
        return entry

    def commit(self, entry: Entry) -> None:
        """Make a reserved and written entry findable. If the medium fails, it stays reserved."""
        assert entry.state is State.RESERVED and entry.key not in self.entries, f"{entry.key} is stored twice"
        self.medium.settle(entry.body)
        entry.state = State.KEPT
        self._unfindable.discard(entry)
        self.entries[entry.key] = entry

    def cancel(self, entry: Entry) -> None:
        """Give back what `reserve` took."""
        assert entry.state is State.RESERVED, f"{entry.key} is {entry.state.value}, only a reservation can be cancelled"
        self._free(entry)

    def set_aside(self, entry: Entry) -> None:
        """Forget a damaged entry that nobody else holds, and take its bytes out of the way."""
        del self.entries[entry.key]
        entry.state = State.GONE
        self.used_bytes -= entry.size_bytes
        self.medium.set_aside(entry.body)

    def check(self, others: Iterable[Sequence[int]] = ()) -> None:
        """Raise BrokenInvariant unless the books agree with the medium; others: pages allocated past this tier."""
        every = [*self.entries.values(), *self._unfindable]
        for entry in every:
            findable = self.entries.get(entry.key) is entry
            if entry.pins < 0 or findable != (entry.state is State.KEPT) or entry.state is State.GONE:
                raise BrokenInvariant(f"{entry.key} is {entry.state.value} with {entry.pins} pins in {self.name!r}.")
            if entry.state is State.LEAVING and not entry.pins:
                raise BrokenInvariant(f"{entry.key} left {self.name!r} and its bytes were kept.")
        total = sum(entry.size_bytes for entry in every)
        if total != self.used_bytes or total > self.medium.budget_bytes:
            raise BrokenInvariant(
                f"{self.name!r} counts {self.used_bytes} bytes, its entries have {total}, its budget is "
                f"{self.medium.budget_bytes}."
            )
        self.medium.check([entry.body for entry in every], others)

    def _read(self, key: Hashable) -> Payload | None:
        entry = self.entries.get(key)
        if entry is None:
            return None
        try:
            return self.medium.copied(self.medium.read(entry.body, entry.n_tokens))
        except StoreDamaged as e:
            if entry.pins:
                raise
            log.warning("%s is treated as missing: %s", key, e)
            self.set_aside(entry)
            return None

    def _forget(self, key: Hashable) -> bool:
        entry = self.entries.pop(key, None)
        if entry is None:
            return False
        if entry.pins:
            entry.state = State.LEAVING
            self._unfindable.add(entry)
        else:
            self._free(entry)
        return True

    def _free(self, entry: Entry) -> None:
        self._unfindable.discard(entry)
        entry.state = State.GONE
        self.used_bytes -= entry.size_bytes
        self.medium.release(entry.body)
