"""Whose tiles are whose, counted out by hand over prompts in several orders."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import HEADS, LAYOUTS, TILE, Layout, Stage

from tamis.prompt.segments import Prompt
from tamis.select.scene import Scene

KINDS = ["prefix", "document", "history", "question"]
layouts = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 3 * TILE + 1)), min_size=1, max_size=6)


def assert_partition(stage: Stage) -> None:
    scene, owners = stage.scene, stage.segment_of_tiles()
    assert len(scene) == len(owners) == len(scene.tiling)
    for i, (own, kind) in enumerate(owners):
        for j, (other, other_kind) in enumerate(owners):
            always, local, cross = (bool(m[i, j]) for m in (scene.always, scene.local, scene.cross))
            if j > i:
                assert not (always or local or cross or scene.causal[i, j])
                continue
            assert scene.causal[i, j]
            documents = kind == other_kind == "document"
            assert always == (i == j or not documents)
            assert local == (documents and own == other)
            assert cross == (documents and own != other)
            assert always or local or cross


def test_always_local_and_cross_cover_the_causal_area(layout: Layout) -> None:
    stage = Stage(layout)
    assert_partition(stage)
    scene = stage.scene
    assert torch.equal(scene.always | scene.local | scene.cross, scene.causal)
    assert not (scene.always & scene.cross).any() and not (scene.local & scene.cross).any()
    # the diagonal of a document is both always and local; nothing else is
    diagonal = torch.eye(len(scene), dtype=torch.bool) & (scene.document >= 0)
    assert torch.equal(scene.always & scene.local, diagonal)


@given(layouts)
@settings(max_examples=60, deadline=None)
def test_any_order_of_segments(layout: list[tuple[str, int]]) -> None:
    assert_partition(Stage(layout))


def test_tiles_start_with_their_segment(layout: Layout) -> None:
    stage = Stage(layout)
    scene, spans = stage.scene, stage.prompt.spans
    assert {a for a, _ in spans} <= set(scene.tiling.starts)
    for ordinal, (segment, kind) in enumerate((s, k) for s, (k, _) in enumerate(layout) if k == "document"):
        assert kind == "document"
        tiles = scene.tiles_of[ordinal]
        assert (scene.tiling.starts[tiles.start], scene.tiling.starts[tiles.stop]) == spans[segment]


def test_two_neighbouring_documents_are_two(layout: Layout) -> None:
    stage = Stage(layout)
    n_documents = sum(kind == "document" for kind, _ in layout)
    assert sorted(set(stage.scene.document.tolist()) - {-1}) == list(range(n_documents))


def test_by_hand() -> None:
    scene = Stage([("prefix", 5), ("document", 20), ("document", 16), ("question", 3)]).scene
    assert scene.tiling.starts == (0, 5, 21, 25, 41, 44)
    assert scene.document.tolist() == [-1, 0, 0, 1, -1]
    assert scene.always.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    assert scene.local.nonzero().tolist() == [[1, 1], [2, 1], [2, 2], [3, 3]]
    assert scene.cross.nonzero().tolist() == [[3, 1], [3, 2]]


def test_stored_bits_are_laid_where_their_document_is(layout: Layout) -> None:
    stage = Stage(layout, bits="some")
    scene = stage.scene
    for layer in range(2):
        local, pages = scene.stored_local(layer, HEADS), scene.stored_pages(layer, HEADS)
        assert bool((scene.local | ~local).all()), "a tile outside its document"
        for ordinal, bits in enumerate(stage.bits):
            own = scene.tiles_of[ordinal]
            wanted = scene.local[own, own].expand(HEADS, -1, -1) if bits is None else bits.la[layer]
            assert torch.equal(local[:, own, own], wanted)
            offered = torch.ones_like(pages[:, own]) if bits is None else bits.ca[layer]
            assert torch.equal(pages[:, own], offered)


def test_layers_have_their_own_bits() -> None:
    scene = Stage(LAYOUTS["one document"]).scene
    assert not torch.equal(scene.stored_local(0, HEADS), scene.stored_local(1, HEADS))
    assert not torch.equal(scene.stored_pages(0, HEADS), scene.stored_pages(1, HEADS))


def test_one_bit_set_per_document() -> None:
    prompt = Prompt.of([("document", range(20)), ("question", range(3))])
    with pytest.raises(AssertionError, match="0 bit sets for 1 documents"):
        Scene.of(prompt, [], TILE)
