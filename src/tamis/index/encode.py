"""From a document's statistics to its bits, and from bits to bytes and back. Pure functions.

Bits per (layer, query head): LA, which tiles of the document's own attention matter, and CA, which of its pages other
documents should see (SIFT, arXiv 2606.09441, section 4). What is not known is kept: a wrong 1 costs time, a wrong 0
costs the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tamis.core.errors import InvalidInput
from tamis.index.spec import DocumentStats, Thresholds, n_pages, payload_bytes


@dataclass(frozen=True, eq=False)
class Bits:
    """One document's bits, True where attention is to be computed. CPU tensors, P tiles.

    la bool [L, H, P, P]  (query tile, key tile); False above the diagonal, True on it
    ca bool [L, H, P]     page
    """

    la: torch.Tensor
    ca: torch.Tensor

    def __post_init__(self) -> None:
        la, ca = tuple(self.la.shape), tuple(self.ca.shape)
        if self.la.dtype != torch.bool or self.ca.dtype != torch.bool or len(ca) != 3 or la != (*ca, ca[-1]):
            raise InvalidInput(
                f"la is {self.la.dtype} {list(la)} and ca {self.ca.dtype} {list(ca)}; "
                "expected bool [L, H, P, P] and [L, H, P]."
            )

    @property
    def n_pages(self) -> int:
        """Tiles along the document."""
        return self.ca.shape[-1]

    def equal(self, other: Bits) -> bool:
        """Whether all bits agree."""
        return torch.equal(self.la, other.la) and torch.equal(self.ca, other.ca)


def encode(stats: DocumentStats, thresholds: Thresholds) -> Bits:
    """Apply the thresholds. The diagonal, and every page that no later row could look at, come out True.

    A tile_max that is not a number sets its bit. float16 maxima are compared at their own precision (about 0.05 %).
    """
    pages = stats.tile_max.shape[-1]
    # not (max < alpha) rather than max >= alpha: a NaN is unknown, and unknown is kept
    la = ~(stats.tile_max.float() < thresholds.alpha)
    la |= torch.eye(pages, dtype=torch.bool)
    la &= torch.ones(pages, pages, dtype=torch.bool).tril()
    return Bits(la, _cross(stats, thresholds, pages))


def trivial_bits(n_layers: int, n_heads: int, n_tokens: int, tile: int) -> Bits:
    """The bits of a document of at most one tile: all of it, known without observing anything.

    Raises InvalidInput for a longer document.
    """
    pages = n_pages(n_tokens, tile)
    if pages != 1:
        raise InvalidInput(f"{n_tokens} tokens are {pages} tiles of {tile}; only one tile needs no observation.")
    return Bits(
        torch.ones(n_layers, n_heads, 1, 1, dtype=torch.bool), torch.ones(n_layers, n_heads, 1, dtype=torch.bool)
    )


def pack(bits: Bits, n_tokens: int, tile: int) -> bytes:
    """Bits to bytes, most significant bit first.

    First the LA bits of every (layer, head), each row by row over the lower triangle (0,0) (1,0) (1,1) (2,0) ...;
    then the CA bits of every (layer, head); then zeros up to a whole byte. Layers are outermost.
    Raises InvalidInput if the bits are not those of a document of `n_tokens`.
    """
    pages = n_pages(n_tokens, tile)
    if bits.n_pages != pages:
        raise InvalidInput(f"bits of {bits.n_pages} tiles for {n_tokens} tokens; in tiles of {tile} those are {pages}.")
    la = bits.la.flatten(-2)[..., _triangle(pages)]
    return np.packbits(torch.cat([la.flatten(), bits.ca.flatten()]).numpy(), bitorder="big").tobytes()


def unpack(payload: bytes, *, n_layers: int, n_heads: int, n_tokens: int, tile: int) -> Bits:
    """The inverse of `pack`. Raises InvalidInput if the size does not fit or the padding is not zero."""
    pages = n_pages(n_tokens, tile)
    wanted = payload_bytes(n_layers, n_heads, n_tokens, tile)
    if len(payload) != wanted:
        raise InvalidInput(
            f"{len(payload)} bytes of bits; {n_layers} layers, {n_heads} heads and {pages} tiles take {wanted}."
        )
    triangle = _triangle(pages)
    n_la, n_ca = n_layers * n_heads * len(triangle), n_layers * n_heads * pages
    unpacked = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="big")
    if unpacked[n_la + n_ca :].any():
        raise InvalidInput("the padding after the last bit is not zero; these are not packed bits of this shape.")
    flat = torch.from_numpy(unpacked.view(np.bool_))
    la = torch.zeros(n_layers, n_heads, pages * pages, dtype=torch.bool)
    la[..., triangle] = flat[:n_la].view(n_layers, n_heads, -1)
    ca = flat[n_la : n_la + n_ca].view(n_layers, n_heads, pages)
    return Bits(la.view(n_layers, n_heads, pages, pages), ca.clone())


def _cross(stats: DocumentStats, thresholds: Thresholds, pages: int) -> torch.Tensor:
    page_of = torch.arange(stats.n_tokens) // stats.tile
    rows = stats.later_rows.double()
    if thresholds.ca_rule == "any":
        high, share = stats.later_high > 0, thresholds.gamma
    else:
        # float64 quotients of small integers: a share that equals gamma on paper does so here
        high, share = stats.later_high / rows.clamp(min=1) > thresholds.gamma, 0.0
    counts = torch.zeros(*stats.later_high.shape[:2], pages, dtype=torch.float64)
    counts.index_add_(-1, page_of, high.double())
    known = torch.zeros(pages, dtype=torch.float64).index_add_(0, page_of, rows) > 0
    return (counts / page_of.bincount(minlength=pages) > share) | ~known


def _triangle(pages: int) -> torch.Tensor:
    """Flat positions of the lower triangle of a [pages, pages] matrix, row by row."""
    return torch.ones(pages, pages, dtype=torch.bool).tril().flatten().nonzero()[:, 0]
