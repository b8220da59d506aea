"""Small prompts in every order worth a look, with random bits, queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tamis.index.encode import Bits
from tamis.prompt.segments import Prompt
from tamis.select.scene import DocumentBits, Scene

TILE = 16
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32
Layout = Sequence[tuple[str, int]]


class Stage:
    """A prompt of segments of given lengths, with random bits for its documents and random keys."""

    def __init__(self, layout: Layout, *, seed: int = 0, bits: str = "random") -> None:
        self.layout = tuple(layout)
        self.prompt = Prompt.of([(kind, range(n)) for kind, n in layout])
        draw = torch.Generator().manual_seed(seed)
        n = len(self.prompt.tokens)
        self.q = 3 * torch.randn(HEADS, n, HEAD_DIM, generator=draw)
        self.k = torch.randn(KV_HEADS, n, HEAD_DIM, generator=draw)
        self.scale = HEAD_DIM**-0.5
        self.bits: list[DocumentBits | None] = []
        for i, document in enumerate(self.prompt.documents):
            missing = bits == "none" or (bits == "some" and i % 2 == 0)
            self.bits.append(None if missing else random_bits(len(document.tokens), draw))
        self.scene = Scene.of(self.prompt, self.bits, TILE)

    def segment_of_tiles(self) -> list[tuple[int, str]]:
        """(segment, its kind) of every tile, counted out by hand."""
        return [(s, kind) for s, (kind, n) in enumerate(self.layout) for _ in range(0, n, TILE)]


def random_bits(n_tokens: int, draw: torch.Generator) -> Bits:
    pages = -(-n_tokens // TILE)
    la = torch.rand(LAYERS, HEADS, pages, pages, generator=draw) < 0.4
    la = (la | torch.eye(pages, dtype=torch.bool)).tril()
    return Bits(la, torch.rand(LAYERS, HEADS, pages, generator=draw) < 0.4)


LAYOUTS: dict[str, Layout] = {
    "prefix, documents, question": [
        ("prefix", 5), ("document", 60), ("document", 33), ("document", 49), ("question", 20),
    ],
    "documents of one token and one tile": [
        ("prefix", 17), ("document", 1), ("document", TILE), ("document", 40), ("document", 1), ("question", 3),
    ],
    "history between documents": [
        ("prefix", 3), ("document", 50), ("history", 21), ("document", 35), ("history", 2), ("document", 20),
        ("question", 9),
    ],
    "question first": [("question", 18), ("document", 40), ("document", 40)],
    "documents alone": [("document", 70), ("document", 45)],
    "one document": [("prefix", 4), ("document", 90), ("question", 30)],
    "no document": [("prefix", 40), ("question", 30)],
}  # fmt: skip
