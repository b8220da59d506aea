"""The self-indexing Triton kernels against the reference: interpreted on a CPU, compiled for sm_90, run on a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from sass import disassemble
from selfindex_cases import MUTATIONS, SCENES, Scene, broken, errors, expected, make, run, within

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    """Errors of every interpreted case; one process for all of them."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(here / "interpreted_selfindex.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {row.pop("case"): row for row in map(json.loads, done.stdout.splitlines())}


class TestInterpreted:
    """On a CPU, by Triton's interpreter."""

    @pytest.mark.parametrize("name", SCENES)
    def test_steps(self, interpreted, name):
        assert within(interpreted[name], SCENES[name].dtype), interpreted[name]

    @pytest.mark.parametrize("kind", MUTATIONS)
    def test_a_broken_kernel_would_be_noticed(self, interpreted, kind):
        assert not within(interpreted[kind], torch.float16)
        assert interpreted[kind]["row"] > 0.1

    def test_exactly_the_best_are_chosen(self, interpreted):
        found = {name: row for name, row in interpreted.items() if name.startswith("selection")}
        assert len(found) == 4
        assert all(row == {"wrong": 0, "hidden": 0} for row in found.values()), found

    def test_compression(self, interpreted):
        found = {name: row for name, row in interpreted.items() if name.startswith("compress")}
        assert len(found) == 3
        assert all(share < 2e-3 for row in found.values() for share in row.values()), found
        assert all(row["codes"] == 0 for row in found.values()), found

    def test_what_is_no_number_stays_where_it_is(self, interpreted):
        row = interpreted["not a number"]
        assert row.pop("spoilt") == row.pop("chosen") == 1
        assert within(row, torch.float32)

    def test_append(self, interpreted):
        assert interpreted["append"] == {"wrong": 0}

    def test_note(self, interpreted):
        assert interpreted["note"]["wrong"] < 1e-5


BF16 = torch.bfloat16
GPU_SCENES = {
    "8B model": Scene((((8000, 0, 64), (700, 8000, 12)),) * 2, (96, 60), 650, (32, 8), 128, dtype=BF16),
    "8B model, fp16": Scene((((5000, 77, 64),),), (3,), 400, (32, 8), 128, dtype=torch.float16, split=128),
    "head dim 64": Scene((((3000, 0, 64), (300, 9000, 1)),), (33,), 300, (14, 2), 64, dtype=BF16),
    "many parts": Scene((tuple((100 + 31 * i, 997 * i, 2) for i in range(12)),), (9,), 200, (32, 8), 128,
                        dtype=BF16),
    "everything": Scene((((3000, 5, 64),),), (1,), 10_000, (8, 2), 128, dtype=BF16),
}  # fmt: skip


@pytest.mark.gpu
class TestOnAGpu:
    """At real sizes, compiled."""

    @pytest.mark.parametrize("name", GPU_SCENES)
    def test_steps(self, name):
        scene = GPU_SCENES[name]
        q, arena = make(scene, device="cuda")
        found = errors(run(q, arena, scene, "triton"), expected(q, arena, scene))
        assert within(found, scene.dtype), found

    @pytest.mark.parametrize("kind", MUTATIONS)
    def test_a_broken_kernel_would_be_noticed(self, kind):
        scene = GPU_SCENES["8B model"]
        q, arena = make(scene, device="cuda")
        right = expected(q, arena, scene)
        broken(kind, arena)
        assert not within(errors(run(q, arena, scene, "triton"), right), scene.dtype)

    def test_runs_are_the_same_bit_for_bit(self):
        scene = GPU_SCENES["8B model"]
        q, arena = make(scene, device="cuda")
        outs = [run(q, arena, scene, "triton")[0] for _ in range(5)]
        assert all(torch.equal(out, outs[0]) for out in outs)

    def test_a_captured_graph_follows_tokens_and_counts(self):
        from tamis.kernels.selfindex_dispatch import selfindex_append, selfindex_decode
        from tamis.kernels.selfindex_workspace import Workspace

        scene = GPU_SCENES["8B model"]
        q, arena = make(scene, device="cuda")
        work = Workspace.reserve(arena, 32, 800)
        count = torch.tensor([10, 20], dtype=torch.int32, device="cuda")
        k, v = (torch.randn(2, 8, 1, 128, device="cuda", dtype=BF16) for _ in range(2))

        def step():
            selfindex_append(arena, k, v)
            return selfindex_decode(q, arena, count=count, scale=scene.dim**-0.5, work=work, kernel="triton")

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = step()
        for n in (10, 650, 3):
            count.fill_(n)
            k.normal_()
            graph.replay()
            right = selfindex_decode(q, arena, count=n, scale=scene.dim**-0.5, kernel="reference")
            assert within(errors(made, right), scene.dtype), n


