"""The paged kernels against dense attention over keys re-rotated into place: reference, CPU, and Triton both ways."""

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
from interpreted_paged import MUTATIONS, broken, decode, packed, prefill
from paged_cases import Prompt, Scene, Shape, flipped, make, right, share_of_bound, turn, within, worst
from paged_shapes import BF16, DECODE, GPU_DECODE, GPU_PREFILL, PACKED, PREFILL

from tamis.core.errors import InvalidInput, Unavailable, UnknownName
from tamis.kernels import paged_dispatch
from tamis.kernels.paged_dispatch import paged_attention, paged_decode
from tamis.kernels.reference import paged as reference
from tamis.model.rope import Rotary

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
CASES = {f"prefill {n}": s for n, s in PREFILL.items()} | {f"decode {n}": s for n, s in DECODE.items()}
CASES |= dict.fromkeys(("decode long splits", "half a page a step", "strided", "lists of each head"), DECODE["step"])


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
class TestOnACpu:
    """The truth of the kernels, and the path of a machine without a GPU."""

    @pytest.mark.parametrize("name", PREFILL)
    def test_prompts(self, kernel, name):
        found = prefill(make(PREFILL[name]), kernel)
        assert within(found, PREFILL[name].dtype), found

    @pytest.mark.parametrize("name", DECODE)
    def test_decode_steps(self, kernel, name):
        found = decode(make(DECODE[name]), kernel)
        assert within(found, DECODE[name].dtype), found

    @pytest.mark.parametrize("kind", MUTATIONS)
    @pytest.mark.parametrize(("run", "shape"), [(prefill, PREFILL["mixed"]), (decode, DECODE["step"])])
    def test_a_broken_kernel_would_be_noticed(self, kernel, kind, run, shape):
        found = run(broken(kind, make(shape)), kernel)
        assert not within(found, torch.float32)
        assert found["row"] > 0.1

    def test_lists_of_each_head(self, kernel):
        scene = make(PREFILL["mixed"])
        mask = torch.rand((4, 2, len(scene.tiles[0].table))) < 0.6
        mask[:, :, 0] = True
        args = scene.q[0], scene.keys, scene.values, scene.tiles[0]
        made = paged_attention(*args, scene.lists(mask=mask), scale=scene.shape.scale, kernel=kernel)
        for h in range(4):
            alone = scene.lists(mask=mask[h : h + 1])
            out, lse = paged_attention(*args, alone, scale=scene.shape.scale, kernel="reference")
            assert torch.allclose(made[0][h], out[h], atol=1e-6)
            assert torch.allclose(made[1][h], lse[h], atol=1e-6)

    @pytest.mark.parametrize("name", ["holes", "needle"])
    def test_bfloat16(self, kernel, name):
        shape = replace(PREFILL[name], dtype=torch.bfloat16)
        assert within(prefill(make(shape), kernel), torch.bfloat16)


NEEDLE = replace(PREFILL["needle"], dim=128, dtype=BF16)


