"""What a selector may look at: where the tiles lie, whose they are, and the stored bits of the documents.

Knows no model and no kernel. Masks are bool [query heads, n query tiles, N key tiles]. A prompt that is prefilled in
chunks is seen through a window: query tiles are those of the chunk, key tiles all up to the chunk's end. Key tiles are
numbered in prompt order, query tiles from the window's first one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.lists import TILE, Tiling
from tamis.prompt.segments import Kind, Prompt


class DocumentBits(Protocol):
    """Stored SIFT bits of one document of P tiles: la bool [layers, heads, P, P], ca bool [layers, heads, P]."""

    @property
    def la(self) -> torch.Tensor:
        """Which tiles of the document's own attention matter."""

    @property
    def ca(self) -> torch.Tensor:
        """Which of its pages later documents look at."""


@dataclass(frozen=True)
class Scene:
    """The tiles of one prompt, or of one chunk of it and what the chunk sees.

    tiling    the N key tiles, from the prompt's first token on
    document  int64 [N]: the ordinal of key tile i's document, or -1 outside documents; all masks are made on its device
    bits      one entry per document of the prompt, None where a document has no record
    first     the key tile that is the first query tile: 0, or the tiles before a chunk. The last one ends both
    """

    tiling: Tiling
    document: torch.Tensor
    bits: tuple[DocumentBits | None, ...]
    first: int = 0

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        bits: Sequence[DocumentBits | None],
        tile: int = TILE,
        device: torch.device | str = "cpu",
    ) -> Scene:
        """Cut `prompt` into tiles from the start of each segment; selectors then work on `device`."""
        document, ordinal = [], 0
        for segment in prompt.segments:
            is_document = segment.kind is Kind.DOCUMENT
            document += [ordinal if is_document else -1] * -(-len(segment.tokens) // tile)
            ordinal += is_document
        assert len(bits) == ordinal, f"{len(bits)} bit sets for {ordinal} documents"
        return cls(Tiling.of_segments(prompt.lengths, tile), torch.tensor(document, device=device), tuple(bits))

    def chunk(self, first: int, last: int) -> Scene:
        """The view of the query tiles [first, last), both counted as key tiles of this scene. Copies nothing.

        Raises InvalidInput for a range that is empty or not inside the scene.
        """
        if not 0 <= first < last <= len(self):
            raise InvalidInput(
                f"chunk of tiles [{first}, {last}); allowed are 1 or more tiles within [0, {len(self)})."
            )
        if (first, last) == (self.first, len(self)):
            return self
        tiling = Tiling(self.tiling.starts[: last + 1], self.tiling.tile)
        return Scene(tiling, self.document[:last], self.bits, first)

    def __len__(self) -> int:
        """Key tiles; `len(scene.queries)` are the query tiles."""
        return len(self.document)

    @property
    def q_offset(self) -> int:
        """Tokens before the first query row: row r of q is at position r + q_offset."""
        return self.tiling.starts[self.first]

    @cached_property
    def queries(self) -> Tiling:
        """The query tiles, as rows of q; `tiling` itself where nothing lies before them."""
        if not self.first:
            return self.tiling
        return Tiling(tuple(start - self.q_offset for start in self.tiling.starts[self.first :]), self.tiling.tile)

    @cached_property
    def causal(self) -> torch.Tensor:
        """bool [n, N]: key tile not after the query tile."""
        shape = len(self.queries), len(self)
        return torch.ones(shape, dtype=torch.bool, device=self.document.device).tril(self.first)

    @cached_property
    def always(self) -> torch.Tensor:
        """bool [n, N]: tiles that every selector computes.

        The diagonal; all that rows outside documents (prefix, history, question) see; and what lies outside documents,
        for every row: SIFT treats it as a document whose bits are all set.
        """
        outside = self.document < 0
        diagonal = self.causal.triu(self.first)
        return self.causal & (diagonal | outside[self.first :, None] | outside[None, :])

    @cached_property
    def local(self) -> torch.Tensor:
        """bool [n, N]: query and key tile belong to the same document."""
        own = self.document[self.first :, None]
        return self.causal & (own == self.document[None, :]) & (own >= 0)

    @cached_property
    def cross(self) -> torch.Tensor:
        """bool [n, N]: a document's rows on an earlier document's keys."""
        return self.causal & ~self.always & ~self.local

    @cached_property
    def document_tiles(self) -> torch.Tensor:
        """int64: the numbers of the query tiles that lie in documents, increasing; 0 is the window's first one."""
        return (self.document[self.first :] >= 0).nonzero()[:, 0]

    @cached_property
    def tiles_of(self) -> list[slice]:
        """The key tiles of each document, as far as they are seen: none of a document after the window."""
        document = self.document.tolist()
        first = [document.index(i) if i in document else len(document) for i in range(len(self.bits))]
        return [slice(at, at + document.count(i)) for i, at in enumerate(first)]

    def stored_local(self, layer: int, heads: int) -> torch.Tensor:
        """bool [heads, n, N]: local tiles that the stored LA bits keep; all of them where there is no record."""
        mask = self.local.expand(heads, -1, -1).clone()
        for own, bits in zip(self.tiles_of, self.bits, strict=True):
            if bits is not None and own.stop > max(own.start, self.first):
                begin = max(own.start, self.first)
                la = bits.la[layer][:, begin - own.start : own.stop - own.start, : own.stop - own.start]
                mask[:, begin - self.first : own.stop - self.first, own] &= la.to(mask.device)
        return mask

    def stored_pages(self, layer: int, heads: int) -> torch.Tensor:
        """bool [heads, N]: pages that the stored CA bits offer to other documents; all where there is no record."""
        pages = torch.ones(heads, len(self), dtype=torch.bool, device=self.document.device)
        for own, bits in zip(self.tiles_of, self.bits, strict=True):
            if bits is not None:
                pages[:, own] = bits.ca[layer][:, : own.stop - own.start].to(pages.device)
        return pages


def window_of(scene: Scene, n_rows: int, n_keys: int) -> Scene:
    """The view of a chunk of `n_rows` query rows, the last of `n_keys` tokens so far.

    Raises InvalidInput where the chunk does not begin and end on borders of the scene's tiles.
    """
    starts, ends = scene.tiling.starts, (n_keys - n_rows, n_keys)
    first, last = (bisect_left(starts, token) for token in ends)
    if any(starts[min(i, len(scene))] != token for i, token in zip((first, last), ends, strict=True)):
        raise InvalidInput(
            f"a chunk of tokens [{ends[0]}, {ends[1]}) of a prompt of {scene.tiling.n_tokens}; chunks must begin and "
            "end on borders of its tiles, see `Scene.tiling.starts`."
        )
    return scene.chunk(first, last)


class Selector(Protocol):
    """Decides which tiles a layer's prefill computes."""

    needs_records: bool  # works from the documents' stored bits, so missing ones are made first

    def select(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
        """bool [Hq, n, N], a superset of `scene.always`, for rotated q [Hq, C, D] and k [Hkv, T, D].

        q holds the rows of the scene's n query tiles, k the keys of its N key tiles: all T = q_offset + C so far.
        """


def keep_mass(mass: torch.Tensor, forced: torch.Tensor, offered: torch.Tensor, share: float) -> torch.Tensor:
    """The fewest tiles whose attention mass, with the forced ones, reaches `share` of each row of tiles' total.

    mass [..., n, N] float32 (a row sums to about 1); forced and offered bool, broadcastable to it. Tiles outside both
    are never taken. Returns bool [..., n, N].
    """
    if share >= 1:
        return forced | (offered & (mass > 0))  # sums would lose the smallest tiles to rounding
    total = mass.sum(-1, keepdim=True)
    free = torch.where(offered & ~forced, mass, torch.zeros_like(mass))
    missing = share * total - (mass * forced).sum(-1, keepdim=True)
    value, order = free.sort(-1, descending=True)
    before = value.cumsum(-1) - value  # mass of the larger ones: a tile is needed if they do not suffice
    taken = (before < missing) & (value > 0)
    return torch.zeros_like(taken).scatter_(-1, order, taken) | forced
