"""Every selector against what it promises: loops over the rule, the true attention, all subsets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import HEADS, LAYOUTS, TILE, Layout, Stage

from tamis.core.errors import InvalidInput, UnknownName
from tamis.kernels.cpu.dense import causal_attention
from tamis.select import SELECTORS
from tamis.select.every import AllTiles, NoCrossTiles
from tamis.select.oracle import Oracle, true_mass
from tamis.select.sampled import Sampled, sample_rows, sampled_mass
from tamis.select.scene import Scene, Selector
from tamis.select.stored import Stored

USUAL = LAYOUTS["prefix, documents, question"]
layouts = st.lists(
    st.tuples(st.sampled_from(["document", "document", "history", "question"]), st.integers(1, 3 * TILE + 1)),
    min_size=1,
    max_size=6,
)


def select(selector: Selector, stage: Stage, layer: int = 0) -> torch.Tensor:
    return selector.select(layer, stage.q, stage.k, stage.scale, stage.scene)


def density(mask: torch.Tensor, scene: Scene) -> float:
    return int(mask.sum()) / (int(scene.causal.sum()) * mask.shape[0])


@pytest.mark.parametrize("bits", ["random", "some", "none"])
@pytest.mark.parametrize("name", list(SELECTORS))
def test_between_always_and_causal(name: str, bits: str, layout: Layout) -> None:
    stage = Stage(layout, bits=bits)
    selector: Selector = SELECTORS.get(name)()
    for layer in (0, 1):
        mask = select(selector, stage, layer)
        n = len(stage.scene)
        assert mask.shape == (HEADS, n, n) and mask.dtype == torch.bool
        assert bool((mask | ~stage.scene.always).all()), "a tile that every selector computes was dropped"
        assert bool((stage.scene.causal | ~mask).all()), "a tile after the query tile"


@given(layouts, st.sampled_from(list(SELECTORS)), st.sampled_from(["random", "some", "none"]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_between_always_and_causal_in_any_order(layout: list[tuple[str, int]], name: str, bits: str, seed: int) -> None:
    stage = Stage(layout, bits=bits, seed=seed)
    mask = select(SELECTORS.get(name)(), stage)
    assert bool((mask | ~stage.scene.always).all()) and bool((stage.scene.causal | ~mask).all())


@pytest.mark.parametrize("name", [n for n in SELECTORS if n != "all"])
def test_something_is_left_out(name: str) -> None:
    """Keeping every tile would satisfy most of the other tests."""
    stage = Stage([("prefix", 5), *[("document", 100)] * 4, ("question", 20)])
    options: dict[str, Any] = {
        "sampled": {"mass": 0.6},
        "oracle": {"mass": 0.6},
        "threshold": {"theta": 0.1, "floor": 0.3},
        "flexprefill": {"gamma": 0.6, "min_budget": TILE},
        "vertical_slash": {"budget": 0.1},
    }
    assert density(select(SELECTORS.get(name)(**options.get(name, {})), stage), stage.scene) < 0.85


def test_selections_are_not_views_of_the_scene() -> None:
    """The scene serves all layers: what a caller does to one layer's mask must not reach the next."""
    stage = Stage(USUAL)
    before = stage.scene.always.clone(), stage.scene.causal.clone()
    for name in ("sampled", "stored", "oracle"):
        select(SELECTORS.get(name)(), stage).fill_(True)
    assert torch.equal(stage.scene.always, before[0]) and torch.equal(stage.scene.causal, before[1])


def test_unknown_selector() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'sampled'"):
        SELECTORS.get("sample")


def test_all_keeps_the_causal_area(layout: Layout) -> None:
    stage = Stage(layout)
    assert torch.equal(select(AllTiles(), stage), stage.scene.causal.expand(HEADS, -1, -1))


def test_none_keeps_documents_apart(layout: Layout) -> None:
    stage = Stage(layout)
    mask, owners = select(NoCrossTiles(), stage), stage.segment_of_tiles()
    for i, j in itertools.product(range(len(owners)), repeat=2):
        apart = owners[i][1] == owners[j][1] == "document" and owners[i][0] != owners[j][0]
        assert bool(mask[:, i, j].all()) == bool(mask[:, i, j].any()) == (j <= i and not apart)


