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
from tamis.core.errors import InvalidInput
from tamis.kernels.blocks import BlockRule
from tamis.kernels.reference.blocks import summed

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


class TestTogether:
    """Tokens that choose as one."""

    @pytest.mark.parametrize("together", [2, 8, 16])
    def test_all_blocks_are_the_stock_model(self, tiny_model: Callable[..., Any], together: int) -> None:
        model, rule = tiny_model("llama"), replace(RULE, together=together)
        every = BlockPrefill.of(replace(rule, top=13))
        torch.testing.assert_close(logits(model, every), logits(model), rtol=1e-4, atol=1e-4)
        job = BlockPrefill.of(rule)
        few, apart = logits(model, job), logits(model, BlockPrefill.of(RULE))
        assert float((few - apart).abs().max()) > 1e-3
        read = sum(16 * (min(row // 16 + 1, 5) - 1) + row % 16 + 1 for row in range(200))
        assert job.density[1] == pytest.approx(read / (200 * 201 / 2)), "as many blocks as each for itself"

    def test_chunks_of_rows_change_nothing(
        self, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, rule = tiny_model("llama"), replace(RULE, together=8)
        whole = logits(model, BlockPrefill.of(rule))
        monkeypatch.setattr(block_prefill, "CHUNK_BYTES", 4 * 4 * 200 * 33)
        assert [r.stop for r in row_chunks(200, 4 * 200, 16)] == [48, 96, 144, 192, 200]
        torch.testing.assert_close(logits(model, BlockPrefill.of(rule)), whole)

    def test_rows_are_cut_between_choices_wherever_they_begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rule, draw = replace(RULE, together=8), torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(heads, n, 64, generator=draw) for heads, n in ((4, 167), (2, 200), (2, 200)))
        whole, _ = BlockPrefill.of(rule).attend(0, q, k, v, 0.3)
        monkeypatch.setattr(block_prefill, "CHUNK_BYTES", 1)
        assert [r.stop for r in row_chunks(40, 4 * 200, 16, 1)] == [15, 31, 40]
        torch.testing.assert_close(BlockPrefill.of(rule).attend(0, q, k, v, 0.3)[0], whole)

    def test_a_choice_is_that_of_the_sum(self) -> None:
        draw, rule = torch.Generator().manual_seed(0), replace(RULE, together=4)
        cells = torch.rand(2, 11, 40, generator=draw)
        positions = torch.arange(6, 17)  # 2 of a choice, two whole ones, 1
        seen = torch.arange(40) * 4 + 8 <= positions[:, None] + 1
        sums, first = summed(cells.masked_fill(~seen, -torch.inf), positions, rule.together)
        assert first.tolist() == [6, 8, 12, 16]
        for i, rows in enumerate((slice(0, 2), slice(2, 6), slice(6, 10), slice(10, 11))):
            right = (cells[:, rows] * seen[rows]).sum(1).masked_fill(~seen[rows].any(0), -torch.inf)
            torch.testing.assert_close(sums[:, i], right)
        apart, same = summed(cells, positions, 1)
        assert apart is cells and same is positions

    @pytest.mark.parametrize("together", [0, 3, 64, 32])
    def test_numbers_that_cannot_be(self, together: int) -> None:
        with pytest.raises(InvalidInput, match="together"):
            replace(RULE, together=together)  # blocks of 16
        assert BlockRule(together=32).n_choices(31, 2) == 2 and BlockRule(together=32).n_choices(32, 32) == 1
