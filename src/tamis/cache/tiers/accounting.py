"""A medium that only counts: the same bookkeeping for a simulator, without tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from tamis.cache.document import Payload
from tamis.cache.tiers.base import Medium, Tier
from tamis.core.errors import BrokenInvariant, InvalidInput, PoolFull


class Accounting(Medium):
    """Counts bytes; payloads are lengths. A body is a document's size in bytes."""

    def __init__(self, name: str, budget_bytes: int, bytes_of: Callable[[int], int]) -> None:
        if budget_bytes < 1:
            raise InvalidInput(f"a budget of {budget_bytes} bytes; allowed is 1 or more.")
        self.name = name
        self.budget_bytes = budget_bytes
        self._bytes_of = bytes_of
        self._used = 0

    def bytes_of(self, n_tokens: int) -> int:
        """As the given function says."""
        return self._bytes_of(n_tokens)

    @property
    def free_bytes(self) -> int:
        """What is not claimed."""
        return self.budget_bytes - self._used

    def claim(self, key: Hashable, n_tokens: int) -> int:
        """Count a document in. Raises PoolFull."""
        size = self._bytes_of(n_tokens)
        if size > self.free_bytes:
            raise PoolFull(
                f"{key} takes {size} bytes and {self.free_bytes} of {self.budget_bytes} are free in tier "
                f"{self.name!r}. Evict some, or give it more bytes."
            )
        self._used += size
        return size

    def write(self, body: int, payload: Payload) -> None:
        """Nothing to copy."""

    def settle(self, body: int) -> None:
        """Nothing to do."""

    def read(self, body: int, n_tokens: int) -> Payload:
        """The length alone."""
        return Payload(n_tokens)

    def release(self, body: int) -> None:
        """Count a document out."""
        self._used -= body

    def check(self, bodies: Sequence[int], others: Iterable[Sequence[int]] = ()) -> None:
        """Compare the sum."""
        if sum(bodies) != self._used:
            raise BrokenInvariant(f"{self.name!r} has {self._used} bytes claimed; its documents take {sum(bodies)}.")


def accounting_tier(name: str, budget_bytes: int, bytes_of: Callable[[int], int]) -> Tier:
    """A tier without tensors; bytes_of(n_tokens) is what a document takes (`KVSpec.token_bytes` times tokens)."""
    return Tier(Accounting(name, budget_bytes, bytes_of))
