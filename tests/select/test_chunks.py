"""A prompt in chunks is the prompt: views of the scene, choices of tiles, lists and attention, put together again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import HEADS, LAYOUTS, TILE, Layout, Stage

from tamis.core.errors import InvalidInput
from tamis.kernels import dispatch
from tamis.kernels.lists import lists_from_mask
from tamis.select import SELECTORS
from tamis.select.flexprefill import FlexPrefill
from tamis.select.on_device import mask_of
from tamis.select.oracle import Oracle
from tamis.select.rules import PerHead, Share, Threshold
from tamis.select.sampled import Sampled, sample_rows
from tamis.select.scene import Scene, Selector, window_of
from tamis.select.variants import GlobalThreshold, RowSampled, mean_correction, partners
from tamis.select.vertical_slash import VerticalSlash
from tamis.select.xattention import XAttention

# row of tiles by row of tiles: chunks change nothing
SAME: dict[str, Any] = {
    "all": SELECTORS.get("all")(),
    "none": SELECTORS.get("none")(),
    "stored": SELECTORS.get("stored")(),
    "sampled": Sampled(4, 0.7),
    "sampled, every row": Sampled(TILE, 1.0),
    "threshold": GlobalThreshold(0.05, 0.3, 4),
    "threshold that follows the context": GlobalThreshold(0.02, 0.3, 4, power=1.0),
    "oracle": Oracle(0.7),
    "xattention": XAttention(threshold=0.7),
    "max of rows": RowSampled(Share(0.7), rows=4, reduce="max", spread="ends"),
    "sampled local": RowSampled(Threshold(0.05, 0.5), rows=3, local="both"),
    "a share per head": RowSampled(PerHead(((0.5, 0.6, 0.7, 0.8),) * 2), rows=4),
    "all rows": RowSampled(Share(0.7), rows=0, local="sampled"),
    "question": RowSampled(Share(0.7), rows=4, question=0.6),
}
PER_CHUNK: dict[str, Any] = {
    "flexprefill": FlexPrefill(0.6, min_budget=TILE),
    "vertical_slash": VerticalSlash(budget=0.2),
}
CUTS: dict[str, Any] = {"one tile": lambda n: 1, "three tiles": lambda n: 3, "uneven": lambda n: 2 + n % 4}


def chunks(scene: Scene, cut: str) -> Iterator[Scene]:
    """The windows over a whole prompt."""
    first = 0
    while first < len(scene):
        last = min(len(scene), first + CUTS[cut](first))
        yield scene.chunk(first, last)
        first = last


def qk(stage: Stage, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and keys that a chunk comes with."""
    end = scene.tiling.n_tokens
    return stage.q[:, scene.q_offset : end], stage.k[:, :end]


def padded(masks: list[torch.Tensor], n: int) -> torch.Tensor:
    """[H, n, N] of all chunks as [H, N, N]."""
    return torch.cat([torch.nn.functional.pad(m, (0, n - m.shape[-1])) for m in masks], -2)


def in_chunks(selector: Selector, stage: Stage, cut: str, layer: int = 0) -> torch.Tensor:
    views = chunks(stage.scene, cut)
    masks = [selector.select(layer, *qk(stage, view), stage.scale, view) for view in views]
    return padded(masks, len(stage.scene))


@pytest.mark.parametrize("cut", CUTS)
class TestScene:
    @pytest.mark.parametrize("bits", ["random", "some"])
    def test_masks_are_those_of_the_prompt(self, layout: Layout, cut: str, bits: str) -> None:
        scene = Stage(layout, bits=bits).scene
        views = list(chunks(scene, cut))
        n = len(scene)
        for name in ("causal", "always", "local", "cross"):
            assert torch.equal(padded([getattr(v, name) for v in views], n), getattr(scene, name)), name
        for layer in (0, 1):
            made = padded([v.stored_local(layer, HEADS) for v in views], n)
            assert torch.equal(made, scene.stored_local(layer, HEADS))
            for v in views:
                assert torch.equal(v.stored_pages(layer, HEADS), scene.stored_pages(layer, HEADS)[:, : len(v)])
        tiles = torch.cat([v.document_tiles + v.first for v in views])
        assert torch.equal(tiles, scene.document_tiles)

    def test_places(self, layout: Layout, cut: str) -> None:
        scene = Stage(layout).scene
        starts: list[int] = []
        for v in chunks(scene, cut):
            assert v.tiling.starts == scene.tiling.starts[: len(v) + 1]
            assert v.q_offset == scene.tiling.starts[v.first]
            starts += [s + v.q_offset for s in v.queries.starts[:-1]]
            every = torch.arange(len(v.queries))
            assert torch.equal(sample_rows(v, every, 3), sample_rows(scene, every + v.first, 3))
            for seen, own in zip(v.tiles_of, scene.tiles_of, strict=True):
                assert range(len(scene))[own][: max(0, len(v) - own.start)] == range(len(scene))[seen]
        assert starts == list(scene.tiling.starts[:-1])


