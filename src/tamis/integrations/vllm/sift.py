"""SIFT rows of one request: the tiles its selector chooses, layer by layer, over keys that vLLM's cache holds.

The scheduler cuts chunks on borders of tiles, so chunks change nothing. What can still cut a tile, a cache hit in the
middle of one, makes the rest of that tile dense, which leaves nothing out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tamis.attention.policy import Policy
from tamis.attention.prefill import SparsePrefill
from tamis.integrations.vllm.request import Asked
from tamis.kernels import dispatch
from tamis.kernels.lists import Tiling, lists_from_mask
from tamis.prompt.segments import Kind, Prompt, Segment
from tamis.select.scene import DocumentBits, Scene


class Part(NamedTuple):
    """Tokens [start, end) of a chunk: whole tiles, or rows that see everything."""

    start: int
    end: int
    dense: bool


@dataclass(frozen=True)
class SiftReport:
    """What was done for one prompt. `density` is the share of the causal area that was computed, all layers and heads
    together; `cached` tokens were not computed at all and count as dense."""

    request: str
    n_tokens: int
    cached: int
    density: float
    kernel: str
    area: int
    causal_area: int
    tile: int


class SiftJob:
    """One prompt under way. `first`: tokens that were cached when it began; `bits`: stored ones of its documents."""

    def __init__(
        self,
        request: str,
        asked: Asked,
        policy: Policy,
        device: torch.device,
        *,
        first: int,
        bits: Sequence[DocumentBits | None] = (),
    ) -> None:
        self.request, self.first, self.heads = request, first, 0
        # the scene knows lengths and kinds; the tokens themselves are not needed here
        prompt = Prompt(tuple(Segment(Kind(s.kind), (0,) * (s.end - s.start)) for s in asked.spans))
        scene = Scene.of(prompt, bits or [None] * len(prompt.documents), policy.tile, device)
        self.job = SparsePrefill(scene, policy.make_selector(), policy.kernel)
        self.tiling = scene.tiling

    def parts(self, start: int, end: int) -> list[Part]:
        """How the chunk [start, end) is computed."""
        return parts_of(self.tiling, start, end)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, start: int
    ) -> torch.Tensor:
        """q [Hq, C, D] of the tokens from `start` on, k and v [Hkv, T, D] of all up to their end → [Hq, C, D]."""
        found, self.heads = [], q.shape[0]
        for part in self.parts(start, start + q.shape[1]):
            rows = q[:, part.start - start : part.end - start]
            keys, values = k[:, : part.end], v[:, : part.end]
            if part.dense:
                found.append(dense_rows(rows, keys, values, scale, self.tiling))
            else:
                found.append(self.job.attend(layer, rows, keys, values, scale)[0])
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def area(self) -> torch.Tensor | None:
        """What was computed so far, on its way to the CPU: int64 [1]. None where no tile was chosen."""
        areas = [trace.area for trace in self.job.layers.values()]
        if not areas:
            return None
        sums = [a.sum(dtype=torch.int64) if isinstance(a, torch.Tensor) else torch.tensor(a) for a in areas]
        return torch.stack(sums).sum().reshape(1).to("cpu", non_blocking=True)

    def report(self, area: int) -> SiftReport:
        """Of what was computed; `area` is the number that `area()` gave, once it is there."""
        traces = self.job.layers.values()
        causal, n = sum(t.causal_area for t in traces), self.tiling.n_tokens
        whole = n * (n + 1) // 2 * self.heads * len(traces)  # rows that did not run here are dense
        return SiftReport(
            self.request,
            n,
            self.first,
            (area + whole - causal) / whole,
            self.job.used_kernel,
            area,
            causal,
            self.tiling.tile,
        )


def parts_of(tiling: Tiling, start: int, end: int) -> list[Part]:
    """[start, end) as whole tiles where it has some; tokens past the tiling's end are dense."""
    starts, last = tiling.starts, min(end, tiling.n_tokens)
    begin = starts[min(bisect_left(starts, start), len(starts) - 1)]
    stop = starts[bisect_right(starts, last) - 1]
    if begin >= stop:
        return [Part(start, end, True)]
    made = [Part(start, begin, True), Part(begin, stop, False), Part(stop, end, True)]
    return [part for part in made if part.start < part.end]


def dense_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, tiling: Tiling) -> torch.Tensor:
    """The last C of T tokens see all before them: q [Hq, C, D], k and v [Hkv, T, D] → [Hq, C, D]."""
    rows, n = q.shape[1], k.shape[1]
    queries = Tiling.of_segments([rows], tiling.tile)
    # keys are cut where rows are; what was generated lies behind the prompt's tiles
    before, first = tiling.starts[: bisect_left(tiling.starts, n - rows)], n - rows
    if first > tiling.n_tokens:
        before = (*before, *range(tiling.n_tokens, first, tiling.tile))
    keys = Tiling((*before, *(first + start for start in queries.starts)), tiling.tile)
    mask = torch.ones(q.shape[0], len(queries), len(keys), dtype=torch.bool, device=q.device)
    lists = lists_from_mask(mask, queries, keys, n - rows)
    return dispatch.block_sparse_attention(q, k, v, lists, scale, need_lse=False)[0]


def borders_of(asked: Asked, policy: Policy) -> tuple[int, ...]:
    """The tokens at which chunks may begin and end: borders of tiles, of pairs of them where tiles are paired."""
    tiling = Tiling.of_segments([s.end - s.start for s in asked.spans], policy.tile)
    if not policy.paired:
        return tiling.starts
    inner = set()
    for span in asked.spans:
        if span.kind == Kind.DOCUMENT:
            odd = range(span.start + policy.tile, span.end, 2 * policy.tile)
            inner |= set(odd)
    return tuple(start for start in tiling.starts if start not in inner)


def chunk_end(borders: tuple[int, ...], start: int, end: int) -> int:
    """The last border in (start, end], or `start` if there is none; `end` itself behind the last border."""
    if end >= borders[-1] or start >= borders[-1]:
        return end
    found = borders[bisect_right(borders, end) - 1]
    return max(start, found)
