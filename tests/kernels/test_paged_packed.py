"""Requests over one pool in one call, against a call for each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted_paged import packed
from paged_cases import Scene, make, within
from paged_shapes import PACKED

from tamis.core.errors import InvalidInput
from tamis.kernels.paged import KeyTiles, PagedLists
from tamis.kernels.paged_dispatch import paged_attention
from tamis.kernels.paged_packed import concat_paged

SHAPES = {
    "plain": PACKED,
    "holes": replace(PACKED, holes=True),
    "partial rotary": replace(PACKED, rotary=32),
    "ALiBi": replace(PACKED, alibi=True),
}


def requests(scene: Scene) -> list[tuple[KeyTiles, PagedLists]]:
    """Tiles and lists of each request."""
    return [(tiles, scene.lists(i)) for i, tiles in enumerate(scene.tiles)]


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
class TestOneCall:
    """What all requests get in one call."""

    @pytest.mark.parametrize("name", SHAPES)
    def test_agrees_with_dense_attention(self, kernel, name):
        found = packed(make(SHAPES[name]), kernel)
        assert within(found, torch.float32), found

    def test_lists_of_each_head(self, kernel):
        scene, draw = make(PACKED), torch.Generator().manual_seed(0)
        parts = []
        for i, tiles in enumerate(scene.tiles):
            n_q = scene.lists(i).q_start.numel()
            parts.append((tiles, scene.lists(i, torch.rand((4, n_q, len(tiles.table)), generator=draw) < 0.6)))
        scale, pools = PACKED.scale, (scene.keys, scene.values)
        made = paged_attention(torch.cat(scene.q, 1), *pools, *concat_paged(parts), scale=scale, kernel=kernel)
        alone = [
            paged_attention(q, *pools, *p, scale=scale, kernel=kernel) for q, p in zip(scene.q, parts, strict=True)
        ]
        for one, each in zip(made, zip(*alone, strict=True), strict=True):
            assert torch.allclose(one, torch.cat(each, 1), atol=1e-6)

    def test_a_wrong_join_would_be_noticed(self, kernel):
        scene = make(PACKED)
        if kernel == "cpu":  # the reference reads documents from the table, the others from the runs
            assert packed(scene, kernel, moved=False)["row"] > 0.1
        own = concat_paged(requests(scene))[1]
        entries = torch.cat([torch.nn.functional.pad(p.entries, (0, own.entries.shape[2] - p.entries.shape[2]))
                             for _, p in requests(scene)], 1)  # fmt: skip
        tiles, lists = concat_paged(requests(scene))
        pools = torch.cat(scene.q, 1), scene.keys, scene.values
        right, wrong = (
            paged_attention(*pools, tiles, x, scale=PACKED.scale, kernel=kernel)[0]
            for x in (lists, replace(lists, entries=entries))
        )
        assert not torch.allclose(right, wrong, atol=1e-3)


def test_one_request_stays_as_it_is():
    scene = make(replace(PACKED, holes=True))
    tiles, lists = requests(scene)[0]
    made_tiles, made_lists = concat_paged([(tiles, lists)])
    for made, own, names in (
        (made_tiles, tiles, ("table", "cos", "sin", "holes")),
        (made_lists, lists, ("q_start", "q_len", "q_position", "entries", "count", "masked", "runs", "run_count")),
    ):
        for name in names:
            assert torch.equal(getattr(made, name), getattr(own, name)), name
    assert (made_tiles.page, made_lists.rows) == (tiles.page, lists.rows)


def test_what_cannot_share_a_call():
    first, second = requests(make(PACKED))[:2]
    heads = torch.ones((4, 1, 1), dtype=torch.bool)
    slopes = torch.ones(4)
    for other, words in (
        ((replace(second[0], page=16), second[1]), r"page sizes \[16, 32\]"),
        ((second[0], replace(second[1], rows=32)), r"rows of a query tile \[16, 32\]"),
        ((second[0], make(PACKED).lists(1, heads)), r"list heads \[1, 4\]"),
        ((replace(second[0], slopes=slopes), second[1]), "different ALiBi slopes"),
        ((replace(second[0], cos=torch.ones((1, 4)), sin=torch.ones((1, 4))), second[1]), r"rotary dims \[8, 64\]"),
    ):
        with pytest.raises(InvalidInput, match=words):
            concat_paged([first, other])
    with pytest.raises(InvalidInput, match="different ALiBi slopes"):
        concat_paged([(replace(t, slopes=slopes * i), p) for i, (t, p) in enumerate((first, second))])
    with pytest.raises(InvalidInput, match="no requests"):
        concat_paged([])
