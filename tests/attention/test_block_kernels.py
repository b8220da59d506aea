"""Decode over blocks by kernels: as plain PyTorch has it, and the same bits wherever the blocks lie."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_blocks import WAYS, Talk, tiny

CASES = ("own", "forecast", "sticking", "batch of 2, group of 3")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    """What every interpreted case found; one process for all of them."""
    here = Path(__file__).parent
    folders = [here, here.parent / "kernels", here.parents[1] / "src"]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(here / "interpreted_blocks.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {row.pop("case"): row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
class TestInterpreted:
    """On a CPU, by Triton's interpreter: two turns, a block ending in each, memory growing in the middle."""

    @pytest.mark.parametrize("name", CASES)
    def test_kernels_are_pytorch(self, interpreted: dict[str, dict[str, Any]], name: str) -> None:
        found = interpreted[name]
        assert found["kernels"] == ["triton", "blocks"] and found["error"] < 1e-5, found
        for what in ("attended", "asked", "recall"):
            assert found[what][0] == (None if found[what][1] is None else pytest.approx(found[what][1])), found
        assert found["copied"][0] == pytest.approx(found["copied"][1], rel=0.1), "ties between slots may fall otherwise"

    @pytest.mark.parametrize("name", CASES)
    def test_the_same_bits_wherever_blocks_lie(self, interpreted: dict[str, dict[str, Any]], name: str) -> None:
        found = interpreted[name]
        assert all(found[way] for way in WAYS if way in found) and found["resident"]
        assert found.get("all copied", True)

    def test_a_copy_that_is_left_out_would_be_noticed(self, interpreted: dict[str, dict[str, Any]]) -> None:
        assert interpreted["a copy is left out"]["error"] > 1e-3


def test_without_kernels_pytorch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert Talk(tiny(2), "own").report.kernel == "blocks"


@pytest.mark.gpu
class TestOnAGpu:
    """Compiled, with streams."""

    @pytest.mark.parametrize("who", ["own", "forecast"])
    def test_kernels_are_pytorch_and_bits_do_not_depend_on_the_place(self, who: str) -> None:
        model = tiny(3).to("cuda")
        kept, plain = Talk(model, who), Talk(model, who, how={"kernels": False})
        assert (kept.report.kernel, plain.report.kernel) == ("triton", "blocks")
        torch.testing.assert_close(kept.logits, plain.logits, rtol=1e-3, atol=1e-3)
        for way in ({"host": False}, {"how": {"forget": True}}, {"how": {"prefetch": False}}, {"slots": 9}):
            assert torch.equal(Talk(model, who, **way).logits, kept.logits), way

    @pytest.mark.parametrize("who", ["own", "forecast"])
    def test_no_step_waits_for_the_host(self, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from tamis.attention.block_kernels import KernelSteps

        def strict(name: str) -> Any:
            plain = getattr(KernelSteps, name)

            def run(self: KernelSteps, *args: Any, **kwargs: Any) -> Any:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    return plain(self, *args, **kwargs)
                finally:
                    torch.cuda.set_sync_debug_mode("default")

            return run

        Talk(tiny(3).to("cuda"), who)  # kernels are built
        for name in ("choose", "fetch", "attend", "end"):
            monkeypatch.setattr(KernelSteps, name, strict(name))
        assert Talk(tiny(3).to("cuda"), who).report.kernel == "triton"