class TestWindow:
    def test_by_tokens_is_by_tiles(self) -> None:
        scene = Stage(LAYOUTS["history between documents"]).scene
        for (i, a), (j, b) in ((x, y) for x in enumerate(scene.tiling.starts) for y in enumerate(scene.tiling.starts)):
            if a < b:
                found = window_of(scene, b - a, b)
                assert (found.first, len(found)) == (i, j)
        assert window_of(scene, scene.tiling.n_tokens, scene.tiling.n_tokens) is scene
        assert scene.chunk(0, len(scene)) is scene

    @pytest.mark.parametrize(("rows", "keys"), [(1, 1), (16, 36), (21, 22), (46, 48), (48, 49), (0, 5), (5, 4)])
    def test_inside_a_tile(self, rows: int, keys: int) -> None:
        scene = Stage([("prefix", 5), ("document", 40), ("question", 3)]).scene
        assert scene.tiling.starts == (0, 5, 21, 37, 45, 48)
        with pytest.raises(InvalidInput, match=r"chunk of t"):
            window_of(scene, rows, keys)

    @pytest.mark.parametrize(("first", "last"), [(-1, 2), (2, 2), (3, 2), (0, 99)])
    def test_no_chunk(self, first: int, last: int) -> None:
        with pytest.raises(InvalidInput, match=r"chunk of tiles \[.*allowed are 1 or more tiles within \[0, 14\)"):
            Stage(LAYOUTS["prefix, documents, question"]).scene.chunk(first, last)


