"""Peers' selectors against loops over their published rules, on prompts of short tiles in several orders."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from stage import HEADS, KV_HEADS, LAYOUTS, TILE, Layout, Stage

from tamis.core.errors import InvalidInput
from tamis.select.flexprefill import FlexPrefill, pooled_attention
from tamis.select.rowmass import STRIP_SCORES
from tamis.select.scene import Scene
from tamis.select.vertical_slash import VerticalSlash, diagonals, last_rows, on_bands, per_band, per_tile, top
from tamis.select.xattention import XAttention, antidiagonal_mass

GROUP = HEADS // KV_HEADS
ALIGNED: Layout = [("prefix", TILE), *[("document", 4 * TILE)] * 3, ("question", TILE)]


def select(selector: Any, stage: Stage) -> torch.Tensor:
    found: torch.Tensor = selector.select(0, stage.q, stage.k, stage.scale, stage.scene)
    return found


def full_scores(stage: Stage) -> torch.Tensor:
    keys = stage.k.repeat_interleave(GROUP, 0)
    return stage.scale * stage.q @ keys.mT


def dense_rows(scene: Scene) -> torch.Tensor:
    return (scene.document < 0)[:, None] & scene.causal


class TestXAttention:
    @pytest.mark.parametrize("stride", [4, 8])
    def test_antidiagonal_sums_in_a_loop(self, stride: int, layout: Layout) -> None:
        stage = Stage(layout)
        got = antidiagonal_mass(stage.q, stage.k, stage.scale, stage.scene, stride)
        wanted = antidiagonals_by_hand(stage, stride)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)

    def test_strips_do_not_matter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stage = Stage(LAYOUTS["history between documents"])
        whole = antidiagonal_mass(stage.q, stage.k, stage.scale, stage.scene, 8)
        monkeypatch.setitem(STRIP_SCORES, "cpu", 1)
        torch.testing.assert_close(antidiagonal_mass(stage.q, stage.k, stage.scale, stage.scene, 8), whole)

    def test_the_fewest_tiles_that_reach_the_threshold(self, layout: Layout) -> None:
        stage, scene = Stage(layout), Stage(layout).scene
        mask = select(XAttention(8, 0.7), stage)
        mass = antidiagonal_mass(stage.q, stage.k, stage.scale, scene, 8)
        for h, i in itertools.product(range(HEADS), scene.document_tiles.tolist()):
            base = scene.always[i].clone()
            base[0] = True
            assert bool((mask[h, i] | ~base).all())
            taken = (mask[h, i] & ~base).nonzero()[:, 0].tolist()
            kept, total = float(mass[h, i][mask[h, i]].sum()), float(mass[h, i].sum())
            assert kept >= 0.7 * total - 1e-4
            if taken:
                assert kept - min(float(mass[h, i, j]) for j in taken) < 0.7 * total + 1e-4

    def test_a_needle_is_found(self) -> None:
        stage = Stage(ALIGNED)
        stage.q.mul_(0.05)
        stage.q[:, 9 * TILE : 10 * TILE, 0] = 30
        stage.k[:, 2 * TILE : 3 * TILE, 0] = 8
        assert bool(select(XAttention(8, 0.5), stage)[:, 9, 2].all())

    @pytest.mark.parametrize(("stride", "threshold"), [(0, 0.9), (8, 0.0), (8, 1.1)])
    def test_out_of_range(self, stride: int, threshold: float) -> None:
        with pytest.raises(InvalidInput):
            XAttention(stride, threshold)

    def test_a_stride_that_does_not_divide_the_tile(self) -> None:
        with pytest.raises(InvalidInput, match="stride is 5 and the tile 16"):
            select(XAttention(5), Stage(ALIGNED))


def antidiagonals_by_hand(stage: Stage, stride: int) -> torch.Tensor:
    starts, lengths = stage.scene.tiling.starts, stage.scene.tiling.lengths
    groups = [(t, a, min(a + stride, starts[t] + n)) for t, n in enumerate(lengths)
              for a in range(starts[t], starts[t] + n, stride)]  # fmt: skip
    scores = full_scores(stage)
    n = len(stage.scene)
    mass = torch.zeros(HEADS, n, n)
    for h in range(HEADS):
        for g, (tile, a, b) in enumerate(groups):
            row = []
            for _, c, d in groups[: g + 1]:
                pairs = [(a + stride - 1 - x, c + x) for x in range(stride)]
                values = [float(scores[h, i, j]) for i, j in pairs if i < b and j < d]
                row.append(sum(values) / len(values) if values else -math.inf)
            p = torch.tensor(row).softmax(0).nan_to_num(0.0)
            for (other, _, _), share in zip(groups, p.tolist(), strict=False):
                mass[h, tile, other] += share
    return mass


class TestLastRows:
    def test_columns_and_diagonals_in_a_loop(self, layout: Layout) -> None:
        stage = Stage(layout)
        n = stage.q.shape[1]
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        p = full_scores(stage).masked_fill(hidden, -math.inf).softmax(-1)
        rows = min(TILE, n)
        got = last_rows(stage.q, stage.k, stage.scale, TILE)
        torch.testing.assert_close(got, p[:, n - rows :], rtol=1e-4, atol=1e-6)
        for h in range(HEADS):
            for distance in range(n):
                along = sum(float(p[h, i, i - distance]) for i in range(max(n - rows, distance), n))
                assert float(diagonals(got)[h, distance]) == pytest.approx(along / rows, abs=1e-5)

    def test_sums_by_tile_and_band(self) -> None:
        scene = Stage([("prefix", 3), ("document", 20), ("question", 2)]).scene
        x = torch.arange(25.0)[None]
        assert per_tile(x, scene).tolist() == [[3, sum(range(3, 19)), sum(range(19, 23)), 47]]
        assert per_band(x, scene).tolist() == [[sum(range(16)), sum(range(16, 25))]]

    def test_bands_of_equal_tiles_are_diagonals_of_tiles(self) -> None:
        scene = Stage(ALIGNED).scene
        bands = torch.zeros(1, len(scene), dtype=torch.bool)
        bands[0, 3] = True
        n = torch.arange(len(scene))
        assert torch.equal(on_bands(bands, scene)[0], n[:, None] - n == 3)

    def test_top(self) -> None:
        values = torch.tensor([[1.0, 5, 3], [9, 2, 4]])
        assert top(values, 2).tolist() == [[False, True, True], [True, False, True]]
        assert top(values, torch.tensor([1, 5])).tolist() == [[False, True, False], [True, True, True]]


class TestVerticalSlash:
    def test_budgets(self) -> None:
        assert VerticalSlash().widths(36_000) == (1000, 6096)
        assert VerticalSlash().widths(2000) == (1000, 2000)
        assert VerticalSlash(0, 0).widths(2000) == (30, 50)
        assert VerticalSlash(budget=0.1).widths(10_000) == (200, 800)

    def test_columns_and_bands(self) -> None:
        stage = Stage(ALIGNED)
        scene, n = stage.scene, len(stage.scene)
        stage.q.mul_(0.01)
        stage.q[:, -64:, 0] = 30
        stage.k[:, 5 * TILE : 6 * TILE, 0] = 8
        mask = select(VerticalSlash(TILE, TILE), stage)
        number = torch.arange(n)
        near = number[:, None] - number <= 100 // TILE + 1
        column = (number == 5) | (number * TILE < 30)
        # 30 and 50 tokens are two columns and four bands of 16
        extra = mask & ~(near | column) & ~dense_rows(scene)
        assert bool(mask[:, :, 5][:, 5:].all())
        assert bool((extra.sum((1, 2)) < scene.causal.sum() / 2).all())

    @pytest.mark.parametrize("options", [{"vertical": -1}, {"rows": 0}, {"budget": 0.0}, {"budget": 1.5}])
    def test_out_of_range(self, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput):
            VerticalSlash(**options)


class TestFlexPrefill:
    def test_pooled_map_in_a_loop(self, layout: Layout) -> None:
        stage = Stage(layout)
        starts = stage.scene.tiling.starts
        spans = list(itertools.pairwise(starts))
        got = pooled_attention(stage.q, stage.k, stage.scale, stage.scene)
        for h, (i, (a, b)) in itertools.product(range(HEADS), enumerate(spans)):
            row = torch.tensor([
                math.log(d - c) + float(stage.q[h, a:b].mean(0) @ stage.k[h // GROUP, c:d].mean(0)) * stage.scale
                for c, d in spans[: i + 1]
            ])  # fmt: skip
            torch.testing.assert_close(got[h, i, : i + 1], row.softmax(0), rtol=1e-4, atol=1e-6)
            assert not got[h, i, i + 1 :].any()

    def test_tau_switches_the_pattern(self) -> None:
        stage = Stage(ALIGNED)
        scene = stage.scene
        lines = select(FlexPrefill(0.5, 0.0, 1), stage)
        aware = select(FlexPrefill(0.5, 2.0, 1), stage)
        assert not torch.equal(lines, aware)
        # the pooled map: the largest of all tiles together, while they hold at most gamma of every row's
        pooled = pooled_attention(stage.q, stage.k, stage.scale, scene)
        for h in range(HEADS):
            value, order = pooled[h].flatten().sort(descending=True)
            wanted = {int(o) for o, c in zip(order, value.cumsum(0), strict=True) if float(c) <= 0.5 * len(scene)}
            got = set(aware[h].flatten().nonzero()[:, 0].tolist())
            assert wanted & set(scene.causal.flatten().nonzero()[:, 0].tolist()) <= got

    def test_more_gamma_keeps_more(self) -> None:
        stage = Stage([("prefix", 5), *[("document", 100)] * 4, ("question", 20)])
        kept = [int(select(FlexPrefill(g, tau, 1), stage).sum()) for tau in (0.0, 2.0) for g in (0.3, 0.6, 0.95)]
        assert kept[0] < kept[1] < kept[2] and kept[3] < kept[4] < kept[5]

    @pytest.mark.parametrize("options", [{"gamma": 0.0}, {"gamma": 1.5}, {"tau": -0.1}, {"min_budget": 0}])
    def test_out_of_range(self, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput):
            FlexPrefill(**options)


@pytest.mark.parametrize("selector", [XAttention(), FlexPrefill(), VerticalSlash()], ids=["x", "flex", "vertical"])
def test_stored_bits_and_documents_do_not_matter_to_peers(selector: Any) -> None:
    """They choose over the whole causal area: one long document gives the same as several, question rows apart."""
    several = Stage(ALIGNED)
    one = Stage([("prefix", TILE), ("document", 12 * TILE), ("question", TILE)])
    one.q, one.k = several.q, several.k
    assert torch.equal(select(selector, several), select(selector, one))