class TestStored:
    @pytest.mark.parametrize("bits", ["random", "some", "none"])
    def test_the_rule_of_the_paper_in_a_loop(self, bits: str, layout: Layout) -> None:
        """arXiv 2606.09441, section 5: LA bits inside a document, CA bits across, question rows and prefix dense."""
        stage = Stage(layout, bits=bits)
        owners = stage.segment_of_tiles()
        first = {own: i for i, (own, _) in reversed(list(enumerate(owners)))}
        ordinal = {s: n for n, s in enumerate(s for s, (kind, _) in enumerate(layout) if kind == "document")}
        for layer in (0, 1):
            mask = select(Stored(), stage, layer)
            for h in range(HEADS):
                for i, (own, kind) in enumerate(owners):
                    for j, (other, other_kind) in enumerate(owners):
                        keep = j <= i
                        if keep and i != j and kind == other_kind == "document":
                            found = stage.bits[ordinal[other]]
                            if found is not None and own == other:
                                keep = bool(found.la[layer, h, i - first[own], j - first[own]])
                            elif found is not None:
                                keep = bool(found.ca[layer, h, j - first[other]])
                        assert bool(mask[h, i, j]) == keep, (layer, h, i, j)

    def test_the_question_does_not_matter(self) -> None:
        stage = Stage(USUAL)
        before = select(Stored(), stage)
        stage.q, stage.k = torch.randn_like(stage.q), torch.randn_like(stage.k)
        assert torch.equal(select(Stored(), stage), before)

    def test_without_records_everything_is_kept(self, layout: Layout) -> None:
        stage = Stage(layout, bits="none")
        assert torch.equal(select(Stored(), stage), stage.scene.causal.expand(HEADS, -1, -1))


class TestTrueMass:
    def test_against_the_whole_matrix(self, layout: Layout) -> None:
        stage = Stage(layout)
        got = true_mass(stage.q, stage.k, stage.scale, stage.scene)
        torch.testing.assert_close(got, brute_mass(stage), rtol=1e-4, atol=1e-6)


class TestOracle:
    @pytest.mark.parametrize("mass", [0.3, 0.7, 0.9])
    def test_no_smaller_choice_keeps_as_much(self, mass: float) -> None:
        stage = Stage(
            [("prefix", 3), ("document", 40), ("document", 30), ("document", 20), ("question", 4)], bits="none"
        )
        mask = select(Oracle(mass), stage)
        true = brute_mass(stage)
        for h, i in itertools.product(range(HEADS), range(len(stage.scene))):
            kept = float(true[h, i][mask[h, i]].sum())
            assert kept >= mass - 1e-5 or not (stage.scene.causal[i] & ~mask[h, i]).any()
            free = true[h, i][stage.scene.causal[i] & ~stage.scene.always[i]].tolist()
            base = float(true[h, i][stage.scene.always[i]].sum())
            n = int(mask[h, i].sum() - stage.scene.always[i].sum())
            if n:
                fewer = max(sum(s) for s in itertools.combinations(free, n - 1))
                assert base + fewer < mass + 1e-5, "one tile less would have been enough"

    def test_more_mass_keeps_more(self) -> None:
        stage = Stage(USUAL)
        masks = [select(Oracle(m), stage) for m in (0.5, 0.8, 0.95, 1.0)]
        densities = [density(m, stage.scene) for m in masks]
        assert densities == sorted(set(densities)) and densities[-1] == 1.0

    def test_stored_bits_do_not_matter(self) -> None:
        assert torch.equal(select(Oracle(), Stage(USUAL)), select(Oracle(), Stage(USUAL, bits="none")))

    @pytest.mark.parametrize("mass", [0.0, -1.0, 1.1])
    def test_mass_out_of_range(self, mass: float) -> None:
        with pytest.raises(InvalidInput, match=f"mass is {mass}"):
            Oracle(mass)


