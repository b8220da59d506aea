"""A model whose tokens read chosen blocks: with all blocks it is the stock model, with few it reads few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tamis.attention import block_prefill
from tamis.attention.block_prefill import BlockPrefill, OwnChoice, row_chunks
from tamis.attention.hook import install
from tamis.attention.layer_inputs import watching
from tamis.kernels.blocks import BlockRule

RULE = BlockRule(top=5, first=1, local=1, block=16, window=8, stride=4, dense_tokens=0)


def logits(model: Any, job: Any = None, n: int = 200) -> torch.Tensor:
    ids = torch.randint(0, 512, (1, n), generator=torch.Generator().manual_seed(0))
    switch, uninstall = install(model)
    try:
        with torch.inference_mode():
            if job is None:
                out: torch.Tensor = model(ids, use_cache=False).logits
                return out
            with switch.running(job, n):
                made: torch.Tensor = model(ids, use_cache=False).logits
                return made
    finally:
        uninstall()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_all_blocks_are_the_stock_model(tiny_model: Callable[..., Any], family: str) -> None:
    model = tiny_model(family)
    job = BlockPrefill.of(replace(RULE, top=13))
    torch.testing.assert_close(logits(model, job), logits(model), rtol=1e-4, atol=1e-4)
    assert job.density == {0: 1.0, 1: 1.0}
    few = BlockPrefill.of(RULE)
    assert float((logits(model, few) - logits(model)).abs().max()) > 1e-2
    assert all(0.5 < share < 0.9 for share in few.density.values())


def test_the_density_counts_what_is_read(tiny_model: Callable[..., Any]) -> None:
    """Rows of block b read b + 1 blocks up to five, the own one up to themselves."""
    job = BlockPrefill.of(RULE)
    logits(tiny_model("llama"), job)
    read = sum(16 * (min(row // 16 + 1, 5) - 1) + row % 16 + 1 for row in range(200))
    assert job.density[1] == pytest.approx(read / (200 * 201 / 2))


def test_chunks_of_rows_change_nothing(tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    whole = logits(model, BlockPrefill.of(RULE))
    monkeypatch.setattr(block_prefill, "CHUNK_BYTES", 4 * 4 * 200 * 33)
    assert [r.stop for r in row_chunks(200, 4 * 200)] == [33, 66, 99, 132, 165, 198, 200]
    torch.testing.assert_close(logits(model, BlockPrefill.of(RULE)), whole)


def test_short_prompts_are_read_in_full(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    job = BlockPrefill.of(replace(RULE, dense_tokens=200))
    torch.testing.assert_close(logits(model, job), logits(model), rtol=1e-4, atol=1e-4)
    rough = BlockPrefill.of(RULE, OwnChoice(RULE, coarse=True))
    assert torch.isfinite(logits(model, rough)).all() and 0.5 < rough.density[0] < 0.9


def test_what_layers_read_is_noted_and_hooks_go(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    ids = torch.arange(9)[None]
    with watching(model, residual=True) as seen, torch.no_grad():
        states = model.model(ids, output_hidden_states=True).hidden_states
        assert sorted(seen.normed) == sorted(seen.residual) == [1, 2], "of the last two"
        torch.testing.assert_close(seen.residual[2], states[2][0])
        norm = model.model.layers[2].input_layernorm
        with seen.paused():
            torch.testing.assert_close(seen.normed[2], norm(states[2])[0])
            norm(states[0])
        torch.testing.assert_close(seen.residual[2], states[2][0])
    assert not any(m._forward_pre_hooks for m in model.modules())
