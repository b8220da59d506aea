"""The device form of a cache stays in step with its sequence, token by token; its answers are those of the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tamis.attention import decode, decode_arena
from tamis.attention.decode import Decoding, SequenceReader, State
from tamis.attention.decode_arena import ArenaReader
from tamis.attention.policy import Policy
from tamis.cache.formats import cache_argument, new_cache
from tamis.cache.selfindex.keep import Budget, Keep
from tamis.cache.selfindex.sequence import CodedSequence, Growth
from tamis.kernels.selfindex import Layout
from tamis.model.rope import Rotary

SMALL = Growth(keep=Keep(first=2, chosen=6, recent=16), block=16, least=64, epoch=128, chosen=1)


def tokens(n: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 2, n, 64), torch.randn(batch, 2, n, 64)


@pytest.fixture(scope="module")
def rotary() -> Rotary:
    return Rotary(10000.0 ** -(torch.arange(32, dtype=torch.float64) / 32), 64)


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(("first", "batch"), [(1, 1), (70, 2), (301, 1)])
def test_steps_are_those_of_the_sequence(rotary: Rotary, first: int, batch: int, turned: bool) -> None:
    sequence = CodedSequence(Layout(64), SMALL, rotary if turned else None)
    made, plain = ArenaReader(spare=200), SequenceReader(torch.device("cpu"))
    sequence.append(*tokens(first, batch))
    sequence.observe(torch.randn(batch, 4, first, 64))
    for step in range(400):
        sequence.settle()
        n = 50 if step % 100 == 99 else 1  # now and then a turn of several tokens
        sequence.append(*tokens(n, batch))
        q = torch.randn(batch, 4, 1, 64)
        sequence.observe(q)
        if n == 1 and (step % 7 == 0 or step > 380):
            options: dict[str, Any] = {"budget": Budget(0.2, 8), "scale": 0.125}
            found, wanted = made.read(0, sequence, q, **options), plain.read(0, sequence, q, **options)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert made.kernel == "cpu" and len(sequence.parts) >= 4 and made.nbytes > sequence.nbytes


def test_a_token_costs_one_append(rotary: Rotary, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence, reader = CodedSequence(Layout(64), SMALL, rotary), ArenaReader()
    sequence.append(*tokens(300, 1))
    sequence.settle()
    appended: list[int] = []
    append = decode_arena.selfindex_append
    monkeypatch.setattr(decode_arena, "selfindex_append", lambda *a: (appended.append(1), append(*a))[1])
    for _ in range(20):
        sequence.settle()
        sequence.append(*tokens(1, 1))
        reader.read(0, sequence, torch.randn(1, 4, 1, 64), budget=Budget(), scale=0.125)
    assert len(appended) == 18  # not the first step, nor the one behind a block that was compressed


def test_inside_a_model(llama: Any, attach: Any) -> None:
    switch, ids, logits = attach(llama), torch.randint(0, 512, (1, 500)), []
    for reader in (ArenaReader(), SequenceReader(torch.device("cpu"))):
        cache = new_cache("selfindex", llama.config)
        decoding = Decoding(llama, cache, Policy(decode="selfindex"), State(reader=reader))
        for begin, end in ((0, 480), *((i, i + 1) for i in range(480, 500))):
            with torch.inference_mode(), decoding.running(switch, step=begin > 0):
                out = llama(ids[:, begin:end], **{cache_argument(llama): cache}).logits[:, -1]
        logits.append(out)
        assert decoding.report().kernel == "cpu"
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


def test_a_gpu_gets_it() -> None:
    assert isinstance(decode.reader_for(torch.device("cuda")), ArenaReader)
    assert isinstance(decode.reader_for(torch.device("cpu")), SequenceReader)


@pytest.mark.gpu
def test_on_a_gpu(tiny_model: Any, attach: Any) -> None:
    model = tiny_model("llama").to("cuda", torch.bfloat16)
    switch, ids, logits = attach(model), torch.randint(0, 512, (1, 900), device="cuda"), []
    for reader in (ArenaReader(), SequenceReader(torch.device("cuda"))):
        cache = new_cache("selfindex", model.config)
        decoding = Decoding(model, cache, Policy(decode="selfindex", decode_budget=1.0), State(reader=reader))
        for begin, end in ((0, 800), *((i, i + 1) for i in range(800, 900))):
            with torch.inference_mode(), decoding.running(switch, step=begin > 0):
                out = model(ids[:, begin:end], **{cache_argument(model): cache}).logits[:, -1]
        logits.append(out.float())
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 0.05
