"""The self-indexed cache: what stays whole, growth without loss, later turns, documents free of position."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Cache

from tamis.cache.selfindex import sequence as sequence_module
from tamis.cache.selfindex.documents import (
    Placed,
    attend_documents,
    encode_document,
    pair_energy,
    shared_tables,
    turned_queries,
)
from tamis.cache.selfindex.keep import Budget, Keep, energy_of, exact_tokens
from tamis.cache.selfindex.layer import SelfIndexLayer
from tamis.cache.selfindex.sequence import CodedSequence, Growth, settle_layers
from tamis.core.errors import InvalidInput
from tamis.kernels.reference.selfindex import Fit, attention, part_scores
from tamis.kernels.selfindex import Layout
from tamis.model.rope import Rotary

SMALL = Growth(keep=Keep(first=2, chosen=6, recent=16), block=16, least=64, epoch=128, chosen=1)


@pytest.fixture(scope="module")
def rotary() -> Rotary:
    return Rotary(10000.0 ** -(torch.arange(32, dtype=torch.float64) / 32), 64)


def filled(n: int, growth: Growth = SMALL, batch: int = 2) -> tuple[CodedSequence, torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(batch, 2, n, 64), torch.randn(batch, 2, n, 64)
    sequence = CodedSequence(Layout(64), growth)
    sequence.append(keys, values)
    return sequence, keys, values


def test_kept_tokens_are_first_then_what_the_window_attends_to() -> None:
    keys = 0.1 * torch.randn(2, 50, 64)
    q = torch.randn(4, 8, 64)
    keys[0, 30] = 5 * q[:2].mean((0, 1))
    keep = Keep(first=3, chosen=4, window=8)
    found = exact_tokens(q, keys, keep, 0.125)
    assert found.shape == (2, 7) and found[:, :3].tolist() == [[0, 1, 2]] * 2 and int(found[0, 3]) == 30
    assert all(len(set(row)) == 7 for row in found.tolist())
    assert exact_tokens(None, keys, keep, 0.125).tolist() == [[0, 1, 2]] * 2
    assert exact_tokens(q, keys[:, :2], keep, 0.125).shape == (2, 2)
    assert exact_tokens(q * math.nan, keys, keep, 0.125).shape == (2, 7)
    assert energy_of(q, 2).shape == (2, 64)
    with pytest.raises(InvalidInput, match="recent and window 1 or more"):
        Keep(recent=0)


def test_budget() -> None:
    assert Budget().count(10) == 96 and Budget(0.1, 1).count(1001) == 101
    with pytest.raises(InvalidInput, match="share is 0 to 1"):
        Budget(share=2)


def test_a_short_sequence_stays_whole() -> None:
    sequence, keys, values = filled(79)
    assert sequence.settle() == 0 and not sequence.parts
    q = torch.randn(2, 4, 1, 64)
    out, _ = sequence.attend(q, Budget(), scale=0.125)
    expected = torch.nn.functional.scaled_dot_product_attention(q, keys, values, scale=0.125, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_growth_keeps_count_order_and_size() -> None:
    sequence, keys, values = filled(200)
    sequence.observe(torch.randn(2, 4, 200, 64))
    assert sequence.settle() == 176 and sequence.parts[0].exact.shape == (2, 2, 8)
    for _ in range(400):
        more = torch.randn(2, 2, 1, 64), torch.randn(2, 2, 1, 64)
        sequence.append(*more)
        keys, values = torch.cat([keys, more[0]], -2), torch.cat([values, more[1]], -2)
        sequence.observe(torch.randn(2, 4, 1, 64))
        sequence.settle()
        assert sequence.open is not None and 16 <= sequence.open[0].shape[-2] < 16 + 24
    assert sequence.n_tokens == 600
    assert [p.records.n_tokens for p in sequence.parts] == [176, 128, 128, 128, 16]
    k, v = sequence.dense()
    for made, true, most in ((k, keys, 0.4), (v, values, 0.36)):
        rows = (made - true).norm(dim=-1) / true.norm(dim=-1)
        assert float(rows.mean()) < most and float(rows.max()) < 0.8
        assert torch.equal(made[..., -16:, :], true[..., -16:, :])
    index = sequence.parts[0].exact[..., None].expand(-1, -1, -1, 64)
    assert torch.equal(k.gather(-2, index), keys.gather(-2, index))
    open_tokens = sequence.open[0].shape[-2]
    whole = 8 + 400 // 16  # of the prompt, and one of each block
    held = sequence.layout.total_bytes(600 - open_tokens, tables=5) + (whole + open_tokens) * 2 * 64 * 4 + whole * 8
    assert sum(p.exact.shape[-1] for p in sequence.parts) == whole
    assert sequence.nbytes == 4 * held  # float32 copies here, and 8-byte positions of the kept tokens


def test_parts_at_positions_of_their_own_follow_rotated_keys(rotary: Rotary) -> None:
    """Keys with a mean that rotates on: tables fitted to the last thousand tokens are right for the next ones."""
    draw = torch.Generator().manual_seed(2)
    mean = 3 * torch.randn((1, 2, 1, 64), generator=draw)
    keys = rotary.rotate(mean + torch.randn((1, 2, 3000, 64), generator=draw), torch.arange(3000))
    values = torch.randn((1, 2, 3000, 64), generator=draw)
    errors, outs = [], []
    q = torch.randn((1, 4, 1, 64), generator=draw)
    for turn in (rotary, None):
        sequence = CodedSequence(Layout(64), Growth(least=64), turn)
        for begin, end in ((0, 1500), *((a, a + 100) for a in range(1500, 3000, 100))):
            sequence.append(keys[..., begin:end, :], values[..., begin:end, :])
            sequence.settle()
        assert sequence.n_tokens == 3000 and len(sequence.parts) == len(sequence.offsets) == 3
        lost = sequence.dense()[0] - keys
        errors.append(float(lost[..., 1500:2900, :].norm() / lost[..., :1400, :].norm()))
        outs.append(sequence.attend(q, Budget(1.0), scale=0.125)[0])
        k, v = sequence.dense()
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.125, enable_gqa=True)
        torch.testing.assert_close(outs[-1], dense, rtol=1e-3, atol=1e-3)
    assert errors[0] < 1.1 and errors[1] > 1.3 * errors[0], errors


def test_many_generated_tokens_leave_the_budget_free() -> None:
    """What the released code loses: chosen records are found anywhere, also among 4,096 generated tokens."""
    growth = Growth(keep=Keep(first=1, chosen=0, recent=64), block=64, least=64, epoch=1024)
    sequence, keys, _ = filled(512, growth, batch=1)
    draw = torch.Generator().manual_seed(5)
    for step in range(64):
        drift = torch.sin(torch.arange(64) * step / 40)  # the mean of the keys moves
        sequence.settle()
        new = torch.randn((1, 2, 64, 64), generator=draw) + 2 * drift
        sequence.append(new, torch.randn((1, 2, 64, 64), generator=draw))
        keys = torch.cat([keys, new], -2)
    sequence.settle()
    assert sequence.n_tokens == 512 + 4096 and sequence.n_compressed == 512 + 4096 - 64
    for token in (100, 700, 2500, 4400):
        q = keys[:, :, token : token + 1].repeat_interleave(2, 1)
        scores = torch.cat([part_scores(q, p) for p in sequence.parts], -1)
        assert (scores[..., 0, :].argsort(-1, descending=True)[..., :20] == token).any(-1).all(), token
    error = (sequence.dense()[0] - keys).norm(dim=-1) / (keys - keys.mean(-2, keepdim=True)).norm(dim=-1)
    begin, end = (float(error[..., a:b].mean()) for a, b in ((512, 1536), (3500, 4500)))
    assert end < 1.3 * begin


def test_all_records_chosen_is_attention_over_the_dense_view() -> None:
    sequence, _, _ = filled(300)
    sequence.observe(torch.randn(2, 4, 300, 64))
    sequence.settle()
    sequence.append(torch.randn(2, 2, 5, 64), torch.randn(2, 2, 5, 64))
    k, v = sequence.dense()
    for rows in (5, 1):
        q = torch.randn(2, 4, rows, 64)
        out, _ = sequence.attend(q, Budget(1.0), scale=0.125)
        mask = torch.ones(rows, 305).tril(305 - rows).bool()
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=0.125, enable_gqa=True
        )
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)


def test_a_sequence_refuses() -> None:
    sequence = CodedSequence(Layout(64))
    for call in (sequence.dense, lambda: sequence.observe(torch.randn(1, 2, 1, 64))):
        with pytest.raises(InvalidInput, match="append"):
            call()
    assert sequence.settle() == 0 and sequence.n_tokens == 0
    sequence.append(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64))
    with pytest.raises(InvalidInput, match=r"keys are \(2, 2, 1, 64\)"):
        sequence.append(torch.randn(2, 2, 1, 64), torch.randn(2, 2, 1, 64))
    with pytest.raises(InvalidInput, match="2 query rows"):
        sequence.attend(torch.randn(1, 2, 2, 64), Budget(), scale=1.0)


def test_stock_models_run_over_it_turn_after_turn(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    ids = torch.randint(0, 512, (2, 420))
    growth = Growth(keep=Keep(recent=64), block=32, least=64)
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    cache = Cache(layers=[SelfIndexLayer(growth) for _ in range(2)])
    with torch.inference_mode():
        whole = model(ids).logits
        made = []
        for begin, end in ((0, 300), (300, 301), (301, 302), (302, 420)):
            made.append(model(ids[:, begin:end], **{name: cache}, use_cache=True).logits)
    layer = cache.layers[0]
    assert cache.get_seq_length() == 420 and layer.sequence.n_compressed > 200
    torch.testing.assert_close(made[0], whole[:, :300], rtol=1e-4, atol=1e-4)  # the first turn is not touched
    torch.testing.assert_close(made[0].argmax(-1), whole[:, :300].argmax(-1))
    assert torch.isfinite(torch.cat(made, 1)).all()
    assert layer.nbytes < 0.6 * 2 * 420 * 2 * 2 * 64 * 4
    layer.reset()
    assert layer.get_seq_length() == 0 and layer.nbytes == 0
    with pytest.raises(InvalidInput, match="beam"):
        layer.reorder_cache(torch.tensor([0]))


def written(rotary: Rotary, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    mean = 4 * torch.randn((2, 1, 64), generator=draw) * (torch.rand((2, 1, 64), generator=draw) < 0.2)
    keys, values = (torch.randn((2, length, 64), generator=draw) for _ in range(2))
    return rotary.rotate(keys + mean, torch.arange(length)), values


@pytest.mark.parametrize("shared", [False, True], ids=["own tables", "shared"])
def test_documents_are_attended_at_any_offset(rotary: Rotary, shared: bool) -> None:
    written_ones = [written(rotary, n, n) for n in (300, 1, 177)]
    layout, offsets = Layout(64), (40, 1000, 340)
    tables = shared_tables(written_ones, layout) if shared else None
    documents = [
        Placed(encode_document(k, v, layout, tables=tables), o) for (k, v), o in zip(written_ones, offsets, strict=True)
    ]
    recent = torch.randn(2, 9, 64), torch.randn(2, 9, 64)
    q = torch.randn(4, 1, 64)
    out, lse = attend_documents(q, documents, recent, rotary, layout, count=10_000, scale=0.125)
    keys = torch.cat([*(rotary.rotate(k, o) for (k, _), o in zip(written_ones, offsets, strict=True)), recent[0]], -2)
    values = torch.cat([*(v for _, v in written_ones), recent[1]], -2)
    scores = q @ keys.repeat_interleave(2, 0).transpose(-1, -2) * 0.125
    assert float((lse - scores.logsumexp(-1)).abs().max()) < 0.3
    exact = scores.softmax(-1) @ values.repeat_interleave(2, 0)
    assert float((out - exact).norm() / exact.norm()) < 0.5
    assert documents[1].part.exact.shape == (2, 1)  # a document of one token is all whole
    backwards = attend_documents(q, documents[::-1], recent, rotary, layout, count=10_000, scale=0.125)[0]
    torch.testing.assert_close(backwards, out, rtol=1e-4, atol=1e-5)
    many_rows = attend_documents(q.expand(4, 3, 64), documents, recent, rotary, layout, count=20, scale=0.125)[0]
    assert many_rows.shape == (4, 3, 64)


def test_offsets_move_scores_with_the_document(rotary: Rotary) -> None:
    part = encode_document(*written(rotary, 200, 1), Layout(64))
    q = torch.randn(4, 2, 64)
    near = part_scores(turned_queries(q, [Placed(part, 30)], rotary)[0], part)
    far = part_scores(turned_queries(rotary.rotate(q, 70), [Placed(part, 100)], rotary)[0], part)
    torch.testing.assert_close(far, near, rtol=1e-3, atol=1e-3)
    unturned = part_scores(rotary.rotate(q, 70), part)[..., 1:]
    assert float((unturned - near[..., 1:]).abs().mean()) > 1


def test_the_first_token_of_a_document_is_always_attended(rotary: Rotary) -> None:
    keys, values = written(rotary, 100, 3)
    values[:, 0] = 50.0
    q = 0.01 * torch.randn(2, 1, 64)
    part = encode_document(keys, values, Layout(64), fit=Fit(steps=0, balance=False))
    out, _ = attention([q, q], [part], (keys[:, -1:], values[:, -1:]), Layout(64), count=0, scale=0.125)
    assert float(out.mean()) > 20
    with pytest.raises(InvalidInput, match="0 kept whole"):
        encode_document(keys, values, Layout(64), first=0)
    with pytest.raises(InvalidInput, match="no documents"):
        shared_tables([], Layout(64))


def test_energy_of_rotary_pairs(rotary: Rotary) -> None:
    energy = torch.rand(2, 64)
    made = pair_energy(energy, rotary)
    assert torch.equal(made[:, :32], made[:, 32:]) and float((made.sum() - energy.sum()).abs()) < 1e-3


@pytest.mark.parametrize(("steps", "n_bytes"), [(0, 1 << 20), (2, 1 << 20), (2, 100_000), (2, 0)])
def test_layers_settle_at_once_as_each_alone(
    rotary: Rotary, steps: int, n_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_module, "AT_ONCE_BYTES", n_bytes)
    growth = Growth(keep=SMALL.keep, fit=Fit(steps=steps), block=16, least=64, epoch=48, chosen=2)
    layers, alone = ([CodedSequence(Layout(64), growth, rotary) for _ in range(3)] for _ in range(2))
    lengthened = []
    for n in (100, *[1] * 100):
        for one, other in zip(layers, alone, strict=True):
            keys, values, q = torch.randn(1, 2, n, 64), torch.randn(1, 2, n, 64), torch.randn(1, 4, n, 64)
            for sequence in (one, other):
                sequence.append(keys, values)
                sequence.observe(q)
        due = layers[0].open is not None and layers[0].open[0].shape[-2] >= layers[0].settles_at
        before = len(layers[0].parts)
        settled = settle_layers(layers)
        assert settled == max(sequence.settle() for sequence in alone) and due == (settled > 0)
        lengthened += [len(layers[0].parts) == before] * due
    assert lengthened == [False, False, True, True, False, True, True]
    for one, other in zip(layers, alone, strict=True):
        assert one.offsets == other.offsets and one.nbytes == other.nbytes
        for x, y in zip(one.dense(), other.dense(), strict=True):
            assert torch.equal(x, y)


def test_steps_elsewhere_count_as_its_own() -> None:
    for n, more in ((20, 3), (20, 40), (200, 5)):
        one, keys, values = filled(n, batch=1)
        other = CodedSequence(Layout(64), SMALL)
        other.append(keys, values)
        for sequence in (one, other):
            sequence.observe(torch.ones(1, 4, n, 64))
            sequence.settle()
        keys, values, q = torch.randn(1, 2, more, 64), torch.randn(1, 2, more, 64), torch.randn(1, 4, more, 64)
        for i in range(more):
            other.append(keys[:, :, i : i + 1], values[:, :, i : i + 1])
            other.observe(q[:, :, i : i + 1])
        assert one.open is not None and other.open is not None and other.noted is not None
        run = torch.cat([one.open[0], keys], 2), torch.cat([one.open[1], values], 2)
        one.resume(run, other.noted[0], q[:, :, -32:], more)
        assert one.noted is not None and one.observed == other.observed == n + more
        for x, y in zip((*one.open, *one.noted), (*other.open, *other.noted), strict=True):
            assert torch.equal(x, y)