class TestRounding:
    """What rounding the turned query to its dtype costs."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_is_bounded_by_the_norms(self, dtype):
        scene = make(replace(NEEDLE, dtype=dtype))
        args = scene.q[0], scene.keys, scene.values, scene.tiles[0], scene.lists()
        made, plain = (reference.paged_attention(*args, scale=NEEDLE.scale, rounded=r) for r in (True, False))
        share = share_of_bound(made, scene, 0)
        assert 0.005 < share["share rms"] < 0.06 and share["share"] < 0.4, share
        assert not within(worst(made, scene.expected[0]), dtype), "the rounding shows"
        assert within(worst(plain, scene.expected[0]), dtype)
        assert share_of_bound(plain, scene, 0)["share"] == 0

    @pytest.mark.parametrize("fault", ["angles in bfloat16", "products rounded"])
    def test_more_of_it_would_be_noticed(self, fault, monkeypatch):
        scene = make(NEEDLE)
        tiles = scene.tiles[0]
        args = scene.q[0], scene.keys, scene.values
        expected = reference.paged_attention(*args, tiles, scene.lists(), scale=NEEDLE.scale, rounded=True)
        if fault == "angles in bfloat16":
            tiles = replace(tiles, cos=tiles.cos.to(BF16).float(), sin=tiles.sin.to(BF16).float())
        else:
            back = reference.turned_back
            monkeypatch.setattr(reference, "turned_back", lambda q, *where: back(q.to(BF16), *where))
        made = reference.paged_attention(*args, tiles, scene.lists(), scale=NEEDLE.scale, rounded=True)
        assert not within(worst(made, (expected[0].double(), expected[1].double())), BF16)

    def test_changes_nothing_in_float32_or_where_nothing_is_turned(self):
        for shape in (PREFILL["mixed"], replace(PREFILL["ALiBi"], dtype=BF16)):
            scene = make(shape)
            args = scene.q[0], scene.keys, scene.values, scene.tiles[0], scene.lists()
            made, plain = (reference.paged_attention(*args, scale=shape.scale, rounded=r) for r in (True, False))
            assert torch.equal(made[0], plain[0]) and torch.equal(made[1], plain[1])

    @pytest.mark.parametrize("longer", [1, 8])
    def test_costs_what_a_re_rotated_copy_costs(self, longer):
        draw, dim, offset = torch.Generator().manual_seed(0), 128, torch.tensor([20_000])
        frequencies = 5e5 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        q, k = (torch.randn((n, dim), generator=draw).to(BF16).double() for n in (300, 1000))
        k[:4] *= longer
        moved = turn(k, offset, frequencies)
        exact = q @ moved.T
        turned = turn(q, -offset, frequencies).to(BF16).double() @ k.T
        copied = q @ moved.to(BF16).double().T
        norms = q.norm(dim=-1)[:, None] * k.norm(dim=-1)
        ours, theirs = (float(((s - exact) / norms).square().mean().sqrt()) * dim**0.5 for s in (turned, copied))
        assert ours == pytest.approx(theirs, rel=0.05)
        assert ours == pytest.approx(0.42 * 2**-8, rel=0.05)
        assert float(((turned - exact) / norms).abs().max()) < 2**-8


@pytest.mark.parametrize("seed", range(4))
def test_random_offsets_up_to_a_million(seed):
    draw = torch.Generator().manual_seed(seed)
    high = [200_000, 131_072, 1_000_000, 3_000_000][seed]
    at = torch.randint(0, high // 4, (4,), generator=draw).add(200).cumsum(0).tolist()
    parts = (*((name, 60 + 17 * i, at[i]) for i, name in enumerate("abc")), ("a", 60, at[3]))
    end = at[3] + 60
    shape = Shape((Prompt((*parts, ("own", 9, end)), tuple(range(end, end + 9))),), (4, 2), 64)
    found = prefill(make(shape, seed=seed), "reference")
    assert within(found, torch.float32), found


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn"},
        {"rope_type": "linear"},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_scaled_frequencies_of_a_model(tiny_model, kernel, scaling):
    rope = {"rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 1024} | scaling
    rotary = Rotary.of(tiny_model("llama", rope_parameters=rope))
    shape = replace(PREFILL["far"], frequencies=tuple(rotary.inv_freq.tolist()))
    scene = make(shape)
    cos, sin = rotary.angles(torch.tensor([131_072, 1_000_000]))
    assert torch.equal(scene.tiles[0].cos, cos)
    assert torch.equal(scene.tiles[0].sin, sin)
    assert within(prefill(scene, kernel), torch.float32)


def test_permuted_documents_change_nothing_but_offsets():
    # the same tables with documents' rows exchanged in the lists: the sum over disjoint keys has no order
    scene = make(PREFILL["mixed"])
    lists = scene.lists()
    args = scene.q[0], scene.keys, scene.values
    out, lse = paged_attention(*args, scene.tiles[0], lists, scale=scene.shape.scale, kernel="cpu")
    table = scene.tiles[0].table
    other = replace(scene.tiles[0], table=table.flip(0))
    shuffled = replace(scene, tiles=[other]).lists()
    out2, lse2 = paged_attention(*args, other, shuffled, scale=scene.shape.scale, kernel="cpu")
    assert torch.allclose(out, out2, atol=1e-6)
    assert torch.allclose(lse, lse2, atol=1e-6)
    # and a prompt whose documents change places is what dense attention at the changed positions gives
    a, b, own = ("a", 64, 5), ("b", 40, 69), ("own", 30, 109)
    swapped = (("b", 40, 5), ("a", 64, 45), own)
    for parts in ((a, b, own), swapped):
        assert within(prefill(make(Shape((Prompt(parts, tuple(range(109, 139))),))), "cpu"), torch.float32)


def test_a_page_is_read_by_two_offsets_at_once():
    tiles = make(PREFILL["mixed"]).tiles[0].table
    pages, counts = tiles[:, 0].unique(return_counts=True)
    assert len(pages) < len(tiles)
    assert int(counts.max()) == 2


class TestDispatch:
    """Choice and refusal."""

    def scene(self) -> Scene:
        return make(PREFILL["first at offset 0"])

    def test_auto_on_a_cpu(self):
        scene = self.scene()
        assert next(n for n, why in paged_dispatch.reasons(scene.q[0], scene.keys).items() if why is None) == "cpu"
        assert within(prefill(scene, "auto"), torch.float32)

    def test_asked_for_and_missing(self):
        if torch.cuda.is_available():
            pytest.skip("a GPU is there")
        with pytest.raises(Unavailable, match="tensors are on cpu"):
            prefill(self.scene(), "triton")
        with pytest.raises(UnknownName, match="reference"):
            prefill(self.scene(), "referense")

    def test_out_is_written(self):
        scene = self.scene()
        out = torch.empty_like(scene.q[0])
        args = scene.q[0], scene.keys, scene.values, scene.tiles[0], scene.lists()
        made = paged_attention(*args, scale=scene.shape.scale, out=out)
        assert made[0] is out
        assert within(worst(made, scene.expected[0]), torch.float32)

    def test_what_no_kernel_may_be_given(self):
        scene = self.scene()
        q, k, v, tiles, lists = scene.q[0], scene.keys, scene.values, scene.tiles[0], scene.lists()
        scale = scene.shape.scale
        for args, words in (
            ((q, k[:, :2], v[:, :2], tiles, lists), "must be a multiple"),
            ((q[:, :3], k, v, tiles, lists), "query positions"),
            ((q, k[:, :, :16], v[:, :, :16], tiles, lists), "pages of 32"),
            ((q, k.half(), v.half(), tiles, lists), "one dtype"),
            ((q, k[:2], v[:2], replace(tiles, table=tiles.table + 1), lists), "the pool has pages"),
        ):
            with pytest.raises(InvalidInput, match=words):
                paged_attention(*args, scale=scale)
        with pytest.raises(InvalidInput, match="must be positive"):
            paged_attention(q, k, v, tiles, lists, scale=0.0)
        with pytest.raises(InvalidInput, match="reserved for"):
            paged_decode(q[None], k, v, make(DECODE["step"]).plan(), scale=scale)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    """Errors of every interpreted case; one process for all of them."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(here / "interpreted_paged.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {row.pop("case"): row for row in map(json.loads, done.stdout.splitlines())}


