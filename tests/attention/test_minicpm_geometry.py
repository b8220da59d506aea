"""MiniCPM4.1-8B's shape and rule: 32 query and 2 KV heads of 128, 96 blocks of 64 of which 34 are forced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tamis.attention.block_decode import BlockDecoding, Steps
from tamis.attention.block_prefill import OwnChoice
from tamis.attention.hook import install
from tamis.cache.block_layer import BlockForm, BlockLayer
from tamis.cache.formats import cache_argument, new_cache
from tamis.cache.offload import LayerBlocks
from tamis.kernels.blocks import BlockRule

RULE = BlockRule()  # MiniCPM4.1's own numbers
N = 7005  # the token stands in block 109: 110 blocks, 96 of which it reads
GROUP, DIM = 16, 128


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Any]) -> Any:
    """Its attention in a narrow model: the decoder around it is Llama's, and short."""
    shape = {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": DIM, "hidden_size": 64}
    return tiny_model("llama", intermediate_size=64, max_position_embeddings=65536, **shape)


def filled(model: Any, form: BlockForm) -> Any:
    """A cache that holds random keys and values, as a prompt of N - 1 tokens would leave it."""
    cache = new_cache("blocks", model.config, form)
    draw = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        layer.update(*(torch.randn((1, 2, N - 1, DIM), generator=draw) for _ in range(2)))
    return cache


class Watch(BlockDecoding):
    """Keeps the queries."""

    def attend(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor | None:
        self.q = getattr(self, "q", {}) | {layer: q}
        return super().attend(layer, q, scale)


def step(model: Any, form: BlockForm, how: Steps | None = None, *, coarse: bool = False) -> tuple[torch.Tensor, Watch]:
    switch, uninstall = install(model)
    try:
        cache = filled(model, form)
        decoding = Watch(cache, OwnChoice(RULE, coarse), how=how)
        with torch.no_grad(), decoding.running(switch, step=True):
            out = model(torch.tensor([[7]]), **{cache_argument(model): cache})
        return out.logits[0, -1], decoding
    finally:
        uninstall()


def infllm(q: torch.Tensor, layer: BlockLayer, head: int, *, coarse: bool) -> set[int]:
    """Blocks by InfLLM-v2's own words, one cell after another: softmax of each of the 16 heads over mean-pooled
    windows, summed; a block has the largest of its cells and of the one that reaches into it; the first, the own and
    the local ones are forced."""
    assert layer.blocks is not None
    keys = layer.blocks.dense()[0][head].double()
    cells = [keys[i : i + 32].mean(0) for i in range(0, N - 31, 16)]
    wide = [keys[i : i + 128].mean(0) for i in range(0, N - 127, 64)]
    total = torch.zeros(len(cells), dtype=torch.float64)
    for row in q[0, head * GROUP : (head + 1) * GROUP, 0].double():
        logits = torch.stack([row @ c for c in cells]) * DIM**-0.5
        norm = logits.logsumexp(0)
        if coarse:
            norm = (torch.stack([row @ c for c in wide]) * DIM**-0.5).logsumexp(0) + torch.log(torch.tensor(4.0))
        total += (logits - norm).exp()
    own = (N - 1) // 64
    scores = {b: max(total[c] for c in range(max(0, 4 * b - 1), min(4 * b + 4, len(cells)))) for b in range(own + 1)}
    forced = {0, *range(own - 32, own + 1)}
    best = sorted((b for b in scores if b not in forced), key=lambda b: -float(scores[b]))[: 96 - 34]
    return forced | set(best)


@pytest.mark.parametrize("coarse", [False, True])
def test_the_blocks_are_infllms(model: Any, coarse: bool) -> None:
    _, decoding = step(model, BlockForm(RULE), coarse=coarse)
    for number, layer in enumerate(decoding.layers):
        for head in range(2):
            found = {*decoding._wanted[number][head].tolist(), (N - 1) // 64}
            assert len(found) == 96 and found == infllm(decoding.q[number], layer, head, coarse=coarse)


def test_from_host_memory(model: Any) -> None:
    truth, resident = step(model, BlockForm(RULE))
    for how in (Steps(), Steps(forget=True)):
        found, decoding = step(model, BlockForm(RULE, host=True), how)
        assert torch.equal(found, truth)
        blocks = decoding.layers[0].blocks
        assert isinstance(blocks, LayerBlocks) and blocks.shape.n_slots == 95
    everything, _ = step(model, BlockForm(BlockRule(top=110)))
    assert not torch.equal(everything, truth)
    report = resident.report().blocks
    assert report is not None and report.kept == 96
