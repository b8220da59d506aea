"""Fresh documents beside stored ones: which tiles their rows compute, chosen by a selector of SIFT layer by layer.

Selectors know a prompt's tiles and keys in order, kernels know pages: this stands between. A layer's keys are brought
into place for the selector (one copy of the keys, not of the values), and a page is visited where a chosen tile lies
in it. Rows outside fresh documents see everything. Makes no records: where a document has none, its tiles all count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tamis.attention.reuse_layout import Layout
from tamis.attention.reuse_pass import Read, Stage
from tamis.kernels.lists import TILE
from tamis.kernels.paged import DOCUMENT, LENGTH, PAGE, POSITION, KeyTiles, paged_lists
from tamis.prompt.segments import Kind, Prompt
from tamis.select.scene import DocumentBits, Scene, Selector


class Fresh(NamedTuple):
    """A document that the request computes: its tokens [start, end), and its tiles [first, last) of the scene."""

    start: int
    end: int
    first: int
    last: int


class Cut(NamedTuple):
    """How a stage's rows are cut. starts: first row of each query tile, int64 [Nq], and of every fresh document the
    first row and the first query tile. meets: for each read bool [N, NT], scene tiles in pages; pairs: for each read
    and document float32 [its query tiles, NT], (row, key) pairs that a page holds for them."""

    starts: torch.Tensor
    documents: tuple[tuple[int, int], ...]
    meets: tuple[torch.Tensor, ...]
    pairs: tuple[tuple[torch.Tensor, ...], ...]


@dataclass
class FreshChoice:
    """Chooses for all fresh documents of one prompt. `skipped`: (row, key) pairs not computed, mean over heads, summed
    over layers since `begin`."""

    scene: Scene
    selector: Selector
    documents: tuple[Fresh, ...]
    _skipped: list[torch.Tensor] = field(default_factory=list)
    _cut: tuple[Stage, Cut] | None = None

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        layout: Layout,
        selector: Selector,
        bits: Sequence[DocumentBits | None],
        *,
        tile: int = TILE,
        device: torch.device | str = "cpu",
    ) -> FreshChoice | None:
        """None where no document is fresh. `bits`: of each document of the prompt, as far as they are stored."""
        scene = Scene.of(prompt, bits, tile, device)
        at = {start: i for i, start in enumerate(scene.tiling.starts)}
        found = tuple(
            Fresh(start, end, at[start], at[end])
            for segment, (start, end) in zip(prompt.segments, prompt.spans, strict=True)
            if segment.kind is Kind.DOCUMENT and bool(layout.fresh[start:end].all())
        )
        return cls(scene, selector, found) if found else None

    def begin(self) -> None:
        """Forget what was skipped: another pass over the prompt begins."""
        self._skipped.clear()

    @property
    def skipped(self) -> float:
        """See the class. Waits for the device."""
        return float(torch.stack(self._skipped).sum()) if self._skipped else 0.0

    def reads(self, stage: Stage, layer: int, q: torch.Tensor, scale: float) -> tuple[Read, ...]:
        """The stage's reads with lists for this layer, per query head. q [Hq, n, D]: the stage's rows, rotated; their
        keys lie in the pages. On a GPU it waits for the device."""
        if self._cut is None or self._cut[0] is not stage:
            self._cut = (stage, self._cut_of(stage))
        cut = self._cut[1]
        n_q = len(cut.starts)
        masks = [
            torch.ones((q.shape[0], n_q, r.tiles.table.shape[0]), dtype=torch.bool, device=q.device)
            for r in stage.reads
        ]
        keys = keys_in_place(stage.reads, layer, self.documents[-1].end)
        for i, (document, (row, tile)) in enumerate(zip(self.documents, cut.documents, strict=True)):
            rows = q[:, row : row + document.end - document.start]
            scene = self.scene.chunk(document.first, document.last)
            chosen = self.selector.select(layer, rows, keys[:, : document.end], scale, scene).float()
            for mask, meets, pairs in zip(masks, cut.meets, cut.pairs, strict=True):
                kept = chosen @ meets[: document.last] > 0
                mask[:, tile : tile + document.last - document.first] = kept
                self._skipped.append((~kept).float().mean(0).mul(pairs[i]).sum())
        return tuple(
            Read(r.pool, r.tiles, paged_lists(r.tiles, stage.rows, mask=mask, starts=cut.starts))
            for r, mask in zip(stage.reads, masks, strict=True)
        )

    def _cut_of(self, stage: Stage) -> Cut:
        starts: list[int] = []
        documents = []
        row, tiling, rows = 0, self.scene.tiling.starts, stage.rows
        for document in self.documents:
            first = int(torch.searchsorted(rows, document.start))
            starts += range(row, first, TILE)
            documents.append((first, len(starts)))
            starts += [first + at - document.start for at in tiling[document.first : document.last]]
            row = first + document.end - document.start
        starts += range(row, len(rows), TILE)
        ends = [*starts[1:], len(rows)]
        meets, pairs = [], []
        for r in stage.reads:
            tiles, device = r.tiles.to("cpu"), r.tiles.table.device
            meets.append(_meets(tiles, tiling).to(device))
            pairs.append(
                tuple(
                    torch.stack([_pairs(tiles, rows[starts[i] : ends[i]]) for i in range(at, at + d.last - d.first)])
                    .to(device)
                    for d, (_, at) in zip(self.documents, documents, strict=True)
                )
            )  # fmt: skip
        return Cut(torch.tensor(starts), tuple(documents), tuple(meets), tuple(pairs))


def keys_in_place(reads: Sequence[Read], layer: int, n_tokens: int) -> torch.Tensor:
    """The first n_tokens keys of a layer [Hkv, n_tokens, D] as a dense pass rotates them, gathered from the pages."""
    pool = reads[0].pool.keys[layer]
    made = pool.new_zeros((pool.shape[1], n_tokens + 1, pool.shape[3]))  # the last one takes what is not wanted
    for r in reads:
        table, page = r.tiles.table, r.tiles.page
        keys = r.pool.keys[layer].index_select(0, table[:, PAGE].long())  # [m, Hkv, page, D]
        keys = _turned(keys, r.tiles, table[:, DOCUMENT].long())
        at = table[:, POSITION, None].long() + torch.arange(page, device=table.device)
        at = torch.where(r.tiles.readable() & (at < n_tokens), at, n_tokens)
        made[:, at.flatten()] = keys.transpose(0, 1).flatten(1, 2)
    return made[:, :n_tokens]


def _turned(keys: torch.Tensor, tiles: KeyTiles, document: torch.Tensor) -> torch.Tensor:
    """keys [m, Hkv, page, D] of the tiles turned from their document's own positions to where they stand."""
    if tiles.cos is None or tiles.sin is None:
        return keys
    moved = (document >= 0)[:, None]
    cos = torch.where(moved, tiles.cos[document.clamp(min=0)], 1.0)[:, None, None]
    sin = torch.where(moved, tiles.sin[document.clamp(min=0)], 0.0)[:, None, None]
    half = cos.shape[-1]
    a, b = keys[..., :half].float(), keys[..., half : 2 * half].float()
    return torch.cat(
        [(a * cos - b * sin).to(keys.dtype), (b * cos + a * sin).to(keys.dtype), keys[..., 2 * half :]], -1
    )


def _meets(tiles: KeyTiles, tiling: Sequence[int]) -> torch.Tensor:
    """float32 [N, NT]: 1 where a scene's tile [tiling[i], tiling[i + 1]) has a position in a page."""
    borders = torch.tensor(tiling)
    first, end = tiles.table[:, POSITION], tiles.table[:, POSITION] + tiles.table[:, LENGTH]
    return ((borders[:-1, None] < end) & (borders[1:, None] > first)).float()


def _pairs(tiles: KeyTiles, rows: torch.Tensor) -> torch.Tensor:
    """float32 [NT]: (row, key) pairs with a key not after the row, of rows int64 [n] (positions) with every page."""
    counts = torch.nn.functional.pad(tiles.readable().long().cumsum(1), (1, 0))  # [NT, page + 1]
    seen = (rows - tiles.table[:, POSITION, None] + 1).clamp(0, tiles.page)  # [NT, n]
    return counts.gather(1, seen).sum(1).float()
