"""A prompt as a row of segments; knows token ids, not text, models or tiles. Spans are half-open token ranges."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from tamis.core.errors import InvalidInput

ID_BYTES = 16


class Kind(StrEnum):
    """What a segment is; only documents have an index, and only their rows may skip tiles."""

    PREFIX = "prefix"
    DOCUMENT = "document"
    HISTORY = "history"
    QUESTION = "question"


def document_id(token_ids: Sequence[int] | np.ndarray[Any, Any]) -> bytes:
    """16 bytes that name a token sequence: blake2b over the ids as little-endian int32.

    Takes anything one-dimensional of whole numbers in 0..2**31-1. Raises InvalidInput otherwise, or if it is empty.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise InvalidInput(
            f"token ids are {ids.dtype} {list(ids.shape)}; expected one row of whole numbers, not empty."
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= 1 << 31:
        raise InvalidInput(f"token ids run from {low} to {high}; allowed are 0 to {(1 << 31) - 1}.")
    return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=ID_BYTES).digest()


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one kind."""

    kind: Kind
    tokens: tuple[int, ...]

    @cached_property
    def id(self) -> bytes:
        """The content address of the tokens."""
        return document_id(self.tokens)


@dataclass(frozen=True)
class Prompt:
    """Segments in order. The last one must hold tokens: generation goes on from it."""

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, parts: Iterable[tuple[Kind | str, Sequence[int]]]) -> Prompt:
        """Build from (kind, token ids) pairs; empty parts are dropped."""
        segments = tuple(Segment(Kind(kind), tuple(int(t) for t in ids)) for kind, ids in parts if len(ids))
        if not segments:
            raise InvalidInput("the prompt holds no tokens; give a question or at least one document.")
        return cls(segments)

    @cached_property
    def tokens(self) -> list[int]:
        """All token ids in order."""
        return [t for s in self.segments for t in s.tokens]

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The half-open token range of each segment."""
        spans, at = [], 0
        for s in self.segments:
            spans.append((at, at + len(s.tokens)))
            at += len(s.tokens)
        return spans

    @property
    def lengths(self) -> list[int]:
        """Tokens of each segment."""
        return [len(s.tokens) for s in self.segments]

    @property
    def documents(self) -> list[Segment]:
        """The document segments in order."""
        return [s for s in self.segments if s.kind is Kind.DOCUMENT]


def find_documents(tokens: Sequence[int], documents: Sequence[Sequence[int]]) -> Prompt:
    """Cut a finished token row where the given documents occur in it, each searched after the one before.

    What lies before the first document becomes the prefix, what lies after the last the question, and what lies
    between two documents history; documents that do not occur are left out.
    """
    haystack = array("i", tokens).tobytes()
    parts: list[tuple[Kind, Sequence[int]]] = []
    at = 0
    for found, ids in _occurrences(haystack, documents):
        if found < at:
            continue
        parts.append((Kind.HISTORY if parts else Kind.PREFIX, tokens[at:found]))
        parts.append((Kind.DOCUMENT, ids))
        at = found + len(ids)
    parts.append((Kind.QUESTION, tokens[at:]))
    return Prompt.of(parts)


def _occurrences(haystack: bytes, documents: Sequence[Sequence[int]]) -> list[tuple[int, Sequence[int]]]:
    """(token position, document) of every document's first occurrence that no earlier one covers, in prompt order."""
    found: list[tuple[int, Sequence[int]]] = []
    taken: list[tuple[int, int]] = []
    for ids in sorted(documents, key=len, reverse=True):  # the longest first: a short one may lie inside it
        needle = array("i", ids).tobytes()
        at = haystack.find(needle) if ids else -1
        while at >= 0 and (at % 4 or any(a < at // 4 + len(ids) and at // 4 < b for a, b in taken)):
            at = haystack.find(needle, at + 1)
        if at >= 0:
            taken.append((at // 4, at // 4 + len(ids)))
            found.append((at // 4, ids))
    return sorted(found, key=lambda pair: pair[0])