@pytest.mark.parametrize("cut", CUTS)
class TestChoices:
    @pytest.mark.parametrize("bits", ["random", "some"])
    @pytest.mark.parametrize("name", SAME)
    def test_the_same_tiles(self, name: str, cut: str, bits: str, layout: Layout) -> None:
        stage = Stage(layout, bits=bits)
        wanted = SAME[name].select(1, stage.q, stage.k, stage.scale, stage.scene)
        assert torch.equal(in_chunks(SAME[name], stage, cut, 1), wanted)

    @pytest.mark.parametrize("name", PER_CHUNK)
    def test_a_choice_per_chunk(self, name: str, cut: str, layout: Layout) -> None:
        stage = Stage(layout)
        mask = in_chunks(PER_CHUNK[name], stage, cut)
        assert bool((mask | ~stage.scene.always).all()) and bool((stage.scene.causal | ~mask).all())
        one = PER_CHUNK[name].select(0, stage.q, stage.k, stage.scale, stage.scene)
        assert torch.equal(mask[:, -1], one[:, -1]) or name == "flexprefill" or cut == "one tile"

    @pytest.mark.parametrize("name", ["sampled", "stored", "oracle", "none"])
    def test_the_same_lists_and_attention(self, name: str, cut: str, layout: Layout) -> None:
        stage = Stage(layout)
        scene, selector, v = stage.scene, SAME[name], stage.k.flip(2)
        mask = selector.select(0, stage.q, stage.k, stage.scale, scene)
        whole = lists_from_mask(mask, scene.tiling, scene.tiling)
        wanted, lse = dispatch.block_sparse_attention(stage.q, stage.k, v, whole, stage.scale, kernel="reference")
        area = causal = 0
        for view in chunks(scene, cut):
            q, k = qk(stage, view)
            lists = lists_from_mask(
                selector.select(0, q, k, stage.scale, view), view.queries, view.tiling, view.q_offset
            )
            assert isinstance(lists.area, int)
            area, causal = area + lists.area, causal + lists.causal_area
            own = slice(view.first, len(view))
            assert torch.equal(lists.count, whole.count[:, own]) and torch.equal(lists.masked, whole.masked[:, own])
            listed = torch.arange(lists.entries.shape[2]) < lists.count[..., None]
            entries = whole.entries[:, own, : lists.entries.shape[2]]
            assert torch.equal(lists.entries * listed, entries * listed)
            assert torch.equal(mask_of(lists, view), mask[:, own, : len(view)])
            rows = slice(view.q_offset, view.tiling.n_tokens)
            for kernel in ("reference", "cpu"):
                out, found = dispatch.block_sparse_attention(q, k, v[:, : rows.stop], lists, stage.scale, kernel=kernel)
                torch.testing.assert_close(out, wanted[:, rows], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(found, lse[:, rows], rtol=1e-5, atol=1e-5)
        assert (area, causal) == (whole.area, whole.causal_area)


layouts = st.lists(
    st.tuples(st.sampled_from(["document", "document", "history", "question"]), st.integers(1, 3 * TILE + 1)),
    min_size=1,
    max_size=6,
)


@given(layouts, st.sampled_from(list(SAME)), st.lists(st.integers(1, 20), max_size=3), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_any_order_and_any_borders(layout: list[tuple[str, int]], name: str, borders: list[int], seed: int) -> None:
    stage = Stage(layout, bits="some", seed=seed)
    n = len(stage.scene)
    ends = sorted({0, n, *(b for b in borders if b < n)})
    views = [stage.scene.chunk(a, b) for a, b in pairwise(ends)]
    made = padded([SAME[name].select(0, *qk(stage, v), stage.scale, v) for v in views], n)
    assert torch.equal(made, SAME[name].select(0, stage.q, stage.k, stage.scale, stage.scene))


USUAL = LAYOUTS["prefix, documents, question"]


class TestBroken:
    """An offset that is forgotten anywhere must be noticed."""

    @pytest.mark.parametrize("name", ["sampled", "threshold", "oracle", "all rows", "a share per head"])
    def test_rows_of_another_place(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        stage = Stage(USUAL)
        wanted = SAME[name].select(0, stage.q, stage.k, stage.scale, stage.scene)
        assert torch.equal(in_chunks(SAME[name], stage, "three tiles"), wanted)
        offset = Scene.q_offset.fget
        assert offset is not None
        monkeypatch.setattr(Scene, "q_offset", property(lambda scene: max(0, offset(scene) - 7)))
        views = [Scene(v.tiling, v.document, v.bits, v.first) for v in chunks(stage.scene, "three tiles")]
        try:
            masks = []
            for v in views:
                end = v.tiling.n_tokens
                masks.append(SAME[name].select(0, stage.q[:, offset(v) : end], stage.k[:, :end], stage.scale, v))
        except (IndexError, RuntimeError, InvalidInput):
            return
        assert not torch.equal(padded(masks, len(stage.scene)), wanted)

    @pytest.mark.parametrize("name", ["stored", "none", "xattention", "sampled"])
    def test_tiles_of_another_place(self, name: str) -> None:
        stage = Stage(USUAL)
        view = stage.scene.chunk(5, 8)
        q, k = qk(stage, view)
        moved = Scene(view.tiling, view.document.roll(2), view.bits, view.first)
        right, wrong = (SAME[name].select(0, q, k, stage.scale, s) for s in (view, moved))
        assert not torch.equal(right, wrong)


class TestVariants:
    def test_pairs_that_a_border_cuts_are_none(self) -> None:
        scene = Stage([("prefix", 5), ("document", 5 * TILE), ("document", 2 * TILE)]).scene
        assert partners(scene).tolist() == [0, 2, 1, 4, 3, 5, 7, 6]
        assert partners(scene.chunk(0, 2)).tolist() == [0, 1]
        assert partners(scene.chunk(2, 5)).tolist() == [0, 2, 1]
        assert partners(scene.chunk(3, 8)).tolist() == [1, 0, 2, 4, 3]

    @pytest.mark.parametrize("cut", CUTS)
    def test_mean_correction(self, cut: str) -> None:
        stage = Stage(USUAL)
        selector = RowSampled(Share(0.5), rows=4)
        mask, mass = selector.select_with_mass(0, stage.q, stage.k, stage.scale, stage.scene)
        wanted = mean_correction(stage.q, mass, mask, stage.k, stage.scene)
        assert not torch.equal(wanted, stage.q)
        for view in chunks(stage.scene, cut):
            q, k = qk(stage, view)
            mask, mass = selector.select_with_mass(0, q, k, stage.scale, view)
            found = mean_correction(q, mass, mask, k, view)
            rows = slice(view.q_offset, view.tiling.n_tokens)
            torch.testing.assert_close(found, wanted[:, rows], rtol=1e-5, atol=1e-5)