@needs_triton
class TestInterpreted:
    """The Triton kernels on a CPU."""

    @pytest.mark.parametrize("name", CASES)
    def test_agrees_with_dense_attention(self, interpreted, name):
        # what main() of the program runs besides prompts and steps is in float32, and has no reference that rounds
        found = interpreted[name]
        assert right(found, CASES[name]) if "share" in found else within(found, torch.float32), found

    @pytest.mark.parametrize("name", ["packed", "packed, holes"])
    def test_packed_requests(self, interpreted, name):
        assert within(interpreted[name], torch.float32), interpreted[name]
        assert interpreted["packed broken: documents not moved"]["row"] > 0.1

    @pytest.mark.parametrize("kind", MUTATIONS)
    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    def test_a_broken_kernel_would_be_noticed(self, interpreted, phase, kind):
        found = interpreted[f"{phase} broken: {kind}"]
        assert not within(found, torch.float32)
        assert found["row"] > 0.1


@pytest.mark.gpu
class TestGpu:
    """The Triton kernels for real."""

    @pytest.mark.parametrize("shape", GPU_PREFILL.values(), ids=GPU_PREFILL)
    def test_prompts(self, shape):
        found = prefill(make(shape, "cuda"))
        assert right(found, shape), found

    @pytest.mark.parametrize("shape", GPU_DECODE.values(), ids=GPU_DECODE)
    @pytest.mark.parametrize("programs", [8, 400])
    def test_decode_steps(self, shape, programs):
        found = decode(make(shape, "cuda"), programs=programs)
        assert right(found, shape), found

    def test_a_broken_kernel_would_be_noticed(self):
        scene = make(GPU_PREFILL["bf16"], "cuda")
        assert not within(prefill(replace(scene, tiles=[flipped(scene.tiles[0])])), BF16)

    @pytest.mark.parametrize("dtype", [torch.float32, BF16])
    def test_packed_requests(self, dtype):
        found = packed(make(replace(PACKED, dim=128, holes=True, dtype=dtype), "cuda"))
        assert within(found, dtype), found

    def test_a_graph_follows_its_plan(self):
        scene = make(GPU_DECODE["bf16"], "cuda")
        plan, q = scene.plan(), scene.batch()
        args = q, scene.keys, scene.values, plan
        paged_decode(*args, scale=scene.shape.scale)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = paged_decode(*args, scale=scene.shape.scale)
        order = [2, 1, 0]  # other requests in the same places, after capture
        plan.write([scene.tiles[i] for i in order], torch.stack([scene.positions[i] for i in order]), kv_heads=2)
        q[:3] = torch.stack([scene.q[i] for i in order])
        graph.replay()
        for place, i in enumerate(order):
            found = worst((made[0][place], made[1][place]), scene.expected[i])
            assert within(found, BF16), found
