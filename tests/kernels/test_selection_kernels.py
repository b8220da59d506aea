"""The kernels that select tiles, against PyTorch: on a CPU through Triton's interpreter, on a GPU for real."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreted_selection import MUTATIONS, RESULTS
from selection_cases import Case, dense_lse, list_error, qk, scene_of, score_error, statistics_error

from tamis.kernels.lists import Tiling, lists_from_mask
from tamis.kernels.reference.tile_statistics import tile_statistics as reference
from tamis.kernels.statistics import tile_statistics
from tamis.select.every import AllTiles, NoCrossTiles
from tamis.select.on_device import CHOICES, DeviceScene, StoredBits, mask_of, why_not
from tamis.select.oracle import Oracle, true_mass
from tamis.select.sampled import Sampled, sample_rows
from tamis.select.stored import Stored
from tamis.select.variants import GlobalThreshold, partners

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
BF16 = torch.bfloat16


def right(what: str, found: dict[str, float]) -> bool:
    """Whether the errors of one interpreted case are those of a right kernel (NaN never is)."""
    if "scores" in what:
        return found["mass"] < (1e-5 if "float32" in what else 2e-3)
    if "statistics" in what:
        return found["mass"] < 1e-5 and found["peak"] < 1e-4 and found["high"] <= 0
    near = abs(found["density"] - found["expected"]) < 1e-2
    kept = abs(found.get("kept", 0.0) - found.get("should", 0.0)) < 1e-2
    return near and kept and found["differ"] <= (0.05 if what.endswith("sampled") else 0.0)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    """Errors of every interpreted case; one process for all of them."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(here / "interpreted_selection.py")],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {row.pop("case"): row for row in map(json.loads, done.stdout.splitlines())}


@needs_triton
class TestInterpreted:
    """The kernels on a CPU."""

    @pytest.mark.parametrize("name", RESULTS)
    def test_agrees_with_pytorch(self, interpreted, name):
        assert right(name, interpreted[name]), interpreted[name]

    @pytest.mark.parametrize("name", MUTATIONS)
    def test_a_broken_kernel_would_be_noticed(self, interpreted, name):
        assert not right(name, interpreted[name]), interpreted[name]


