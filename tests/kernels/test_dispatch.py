"""Choosing a kernel: by name, automatically, and what is said when one cannot run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from attention_cases import Shape, errors, make, truth, within

from tamis.core.errors import InvalidInput, Unavailable, UnknownName
from tamis.kernels import dispatch

SHAPE = Shape((40, 33), tile=32, dim=16)
BF16 = torch.bfloat16


def test_a_cpu_gets_the_cpu_kernel():
    assert dispatch.choose(torch.device("cpu"), torch.float32) == "cpu"
    q, k, v, lists = make(SHAPE)
    expected = truth(q, k, v, lists, SHAPE.scale)
    assert within(errors(dispatch.block_sparse_attention(q, k, v, lists, SHAPE.scale), expected), torch.float32)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_out_is_written_by_kernels_that_make_their_own(kernel):
    q, k, v, lists = make(SHAPE)
    out = torch.full_like(q, 7.0)
    made = dispatch.block_sparse_attention(q, k, v, lists, SHAPE.scale, kernel=kernel, out=out)
    assert made[0] is out
    assert within(errors(made, truth(q, k, v, lists, SHAPE.scale)), torch.float32)


def test_available_names_every_kernel_and_gives_reasons():
    found = dispatch.available()
    assert list(found) == ["gluon", "cpu", "triton", "fa4", "reference"]
    assert found["cpu"] is None
    assert found["reference"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, on which the kernel may run")
@pytest.mark.parametrize("kernel", ["gluon", "triton"])
def test_a_kernel_asked_for_by_name_that_cannot_run_says_why(kernel):
    q, k, v, lists = make(SHAPE)
    with pytest.raises(Unavailable, match=f"{kernel}.*(no NVIDIA GPU|not installed)"):
        dispatch.block_sparse_attention(q, k, v, lists, SHAPE.scale, kernel=kernel)


@pytest.mark.parametrize(
    ("capability", "triton", "reason"),
    [
        (None, "3.6.0", "no NVIDIA GPU"),
        ((8, 0), "3.6.0", "sm_80"),
        ((10, 0), "3.6.0", "sm_100"),
        ((9, 0), "3.7.1", "3.7.1"),
        ((9, 0), None, "no Triton"),
        ((9, 0), "3.6.2", None),
    ],
)
def test_gluon_runs_on_hopper_with_triton_3_6_only(monkeypatch, capability, triton, reason):
    monkeypatch.setattr(dispatch, "_capability", lambda: capability)
    monkeypatch.setattr(dispatch, "_version", lambda package: triton)
    found = dispatch.available()["gluon"]
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "tile", "chosen"),
    [
        ("cuda", BF16, 128, 128, "gluon"),
        ("cuda", torch.float16, 96, 128, "gluon"),
        ("cuda", BF16, 256, 128, "triton"),
        ("cuda", BF16, 128, 64, "triton"),
        ("cuda", torch.float32, 64, 128, "triton"),
        ("cuda", BF16, 128, 100, "reference"),
        ("cpu", BF16, 128, 128, "cpu"),
    ],
)
def test_auto_falls_to_the_next_kernel_that_takes_the_case(monkeypatch, device, dtype, head_dim, tile, chosen):
    monkeypatch.setattr(dispatch, "_capability", lambda: (9, 0))
    monkeypatch.setattr(dispatch, "_version", lambda package: "3.6.0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert dispatch.choose(torch.device(device), dtype, head_dim=head_dim, tile=tile) == chosen


def test_a_view_that_the_copy_engine_cannot_read_is_noticed():
    q = torch.zeros(2, 10, 65, dtype=BF16)[..., 1:]
    assert not dispatch.Case.of((q,), 128).steps_of_16
    assert dispatch.Case.of((torch.zeros(2, 10, 64, dtype=BF16),), 128).steps_of_16
    assert not dispatch.Case.of((torch.zeros(2, 64, 10, dtype=BF16).transpose(1, 2),), 128).dense_rows


def test_an_unknown_kernel_is_answered_with_the_nearest():
    q, k, v, lists = make(SHAPE)
    with pytest.raises(UnknownName, match="'gluon'"):
        dispatch.block_sparse_attention(q, k, v, lists, SHAPE.scale, kernel="glueon")


def test_input_that_no_kernel_may_be_given():
    q, k, v, lists = make(SHAPE)
    with pytest.raises(InvalidInput, match="positive"):
        dispatch.block_sparse_attention(q, k, v, lists, -1.0)
    with pytest.raises(InvalidInput, match="one dtype"):
        dispatch.block_sparse_attention(q, k.half(), v, lists, SHAPE.scale)
    with pytest.raises(InvalidInput, match="like q"):
        dispatch.block_sparse_attention(q, k, v, lists, SHAPE.scale, out=q[:, :5])


@pytest.mark.parametrize(("rows", "keys"), [(70, 70), (33, 70)])
def test_dense_causal_attention(rows, keys):
    q, k, v = (torch.randn(h, n, 32) for h, n in ((4, rows), (2, keys), (2, keys)))
    out, lse = dispatch.causal_attention(q, k, v, 0.2)
    scores = q @ k.repeat_interleave(2, 0).mT * 0.2
    scores.masked_fill_(torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1), float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ v.repeat_interleave(2, 0))


def test_importing_the_choice_does_not_import_triton():
    code = "import sys, tamis.kernels.dispatch as d; d.available(); sys.exit('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "src", "PATH": ""}, check=False)
    assert done.returncode == 0
