"""What a timed prefill does and what it replays: each layer's own lists, after a selection that really ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.attention.prefill import SparsePrefill
from tamis.bench import ttft
from tamis.bench.clock import Clock
from tamis.bench.dense import Heads, dense_functions
from tamis.bench.densities import Recorded, from_log, load, save
from tamis.bench.machine import device_of
from tamis.bench.replay import Replay, bench_prompt, random_question, selector_of
from tamis.bench.results import Row
from tamis.bench.ttft import Plan, TtftBench, bench_ttft
from tamis.core.errors import InvalidInput, NothingFound, Unavailable
from tamis.kernels import dispatch
from tamis.kernels.lists import TileLists, lists_from_mask
from tamis.select.sampled import Sampled
from tamis.select.variants import GlobalThreshold

SPEC = "sampled:rows=4,mass=0.9"
CPU = torch.device("cpu")


def recorded(tokens: int, *layers: tuple[float, ...]) -> Recorded:
    return Recorded("m", "d", SPEC, tokens, 3, tokens / 1e4, 1.0, layers)


class TestReplay:
    QUESTION = random_question(bench_prompt(1500, 512), 2, 4, CPU)

    def lists(self) -> list[TileLists]:
        """Every tile in layer 0, what is always kept in layer 1."""
        scene = self.QUESTION.scene()
        masks = scene.causal.expand(4, -1, -1), scene.always.expand(4, -1, -1)
        return [lists_from_mask(mask, scene.tiling, scene.tiling) for mask in masks]

    def test_a_layer_attends_over_its_own_lists(self) -> None:
        q, k, v = (torch.randn(h, 1500, 64) for h in (4, 2, 2))
        lists = self.lists()
        job = Replay(self.QUESTION, Sampled(), lists, Clock(False))
        made = [job.attend(layer, q, k, v, 0.125)[0] for layer in range(2)]
        assert torch.equal(made[0], dispatch.block_sparse_attention(q, k, v, lists[0], 0.125)[0])
        assert torch.equal(made[1], dispatch.block_sparse_attention(q, k, v, lists[1], 0.125)[0])
        assert not torch.equal(made[0], made[1])

    def test_the_selection_runs_on_the_model_s_own_tensors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        real = SparsePrefill.lists
        monkeypatch.setattr(
            SparsePrefill, "lists", lambda self, n, q, k, s: (seen.append((n, q, k)), real(self, n, q, k, s))[1]
        )
        clock = Clock(False)
        q, k, v = (torch.randn(h, 1500, 64) for h in (4, 2, 2))
        job = Replay(self.QUESTION, Sampled(), self.lists(), clock)
        job.attend(1, q, k, v, 0.125)
        assert len(seen) == 1 and seen[0][0] == 1 and seen[0][1] is q and seen[0][2] is k
        assert len(clock.spans["selection"]) == 2 and len(clock.spans["attention"]) == 1


class TestLengths:
    def test_each_length_has_its_own_recording_and_peer(self, tmp_path: Path) -> None:
        save([recorded(1300, (0.9, 0.9)), recorded(2600, (0.6, 0.6))], tmp_path / "d.json")
        peers = [{"vllm": "0.26.0", "tokens": n, "ttft_s": n / 1000} for n in (1300, 2600)]
        (tmp_path / "p").write_text("".join(json.dumps(p) + "\n" for p in peers))
        rows: list[Row] = []
        plan = Plan("tiny", [1300, 2600], ["dense-tamis"], [SPEC], str(tmp_path / "d.json"), repeats=1, device="cpu",
                    peer=str(tmp_path / "p"))  # fmt: skip
        made = bench_ttft(plan, keep=rows.extend)
        found = {(r.case.rpartition("/")[2], r.provider, r.metric): r.p50 for r in rows}
        for n in (1300, 2600):
            assert found[str(n), SPEC, "recorded_tokens"] == n and found[str(n), "vllm-0.26.0", "ttft_s"] == n / 1000
        assert [p.ttft_s for p in made.peers] == [1.3, 2.6]

    def test_lists_have_the_densities_of_their_layer_and_head(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[list[float]] = []
        real = ttft.lists_of_density
        monkeypatch.setattr(
            ttft, "lists_of_density", lambda s, density, g: (asked.append(density.tolist()), real(s, density, g))[1]
        )
        bench = TtftBench(ttft.random_model("tiny", device="cpu", dtype=torch.float32, context=2048))
        try:
            question = random_question(bench_prompt(1500, 512), 2, 4, CPU)
            bench.sparse(SPEC, recorded(1500, (0.9, 0.8, 0.7, 0.6), (0.5, 0.4, 0.3, 0.2)), question, 1)
        finally:
            bench.close()
        assert asked == [pytest.approx([0.9, 0.8, 0.7, 0.6]), pytest.approx([0.5, 0.4, 0.3, 0.2])]


def test_paired_tiles_are_timed_as_such() -> None:
    selector, note = selector_of("threshold:rows=8,theta=0.02,local=sampled,paired=true")
    assert isinstance(selector, GlobalThreshold) and selector.paired and not note
    assert "PyTorch" in selector_of("sampled:rows=8,paired=true")[1], "it has no kernel"


class TestLog:
    LINE = '{"case": "%s", "variant": "v", "tokens": 6100, "kl": 0.1, "agreement": 1.0, "heads": [[0.2, 0.5]]}\n'

    def test_a_line_that_a_kill_cut_short_is_left_out(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_text(self.LINE % "m/d/6144" + '{"case": "m/d/61')
        assert [r.prompts for r in from_log(tmp_path / "log", "m", "d")] == [1]

    def test_heads_and_layers_keep_their_places(self, tmp_path: Path) -> None:
        line = json.loads(self.LINE % "m/d/6144") | {"heads": [[0.1, 0.2], [0.3, 0.4]]}
        (tmp_path / "log").write_text(json.dumps(line) + "\n")
        assert from_log(tmp_path / "log", "m", "d")[0].density == ((0.1, 0.2), (0.3, 0.4))

    @pytest.mark.parametrize(
        ("text", "error", "message"),
        [
            ("", NothingFound, "holds no densities"),
            ('{"a": 1}\n', NothingFound, "holds no densities"),
            ("nonsense\n", InvalidInput, "line 1 is no result"),
            ('{"heads": [[1]]}\n', InvalidInput, "line 1 is no result"),
            (LINE % "m/d/6144" + LINE % "other/d/6144", InvalidInput, "m/d/6144, other/d/6144 at 6144 tokens"),
        ],
    )
    def test_a_wrong_log_is_an_error(self, tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
        (tmp_path / "log").write_text(text)
        with pytest.raises(error, match=message):
            from_log(tmp_path / "log", "m", "d")

    def test_a_missing_log_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(NothingFound, match="research --log"):
            from_log(tmp_path / "none", "m", "d")

    @pytest.mark.parametrize("text", ["{}", '{"a": 1}', "[1]", '[{"model": "m"}]', "[", "[]"])
    def test_a_wrong_file_of_densities_is_an_error(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "d.json").write_text(text)
        with pytest.raises(InvalidInput, match="does not hold recorded densities"):
            load(tmp_path / "d.json")


class TestInputs:
    """Everything that can be wrong is found before a model is built."""

    @pytest.fixture(autouse=True)
    def no_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ttft, "random_model", lambda *_, **__: pytest.fail("a model was built"))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"shape": "tiny-moe", "fp8": True}, "float8 is for models without experts"),
            ({"device": "gpu"}, "device is 'gpu'"),
            ({"dense": ["all", "dense-tamis"]}, "'all' stands alone"),
            ({"lengths": [1 << 23]}, "are too many"),
            ({"lengths": [100]}, "are too few"),
            ({"layers": 9}, "layers is 9; tiny has 2"),
        ],
    )
    def test_a_wrong_plan(self, change: dict[str, Any], message: str) -> None:
        plan: dict[str, Any] = {"shape": "tiny", "lengths": [1500], "dense": ["all"], "selectors": ["all"]}
        with pytest.raises(InvalidInput, match=message):
            bench_ttft(Plan(**{**plan, "densities": "none", "device": "cpu"} | change))

    def test_devices(self) -> None:
        assert device_of("cpu") == CPU
        with pytest.raises(InvalidInput, match="cpu, cuda, or cuda:1"):
            device_of("cuda:one")
        with pytest.raises(Unavailable, match="NVIDIA GPUs"):
            device_of("cuda:99")

    def test_no_provider_by_that_name(self) -> None:
        with pytest.raises(InvalidInput, match="'all' stands alone"):
            dense_functions(CPU, torch.float32, Heads(4, 2, 64), ["dense-tamis", "all"])
