"""The parts of the research selectors: estimates against `sampled` and the whole matrix, rules against loops."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import HEADS, KV_HEADS, LAYERS, LAYOUTS, TILE, Layout, Stage

from tamis.core.errors import InvalidInput
from tamis.kernels.cpu.dense import causal_attention
from tamis.kernels.lists import lists_from_mask, tile_areas
from tamis.kernels.reference.block_sparse import block_sparse_attention
from tamis.select.calibrate import Curves, calibrate
from tamis.select.oracle import Oracle, true_mass
from tamis.select.rowmass import STRIP_SCORES, Pages, row_mass, spread_rows
from tamis.select.rules import PerHead, Share, Threshold, keep_shares
from tamis.select.sampled import Sampled, sample_rows
from tamis.select.scene import keep_mass
from tamis.select.variants import Calibrated, GlobalThreshold, RowSampled, asking_tiles, mean_correction, partners

USUAL = LAYOUTS["prefix, documents, question"]
LONG: Layout = [("prefix", 5), *[("document", 6 * TILE)] * 3, ("question", 20)]


def select(selector: Any, stage: Stage, layer: int = 0) -> torch.Tensor:
    found: torch.Tensor = selector.select(layer, stage.q, stage.k, stage.scale, stage.scene)
    return found


class TestRowMass:
    def test_all_rows_are_the_true_mass(self, layout: Layout) -> None:
        stage = Stage(layout)
        args = (stage.q, stage.k, stage.scale, stage.scene)
        every = Pages(stage.scene.tiling, stage.q.device).index
        torch.testing.assert_close(row_mass(*args, every), true_mass(*args), rtol=1e-4, atol=1e-6)

    def test_strips_do_not_matter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stage = Stage(USUAL)
        args = (stage.q, stage.k, stage.scale, stage.scene, spread_rows(stage.scene, 4))
        whole = row_mass(*args)
        monkeypatch.setitem(STRIP_SCORES, "cpu", 1)
        torch.testing.assert_close(row_mass(*args), whole)

    @pytest.mark.parametrize("reduce", ["mean", "max"])
    def test_joined_rows(self, reduce: str, layout: Layout) -> None:
        stage = Stage(layout)
        position = spread_rows(stage.scene, 3)
        got = row_mass(stage.q, stage.k, stage.scale, stage.scene, position, reduce)
        single = torch.stack(
            [row_mass(stage.q, stage.k, stage.scale, stage.scene, position[:, i : i + 1]) for i in range(3)]
        )
        wanted = single.mean(0) if reduce == "mean" else single.amax(0)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("rows", [1, 3, 8])
    def test_even_rows_are_those_of_sampled(self, rows: int, layout: Layout) -> None:
        scene = Stage(layout).scene
        assert torch.equal(spread_rows(scene, rows), sample_rows(scene, torch.arange(len(scene)), rows))

    def test_spreads_by_hand(self) -> None:
        scene = Stage([("document", TILE + 3)]).scene
        assert spread_rows(scene, 4, "ends").tolist() == [[0, 1, 14, 15], [16, 17, 17, 18]]
        assert spread_rows(scene, 4, "last").tolist() == [[12, 13, 14, 15], [16, 16, 17, 18]]

    @pytest.mark.parametrize(("rows", "spread"), [(0, "even"), (TILE + 1, "even"), (4, "middle")])
    def test_out_of_range(self, rows: int, spread: str) -> None:
        with pytest.raises(InvalidInput):
            spread_rows(Stage(USUAL).scene, rows, spread)


class TestRowSampled:
    @pytest.mark.parametrize("bits", ["random", "some", "none"])
    @pytest.mark.parametrize("mass", [0.5, 0.9])
    def test_the_plain_one_is_sampled(self, mass: float, bits: str, layout: Layout) -> None:
        stage = Stage(layout, bits=bits)
        assert torch.equal(select(RowSampled(Share(mass)), stage, 1), select(Sampled(mass=mass), stage, 1))

    @pytest.mark.parametrize("mass", [0.5, 0.9])
    def test_all_rows_and_no_bits_are_the_oracle(self, mass: float, layout: Layout) -> None:
        stage = Stage(layout)
        assert torch.equal(select(RowSampled(Share(mass), rows=0, local="sampled"), stage), select(Oracle(mass), stage))

    def test_whose_tiles_are_decided_by_whom(self) -> None:
        stage = Stage(USUAL)
        scene, stored = stage.scene, stage.scene.stored_local(0, HEADS)
        found = {
            name: select(RowSampled(Share(0.6), local=name), stage) for name in ("stored", "sampled", "both", "none")
        }
        local = {name: mask & scene.local & ~scene.always for name, mask in found.items()}
        assert torch.equal(local["stored"], stored & ~scene.always)
        assert torch.equal(local["none"], (scene.local & ~scene.always).expand(HEADS, -1, -1))
        assert bool((local["both"] | ~local["stored"]).all()) and not torch.equal(local["both"], local["stored"])
        assert not bool((local["sampled"] | ~local["stored"]).all())
        assert [RowSampled(Share(), local=name).needs_records for name in found] == [True, False, True, False]

    def test_pairs_speak_for_each_other(self) -> None:
        stage = Stage(LONG)
        scene = stage.scene
        pair = partners(scene)
        assert pair.tolist() == [0, *[x for a in range(1, 19, 2) for x in (a + 1, a)], 19, 20]
        got = RowSampled(Share(), rows=8, paired=True).estimate(stage.q, stage.k, stage.scale, scene)
        half = row_mass(stage.q, stage.k, stage.scale, scene, spread_rows(scene, 4))
        torch.testing.assert_close(got[:, 8], (half[:, 7] + half[:, 8]) / 2)  # the later one sees all of the earlier's
        seen = half[:, 8, :8] / half[:, 8, :8].sum(-1, keepdim=True)
        torch.testing.assert_close(got[:, 7, :8], (half[:, 7, :8] + seen) / 2)
        torch.testing.assert_close(got.sum(-1), torch.ones(HEADS, len(scene)))

    def test_pairs_by_hand(self) -> None:
        scene = Stage([("prefix", 3), ("document", 3 * TILE), ("document", TILE), ("question", 3)]).scene
        assert partners(scene).tolist() == [0, 2, 1, 3, 4, 5]

    def test_a_sparse_question(self) -> None:
        stage = Stage([("prefix", 5), *[("document", 60)] * 4, ("history", 20), ("question", 20)], bits="none")
        scene = stage.scene
        rows = asking_tiles(scene)
        assert [scene.tiling.starts[i] for i in rows.tolist()] == [245, 261, 265, 281]
        mask = select(RowSampled(Share(0.9), rows=2, question=0.5), stage)
        true = true_mass(stage.q, stage.k, stage.scale, scene)[:, rows]
        outside = (scene.document < 0) & scene.causal[rows]
        assert torch.equal(mask[:, rows], keep_mass(true, outside, scene.causal[rows], 0.5))
        assert int(mask[:, rows].sum()) < int(scene.causal[rows].sum()) * HEADS
        dense = select(RowSampled(Share(0.9), rows=2), stage)
        mask[:, rows] = dense[:, rows]
        assert torch.equal(mask, dense)

    @pytest.mark.parametrize(
        "options",
        [{"rows": -1}, {"rows": 129}, {"rows": 3, "paired": True}, {"spread": "x"}, {"reduce": "x"}, {"local": "x"}],
    )
    def test_out_of_range(self, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput):
            RowSampled(Share(), **options)


class TestThreshold:
    @pytest.mark.parametrize("floor", [0.0, 0.4])
    def test_in_a_loop(self, floor: float, layout: Layout) -> None:
        stage = Stage(layout)
        scene, theta = stage.scene, 0.07
        mask = select(GlobalThreshold(theta, floor, rows=4), stage)
        mass = RowSampled(Share(), rows=4).estimate(stage.q, stage.k, stage.scale, scene)
        forced = scene.always | scene.stored_local(0, HEADS)
        least = keep_mass(mass, forced, scene.cross, floor)
        for h, i, j in itertools.product(range(HEADS), range(len(scene)), range(len(scene))):
            worth = bool(scene.cross[i, j]) and float(mass[h, i, j]) >= theta * scene.tiling.lengths[j] / TILE
            assert bool(mask[h, i, j]) == (worth or bool(forced[h, i, j]) or bool(least[h, i, j]))

    @pytest.mark.parametrize("power", [0.5, 1.0])
    def test_the_bar_follows_what_a_row_sees(self, power: float, layout: Layout) -> None:
        stage = Stage(layout)
        scene, theta = stage.scene, 0.02
        mask = select(GlobalThreshold(theta, 0.0, rows=4, power=power), stage)
        mass = RowSampled(Share(), rows=4).estimate(stage.q, stage.k, stage.scale, scene)
        forced = scene.always | scene.stored_local(0, HEADS)
        for h, i, j in itertools.product(range(HEADS), range(len(scene)), range(len(scene))):
            bar = min(1.0, theta * (64 / (i + 1)) ** power) * scene.tiling.lengths[j] / TILE
            worth = bool(scene.cross[i, j]) and float(mass[h, i, j]) >= bar
            assert bool(mask[h, i, j]) == (worth or bool(forced[h, i, j]))

    def test_bars(self) -> None:
        seen = torch.tensor([1, 16, 64, 256])
        assert Threshold(0.01).bar(seen).tolist() == pytest.approx([0.01] * 4)
        assert Threshold(0.01, power=0.5).bar(seen).tolist() == pytest.approx([0.08, 0.02, 0.01, 0.005])
        assert Threshold(0.1, power=1).bar(seen).tolist() == pytest.approx([1.0, 0.4, 0.1, 0.025])

    def test_no_other_choice_of_its_area_loses_less(self) -> None:
        """All tiles alike: with the same count of tiles over all heads and rows, none keeps more mass."""
        mass = (3 * torch.randn(3, 5, 9)).softmax(-1)
        none, offered = torch.zeros(3, 5, 9, dtype=torch.bool), torch.ones(3, 5, 9, dtype=torch.bool)
        kept = Threshold(0.1, 0.0).keep(0, mass, none, offered, torch.ones(9), torch.full((5,), 9))
        best = mass.flatten().sort(descending=True).values[: int(kept.sum())].sum()
        assert float(mass[kept].sum()) == pytest.approx(float(best))

    @pytest.mark.parametrize(("theta", "floor"), [(0.0, 0.5), (1.5, 0.5), (0.1, -0.1), (0.1, 1.1)])
    def test_out_of_range(self, theta: float, floor: float) -> None:
        with pytest.raises(InvalidInput):
            Threshold(theta, floor)

    @pytest.mark.parametrize("power", [-0.5, math.inf, math.nan])
    def test_power_out_of_range(self, power: float) -> None:
        with pytest.raises(InvalidInput, match="power"):
            Threshold(power=power)


class TestPerHead:
    def test_each_head_has_its_share(self) -> None:
        stage = Stage(LONG)
        shares = PerHead(((0.3, 0.6, 0.8, 0.95), (0.5, 0.5, 0.5, 0.5)))
        mask = select(RowSampled(shares), stage, 0)
        for h, share in enumerate(shares.mass[0]):
            assert torch.equal(mask[h], select(Sampled(mass=share), stage, 0)[h])

    def test_file(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        shares = PerHead(((0.5, 0.9, 0.9, 0.9), (0.25, 0.9, 0.9, 0.9)))
        shares.save(path, model="tiny", density=0.2)
        assert PerHead.load(path) == shares
        assert torch.equal(select(Calibrated(str(path)), Stage(LONG), 1), select(RowSampled(shares), Stage(LONG), 1))
        with pytest.raises(InvalidInput, match=r"there is no thresholds file at .*calibrate"):
            PerHead.load(tmp_path / "no.json")
        for text in ("[]", "{", '{"mass": [[2]]}', '{"mass": [[0.5], []]}', '{"mass": "a"}'):
            path.write_text(text)
            with pytest.raises(InvalidInput):
                PerHead.load(path)

    def test_another_model(self) -> None:
        with pytest.raises(InvalidInput, match="layer 0 has 4 heads; the shares are for 1 layers of 2 heads"):
            select(RowSampled(PerHead(((0.5, 0.5),))), Stage(LONG))

    @pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
    def test_keep_shares_is_keep_mass(self, share: float) -> None:
        mass = (2 * torch.randn(4, 6, 20)).softmax(-1)
        forced, offered = torch.rand(4, 6, 20) < 0.2, torch.rand(4, 6, 20) < 0.7
        assert torch.equal(
            keep_shares(mass, forced, offered, torch.tensor(share)), keep_mass(mass, forced, offered, share)
        )


class TestCalibrate:
    def curves(self, seeds: range) -> Curves:
        curves = Curves()
        for seed in seeds:
            stage = Stage(LONG, seed=seed)
            stage.q[0] *= 4  # one head that is sparser than the others
            truth = true_mass(stage.q, stage.k, stage.scale, stage.scene)
            curves.add(stage.scene, [truth] * LAYERS, [truth] * LAYERS)
        return curves

    def test_loses_less_than_one_share_for_all_at_no_more_area(self) -> None:
        curves = self.curves(range(2))
        assert curves.area is not None and curves.lost is not None
        for n in (2, 5, 8):
            target = float(curves.area[..., n].mean()) / curves.causal_area
            found = calibrate(curves, target)
            index = torch.tensor([[curves.grid.index(pytest.approx(s)) for s in row] for row in found.mass])
            area = curves.area.gather(-1, index[..., None]).mean() / curves.causal_area
            lost = curves.lost.gather(-1, index[..., None]).sum()
            assert float(area) <= target + 1e-9
            assert len({s for row in found.mass for s in row}) > 1
            # the discrete choice may stop short of the budget: allow for the step between two shares
            assert float(lost) <= float(curves.lost[..., max(0, n - 1)].sum())

    def test_what_is_recorded(self) -> None:
        stage = Stage(LONG, seed=3)
        scene = stage.scene
        truth = true_mass(stage.q, stage.k, stage.scale, scene)
        curves = Curves(grid=(0.5, 0.9))
        curves.add(scene, [truth] * LAYERS, [truth] * LAYERS)
        assert curves.area is not None and curves.lost is not None
        mask = select(RowSampled(Share(0.9), rows=0), stage, 1)
        areas = tile_areas(scene.tiling, scene.tiling)
        rows = torch.tensor(scene.tiling.lengths)
        assert curves.area[1, :, 1].tolist() == (mask * areas).sum((1, 2)).tolist()
        lost = ((truth * (scene.causal & ~mask)).sum(-1) * rows).sum(-1)
        torch.testing.assert_close(curves.lost[1, :, 1].float(), lost)
        assert (curves.rows, curves.causal_area) == (float(rows.sum()), float(areas.sum()))

    def test_out_of_reach(self) -> None:
        with pytest.raises(InvalidInput, match="nothing was recorded"):
            calibrate(Curves(), 0.5)
        with pytest.raises(InvalidInput, match=r"density is 0.001; the smallest share, 0.3, computes"):
            calibrate(self.curves(range(1)), 0.001)


class TestMeanCorrection:
    def attend(self, stage: Stage, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        lists = lists_from_mask(mask, stage.scene.tiling, stage.scene.tiling)
        return block_sparse_attention(stage.q, stage.k, v, lists, stage.scale)[0]

    def test_nothing_skipped_changes_nothing(self, layout: Layout) -> None:
        stage = Stage(layout)
        v = torch.randn_like(stage.k)
        out = torch.randn_like(stage.q)
        mass = true_mass(stage.q, stage.k, stage.scale, stage.scene)
        everything = stage.scene.causal.expand(HEADS, -1, -1)
        assert torch.equal(mean_correction(out, mass, everything, v, stage.scene), out)

    def test_in_a_loop(self, layout: Layout) -> None:
        stage = Stage(layout)
        scene, v, out = stage.scene, torch.randn_like(stage.k), torch.randn_like(stage.q)
        mask, mass = RowSampled(Share(0.4)).select_with_mass(0, stage.q, stage.k, stage.scale, scene)
        got = mean_correction(out, mass, mask, v, scene)
        spans = list(itertools.pairwise(scene.tiling.starts))
        for h, (i, (a, b)) in itertools.product(range(HEADS), enumerate(spans)):
            own = v[h // (HEADS // KV_HEADS)]
            skipped = [j for j in range(i) if not mask[h, i, j]]
            r = sum(float(mass[h, i, j]) for j in skipped)
            added = sum((float(mass[h, i, j]) * own[slice(*spans[j])].mean(0) for j in skipped), torch.zeros(1))
            torch.testing.assert_close(got[h, a:b], (1 - r) * out[h, a:b] + added, rtol=1e-4, atol=1e-5)

    def test_it_helps_where_skipped_keys_are_alike(self) -> None:
        """Keys that differ little inside a tile: the mean of their values is then what attention would take."""
        stage = Stage(LONG, bits="none")
        stage.k = stage.k.view(KV_HEADS, -1, stage.k.shape[2]) * 0.05
        stage.q *= 0.3
        v = torch.randn_like(stage.k) + 1
        mask, mass = RowSampled(Share(0.5)).select_with_mass(0, stage.q, stage.k, stage.scale, stage.scene)
        dense, _ = causal_attention(stage.q, stage.k, v, stage.scale)
        sparse = self.attend(stage, v, mask)
        corrected = mean_correction(sparse, mass, mask, v, stage.scene)
        assert math.isfinite(float(corrected.sum()))
        assert float((corrected - dense).norm()) < 0.5 * float((sparse - dense).norm())