class TestScene:
    """What goes to the device, without a kernel."""

    def test_the_flat_bits_are_the_scene_s(self):
        case = Case((40, 1, 16, 37), records="some")
        scene = scene_of(case)
        bits = StoredBits.of(scene)
        n = torch.arange(len(scene))
        local = scene.local
        for layer in range(2):
            one = bits.layer(layer)
            at = torch.where(local, one.row[:, None] + n, 0)
            assert torch.equal(one.la[:, at] & local, scene.stored_local(layer, 4))
            assert torch.equal(one.ca, scene.stored_pages(layer, 4))

    @pytest.mark.parametrize("window", [(0, 3), (2, 4), (5, 9), (0, 9)])
    def test_a_chunk_of_the_prompt_s_is_the_chunk_s(self, window):
        case = Case((40, 1, 16, 21), records="some")
        whole, scene = scene_of(case), scene_of(replace(case, window=window))
        cut, made = DeviceScene.of(whole).chunk(*window), DeviceScene.of(scene)
        for one in (cut, made):
            assert torch.equal(one.tiles, (scene.document_tiles + window[0]).int())
            assert torch.equal(one.rows(4), sample_rows(whole, one.tiles.long(), 4).int())
            assert torch.equal(one.places.entry, DeviceScene.of(whole).places.entry[: window[1]])
            assert (one.places.first, one.places.q_offset) == (window[0], whole.tiling.starts[window[0]])
            own = one.places.slot[window[0] :][scene.document_tiles]
            assert own.tolist() == list(range(len(scene.document_tiles)))
        n, ends = torch.arange(len(scene)), slice(*window)
        for bits in (cut.bits.layer(1), made.bits.layer(1)):
            at = torch.where(scene.local, bits.row[ends, None] + n, 0)
            assert torch.equal(bits.la[:, at] & scene.local, scene.stored_local(1, 4))
            assert torch.equal(bits.ca[:, : len(scene)], scene.stored_pages(1, 4))

    def test_no_records_no_bits(self):
        assert StoredBits.of(scene_of(Case((40,), records="none"))) is None
        assert StoredBits.of(scene_of(Case(()))) is None

    def test_lists_give_their_mask_back(self):
        scene = scene_of(Case((40, 1, 16, 37)))
        mask = Stored().select(0, torch.zeros(4, 1, 1), torch.zeros(2, 1, 1), 1.0, scene)
        assert torch.equal(mask_of(lists_from_mask(mask, scene.tiling, scene.tiling), scene), mask)

    def test_says_why_not(self, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        q, scene = torch.zeros(4, 8, 16), scene_of(Case((40,)))
        assert "Oracle" in str(why_not(Oracle(0.9), q, scene))
        assert "cpu" in str(why_not(Stored(), q, scene))
        for selector in (GlobalThreshold(rows=0), GlobalThreshold(rows=16), GlobalThreshold(local="both")):
            assert "has no kernel" in str(why_not(selector, q, scene))  # 16 rows are all of this tile

    @pytest.mark.parametrize("documents", [(40, 1, 16, 21), (48, 48), (64,), (9,) * 5])
    def test_pairs_are_those_of_the_selector(self, documents):
        """The same partners in every window, and none in another document."""
        scene = scene_of(Case(documents))
        whole = DeviceScene.of(scene)
        for first, last in itertools.combinations(range(len(scene) + 1), 2):
            cut = whole.chunk(first, last)
            pair = cut.places.pair[first:last]
            assert (pair - first).tolist() == partners(scene.chunk(first, last)).tolist()
            assert torch.equal(scene.document[pair], scene.document[first:last])


GPU = {
    "odd documents": Case((300, 1, 128, 1000, 63), (60, 111), (8, 2), 128, 128, BF16, rows=8),
    "4 rows": Case((700, 513, 900), (128, 9), (8, 2), 128, 128, BF16),
    "MQA, d64, no prefix": Case((700, 513, 64), (0, 40), (4, 1), 64, 128, BF16),
    "14/2 heads, fp16, 5 rows": Case((700, 513), (33, 40), (14, 2), 64, 128, torch.float16, "some", 5),
    "d96, tile of 64": Case((700, 1, 513), (33, 40), (6, 3), 96, 64, BF16, "none"),
    "many documents": Case((500,) * 30, (60, 200), (32, 8), 128, 128, BF16, rows=8),
    "fp32": Case((300, 129), (10, 70), (4, 2), 64, 128, torch.float32),
    "chunk": Case((300, 1, 128, 1000, 63), (60, 111), (8, 2), 128, 128, BF16, rows=8, window=(5, 10)),
    "last chunk": Case((700, 513, 900), (128, 9), (8, 2), 128, 128, BF16, window=(13, 21)),
    "head dim 256": Case((300, 129), (10, 70), (2, 1), 256, 128, BF16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU.values(), ids=GPU)
class TestGpu:
    """The kernels on a GPU."""

    def test_scores(self, case):
        scene = scene_of(case, "cuda")
        assert score_error(case, *qk(case, scene, "cuda"), scene, torch.float16) < 5e-3

    @pytest.mark.parametrize(
        "selector",
        [
            Stored(),
            AllTiles(),
            NoCrossTiles(),
            Sampled(4, 0.9),
            Sampled(8, 0.6),
            Sampled(8, 1.0),
            GlobalThreshold(power=0.5),
        ],
    )
    def test_lists(self, case, selector):
        assert type(selector) in CHOICES
        scene = scene_of(case, "cuda")
        found = list_error(selector, case, *qk(case, scene, "cuda"), scene)
        exact = not isinstance(selector, Sampled | GlobalThreshold)
        assert found["differ"] <= (0.0 if exact else 0.1), found
        assert abs(found["density"] - found["expected"]) <= (0.0 if exact else 0.01), found
        assert abs(found.get("kept", 0.0) - found.get("should", 0.0)) < 0.01, found

    def test_statistics(self, case):
        scene = scene_of(case, "cuda")
        if scene.tiling.n_tokens > 4000:
            pytest.skip("the reference would take long")
        q, k = qk(case, scene, "cuda")
        lse = dense_lse(q, k, case.scale)
        both = (
            f(q, k, lse, scene.queries, scene.tiling, scale=case.scale, beta=0.01, q_offset=scene.q_offset)
            for f in (tile_statistics, reference)
        )
        found = statistics_error(*both)
        assert found["mass"] < 1e-4 and found["peak"] < 1e-3 and found["high"] < 1e-3, found

    def test_nothing_waits_for_the_device(self, case):
        scene = scene_of(case, "cuda")
        q, k = qk(case, scene, "cuda")
        device = DeviceScene.of(scene)
        device.rows(8)
        for selector in (Sampled(8, 0.9), GlobalThreshold(power=0.5), Stored()):
            device.lists(selector, 0, q, k, case.scale)  # compiles
            torch.cuda.set_sync_debug_mode("error")
            try:
                device.lists(selector, 1, q, k, case.scale)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        true_mass(q, k, case.scale, scene)
        torch.cuda.set_sync_debug_mode("error")
        try:
            true_mass(q, k, case.scale, scene)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
class TestGpuMore:
    """What no case above can show."""

    def test_broken_kernels_would_be_noticed(self):
        case = GPU["odd documents"]
        scene = scene_of(case, "cuda")
        q, k = qk(case, scene, "cuda")
        assert score_error(case, q, k, scene, torch.float16, wrong="heads") > 0.1
        assert list_error(Stored(), case, q, k, scene, asked=0)["differ"] > 0.1

    def test_statistics_of_a_chunk(self):
        draw = torch.Generator().manual_seed(0)
        q, k = (torch.randn(h, n, 64, generator=draw).to("cuda", BF16) for h, n in ((4, 700), (2, 1000)))
        queries, keys = Tiling.of_segments([0, 340, 360]), Tiling.of_segments([200, 440, 360])
        s = torch.matmul(q.float(), k.float().repeat_interleave(2, 0).transpose(1, 2)) / 8
        future = torch.arange(1000, device="cuda") > 300 + torch.arange(700, device="cuda")[:, None]
        lse = s.masked_fill(future, float("-inf")).logsumexp(-1)
        given = {"scale": 0.125, "beta": 0.01, "q_offset": 300}
        found = statistics_error(*(f(q, k, lse, queries, keys, **given) for f in (tile_statistics, reference)))
        assert found["mass"] < 1e-4 and found["peak"] < 1e-3 and found["high"] < 1e-3, found

    def test_prefill_takes_them_by_itself(self):
        from tamis.attention.prefill import SparsePrefill

        case = GPU["odd documents"]
        scene = scene_of(case, "cuda")
        q, k = qk(case, scene, "cuda")
        job = SparsePrefill(scene, Sampled(8, 0.9), measure_recall=True)
        job.attend(0, q, k, k, case.scale)
        assert isinstance(job.layers[0].area, torch.Tensor)
        mask = Sampled(8, 0.9).select(0, q, k, case.scale, scene)
        expected = lists_from_mask(mask, scene.tiling, scene.tiling).density
        assert abs(job.density - expected) < 0.01
        assert job.recall is not None and job.recall > 0.7
