"""Whole-model TTFT on tiny shapes: what is replayed, what is timed, and that the parts make the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tamis.bench import dense
from tamis.bench.clock import Clock
from tamis.bench.dense import Heads, dense_functions
from tamis.bench.densities import Recorded, from_log, lists_of_density, load, nearest, save
from tamis.bench.peer import PeerTime, load_peers, nearest_peers
from tamis.bench.replay import bench_prompt, random_question, selector_of
from tamis.bench.replay_blocks import BlockVariant
from tamis.bench.results import Row
from tamis.bench.ttft import Plan, bench_ttft
from tamis.bench.ttft_report import Comparison, Timed, compare, table
from tamis.cli.bench import app
from tamis.core.errors import InvalidInput, NothingFound, Unavailable
from tamis.kernels.blocks import BlockRule
from tamis.kernels.lists import counted
from tamis.select.sampled import Sampled
from tamis.select.variants import GlobalThreshold

SPEC = "sampled:rows=4,mass=0.9"
CPU = torch.device("cpu")


def recorded(selector: str = SPEC, tokens: int = 2048) -> Recorded:
    return Recorded("m", "d", selector, tokens, 3, 0.1, 1.0, ((0.5, 0.3), (0.6, 0.4)))


@pytest.fixture
def densities(tmp_path: Path) -> str:
    save([recorded()], tmp_path / "d.json")
    return str(tmp_path / "d.json")


def values(rows: list[Row], provider: str) -> dict[str, float]:
    return {r.metric: r.p50 for r in rows if r.provider == provider}


def test_every_provider_is_timed_and_its_parts_make_a_pass(densities: str) -> None:
    rows: list[Row] = []
    plan = Plan("tiny", [2048], ["all"], [SPEC, "all"], densities, repeats=1, device="cpu")
    made = bench_ttft(plan, keep=rows.extend)
    plain, sparse, every = made.results
    assert [m["provider"] for m in made.results] == ["dense-tamis", SPEC, "all"]
    assert set(made.left_out) == {"dense-fa4", "dense-cudnn"} and "NVIDIA GPU" in made.left_out["dense-cudnn"]
    for m in made.results:
        assert min(m["parts"].values()) > 0 and sum(m["shares"].values()) == pytest.approx(1)
    assert set(sparse["parts"]) == {"linear", "selection", "attention", "other"} and plain["speedup"] == 1
    assert set(plain["parts"]) == {"linear", "attention", "other"}
    assert sparse["density"] < 0.62 and every["density"] == 1 and {r.case for r in rows} == {"tiny/float32/2048"}
    assert values(rows, SPEC)["recorded_tokens"] == 2048 and values(rows, SPEC)["recorded_kl"] == pytest.approx(0.1)
    assert "densities of m at 2048 tokens" in table(made) and "left out: dense-fa4" in table(made)


def test_a_slice_of_a_mixture_of_experts_is_scaled_by_layers_and_says_so(densities: str) -> None:
    rows: list[Row] = []
    plan = Plan("tiny-moe", [1500], ["dense-tamis"], [SPEC], densities, layers=2, repeats=1, device="cpu")
    made = bench_ttft(plan, keep=rows.extend)
    assert {r.case for r in rows} == {"tiny-moe-2-of-4-layers/float32/1500"} and made.experts == "grouped_mm"
    for provider in ("dense-tamis", SPEC):
        found = values(rows, provider)
        ends = found["ttft_s"] - found["layers_s"]
        assert 0 < ends < found["ttft_s"]
        assert found["ttft_scaled_s"] == pytest.approx(ends + 2 * found["layers_s"], rel=1e-4)
    assert "experts: grouped_mm" in table(made) and "whole model" in table(made)


def timed(provider: str, seconds: float, joules: float | None = None) -> Timed:
    return Timed(provider, 1000, (seconds,) * 3, (seconds / 2,) * 3, {"linear": 1.0, "other": 1.0}, joules=joules)


def test_energy_is_compared_by_its_products_with_delay() -> None:
    base, own = timed("dense-fa4", 2.0, 100.0), timed("sampled", 1.0, 60.0)
    found = values(own.rows("c", base), "sampled")
    assert (found["joules"], found["edp"], found["ed2p"]) == (60, 60, 60)
    assert found["edp_ratio"] == pytest.approx(200 / 60) and found["ed2p_ratio"] == pytest.approx(400 / 60)
    assert own.summary("c", base)["edp_ratio"] == pytest.approx(200 / 60)


def test_a_clock_that_does_not_split_marks_nothing() -> None:
    module = torch.nn.Linear(4, 4)
    clock = Clock(cuda=False, split=False)
    with clock.part("attention"), clock.watching("layers", [(module, module)]):
        module(torch.ones(1, 4))
    module(torch.ones(1, 4))  # the hooks are gone
    assert set(clock.seconds()) == {"layers"} and len(clock.spans["layers"]) == 1


def wrong(device: torch.device) -> Any:
    return lambda q, k, v, scale: q


def test_a_dense_provider_that_computes_something_else_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dense.MAKERS, "dense-cudnn", wrong)
    found, left_out = dense_functions(CPU, torch.float32, Heads(4, 2, 64))
    assert set(found) == {"dense-tamis"} and "off by" in left_out["dense-cudnn"]
    with pytest.raises(Unavailable, match="dense-cudnn was asked for and does not run here: its result is off"):
        dense_functions(CPU, torch.float32, Heads(4, 2, 64), ["dense-cudnn"])
    with pytest.raises(InvalidInput, match="Did you mean 'dense-fa4'"):
        dense_functions(CPU, torch.float32, Heads(4, 2, 64), ["dense-fa3"])


class TestSelectors:
    @pytest.mark.parametrize("spec", [SPEC, "sampled:rows=4", "sampled:rows=4,local=sampled"])
    def test_sampled_is_timed_in_the_form_that_has_a_kernel(self, spec: str) -> None:
        selector, note = selector_of(spec)
        assert isinstance(selector, Sampled) and (selector.rows, selector.mass) == (4, 0.9)
        assert note == ("local=sampled timed as stored" if "local" in spec else "")

    def test_threshold_keeps_its_bar(self) -> None:
        selector, note = selector_of("threshold:rows=4,theta=0.02,floor=0.3,power=0.5")
        assert isinstance(selector, GlobalThreshold) and not note
        assert (selector.rows, selector.theta, selector.floor, selector.power) == (4, 0.02, 0.3, 0.5)

    @pytest.mark.parametrize("spec", ["stored", "all", "none"])
    def test_plain_ones_have_kernels(self, spec: str) -> None:
        assert selector_of(spec)[1] == ""

    @pytest.mark.parametrize("spec", ["xattention", "sampled:rows=8,reduce=max", "oracle", "flexprefill:gamma=0.9"])
    def test_one_without_a_kernel_says_so(self, spec: str) -> None:
        assert "PyTorch" in selector_of(spec)[1]

    def test_an_unknown_option_is_an_error(self) -> None:
        with pytest.raises(InvalidInput, match="theta"):
            selector_of("threshold:thta=0.1")


@pytest.mark.parametrize("wanted", [0.45, 0.7])
def test_lists_have_the_recorded_density(wanted: float) -> None:
    scene = random_question(bench_prompt(6000, 512), 1, 4, CPU).scene()
    lists = lists_of_density(scene, torch.tensor([wanted] * 4), torch.Generator().manual_seed(0))
    assert counted(lists.area) / lists.causal_area == pytest.approx(wanted, abs=0.03)


def test_a_density_below_what_is_always_kept_gives_just_that() -> None:
    scene = random_question(bench_prompt(6000, 512), 1, 1, CPU).scene()
    lists = lists_of_density(scene, torch.tensor([0.0]), torch.Generator().manual_seed(0))
    assert counted(lists.area) / lists.causal_area < 0.45


def test_a_prompt_needs_room_for_a_document() -> None:
    assert len(bench_prompt(3000, 512).tokens) == 3000
    with pytest.raises(InvalidInput, match="one document take 1,216"):
        bench_prompt(1000, 512)


def test_heads_and_layers_are_mapped_by_rank_and_depth() -> None:
    r = recorded()
    assert r.of(0, 4, 4).tolist() == pytest.approx([0.5, 0.5, 0.3, 0.3])
    assert r.of(3, 4, 2).tolist() == pytest.approx([0.6, 0.4])


def test_the_nearest_recording_is_taken_and_a_missing_one_is_named() -> None:
    rows = [recorded(tokens=6144), recorded(tokens=32000)]
    assert nearest(rows, SPEC, 65536).tokens == 32000 and nearest(rows, SPEC, 8000).tokens == 6144
    with pytest.raises(NothingFound, match="no densities were recorded for 'stored'"):
        nearest(rows, "stored", 8000)


def test_a_length_beyond_the_recording_is_noted() -> None:
    assert "beyond" not in recorded(tokens=32000).note(32768)
    assert "the densities are those of 32000 tokens" in recorded(tokens=32000).note(65536)


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


class TestPeers:
    def test_lines_of_results_are_read_and_others_skipped(self, tmp_path: Path) -> None:
        (tmp_path / "p").write_text(
            "loading …\n[1, 2]\n"
            'RESULT {"vllm": "0.26.0", "tokens": 32760, "ttft_s": 1.2, "all": [1.1, 1.2, 1.3]}\n'
            '{"vllm": "0.26.0", "tokens": 8192, "ttft_s": 0.25}\n'
        )
        found = load_peers(tmp_path / "p")
        assert found[0] == PeerTime("vllm-0.26.0", 32760, (1.1, 1.2, 1.3)) and found[1].ttft_s == (0.25,)
        assert nearest_peers(found, 32768) == [found[0]] and nearest_peers(found, 16384) == []

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("nothing here\n", "holds no result of a peer"),
            ('{"vllm": "0.26.0", "ttft_s": 1.2}\n', "line 1 of .*: tokens is None"),
            ('\nRESULT {"vllm": "0.26.0", "tokens": 8192, "ttft_s": "fast"}\n', "line 2 of .*: ttft_s is 'fast'"),
            ('{"vllm": "0.26.0", "tokens": 8192, "ttft_s": 1.0, "all": [0]}\n', "expected seconds above 0"),
        ],
    )
    def test_a_wrong_file_is_an_error(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "p").write_text(text)
        with pytest.raises(InvalidInput, match=message):
            load_peers(tmp_path / "p")

    @pytest.mark.parametrize("order", [1, -1])
    def test_of_two_near_ones_the_nearer_is_taken(self, order: int) -> None:
        near = [PeerTime("vllm-0.26.0", n, (1.0,)) for n in (32500, 32760, 32900)][::order]
        other = PeerTime("vllm-0.27.0", 32800, (1.0,))
        assert nearest_peers([*near, other], 32768) == [near[1], other]

    def test_a_missing_file_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(NothingFound, match="no peer's file"):
            load_peers(tmp_path / "p")

    def test_a_peer_gets_rows_in_the_same_case(self) -> None:
        made, rows = compare("c", PeerTime("vllm-0.26.0", 1000, (2.5,)), timed("dense-fa4", 2.0), [timed("s", 1.0)])
        assert made == Comparison("c", "vllm-0.26.0", 2.5, "dense-fa4", 0.8, "s", 0.4)
        assert "dense-fa4 takes 0.80 of it, s 0.40" in str(made)
        assert values(rows, "vllm-0.26.0") == {"ttft_s": 2.5, "speedup": 0.8}

    def test_a_slice_has_no_peer(self, tmp_path: Path, densities: str) -> None:
        (tmp_path / "p").write_text('{"vllm": "0.26.0", "tokens": 2048, "ttft_s": 1.0}\n')
        plan = Plan("tiny", [2048], ["all"], [], densities, layers=1, device="cpu", peer=str(tmp_path / "p"))
        with pytest.raises(InvalidInput, match="is a slice"):
            bench_ttft(plan)


def test_the_command_prints_one_object_with_the_peer_beside(tmp_path: Path, densities: str) -> None:
    (tmp_path / "p").write_text('{"vllm": "0.26.0", "tokens": 1510, "ttft_s": 1.0}\n')
    loosely = f"; {SPEC.replace(',', ', ')};{SPEC}"  # blanks and doubles do not matter
    arguments = ["ttft", "--shape", "tiny", "--tokens", "1500", "--selectors", loosely, "--densities", densities]
    arguments += ["--repeats", "1", "--device", "cpu", "--results", str(tmp_path), "--peer", str(tmp_path / "p")]
    arguments += ["--dense", " dense-tamis,"]
    run = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    made = json.loads(run.stdout)
    assert [r["provider"] for r in made["results"]] == ["dense-tamis", SPEC]
    assert made["peers"][0]["provider"] == "vllm-0.26.0" and made["left_out"] == {}
    assert "vllm-0.26.0,ttft_s,1,1,1,s" in (tmp_path / "ttft.csv").read_text()


@pytest.mark.parametrize("tokens", ["", "8k", "0", "8192,,1"])
def test_lengths_are_numbers(tokens: str, densities: str) -> None:
    run = CliRunner().invoke(app, ["ttft", "--shape", "tiny", "--tokens", tokens, "--densities", densities])
    assert isinstance(run.exception, InvalidInput) and "8192,32768" in str(run.exception)


class TestBlocks:
    """Prefills over blocks are timed with the choice they make."""

    def test_they_are_timed_beside_the_rest(self) -> None:
        variants = ["blocks:together=16,top=8,local=2", "blocks-forecast:top=8,local=2"]
        made = bench_ttft(Plan("tiny", [1280], ["dense-tamis"], variants, "", repeats=1, device="cpu")).results
        together, apart = made[1:]
        tokens, block = 1280, 64
        read = sum(block * min(row // block, 7) + row % block + 1 for row in range(tokens))
        for found in (together, apart):
            assert found["density"] == pytest.approx(read / (tokens * (tokens + 1) / 2))
            assert found["parts"]["selection"] > 0 and found["parts"]["attention"] > 0
        assert not together["note"] and "apart" in apart["note"]

    @pytest.mark.parametrize("name", ["blocks:rows=3", "blocks:top=x", "blocks:top=2", "blocks:together=5"])
    def test_options_that_cannot_be(self, name: str) -> None:
        with pytest.raises(InvalidInput):
            BlockVariant.parse(name)

    def test_another_name_is_not_one(self) -> None:
        assert BlockVariant.parse("sampled:rows=4") is None
        assert BlockVariant.parse("blocks-forecast:top=64") == BlockVariant(BlockRule(top=64, dense_tokens=0), True)
