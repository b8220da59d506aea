"""The kernels of block decoding against the reference: interpreted on a CPU, and on a GPU with streams and graphs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreted_offload import ATTEND, ATTEND_WRONG, MUTATIONS, PREFILL, STEPS, TIES, WANTED
from offload_cases import Case, attend_errors, kept, moved, piece_errors, prefill_errors, selection_error, tied, walk

from tamis.cache.slots import SlotMap
from tamis.core.errors import InvalidInput, Unavailable, UnknownName
from tamis.kernels.block_pool import BlockPool, PoolRoom
from tamis.kernels.blocks import COARSE, BlockRule
from tamis.kernels.blocks_dispatch import block_steps, copied_by
from tamis.kernels.reference import offload as reference

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    """Errors of every interpreted case; one process for all of them."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(here / "interpreted_offload.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {row.pop("case"): row for row in map(json.loads, done.stdout.splitlines())}


def right(found: dict[str, float], dtype: torch.dtype) -> bool:
    return kept({name: value for name, value in found.items() if name != "copies"}, dtype)


@needs_triton
class TestInterpreted:
    """On a CPU, by Triton's interpreter."""

    @pytest.mark.parametrize("name", STEPS)
    def test_steps(self, interpreted, name):
        case, _, forget = STEPS[name]
        found = interpreted[f"steps, {name}"]
        assert right(found, case.dtype), found
        assert found["copies"] == 16 or not forget

    @pytest.mark.parametrize("name", WANTED)
    def test_slots_and_copies(self, interpreted, name):
        found = interpreted[f"wanted, {name}"]
        assert right(found, torch.float32), found
        assert found["copies"] == 4 * WANTED[name][1]  # of four rows

    @pytest.mark.parametrize("name", TIES)
    def test_selection(self, interpreted, name):
        assert interpreted[f"selection, {name}"] == {"wrong": 0}

    @pytest.mark.parametrize("name", PREFILL)
    def test_prefill(self, interpreted, name):
        found = interpreted[f"prefill, {name}"]
        exact = PREFILL[name][2].get("dtype", torch.float32) == torch.float32
        assert found["seen"] == found["selection"] == 0 and found["scores"] < (1e-5 if exact else 5e-3), found

    @pytest.mark.parametrize("name", ATTEND)
    def test_prefill_attention(self, interpreted, name):
        exact = ATTEND[name][2].get("dtype", torch.float32) == torch.float32
        assert interpreted[f"attend, {name}"]["out"] < (1e-6 if exact else 2e-3), interpreted[f"attend, {name}"]

    @pytest.mark.parametrize("name", ATTEND_WRONG)
    def test_wrong_blocks_would_be_noticed(self, interpreted, name):
        assert interpreted[name]["out"] > 1e-2

    def test_pieces(self, interpreted):
        assert max(interpreted["pieces"].values()) < 1e-6, interpreted["pieces"]

    @pytest.mark.parametrize("name", MUTATIONS)
    def test_a_broken_kernel_would_be_noticed(self, interpreted, name):
        found = interpreted[name]
        if "wrong" in found:
            assert found["wrong"] > 0.1
        elif "seen" in found:
            assert found["scores"] > 0.05
        else:
            assert not right(found, torch.float16) and found["out"] > 0.1


