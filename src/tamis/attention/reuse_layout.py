"""Where each token of a prompt lies: in stored pages, read in place, or in pages of the request's own.

Knows positions and pages, not models or caches. A page of the request's own stands for the same positions as a page
of the segment would, from the segment's start on; slots that nothing was computed for are holes, and so are the
stored ones whose tokens are read from own pages. So any set of tokens can be recomputed, at one page for each page
of a document that holds one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.paged import Angles, KeyTiles, Segment


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a prompt, from absolute position `start` on.

    stored   pages of the shared pool that hold their keys and values; (): they are computed by the request
    local    position at which the first stored key was rotated, or None: stored keys are at absolute positions
    """

    start: int
    length: int
    stored: tuple[int, ...] = ()
    local: int | None = None

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + self.length


@dataclass(frozen=True)
class Layout:
    """Pieces that cover a prompt in order, the last one computed by the request. Raises InvalidInput otherwise."""

    pieces: tuple[Piece, ...]
    page: int

    def __post_init__(self) -> None:
        at = 0
        for piece in self.pieces:
            if piece.start != at or piece.length < 1:
                raise InvalidInput(f"a piece of {piece.length} tokens at {piece.start}; the next one starts at {at}.")
            at = piece.end
        if not self.pieces or self.pieces[-1].stored:
            raise InvalidInput("the prompt's last token is stored; it must be computed, generation goes on from it.")

    @classmethod
    def of(cls, pieces: Iterable[Piece], page: int) -> Layout:
        """With neighbours that are both computed made one, so that they share pages."""
        merged: list[Piece] = []
        for piece in pieces:
            if merged and not piece.stored and not merged[-1].stored:
                piece = Piece(merged[-1].start, merged.pop().length + piece.length)
            merged.append(piece)
        return cls(tuple(merged), page)

    @property
    def n_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.pieces[-1].end

    @property
    def reused(self) -> tuple[Piece, ...]:
        """The pieces that are stored."""
        return tuple(piece for piece in self.pieces if piece.stored)

    @cached_property
    def fresh(self) -> torch.Tensor:
        """bool [n_tokens]: tokens that only the request can compute."""
        made = torch.ones(self.n_tokens, dtype=torch.bool)
        for piece in self.reused:
            made[piece.start : piece.end] = False
        return made

    def spans(self, own: torch.Tensor) -> tuple[tuple[int, int], ...]:
        """(first position, positions) of every page of a segment that holds a token of `own` bool [n_tokens]."""
        made = []
        for piece in self.pieces:
            for at in range(piece.start, piece.end, self.page):
                end = min(piece.end, at + self.page)
                if bool(own[at:end].any()):
                    made.append((at, end - at))
        return tuple(made)

    def stored_segments(self, own: torch.Tensor) -> list[Segment]:
        """The stored keys to be read, where the tokens of `own` are read elsewhere."""
        made: list[Segment] = []
        for piece in self.reused:
            holes = own[piece.start : piece.end]
            if not bool(holes.any()):
                made.append(Segment(piece.stored, piece.length, piece.start, piece.local))
                continue
            for i, (number, gone) in enumerate(zip(piece.stored, torch.split(holes, self.page), strict=True)):
                at = i * self.page
                local = None if piece.local is None else piece.local + at
                if not bool(gone.all()):
                    made.append(Segment((number,), len(gone), piece.start + at, local, gone if gone.any() else None))
        return made


@dataclass
class OwnPages:
    """The pages of a request's own tokens: one for each span of positions, and spare ones for tokens to come."""

    page: int
    spans: list[tuple[int, int]]
    pages: list[int]
    spare: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], pages: Sequence[int], page: int) -> OwnPages:
        """`pages` has one for each span, in order; the rest is spare."""
        return cls(page, list(spans), list(pages[: len(spans)]), list(pages[len(spans) :]))

    def slots(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(page, slot in it) int64 of each of `positions`, ascending and all inside spans."""
        starts = torch.tensor([start for start, _ in self.spans])
        at = torch.searchsorted(starts, positions, right=True) - 1
        return torch.tensor(self.pages)[at], positions - starts[at]

    def segments(self, own: torch.Tensor) -> list[Segment]:
        """The own keys to be read: those of `own` bool [positions]; later positions are all there."""
        made = []
        for (start, length), number in zip(self.spans, self.pages, strict=True):
            holes = torch.zeros(length, dtype=torch.bool)
            known = ~own[start : start + length]
            holes[: len(known)] = known
            if not bool(holes.all()):
                made.append(Segment((number,), length, start, None, holes if holes.any() else None))
        return made

    def cover(self, spans: Sequence[tuple[int, int]]) -> None:
        """Give those of `spans` a page that have none, out of the spare ones; all stay in order of position."""
        known = {start for start, _ in self.spans}
        for start, length in spans:
            if start not in known:
                self.spans.append((start, length))
                self.pages.append(self.spare.pop())
        order = sorted(range(len(self.spans)), key=lambda i: self.spans[i][0])
        self.spans[:], self.pages[:] = [self.spans[i] for i in order], [self.pages[i] for i in order]

    @property
    def full(self) -> bool:
        """Whether the next token needs another page."""
        return self.spans[-1][1] == self.page and not self.spare

    def grow(self) -> bool:
        """One token more behind the last; whether it is the first of a page. There must be room (`full` is False)."""
        start, length = self.spans[-1]
        if length < self.page:
            self.spans[-1] = (start, length + 1)
            return False
        self.spans.append((start + length, 1))
        self.pages.append(self.spare.pop(0))
        return True


def tiles_of(segments: Sequence[Segment], angles: Angles, page: int) -> KeyTiles | None:
    """Key tiles on the CPU; None where there is nothing to read."""
    return KeyTiles.of(segments, angles, page=page) if segments else None
