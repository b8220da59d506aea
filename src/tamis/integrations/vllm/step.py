"""What the scheduler tells the workers of one engine step: rows of Tamis's requests, documents to load and to save.

Plain values that are pickled every step; knows block numbers and token indices, not tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from tamis.integrations.vllm.request import Asked


@dataclass(frozen=True)
class Row:
    """Tokens [computed, computed + scheduled) of a request, and all blocks that it has, from its first token on."""

    request: str
    asked: Asked
    computed: int
    scheduled: int
    blocks: tuple[int, ...]

    @property
    def end(self) -> int:
        """The token behind the last one of this step."""
        return self.computed + self.scheduled


@dataclass(frozen=True)
class Move:
    """Tokens [first, first + count) of a document of `n_tokens`, in slots of blocks from token index `index` of a
    request on; to be loaded, or (whole) to be saved."""

    key: str
    namespace: str
    n_tokens: int
    first: int
    count: int
    index: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One engine step. `finished`: requests that are done, or were preempted and begin anew."""

    rows: tuple[Row, ...] = ()
    loads: tuple[Move, ...] = ()
    saves: tuple[Move, ...] = ()
    finished: tuple[str, ...] = ()


ALIKE = ("sift_tokens", "sift_unrecorded")  # what every worker of a model counts in full, and the first alone tells


@dataclass
class Counters:
    """Sums since the last report, by the names of the metrics."""

    reused_tokens: int = 0
    sift_tokens: int = 0
    sift_unrecorded: int = 0
    documents_loaded: int = 0
    documents_unread: int = 0
    documents_saved: int = 0
    sift_tiles: float = 0.0
    sift_tiles_computed: float = 0.0

    def taken(self) -> dict[str, float]:
        """What is not zero, and start again."""
        found = {name: value for name, value in vars(self).items() if value}
        for name, value in found.items():
            setattr(self, name, type(value)(0))
        return found