class TestReference:
    """What the kernels are compared with, and who may run."""

    def test_slots_are_those_of_the_slot_map(self):
        """Stress: a thousand random steps, two rows, as `cache.slots` has them."""
        case = Case(tokens=(190,), slots=6)
        pool, known = case.pool(), SlotMap(2, 6)
        draw = torch.Generator().manual_seed(0)
        for step in range(1000):
            n = int(torch.randint(0, 6, (1,), generator=draw))
            wanted = torch.full((2, 5), -1, dtype=torch.int32)
            for row in range(2):
                wanted[row, :n] = torch.randperm(11, generator=draw)[:n].int()
            forget = step % 97 == 0
            if forget:
                pool.forget()
            pool.count.zero_()
            reference.place(pool, wanted)
            moves = known.place(wanted, forget=forget)
            assert torch.equal(pool.place.long(), moves.slot) and torch.equal(pool.held.long(), known.held)
            assert int(pool.count) == int(moves.missing.sum())
            reference.fetch(pool)
            for row in range(2):
                blocks = pool.host[int(pool.region[row])][wanted[row, :n].long()]
                assert torch.equal(pool.slots[row][pool.place[row, :n].long()], blocks)
        known.check()

    @pytest.mark.parametrize("wide", [False, True])
    def test_tokens_one_by_one_are_the_keys_pooled_at_once(self, wide):
        from tamis.kernels.reference.blocks import pool_keys

        case = Case(tokens=(150,), wide=wide)
        draw = torch.Generator().manual_seed(0)
        keys = case.normal(draw, 150, 1, 2, 16)[:, 0].transpose(0, 1)
        pool = case.pool()
        for table, times in ((pool.pooled, 1), (pool.wide, COARSE)):
            if table is not None:
                expected = pool_keys(keys, 8 * times, 4 * times)
                assert torch.allclose(table[:, : expected.shape[1]], expected, atol=1e-6)

    def test_evicted_at_every_step_is_resident_to_the_last_bit(self):
        case = Case(slots=9)
        steps = zip(walk(case, reference, 20), walk(case, reference, 20, forget=True), strict=True)
        assert all(torch.equal(a["out"], b["out"]) for a, b in steps)

    def test_who_runs(self, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        like = torch.zeros(2, 64)
        assert block_steps(like) is reference
        with pytest.raises(Unavailable, match="cpu"):
            block_steps(like, kernel="triton")
        with pytest.raises(UnknownName, match="reference"):
            block_steps(like, kernel="refrence")
        assert copied_by(64 << 10, captured=False) == "kernel" == copied_by(1 << 20, captured=True)
        assert copied_by(1 << 20, captured=False) == "engine"

    def test_mistakes_are_answered(self):
        rule = BlockRule(top=6, local=2)
        with pytest.raises(InvalidInput, match="5 blocks"):
            PoolRoom(1, 1, 2, 16, 8, 4, rule)
        with pytest.raises(InvalidInput, match="regions is 9"):
            PoolRoom(1, 1, 2, 16, 8, 5, rule, regions=9)
        with pytest.raises(InvalidInput, match="layers is 0"):
            PoolRoom(0, 1, 2, 16, 8, 5, rule)

    def test_bytes(self):
        room = PoolRoom(2, 3, 2, 16, 8, 7, BlockRule(top=6, local=2), wide=True)
        pool = BlockPool(room, dtype=torch.float16, device="cpu")
        assert pool.wide is not None
        kept_there = pool.slots.nbytes + pool.tail.nbytes + pool.pooled.nbytes + pool.wide.nbytes
        assert room.device_bytes() == kept_there and room.host_bytes() == pool.host.nbytes


MINICPM = Case((9000, 8191), 32, 2, 128, 145, 95, BlockRule(dense_tokens=0), True, BF16)
GPU = {
    "MiniCPM4.1-8B": MINICPM,
    "Llama-3.1-8B": Case((700, 6300), 32, 8, 128, 100, 190, BlockRule(24, 1, 8, dense_tokens=0), True, BF16),
    "head dim 64, fp16": Case((700, 1999), 14, 2, 64, 40, 30, BlockRule(16, 1, 4, dense_tokens=0), False,
                              torch.float16),
    "fp32": Case((150, 61)),
}  # fmt: skip


def filled(case: Case):
    """A pool on the GPU of random numbers, and the same for the reference; appending so many tokens takes too long."""
    pool = BlockPool(case.room, dtype=case.dtype, device="cuda").layers[0]
    for t in (pool.slots, pool.tail, pool.ring, pool.pooled, pool.host, *([pool.wide] if case.wide else [])):
        t.copy_(torch.randn(t.shape))
    return pool, moved(pool, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU.values(), ids=GPU)
class TestOnAGpu:
    """The kernels compiled, at real sizes."""

    @pytest.mark.parametrize("mode", ["own", "raw"])
    def test_steps(self, case, mode):
        from tamis.kernels.triton import blocks

        ours, theirs = filled(case)
        positions = torch.tensor(case.tokens, dtype=torch.int32, device="cuda")
        out = torch.empty((len(ours.stamp), case.room.width), dtype=torch.int32, device="cuda")
        for _ in range(4):
            k, v, f = (torch.randn(2, case.kv_heads, case.dim, device="cuda").to(case.dtype) for _ in range(3))
            q = torch.randn(2, case.heads, case.dim, device="cuda").to(case.dtype)
            x, scale = (q, 0.1) if mode == "own" else (f, None)
            made, expected = (m.scores(x, ours, positions, scale=scale, lag=1) for m in (blocks, reference))
            seen = expected > -torch.inf
            assert torch.equal(seen, made > -torch.inf)
            assert float((made[seen] - expected[seen]).norm() / expected[seen].norm()) < 1e-2
            blocks.select(made, positions, case.rule, out)
            assert torch.equal(out, reference.select(made, positions, case.rule, torch.empty_like(out)))
            for module, pool in ((blocks, ours), (reference, theirs)):
                module.append(pool, k, v, positions)
                pool.count.zero_()
                module.place(pool, out)
                module.fetch(pool)
            torch.cuda.synchronize()
            for name in ("held", "used", "place", "count", "slots", "tail", "ring", "host"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
            args = (q, ours.slots, ours.place, ours.tail, positions)
            made, expected = (m.attend(*args, scale=0.1).float() for m in (blocks, reference))
            assert float((made - expected).norm() / expected.norm()) < 2e-2
            positions += 1

    def test_evicted_at_every_step_is_resident_to_the_last_bit(self, case):
        from tamis.kernels.triton import blocks

        pool, _ = filled(case)
        everything = pool.host.to("cuda")  # a region is a row's
        positions = torch.tensor(case.tokens, dtype=torch.int32, device="cuda")
        draw = torch.Generator().manual_seed(0)
        for _ in range(20):
            wanted = torch.full((len(pool.stamp), case.room.width), -1, dtype=torch.int32)
            for row in range(len(wanted)):
                n = int(torch.randint(1, min(case.room.width, case.n_blocks) + 1, (1,), generator=draw))
                wanted[row, :n] = torch.randperm(case.n_blocks, generator=draw)[:n].sort().values.int()
            wanted = wanted.to("cuda")
            pool.forget()
            pool.count.zero_()
            blocks.place(pool, wanted)
            blocks.fetch(pool)
            q = torch.randn(2, case.heads, case.dim, device="cuda").to(case.dtype)
            made = blocks.attend(q, pool.slots, pool.place, pool.tail, positions, scale=0.1)
            assert torch.equal(made, blocks.attend(q, everything, wanted, pool.tail, positions, scale=0.1))

    def test_nothing_waits_for_the_host(self, case):
        from tamis.kernels.triton import blocks

        pool, _ = filled(case)
        positions = torch.tensor(case.tokens, dtype=torch.int32, device="cuda")
        out = torch.empty((len(pool.stamp), case.room.width), dtype=torch.int32, device="cuda")
        q, k = (torch.randn(2, n, case.dim, device="cuda").to(case.dtype) for n in (case.heads, case.kv_heads))

        def step():
            blocks.append(pool, k, k, positions)
            blocks.select(blocks.scores(q, pool, positions, scale=0.1), positions, case.rule, out)
            pool.count.zero_()
            blocks.place(pool, out)
            blocks.fetch(pool)
            return blocks.attend(q, pool.slots, pool.place, pool.tail, positions, scale=0.1)

        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
class TestGpuMore:
    """What no case above can show."""

    @pytest.mark.parametrize("name", TIES)
    def test_ties(self, name):
        from tamis.kernels.triton import blocks

        n, levels, positions, rule = TIES[name]
        at = torch.tensor(positions, device="cuda")
        assert selection_error(blocks, tied(6, n, levels).to("cuda"), at, rule) == 0

    def test_sticking(self):
        from tamis.kernels.block_pool import NEVER
        from tamis.kernels.triton import blocks

        rule, positions = BlockRule(stick=0.5, recent=2), torch.tensor([100_000, 131_070], device="cuda")
        last = torch.full((2, 64, 2050), NEVER, dtype=torch.int32, device="cuda")
        out = torch.empty((2, 64, 95), dtype=torch.int32, device="cuda")
        values = torch.randn(64, 2050, device="cuda")
        for _ in range(5):
            values += 0.3 * torch.randn(64, 2050, device="cuda")
            for module, i in ((blocks, 0), (reference, 1)):
                module.select(values, positions, rule, out[i], last[i])
            assert torch.equal(out[0], out[1]) and torch.equal(last[0], last[1])
            plain = reference.select(values, positions, rule, torch.empty_like(out[0]))
            positions += 1
        assert not torch.equal(out[0], plain)

    def test_pieces(self):
        found = piece_errors(64, 4096, 14336, (42, 2, 128), dtype=BF16, device="cuda")
        assert max(found.values()) < 1e-2, found

    @pytest.mark.parametrize("given", [{"own": False}, {}, {"wide": True}], ids=["raw", "own", "wide"])
    def test_prefill(self, given):
        from tamis.kernels.triton import blocks

        rule = BlockRule(top=24, local=8, dense_tokens=0)
        for together in (1, 8, 32):
            args = (blocks, 3000, 1500, replace(rule, together=together))
            found = prefill_errors(*args, heads=(32, 2), dim=128, dtype=BF16, device="cuda", **given)
            assert found["seen"] == found["selection"] == 0 and found["scores"] < 1e-2, (together, found)

    @pytest.mark.parametrize("heads", [(32, 2), (32, 8), (12, 2), (40, 8), (5, 5)])
    @pytest.mark.parametrize("dim", [64, 128, 256])
    def test_prefill_attention(self, heads, dim):
        from tamis.kernels.triton import blocks

        rule = BlockRule(top=24, local=8, dense_tokens=0)
        for together in (1, 4, 32):
            for first in (0, 1487):
                args = (blocks, 3000, first, replace(rule, together=together))
                found = attend_errors(*args, heads=heads, dim=dim, dtype=BF16, device="cuda")
                assert found["out"] < 1e-2, (together, first, found)
        assert (
            attend_errors(blocks, 3000, 0, rule, heads=heads, dim=dim, dtype=BF16, device="cuda", wrong="later")["out"]
            > 3e-2
        )

    def test_copies_of_odd_blocks_and_every_number_of_programs(self):
        from tamis.kernels.triton.offload_move import copy_blocks

        for words in (3 << 10, 8 << 10, 1 << 10, 96):
            host = torch.randint(1 << 30, (300 * words,), dtype=torch.int32).pin_memory()
            slots = torch.zeros(200 * words, dtype=torch.int32, device="cuda")
            tasks = torch.stack([torch.randperm(300)[:150], torch.randperm(200)[:150]], -1).int().to("cuda")
            for n in (150, 1, 0):
                count = torch.tensor([n], dtype=torch.int32, device="cuda")
                for programs in (1, 3, 8, 32):
                    slots.zero_()
                    copy_blocks(host, slots, tasks, count, words, programs=programs)
                    expected = torch.zeros_like(slots).view(200, words)
                    some = tasks[:n].long().cpu()
                    expected[some[:, 1].to("cuda")] = host.view(300, words)[some[:, 0]].to("cuda")
                    assert torch.equal(slots.view(200, words), expected), (words, n, programs)

    def test_the_copy_engine_and_the_device_s_own_view_do_the_same(self):
        from tamis.kernels.copy_engine import copy_tasks, device_view
        from tamis.kernels.triton.offload_move import copy_blocks

        host = torch.randn(64, 2, 64, 128).to(BF16).pin_memory()
        tasks = torch.stack([torch.randperm(64)[:40], torch.randperm(50)[:40]], -1).int().to("cuda")
        count = torch.tensor([40], dtype=torch.int32, device="cuda")
        slots = torch.zeros(3, 50, 2, 64, 128, dtype=BF16, device="cuda")
        copy_tasks(host, slots[0], tasks, count)
        copy_blocks(device_view(host), slots[1].flatten().view(torch.int32), tasks, count, 8192)
        copy_blocks(host.flatten().view(torch.int32), slots[2].flatten().view(torch.int32), tasks, count, 8192)
        assert torch.equal(slots[0], slots[2]) and torch.equal(slots[1], slots[2])
        assert bool(slots[0].any())

    def test_a_graph_of_two_streams_is_the_step_without_one(self):
        """All providers; lists and positions change between replays, and every step's logits are compared."""
        from tamis.bench.clock import graphed
        from tamis.bench.locality import Locality
        from tamis.bench.offload_cell import Cell, CellPlan
        from tamis.bench.offload_step import PROVIDERS, Weights
        from tamis.bench.shapes import Shape
        from tamis.kernels.triton import blocks

        shape = Shape("llama", 4, 512, 1024, 8, 2, 64, 512, 10000.0)
        rule = BlockRule(top=12, first=1, local=3, dense_tokens=0)
        weights = Weights(shape, 4, torch.device("cuda"), BF16)
        one = Locality("none", "none", "own", 1, 1, rule, (0.2, 0.6, 0.9), {"1": 0.3, "2": 0.1}, 1.0)
        host = torch.randn(4 << 20).to(BF16).pin_memory().view(torch.int32)
        plan = CellPlan(1600, 3, 16, rule, 12, 8)
        known = {}
        for name, provider in PROVIDERS.items():
            if provider.resident:
                continue
            recorded = dict.fromkeys((p.chooser for p in PROVIDERS.values()), one)
            cell = Cell(plan, weights, blocks, recorded, host, wide=True)
            torch.manual_seed(1)
            for t in (cell.pool.pooled, cell.pool.wide, cell.pool.ring, cell.pool.tail, cell.x):
                t.normal_()
            start = {n: getattr(cell.pool, n).clone() for n in ("pooled", "wide", "ring", "tail")}
            whole = cell.pool.host.clone()
            outs = {}
            for kind in ("plain", "graph"):
                step, made = cell.step(provider), []

                def run(step=step, made=made):
                    made[:] = [step.run()]

                replay = graphed(run, warm=1) if kind == "graph" else run
                cell.pool.host.copy_(whole)
                for n, t in start.items():
                    getattr(cell.pool, n).copy_(t)
                cell.pool.forget()
                step.positions.fill_(plan.positions[0])
                for wanted in cell.lists[provider.chooser]:
                    step.wanted.copy_(wanted)
                    replay()
                    outs.setdefault(kind, []).append(made[0].clone())
            assert all(torch.equal(a, b) for a, b in zip(outs["plain"], outs["graph"], strict=True)), name
            known[name] = outs["graph"][-1]
        first = known.pop("sparse-offload")
        # all read the same lists; their products have other widths and may round differently
        assert all(float((other - first).norm() / first.norm()) < 0.05 for other in known.values())
