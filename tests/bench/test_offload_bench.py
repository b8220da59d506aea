"""The offload bench on a CPU: what is recorded and replayed, checked before it is timed, counted and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tamis.bench import offload as module
from tamis.bench import offload_check
from tamis.bench.locality import Locality, load, load_all, record, replay, save
from tamis.bench.offload import OffloadPlan, bench_offload
from tamis.bench.offload_cell import Cell, CellPlan, Timed
from tamis.bench.offload_step import PROVIDERS, Weights
from tamis.bench.results import Row
from tamis.bench.shapes import SHAPES
from tamis.core.errors import InvalidInput, NothingFound, TamisError
from tamis.kernels.blocks import BlockRule
from tamis.kernels.reference import offload as reference

RULE = BlockRule(top=12, first=1, local=3, block=16, window=8, stride=4, dense_tokens=0)
CPU = torch.device("cpu")


def recorded(kept: float, misses: dict[str, float] | None = None, provider: str = "own") -> Locality:
    return Locality("m", "d", provider, 8, 8, RULE, (kept, kept), misses or {"1": 0.3, "2": 0.1}, 1.0)


@pytest.fixture
def plan(tmp_path: Path) -> OffloadPlan:
    sticky = [replace(recorded(kept, provider=f"{name}-stick"), rule=replace(RULE, stick=0.5))
              for name, kept in (("own", 0.8), ("forecast", 0.7))]  # fmt: skip
    plain = [recorded(0.7), recorded(0.5, provider="forecast")]
    save(plain + sticky, str(tmp_path / "l.json"), how="by hand")
    return OffloadPlan("tiny", (512,), (2,), locality=str(tmp_path / "l.json"), rounds=3, host_gb=0.005, device="cpu")


class TestLocality:
    """Recorded and replayed."""

    @pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
    def test_a_replay_keeps_the_share(self, kept):
        lists = replay(recorded(kept), RULE, 300, list(range(992, 1002)), 70, slots=11, device=CPU)
        assert lists.shape == (10, 300, 11) and lists.dtype == torch.int32
        assert (lists[:, :, 1:] > lists[:, :, :-1]).all() and (lists >= 0).all() and lists.max() < 62
        forced = {0, 59, 60, 61}
        before = after = 0
        for a, b in zip(lists[1:], lists[:-1], strict=True):
            for row in range(0, 300, 50):
                now, then = set(a[row].tolist()) - forced, set(b[row].tolist()) - forced
                before, after = before + len(now & then), after + len(now)
        # what is new may by chance be what was there, where nothing else is drawn from
        assert abs(before / after - kept) < 0.08

    def test_forced_blocks_move_on_and_the_own_one_is_left_out(self):
        lists = replay(recorded(0.8), RULE, 3, [1007, 1008], 70, slots=11, device=CPU)
        for blocks, local in zip(lists, ({59, 60, 61}, {60, 61, 62}), strict=True):
            for row in blocks.tolist():
                assert {0} | local <= set(row)

    def test_a_larger_pool_misses_as_much_less_as_recorded(self):
        from tamis.cache.slots import SlotMap

        positions, shares = list(range(1600, 1660)), {}
        for slots in (11, 22):
            lists = replay(recorded(0.5), RULE, 60, positions, 120, slots=slots, device=CPU)
            known, missing = SlotMap(60, slots), 0
            for step, wanted in enumerate(lists):
                moves = known.place(wanted)
                missing += int(moves.missing.sum()) * (step >= 20)
            shares[slots] = missing / lists[20:].numel()
        assert 0.2 < shares[11] < 0.45 and abs(shares[22] / shares[11] - 1 / 3) < 0.12

    def test_early_tokens_have_fewer(self):
        lists = replay(recorded(0.5), RULE, 2, [5, 40, 100], 20, slots=11, device=CPU)
        assert (lists[0] == -1).all() and lists[1, 0].tolist() == [0, 1] + [-1] * 9
        assert lists[2, 0].tolist() == [0, 1, 2, 3, 4, 5] + [-1] * 5

    def test_a_model_s_choices(self, loaded, tmp_path):
        own = record(loaded, [i * 7 % 509 for i in range(600)], RULE, 64, data="numbers")
        assert [one.provider for one in own] == ["own"] and own[0].recall == 1.0
        assert len(own[0].kept) == 21 and 0 <= own[0].kept[0] <= own[0].kept_mean <= own[0].kept[-1] <= 1
        misses = list(own[0].misses.values())
        assert misses == sorted(misses, reverse=True) and misses[0] > 0
        assert own[0].returns(1.2) == 0 and own[0].returns(2.5) == pytest.approx(1 - misses[2] / misses[0])
        path = str(tmp_path / "deep" / "l.json")
        save(own, path, how="so")
        assert load(path) == own[0] and json.loads(Path(path).read_text())["how"] == "so"
        assert load_all(path) == {"own": own[0], "forecast": own[0]}
        sticky = record(loaded, [i * 7 % 509 for i in range(600)], RULE, 64, data="numbers", stick=2.0)[1]
        assert sticky.provider == "own-stick" and sticky.rule == replace(RULE, stick=2.0)
        assert sticky.misses["1"] < own[0].misses["1"] and sticky.recall < 1
        with pytest.raises(NothingFound, match="forecast"):
            load(path, "forecast")
        with pytest.raises(NothingFound, match="record-locality"):
            load(str(tmp_path / "none.json"))

    def test_a_short_text(self, loaded):
        with pytest.raises(InvalidInput, match="256 tokens or more"):
            record(loaded, list(range(200)), RULE, 64, data="numbers")


class TestBench:
    """A whole run."""

    def test_every_measure(self, plan):
        rows: list[Row] = []
        told: list[str] = []
        made = bench_offload(plan, told.append, rows.extend)
        assert made["left_out"] == {} and set(made["errors"].values()) == {0.0}
        assert told[0].startswith("no GPU is used") and told[1].startswith("checked")
        found = {(r.case, r.provider, r.metric): r for r in rows}
        cell = "tiny/512/b2/2x/l"
        for name in plan.providers:
            for metric in ("tokens_per_s", "step_ms", "bytes_moved", "hit_rate", "speedup_vs_sparse_offload",
                           "throughput_vs_resident", "throughput_vs_sparse_resident"):  # fmt: skip
                assert (cell, name, metric) in found, (name, metric)
        assert (cell, "forecast", "copy_hidden_share") in found and (cell, "infinigen", "copy_hidden_share") in found
        assert ("tiny/512/b2", "dense-offload", "tokens_per_s") in found
        assert ("tiny/512/selection", "forecast", "select_speedup") in found
        assert ("copy/all", "cpu", "gb_per_s") in found
        for provider in ("dense-resident", "sparse-resident"):
            assert ("tiny/512/resident", provider, "batch") in found
        # the same lists, the same bytes: what a layer chose late or early
        moved = [found[cell, name, "bytes_moved"].p50 for name in ("sparse-offload", "infinigen")]
        assert moved[0] == moved[1]
        assert found[cell, "forecast-stick", "bytes_moved"].p50 < found[cell, "forecast", "bytes_moved"].p50
        (case,) = [c for c in made["cases"] if c["case"] == cell]
        assert any("own, 8 tokens" in note for note in case["notes"])

    def test_a_slice_of_the_layers_is_scaled_and_said(self, plan):
        some = replace(plan, layers=1, measures=("cells",), providers=("forecast",))
        made = bench_offload(some)
        assert any("1 of 2 layers" in note for note in made["cases"][0]["notes"])
        assert made["cases"][0]["case"] == "tiny/512/b2/2x/l/1-layers"
        assert "speedup_vs_sparse_offload" not in made["cases"][0]["found"]["forecast"]

    def test_a_plan_without_a_word_on_memory_takes_little_on_a_cpu(self, plan):
        made = bench_offload(replace(plan, host_gb=None, measures=("cells",), providers=("forecast",), rounds=1))
        assert made["plan"]["host_gb"] == 0.5 and made["cases"] and not made["left_out"], "of one round, too"
        with pytest.raises(InvalidInput, match="give 64, a block, or more"):
            replace(plan, tokens=(1,))

    def test_what_does_not_fit_is_left_out(self, plan):
        made = bench_offload(replace(plan, batch=(1, 40), measures=("cells",), host_gb=0.001, kv_cap_gb=0.002))
        assert list(made["left_out"]) == ["tiny/512/b40/2x/l/host-0.001gb"] and "GB of" in str(made["left_out"])

    def test_a_provider_that_fails_leaves_the_others(self, plan, monkeypatch):
        run = Cell.run

        def broken(self, name, **given):
            if name == "infinigen":
                raise RuntimeError("no such launch")
            return run(self, name, **given)

        monkeypatch.setattr(Cell, "run", broken)
        made = bench_offload(replace(plan, measures=("cells",)))
        assert made["left_out"] == {"tiny/512/b2/2x/l/infinigen": "RuntimeError: no such launch"}
        assert "forecast" in made["cases"][0]["found"]

    def test_nothing_is_timed_where_a_step_is_wrong(self, plan, monkeypatch):
        class Wrong:
            """The reference but for one step."""

            def __getattr__(self, name):
                return getattr(reference, name)

            @staticmethod
            def fetch(pool, *, programs=0, warps=0):
                return None

        monkeypatch.setattr(module, "block_steps", lambda *_, **__: Wrong())
        kept: list[Row] = []
        with pytest.raises(TamisError, match="slots of step 0"):
            bench_offload(plan, keep=kept.extend)
        assert kept == []

    def test_only_checks(self, plan):
        made = bench_offload(replace(plan, check_only=True))
        assert made["cases"] == [] and set(made["errors"]) == set(offload_check.ALLOWED)

    def test_mistakes_are_answered(self, plan):
        with pytest.raises(InvalidInput, match="copy, resident"):
            replace(plan, measures=("copies",))
        with pytest.raises(InvalidInput, match="sparse-offload"):
            replace(plan, providers=("dense",))
        with pytest.raises(InvalidInput, match="numbers are 1 or more"):
            replace(plan, batch=(0,))
        with pytest.raises(InvalidInput, match="has experts"):
            bench_offload(replace(plan, shape="tiny-moe"))


class TestSteps:
    """What the times are of."""

    def test_all_providers_that_read_the_same_lists_give_the_same(self):
        """And reading where the blocks lie is no different: the host's memory is shared by rows, as is the resident."""
        weights = Weights(SHAPES["tiny"], 2, CPU, torch.float32)
        host = torch.randn(1 << 20).view(torch.int32)
        outs = {}
        for name, provider in PROVIDERS.items():
            locality = dict.fromkeys((p.chooser for p in PROVIDERS.values()), recorded(0.5))
            cell = Cell(CellPlan(512, 2, 11, RULE, 2, 1), weights, reference, locality, host.clone(), wide=True)
            torch.manual_seed(5)
            for t in (cell.pool.pooled, cell.pool.wide, cell.pool.ring, cell.pool.tail, cell.x):
                t.normal_()
            slots = [layer.host[layer.region.long()] for layer in cell.pool.layers] if provider.resident else []
            step = cell.step(provider, resident=slots)
            cell.pool.forget()
            made = []
            for wanted in cell.lists_of(provider)[:4]:  # no block ends meanwhile
                step.wanted.copy_(wanted)
                made.append(step.run())
            outs[name] = torch.stack(made)
        first = outs.pop("sparse-offload")
        assert all(torch.allclose(first, other, atol=1e-4, rtol=1e-4) for other in outs.values())

    def test_hidden_share(self):
        made = Timed("forecast", [5.0, 7.0, 4.0, 12.0], found_all=[5.0, 5.0, 6.0], copies=4.0)
        assert made.hidden == [1.0, 0.5, 1.0, 0.0]
        assert Timed("forecast", [5.0], found_all=[4.0]).hidden == [1.0]


@pytest.mark.parametrize("made", ["offload", "decode"])
def test_weights_larger_than_the_machine_are_refused_before_they_are_made(
    made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tamis.bench import machine
    from tamis.bench.decode_token import Layers
    from tamis.bench.offload_step import Weights
    from tamis.bench.shapes import shape_of
    from tamis.core.errors import Unavailable

    monkeypatch.setattr(machine.os, "sysconf", lambda name: 1 << 10)  # a megabyte
    kind = Weights if made == "offload" else Layers
    with pytest.raises(Unavailable, match="2 layers' weights take 5 GB and this machine has 0 GB"):
        kind(shape_of("qwen2.5-14b"), 2, torch.device("cpu"), torch.float32)
