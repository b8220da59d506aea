"""A kernel is built once for a model, not again for every length of a prompt: seconds a build, in a user's request."""

from __future__ import annotations

import importlib

import pytest

MODEL = {"G", "HKV", "HQ", "ROWS", "NC"}  # sizes in capitals that belong to the model, or say yes or no
KERNELS = {
    "triton.block_sparse": "kernel",
    "triton.paged_prefill": "kernel",
    "triton.paged_decode": "split_kernel",
    "triton.tile_scores": "kernel",
    "triton.tile_lists": "kernel",
    "triton.tile_statistics": "kernel",
    "gluon.block_sparse": "kernel",
    "gluon.paged_prefill": "kernel",
}


@pytest.mark.parametrize("module", KERNELS)
def test_sizes_of_a_request_are_not_compiled_in(module: str) -> None:
    pytest.importorskip("triton")
    kernel = getattr(importlib.import_module(f"tamis.kernels.{module}"), KERNELS[module])
    if not hasattr(kernel, "params"):
        pytest.skip("Triton's interpreter builds nothing")
    sizes = [p for p in kernel.params if p.name.isupper() and not p.is_constexpr and p.name not in MODEL]
    assert [p.name for p in sizes if not p.do_not_specialize] == []
    offsets = [p for p in kernel.params if p.name == "q_offset"]
    assert all(p.do_not_specialize for p in offsets)
