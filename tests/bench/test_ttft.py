"""Whole-model TTFT on a tiny shape: what is replayed, what is timed, and that the parts make the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tamis.bench.densities import Recorded, from_log, lists_of_density, load, nearest, save
from tamis.bench.ttft import Plan, bench_prompt, bench_ttft, random_scene
from tamis.core.errors import NothingFound
from tamis.kernels.lists import counted

SPEC = "sampled:rows=4,mass=0.9"


def recorded(selector: str = SPEC, tokens: int = 2048) -> Recorded:
    return Recorded("m", "d", selector, tokens, 3, 0.1, 1.0, ((0.5, 0.3), (0.6, 0.4)))


def test_every_provider_is_timed_and_its_parts_make_the_whole(tmp_path: Path) -> None:
    save([recorded()], tmp_path / "d.json")
    rows: list[object] = []
    plan = Plan("tiny", [2048], ["all"], [SPEC], str(tmp_path / "d.json"), repeats=1, device="cpu")
    made = bench_ttft(plan, keep=rows.extend)
    assert [m["provider"] for m in made] == ["dense-tamis", SPEC]
    for m in made:
        assert sum(m["parts"].values()) == pytest.approx(m["ttft_s"])
    assert set(made[1]["parts"]) == {"selection", "attention", "other"} and made[0]["speedup"] == 1
    assert made[1]["density"] < 0.62 and len(rows) >= 8


@pytest.mark.parametrize("wanted", [0.45, 0.7])
def test_lists_have_the_recorded_density(wanted: float) -> None:
    scene = random_scene(bench_prompt(6000, 512), 1, 4, torch.device("cpu"))
    lists = lists_of_density(scene, torch.tensor([wanted] * 4), torch.Generator().manual_seed(0))
    assert counted(lists.area) / lists.causal_area == pytest.approx(wanted, abs=0.03)


def test_a_density_below_what_is_always_kept_gives_just_that() -> None:
    scene = random_scene(bench_prompt(6000, 512), 1, 1, torch.device("cpu"))
    lists = lists_of_density(scene, torch.tensor([0.0]), torch.Generator().manual_seed(0))
    assert counted(lists.area) / lists.causal_area < 0.45


def test_heads_and_layers_are_mapped_by_rank_and_depth() -> None:
    r = recorded()
    assert r.of(0, 4, 4).tolist() == pytest.approx([0.5, 0.5, 0.3, 0.3])
    assert r.of(3, 4, 2).tolist() == pytest.approx([0.6, 0.4])


def test_the_nearest_recording_is_taken_and_a_missing_one_is_named() -> None:
    rows = [recorded(tokens=6144), recorded(tokens=32000)]
    assert nearest(rows, SPEC, 65536).tokens == 32000 and nearest(rows, SPEC, 8000).tokens == 6144
    with pytest.raises(NothingFound, match="no densities were recorded for 'stored'"):
        nearest(rows, "stored", 8000)


def test_recordings_come_back_as_they_were_saved(tmp_path: Path) -> None:
    save([recorded()], tmp_path / "a" / "d.json")
    assert load(tmp_path / "a" / "d.json") == [recorded()]
    with pytest.raises(NothingFound, match="record-densities"):
        load(tmp_path / "none.json")


def test_a_research_log_is_averaged_per_variant_and_length(tmp_path: Path) -> None:
    line = '{"case": "m/d/6144", "variant": "v", "tokens": 6100, "kl": %s, "agreement": 1.0, "heads": [[%s, 0.5]]}\n'
    (tmp_path / "log").write_text(line % (0.1, 0.2) + line % (0.3, 0.4))
    (found,) = from_log(tmp_path / "log", "m", "d")
    assert (found.tokens, found.prompts) == (6144, 2)
    assert found.kl == pytest.approx(0.2) and found.density[0] == pytest.approx((0.3, 0.5))
