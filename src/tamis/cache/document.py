"""A stored document as others see it: its pages, what is copied between tiers, and the lease that keeps it in place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from tamis.core.errors import InvalidInput, NotCached

if TYPE_CHECKING:
    import torch


class Wanted(NamedTuple):
    """A document that a request needs: its key (`DocumentKey`, `PrefixKey`, or anything hashable) and its length."""

    key: Hashable
    n_tokens: int


@dataclass(frozen=True)
class DocumentKV:
    """A document's keys and values in place: immutable, one copy for any number of requests and offsets.

    pages: page numbers in the pool, in order of the tokens, all full but the last; empty in tiers without pages.
    """

    key: Hashable
    n_tokens: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Payload:
    """Keys and values on their way between tiers: pieces (k, v), each [layers, Hkv, m, D], m summing to n_tokens.

    Without pieces it is a length alone, for tiers that only count (`tiers/accounting.py`).
    """

    n_tokens: int
    pieces: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    def __post_init__(self) -> None:
        if self.n_tokens < 1:
            raise InvalidInput(f"a document of {self.n_tokens} tokens; allowed is 1 or more.")
        held = sum(k.shape[2] for k, _ in self.pieces)
        if self.pieces and held != self.n_tokens:
            raise InvalidInput(f"a document of {self.n_tokens} tokens with keys of {held}; they must agree.")

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Payload:
        """From keys and values [layers, Hkv, n, D]. Raises InvalidInput if their shapes differ."""
        if keys.ndim != 4 or keys.shape != values.shape:
            raise InvalidInput(
                f"keys {list(keys.shape)} and values {list(values.shape)}; expected two of [layers, Hkv, n, D]."
            )
        return cls(keys.shape[2], ((keys.detach(), values.detach()),))

    @cached_property
    def keys(self) -> torch.Tensor:
        """All keys [layers, Hkv, n, D]. Raises NotCached if this is a length alone."""
        return self._joined(0)

    @cached_property
    def values(self) -> torch.Tensor:
        """All values [layers, Hkv, n, D]. Raises NotCached if this is a length alone."""
        return self._joined(1)

    def _joined(self, which: int) -> torch.Tensor:
        import torch

        if not self.pieces:
            raise NotCached("this tier only counts bytes and has no keys or values; use one that holds tensors.")
        tensors = [piece[which] for piece in self.pieces]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=2)


class Lease:
    """Documents that stay where they are until the lease ends; a context manager, and safe to close twice.

    A document dropped meanwhile is found by nobody any more; its pages are freed with its last lease.
    """

    def __init__(self, documents: Sequence[DocumentKV], end: Callable[[], None]) -> None:
        self.documents = tuple(documents)
        self._end: Callable[[], None] | None = end
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """Whether the documents are still held."""
        return self._end is not None

    def close(self) -> None:
        """Let go of the documents."""
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            end()

    def __iter__(self) -> Iterator[DocumentKV]:
        return iter(self.documents)

    def __len__(self) -> int:
        return len(self.documents)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
