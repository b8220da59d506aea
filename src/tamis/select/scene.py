"""What a selector may look at: where the tiles lie, whose they are, and the stored bits of the documents.

Knows no model and no kernel. Tiles are numbered in prompt order; masks are bool [query heads, query tile, key tile].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

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
    """The tiles of one prompt. `document[i]` is the ordinal of tile i's document, or -1 outside documents.

    `bits` has one entry per document, None where a document has no record. All masks are made on `document`'s device.
    """

    tiling: Tiling
    document: torch.Tensor
    bits: tuple[DocumentBits | None, ...]

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

    def __len__(self) -> int:
        return len(self.document)

    @cached_property
    def causal(self) -> torch.Tensor:
        """bool [N, N]: key tile not after the query tile."""
        return torch.ones(len(self), len(self), dtype=torch.bool, device=self.document.device).tril()

    @cached_property
    def always(self) -> torch.Tensor:
        """bool [N, N]: tiles that every selector computes.

        The diagonal; all that rows outside documents (prefix, history, question) see; and what lies outside documents,
        for every row: SIFT treats it as a document whose bits are all set.
        """
        outside = self.document < 0
        diagonal = torch.eye(len(self), dtype=torch.bool, device=self.document.device)
        return self.causal & (diagonal | outside[:, None] | outside[None, :])

    @cached_property
    def local(self) -> torch.Tensor:
        """bool [N, N]: query and key tile belong to the same document."""
        same = self.document[:, None] == self.document[None, :]
        return self.causal & same & (self.document >= 0)[:, None]

    @cached_property
    def cross(self) -> torch.Tensor:
        """bool [N, N]: a document's rows on an earlier document's keys."""
        return self.causal & ~self.always & ~self.local

    @cached_property
    def document_tiles(self) -> torch.Tensor:
        """int64: the numbers of the tiles that lie in documents, increasing."""
        return (self.document >= 0).nonzero()[:, 0]

    @cached_property
    def tiles_of(self) -> list[slice]:
        """The tile numbers of each document."""
        document = self.document.tolist()
        return [slice(document.index(i), document.index(i) + document.count(i)) for i in range(len(self.bits))]

    def stored_local(self, layer: int, heads: int) -> torch.Tensor:
        """bool [heads, N, N]: local tiles that the stored LA bits keep; all of them where there is no record."""
        mask = self.local.expand(heads, -1, -1).clone()
        for ordinal, bits in enumerate(self.bits):
            if bits is not None:
                own = self.tiles_of[ordinal]
                mask[:, own, own] &= bits.la[layer].to(mask.device)
        return mask

    def stored_pages(self, layer: int, heads: int) -> torch.Tensor:
        """bool [heads, N]: pages that the stored CA bits offer to other documents; all where there is no record."""
        pages = torch.ones(heads, len(self), dtype=torch.bool, device=self.document.device)
        for ordinal, bits in enumerate(self.bits):
            if bits is not None:
                pages[:, self.tiles_of[ordinal]] = bits.ca[layer].to(pages.device)
        return pages


class Selector(Protocol):
    """Decides which tiles a layer's prefill computes."""

    needs_records: bool  # works from the documents' stored bits, so missing ones are made first

    def select(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
        """bool [Hq, N, N] for rotated q [Hq, T, D] and k [Hkv, T, D]; a superset of `scene.always`."""


def keep_mass(mass: torch.Tensor, forced: torch.Tensor, offered: torch.Tensor, share: float) -> torch.Tensor:
    """The fewest tiles whose attention mass, with the forced ones, reaches `share` of each row of tiles' total.

    mass [..., N, N] float32 (a row sums to about 1); forced and offered bool, broadcastable to it. Tiles outside both
    are never taken. Returns bool [..., N, N].
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
