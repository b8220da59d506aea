"""The positions that vLLM counts by, moved for reused documents while the model runs and no longer; needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tamis.integrations.vllm import compat, rows
from tamis.integrations.vllm.client import request
from tamis.integrations.vllm.config import Settings
from tamis.integrations.vllm.request import parse
from tamis.integrations.vllm.step import Row, Step
from tamis.model.rope import Rotary

PAGE, KV, DIM = 16, 2, 32
ROTARY = Rotary(1.0 / 10_000 ** (torch.arange(0, DIM, 2, dtype=torch.float64) / DIM), DIM)


def test_positions_are_vllms_own_again_behind_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stock request lies beside; what comes after the model counts tokens by positions."""
    made = request(range(21), [range(100, 120)], range(11), mode="reuse", block_size=PAGE)
    told = parse(made["kv_transfer_params"]["tamis"], made["prompt"], block_size=PAGE)
    blocks = tuple(range(-(-told.n_tokens // PAGE)))
    worker = rows.Worker(Settings(min_tokens=0, accept_block_attention=True), PAGE, KV, rotary=ROTARY)
    starts = torch.tensor([0, 3, 3 + told.n_tokens])
    positions = torch.cat([torch.arange(40, 43), torch.arange(told.n_tokens)])
    common = SimpleNamespace(query_start_loc=starts, query_start_loc_cpu=starts, positions=positions.clone())
    monkeypatch.setattr(compat, "rows_of", lambda *_: (None, torch.arange(3)))
    rows.begin(worker, Step(rows=(Row("a", told, 0, told.n_tokens, blocks),)), lambda: ["stock", "a"])
    try:
        assert rows.running is not None
        for _ in range(2):  # metadata may be built more than once in a step
            rows.running.plan(common, lambda _: None)
        own = told.units[-1]
        assert common.positions[3 + own.start : 3 + own.end].tolist() == list(range(20))
        assert torch.equal(common.positions[:3], positions[:3])
    finally:
        rows.end()
    assert torch.equal(common.positions, positions)
    assert rows.running is None
