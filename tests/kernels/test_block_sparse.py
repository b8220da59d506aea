"""The Triton and Gluon kernels against the reference: on a CPU through Triton's interpreter, on a GPU for real."""

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
from attention_cases import MUTATIONS, ODD, Shape, errors, make, mutate, truth, within
from interpreted import CASES

from tamis.kernels import dispatch

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float | str]]:
    """Errors of every interpreted case; one process for all of them."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(here / "interpreted.py")],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {row.pop("case"): row for row in map(json.loads, done.stdout.splitlines())}


@needs_triton
class TestInterpreted:
    """The Triton kernel on a CPU."""

    @pytest.mark.parametrize("name", CASES)
    def test_agrees_with_the_reference(self, interpreted, name):
        assert within(interpreted[name], CASES[name].dtype), interpreted[name]

    @pytest.mark.parametrize("kind", MUTATIONS)
    def test_a_broken_kernel_would_be_noticed(self, interpreted, kind):
        assert not within(interpreted[kind], torch.float32), interpreted[kind]
        assert interpreted[kind]["row"] > 0.1


SHAPES = {
    "odd segments": Shape(ODD, (8, 2), 128, BF16),
    "odd segments, needle": Shape(ODD, (8, 2), 128, BF16, needle=True),
    "odd segments, token-major": Shape(ODD, (8, 2), 128, BF16, token_major=True),
    "fp16": Shape(ODD, (8, 2), 128, FP16),
    "fp16, needle": Shape(ODD, (8, 2), 128, FP16, needle=True),
    "MQA, d64": Shape(ODD, (4, 1), 64, BF16),
    "MQA, d64, fp16, token-major": Shape(ODD, (4, 1), 64, FP16, token_major=True),
    "d64, needle": Shape(ODD, (6, 2), 64, BF16, needle=True),
    "d96, token-major": Shape(ODD, (3, 3), 96, BF16, token_major=True),
    "d96, fp16, needle": Shape(ODD, (6, 3), 96, FP16, needle=True),
    "chunk of a prompt": Shape((300, 640, 777), (4, 2), 128, BF16, offset=500, needle=True),
    "many tiles": Shape((4096,), (32, 8), 128, BF16),
    "many tiles, d64, 14/2 heads": Shape((4096,), (14, 2), 64, BF16),
    "every tile": Shape((1500,), (4, 2), 128, BF16, share=1.0),
    "own tiles only": Shape((3000, 77), (8, 2), 128, BF16, share=0.0),
}


def run(name: str, shape: Shape) -> dict[str, float]:
    """Errors of kernel `name` on fresh inputs."""
    if (reason := dispatch.available()[name]) is not None:
        pytest.skip(f"{name}: {reason}")
    q, k, v, lists = make(shape, "cuda")
    made = dispatch.block_sparse_attention(q, k, v, lists, shape.scale, kernel=name)
    return errors(made, truth(q, k, v, lists, shape.scale))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["gluon", "triton"])
class TestGpu:
    """Both kernels on a GPU."""

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_agrees_with_the_reference(self, kernel, shape):
        found = run(kernel, shape)
        assert within(found, shape.dtype), found

    @pytest.mark.parametrize("kind", MUTATIONS)
    def test_a_broken_kernel_would_be_noticed(self, kernel, kind):
        if (reason := dispatch.available()[kernel]) is not None:
            pytest.skip(f"{kernel}: {reason}")
        shape = SHAPES["odd segments"]
        q, k, v, lists = make(shape, "cuda")
        made = dispatch.block_sparse_attention(*mutate(kind, q, k, v, lists), shape.scale, kernel=kernel)
        assert not within(errors(made, truth(q, k, v, lists, shape.scale)), BF16)

    def test_writes_into_out_and_nothing_else(self, kernel):
        if (reason := dispatch.available()[kernel]) is not None:
            pytest.skip(f"{kernel}: {reason}")
        shape = SHAPES["odd segments"]
        q, k, v, lists = make(shape, "cuda")
        room = torch.full((q.shape[1] + 9, q.shape[0], q.shape[2]), 7.0, dtype=BF16, device="cuda")
        out = room.transpose(0, 1)[:, : q.shape[1]]
        made = dispatch.block_sparse_attention(q, k, v, lists, shape.scale, kernel=kernel, out=out)
        assert made[0] is out
        assert within(errors(made, truth(q, k, v, lists, shape.scale)), BF16)
        assert bool((room[q.shape[1] :] == 7).all())

    def test_the_same_twice(self, kernel):
        if (reason := dispatch.available()[kernel]) is not None:
            pytest.skip(f"{kernel}: {reason}")
        shape = replace(SHAPES["many tiles"], segments=(2048,))
        q, k, v, lists = make(shape, "cuda")
        first, again = (dispatch.block_sparse_attention(q, k, v, lists, shape.scale, kernel=kernel) for _ in range(2))
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.gpu
def test_triton_takes_head_dim_256_and_short_tiles():
    for shape in (Shape((700,), (2, 1), 256, BF16), Shape((200, 33), (4, 2), 64, BF16, tile=32)):
        found = run("triton", shape)
        assert within(found, shape.dtype), found


@pytest.mark.gpu
def test_dense_causal_attention():
    shape = Shape((1000,), (4, 2), 128, BF16, offset=300)
    q, k, v, _ = make(shape, "cuda")
    made = dispatch.causal_attention(q, k, v, shape.scale)
    lists = dispatch._every_tile(q.shape[1], k.shape[1], q.shape[0], q.device)
    assert within(errors(made, truth(q, k, v, lists, shape.scale)), BF16)