POINTERS = {
    "*i32": "codes residuals live part_of slots n_parts tally count chosen n_chosen n_exact key_scales value_scales",
    "*fp32": "lut span bias cos sin part part_top part_den lse",
    "*bf16": "q turned spread spreads mean centroids weight value_scale value_mean whole_keys whole_values out",
    "*u8": "order coded", "*i64": "open_end", "*i16": "keys", "fp32": "scale",
}  # fmt: skip


def compiled(kernel, constants, *, warps: int, registers: int | None = None, **kinds: str):
    """A kernel for sm_90; pointers and strides are multiples of 16, as they are in use."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kind = {name: k for k, names in POINTERS.items() for name in names.split()} | kinds
    signature = {n: "constexpr" if n in constants else kind.get(n, "i32") for n in kernel.arg_names}
    aligned = [
        n
        for n, k in signature.items()
        if k.startswith("*") or n in ("N", "W", "T", "MOST") or n.endswith(("_batch", "_head", "_row", "_token"))
    ]
    hints = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    options = {"num_warps": warps, "maxnreg": registers}
    return triton.compile(
        ASTSource(kernel, signature, constants, hints), target=GPUTarget("cuda", 90, 32), options=options
    )


class TestCompiled:
    """For sm_90, and what their machine code must not have."""

    @pytest.mark.parametrize("groups", [16, 32])
    def test_look_ups_stay_in_their_thread(self, groups, tmp_path):
        from tamis.kernels.triton.selfindex_score import score_kernel

        code = disassemble(
            compiled(score_kernel, {"G": groups, "BN": 128, "PER": 512, "ITERS": 4, "PP": 1}, warps=4).asm["cubin"],
            tmp_path,
        )
        counts = Counter(op.name.partition(".")[0] for op in code)
        assert counts["LDG"] >= 4 * groups
        assert counts["STS"] + counts["LDS"] <= 12, "an index went through shared memory on its way to its table"
        assert not counts["STL"]

    @pytest.mark.parametrize(
        ("groups", "warps", "records", "registers"), [(32, 1, 32, None), (32, 4, 64, 168), (16, 1, 32, None)]
    )
    def test_attention(self, groups, warps, records, registers, tmp_path):
        from tamis.kernels.triton.selfindex_attend import attend_kernel

        constants = {"GH": 4, "D": 4 * groups, "G": groups, "BM": 16, "BN": records, "BW": 32, "PER": 512,
                     "SB": groups // 8, "PRECISION": "tf32"}  # fmt: skip
        scales = "*i32" if groups == 32 else "*i16"
        made = compiled(attend_kernel, constants, warps=warps, registers=registers, centroids="*i64", values="*i32",
                        key_scales=scales, value_scales=scales)  # fmt: skip
        code = Counter(op.name.partition(".")[0] for op in disassemble(made.asm["cubin"], tmp_path))
        spilled = 160 if warps == 1 else 64  # one warp has the query of all planes, and no others to fill a wait
        assert code["STL"] + code["LDL"] <= spilled and made.metadata.shared <= 48 << 10

    def test_the_rest(self):
        from tamis.kernels.triton import (
            selfindex_attend,
            selfindex_compress,
            selfindex_decode,
            selfindex_note,
            selfindex_score,
            selfindex_select,
        )

        dims = {"GH": 4, "GP": 4, "D": 128, "G": 32, "RH": 64, "TP": 1024}
        compiled(selfindex_score.prepare_kernel, dims, warps=4)
        compiled(selfindex_select.refine_kernel, {"BN": 2048}, warps=8)
        compiled(selfindex_select.compact_kernel, {"BN": 2048, "CP": 32}, warps=8)
        compiled(selfindex_attend.combine_kernel, {"D": 128, "BS": 16}, warps=2)
        whole = dict.fromkeys(("keys", "values", "kept_keys", "kept_values", "queries"), "*bf16")
        whole |= {"energy": "*fp32", "weight": "*fp32", "there": "*i32"}
        compiled(selfindex_note.note_kernel, {"H": 8, "HP": 8, "GH": 4, "D": 128}, warps=4, **whole)
        bytes_ = dict.fromkeys(("codes", "residuals", "key_scales", "value_scales"), "*u8")
        compiled(
            selfindex_compress.kernel, {"G": 32, "SB": 4, "BT": 32}, warps=4, keys="*bf16", values="*bf16", **bytes_
        )
        kept = dict.fromkeys(("keys", "values", "kept_keys", "kept_values"), "*bf16")
        compiled(selfindex_decode.append_kernel, {"H": 8, "HP": 8, "D": 128}, warps=4, **kept)