class TestSampled:
    def test_all_rows_sampled_is_the_true_mass(self, layout: Layout) -> None:
        stage = Stage(layout)
        scene = stage.scene
        whole = torch.tensor([n == TILE for n in scene.tiling.lengths])
        tiles = ((scene.document >= 0) & whole).nonzero()[:, 0]
        got = sampled_mass(stage.q, stage.k, stage.scale, scene, tiles, TILE)
        torch.testing.assert_close(got, brute_mass(stage)[:, tiles], rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("rows", [1, 3, 8])
    def test_mass_of_the_sampled_rows(self, rows: int, layout: Layout) -> None:
        stage = Stage(layout)
        scene = stage.scene
        tiles = (scene.document >= 0).nonzero()[:, 0]
        picked = sample_rows(scene, tiles, rows)
        got = sampled_mass(stage.q, stage.k, stage.scale, scene, tiles, rows)
        p = probabilities(stage)
        starts = scene.tiling.starts
        for n in range(len(tiles)):
            mean = p[:, picked[n]].mean(1)
            for j in range(len(scene)):
                torch.testing.assert_close(
                    got[:, n, j], mean[:, starts[j] : starts[j + 1]].sum(-1), rtol=1e-4, atol=1e-6
                )

    @given(st.lists(st.integers(1, 70), min_size=1, max_size=4), st.integers(1, 128))
    @settings(max_examples=60, deadline=None)
    def test_sampled_rows_lie_in_their_tile_and_rise(self, lengths: list[int], rows: int) -> None:
        scene = Stage([("document", n) for n in lengths]).scene
        picked = sample_rows(scene, torch.arange(len(scene)), rows)
        starts = torch.tensor(scene.tiling.starts)
        assert picked.shape == (len(scene), rows)
        assert bool((picked >= starts[:-1, None]).all()) and bool((picked < starts[1:, None]).all())
        assert bool((picked.diff(dim=1) >= 0).all())
        for row, n in zip(picked.tolist(), scene.tiling.lengths, strict=True):
            assert len(set(row)) == min(rows, n), "rows are not spread"

    def test_sampled_rows_by_hand(self) -> None:
        scene = Stage([("prefix", 3), ("document", 21)]).scene
        assert sample_rows(scene, torch.tensor([1, 2]), 4).tolist() == [[5, 9, 13, 17], [19, 20, 22, 23]]

    @pytest.mark.parametrize("bits", ["random", "some", "none"])
    @pytest.mark.parametrize("mass", [0.5, 0.9])
    def test_fewest_cross_tiles_beside_the_stored_ones(self, mass: float, bits: str, layout: Layout) -> None:
        stage = Stage(layout, bits=bits)
        scene = stage.scene
        mask = select(Sampled(rows=TILE, mass=mass), stage, 1)
        fixed = scene.always | scene.stored_local(1, HEADS)
        assert torch.equal(mask & ~scene.cross, fixed), "tiles that the stored bits decide"
        tiles = (scene.document >= 0).nonzero()[:, 0]
        seen = sampled_mass(stage.q, stage.k, stage.scale, scene, tiles, TILE)
        for h, (n, i) in itertools.product(range(HEADS), enumerate(tiles.tolist())):
            base = float(seen[h, n][fixed[h, i]].sum())
            free = sorted(seen[h, n][scene.cross[i]].tolist(), reverse=True)
            taken = int((mask[h, i] & scene.cross[i]).sum())
            assert base + sum(free[:taken]) >= mass - 1e-5 or taken == len(free)
            assert not taken or base + sum(free[: taken - 1]) < mass + 1e-5
            kept = seen[h, n][mask[h, i] & scene.cross[i]].sum()
            torch.testing.assert_close(kept, torch.tensor(free[:taken]).sum(), rtol=1e-5, atol=1e-6)

    def test_rows_outside_documents_stay_dense(self, layout: Layout) -> None:
        stage = Stage(layout)
        mask = select(Sampled(mass=0.1), stage)
        outside = stage.scene.document < 0
        assert torch.equal(mask[:, outside], stage.scene.causal[outside].expand(HEADS, -1, -1))

    def test_more_mass_keeps_more(self) -> None:
        stage = Stage([("prefix", 5), *[("document", 60)] * 4, ("question", 20)])
        densities = [density(select(Sampled(mass=m), stage), stage.scene) for m in (0.3, 0.6, 0.9, 0.97)]
        assert densities == sorted(set(densities))

    def test_close_to_the_oracle_at_the_same_mass(self) -> None:
        stage = Stage([("prefix", 5), *[("document", 96)] * 4, ("question", 20)], bits="none")
        true = brute_mass(stage)
        kept = [
            float((true * select(s, stage)).sum(-1).mean()) for s in (Sampled(mass=0.8), NoCrossTiles(), Oracle(0.8))
        ]
        assert kept[0] > kept[1] + 0.05 and kept[0] > 0.8

    @pytest.mark.parametrize(("rows", "mass"), [(0, 0.9), (129, 0.9), (8, 0.0), (8, 1.5)])
    def test_settings_out_of_range(self, rows: int, mass: float) -> None:
        with pytest.raises(InvalidInput, match="allowed are"):
            Sampled(rows, mass)


def probabilities(stage: Stage) -> torch.Tensor:
    """Dense causal attention [Hq, T, T], the plain way."""
    k = stage.k.repeat_interleave(stage.q.shape[0] // stage.k.shape[0], 0)
    scores = stage.q.double() @ k.double().mT * stage.scale
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf")).softmax(-1).float()


def brute_mass(stage: Stage) -> torch.Tensor:
    """float32 [Hq, N, N] from the whole matrix."""
    p, starts = probabilities(stage), stage.scene.tiling.starts
    spans = list(itertools.pairwise(starts))
    return torch.stack([torch.stack([p[:, a:b, c:d].sum(2).mean(1) for c, d in spans], -1) for a, b in spans], 1)


def test_the_plain_way_agrees_with_the_kernel() -> None:
    stage = Stage(USUAL)
    v = torch.randn_like(stage.k)
    wanted = probabilities(stage) @ v.repeat_interleave(2, 0)
    torch.testing.assert_close(causal_attention(stage.q, stage.k, v, stage.scale)[0], wanted, rtol=1e-4, atol=1e-5)
