"""The self-indexing form: exact packing, tables with guards, scores, selection, and attention in its folded form."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.cpu import selfindex as cpu
from tamis.kernels.reference import selfindex as ref
from tamis.kernels.reference.selfindex import Fit
from tamis.kernels.selfindex import (
    Layout,
    Part,
    Records,
    Tables,
    by_group,
    dequantised,
    group_mean,
    pack_nibbles,
    pack_pairs,
    pack_scales,
    unpack_nibbles,
    unpack_pairs,
    unpack_scales,
)

SIGNS = Fit(steps=0, balance=False)


def drawn(*shape: int, seed: int = 0, outliers: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with a few channels far from zero and of different spread, as models have them; and values."""
    draw = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(shape, generator=draw) for _ in range(2))
    spread = torch.rand(shape[-1], generator=draw) * 2 + 0.2
    shift = 6 * torch.randn(shape[-1], generator=draw) * (torch.rand(shape[-1], generator=draw) < 0.15)
    return (keys * spread + shift if outliers else keys), values


def compressed(keys: torch.Tensor, values: torch.Tensor, fit: Fit | None = None) -> tuple[Layout, Tables, Records]:
    layout = Layout(keys.shape[-1])
    tables = ref.fit_tables(keys, values, layout, fit=fit)
    return layout, tables, ref.compress(keys, values, tables, layout, signs=fit is not None and fit.steps == 0)


def part_of(keys: torch.Tensor, values: torch.Tensor, exact: torch.Tensor, fit: Fit | None = None) -> Part:
    _, tables, records = compressed(keys, values, fit)
    kept = (t.gather(-2, exact[..., None].expand(*exact.shape, t.shape[-1])) for t in (keys, values))
    return Part(records, tables, exact, *kept)


@pytest.mark.parametrize(("head_dim", "record", "tables"), [(128, 88, 128 * 43), (64, 44, 64 * 43)])
def test_sizes_are_what_lies_in_memory(head_dim: int, record: int, tables: int) -> None:
    layout = Layout(head_dim)
    assert layout.record_bytes == record and layout.table_bytes == tables
    keys, values = drawn(2, 3, 50, head_dim)
    _, made, records = compressed(keys, values)
    assert records.nbytes == 2 * 3 * 50 * record and made.nbytes == 2 * 3 * tables
    for name, n in layout.plane_bytes.items():
        assert getattr(records, name).shape == (2, 3, 50, n) and getattr(records, name).dtype == torch.uint8
    assert layout.ratio(32768, exact_tokens=4 + 60 + 127) > 5


def test_layout_refuses() -> None:
    with pytest.raises(InvalidInput, match="head_dim is 96"):
        Layout(96)
    with pytest.raises(InvalidInput, match="48 channels share a scale"):
        Layout(128, 48)


@pytest.mark.parametrize("n", [1, 7])
def test_packing_is_exact(n: int) -> None:
    nibbles, pairs = torch.randint(0, 16, (2, n, 32)), torch.randint(0, 4, (2, n, 128))
    assert torch.equal(unpack_nibbles(pack_nibbles(nibbles)), nibbles.byte())
    assert torch.equal(unpack_pairs(pack_pairs(pairs)), pairs.byte())
    assert int(pack_nibbles(nibbles)[0, 0, 3]) == int(nibbles[0, 0, 3]) + 16 * int(nibbles[0, 0, 19])
    byte = sum(int(pairs[0, 0, 5 + 32 * j]) << 2 * j for j in range(4))
    assert int(pack_pairs(pairs)[0, 0, 5]) == byte
    assert torch.equal(pack_scales(unpack_scales(torch.arange(256).byte())), torch.arange(256).byte())
    scales = torch.logspace(-2.5, 1.5, 400)
    assert float((unpack_scales(pack_scales(scales)) / scales - 1).abs().max()) < 0.0222
    assert unpack_scales(pack_scales(torch.tensor([0.0, 1e9]))).tolist() == [0.0, pytest.approx(2.0 ** (95 / 16))]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("fit", [Fit(), SIGNS], ids=["refined", "signs"])
def test_round_trip(head_dim: int, fit: Fit) -> None:
    keys, values = drawn(2, 2, 777, head_dim)
    layout, tables, records = compressed(keys, values, fit)
    k, v = dequantised(records, tables, layout)
    for made, true, most in ((k, keys, 0.25), (v, values, 0.36)):
        centred = true - true.mean(-2, keepdim=True)
        assert float((made - true).norm() / centred.norm()) < most
    once = ref.compress(k, v, tables, layout, signs=fit.steps == 0)
    assert float((once.values == records.values).float().mean()) > 0.9


def test_signs_are_the_papers_codes_and_centroids() -> None:
    keys, values = drawn(1, 200, 64)
    _, tables, records = compressed(keys, values, SIGNS)
    centred = keys[0] - tables.mean.float()
    codes = unpack_nibbles(records.codes)[0]
    group = 5
    channels = centred[:, [group, group + 16, group + 32, group + 48]]
    signs = ((channels > 0) * torch.tensor([1, 2, 4, 8])).sum(-1)
    assert torch.equal(codes[:, group].long(), signs)
    cell = int(signs[0])
    mean = channels[signs == cell].mean(0)
    torch.testing.assert_close(tables.centroids[0, group, cell].float(), mean, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("n", [1, 2, 63, 111, 1000])
def test_scores_are_products_with_the_centroids(n: int) -> None:
    keys, values = drawn(2, n, 64)
    layout, tables, records = compressed(keys, values)
    q = torch.randn(2, 3, 64)
    bare = dataclasses.replace(records, key_scales=torch.zeros_like(records.key_scales))
    expected = q @ dequantised(bare, tables, layout)[0].transpose(-1, -2)
    torch.testing.assert_close(ref.score(q, records, tables), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(cpu.score(q, records, tables), expected, rtol=1e-4, atol=1e-3)


def overlap(q: torch.Tensor, keys: torch.Tensor, scores: torch.Tensor, count: int = 75) -> float:
    exact = ref.highest(q @ keys.transpose(-1, -2), count)
    return float((ref.highest(scores, count) & exact).sum() / exact.sum())


def test_what_each_step_is_worth() -> None:
    keys, values = drawn(4, 1000, 128)
    draw = torch.Generator().manual_seed(3)
    strength = torch.rand((4, 1, 128), generator=draw).square() * 3
    q = torch.randn((4, 16, 128), generator=draw) * strength
    layout = Layout(128)
    found = {}
    for name, fit, energy in (
        ("signs", SIGNS, None),
        ("refined", Fit(), None),
        ("weighed", Fit(), strength[:, 0] ** 2),
    ):
        tables = ref.fit_tables(keys, values, layout, energy=energy, fit=fit)
        records = ref.compress(keys, values, tables, layout, signs=fit.steps == 0)
        found[name] = overlap(q, keys, ref.score(q, records, tables))
    assert found["signs"] + 0.03 < found["refined"] and found["refined"] + 0.03 < found["weighed"], found


@pytest.mark.parametrize("mutation", ["group", "head"])
def test_mutations_are_noticed(mutation: str) -> None:
    keys, values = drawn(2, 1000, 64)
    keys[1] += 2 * torch.randn(64)
    q = torch.randn(2, 8, 64)
    _, tables, records = compressed(keys, values)
    good = overlap(q, keys, ref.score(q, records, tables))
    if mutation == "group":
        records = dataclasses.replace(records, codes=records.codes.roll(1, -1))
    else:
        tables = dataclasses.replace(tables, centroids=tables.centroids.flip(0))
    assert overlap(q, keys, ref.score(q, records, tables)) < good - 0.2


def test_a_missing_bias_is_noticed() -> None:
    shifts, plain = 3 * torch.randn(2, 64), [drawn(2, 500, 64, seed=i) for i in (1, 2)]
    pairs = [(k + shift, v) for (k, v), shift in zip(plain, shifts, strict=True)]
    made = [compressed(*p) for p in pairs]
    q = torch.randn(2, 8, 64)
    good = [ref.score(q, records, tables) for _, tables, records in made]
    bare = [dataclasses.replace(tables, mean=torch.zeros_like(tables.mean)) for _, tables, _ in made]
    bad = [ref.score(q, records, tables) for (_, _, records), tables in zip(made, bare, strict=True)]
    keys = torch.cat([k for k, _ in pairs], -2)
    assert overlap(q, keys, torch.cat(bad, -1)) < overlap(q, keys, torch.cat(good, -1)) - 0.2
    for (layout, tables, records), other in zip(made, bare, strict=True):
        one, two = (ref.attend_records(q[:, None], records, t, layout, scale=0.125)[1] for t in (tables, other))
        assert float((one - two).abs().min()) > 1e-3


@pytest.mark.parametrize("fit", [Fit(), SIGNS], ids=["refined", "signs"])
@pytest.mark.parametrize("kind", ["zeros", "equal", "one token"])
def test_constant_inputs_come_back_exactly(kind: str, fit: Fit) -> None:
    row = torch.zeros(64) if kind == "zeros" else torch.randn(64).bfloat16().float()
    keys = row.expand(2, 1 if kind == "one token" else 40, 64).clone()
    layout, tables, records = compressed(keys, keys, fit)
    k, v = dequantised(records, tables, layout)
    assert torch.equal(k, keys) and torch.equal(v, keys)
    assert torch.isfinite(ref.score(torch.randn(2, 1, 64), records, tables)).all()


def test_what_is_not_finite_stays_where_it_is() -> None:
    keys, values = drawn(2, 100, 64)
    layout, tables, records = compressed(keys, values)
    clean = dequantised(records, tables, layout)
    for bad in (math.nan, math.inf, -math.inf):
        k, v = keys.clone(), values.clone()
        k[0, 50, 3] = v[1, 50, 3] = bad
        _, other, made = compressed(k, v)
        back = dequantised(made, other, layout)
        assert all(torch.isfinite(t).all() for t in (*back, other.mean, other.centroids, other.residual_scale))
        again = ref.compress(k, v, tables, layout)
        rest = [i for i in range(100) if i != 50]
        for a, b in zip(dequantised(again, tables, layout), clean, strict=True):
            assert torch.equal(a[:, rest], b[:, rest]) and torch.isfinite(a).all()


def test_left_out_tokens_do_not_move_the_tables() -> None:
    keys, values = drawn(2, 100, 64)
    spoiled = keys.clone()
    spoiled[:, 0] = 1000.0
    left_out = torch.zeros(2, 100, dtype=torch.bool)
    left_out[:, 0] = True
    layout = Layout(64)
    a = ref.fit_tables(keys, values, layout, left_out=left_out)
    b = ref.fit_tables(spoiled, values, layout, left_out=left_out)
    assert torch.equal(a.centroids, b.centroids) and torch.equal(a.mean, b.mean)
    everything = ref.fit_tables(keys, values, layout, left_out=torch.ones(2, 100, dtype=torch.bool))
    assert torch.equal(everything.mean, ref.fit_tables(keys, values, layout).mean)


def test_select_counts_exactly_and_breaks_ties_by_position() -> None:
    scores = torch.tensor([[1.0, 3, 3, 0, 3, 3], [math.nan, 2, 2, -math.inf, 2, 5], [0, 0, 0, 0, 0, 0]])
    assert ref.select(scores, 3).tolist() == [[1, 2, 4], [1, 2, 5], [0, 1, 2]]
    assert ref.select(scores, 0).shape == (3, 0) and ref.select(scores, 99).shape == (3, 6)
    with pytest.raises(InvalidInput, match="-1 tokens"):
        ref.select(scores, -1)


def test_folded_attention_is_attention_over_the_dequantised() -> None:
    keys, values = drawn(2, 2, 130, 64)
    layout, tables, records = compressed(keys, values)
    q = torch.randn(2, 6, 3, 64)
    out, lse = ref.attend_records(by_group(q, 2), records, tables, layout, scale=0.125)
    k, v = (t.repeat_interleave(3, 1) for t in dequantised(records, tables, layout))
    scores = q @ k.transpose(-1, -2) * 0.125
    torch.testing.assert_close(out.flatten(1, 2), scores.softmax(-1) @ v, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.flatten(1, 2), scores.logsumexp(-1), rtol=1e-5, atol=1e-4)
    none = ref.attend_records(by_group(q, 2), records.span(0, 0), tables, layout, scale=0.125)
    assert not none[0].any() and (none[1] == -math.inf).all()


def many(
    batch: int = 2, head_dim: int = 64
) -> tuple[list[Part], tuple[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    """Two parts, the first with exact tokens that differ between heads, and recent ones; (keys, values) of each."""
    first, second, recent = (drawn(batch, 2, n, head_dim, seed=n) for n in (201, 77, 5))
    exact = torch.stack([torch.randperm(201)[:9] for _ in range(2)]).expand(batch, 2, 9).contiguous()
    parts = [part_of(*first, exact), part_of(*second, torch.zeros(batch, 2, 0, dtype=torch.long))]
    return parts, recent, [torch.cat([a, b, c], -2) for a, b, c in zip(first, second, recent, strict=True)]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("count", [0, 1, 40, 10_000])
def test_the_step_on_a_cpu_is_the_reference(count: int, head_dim: int) -> None:
    parts, recent, _ = many(head_dim=head_dim)
    q = torch.randn(2, 6, 1, head_dim)
    layout, queries = Layout(head_dim), [q, q * 1.1, q]
    expected = ref.attention(queries, parts, recent, layout, count=count, scale=0.1)
    made = cpu.decode(queries, parts, recent, layout, count=count, scale=0.1)
    for a, b in zip(made, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_choosing_everything_is_full_attention_but_for_the_rounding() -> None:
    parts, recent, (keys, values) = many()
    q = torch.randn(2, 6, 4, 64)
    layout = Layout(64)
    out, _ = ref.attention([q] * 3, parts, recent, layout, count=10_000, scale=0.125)
    true_k, true_v = keys.clone(), values.clone()
    begin = 0
    for part in parts:
        n = part.records.n_tokens
        for true, made, kept in zip((true_k, true_v), dequantised(part.records, part.tables, layout),
                                    (part.keys, part.values), strict=True):  # fmt: skip
            index = part.exact[..., None].expand(kept.shape)
            true[..., begin : begin + n, :] = made.scatter(-2, index, kept)
        begin += n
    k, v = (t.repeat_interleave(3, 1) for t in (true_k, true_v))
    mask = torch.ones(4, keys.shape[-2]).tril(keys.shape[-2] - 4).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.125)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_exact_count_over_all_parts() -> None:
    parts, _, _ = many()
    q = torch.randn(2, 6, 3, 64)
    chosen = ref.choose([ref.part_scores(q, p) for p in parts], 33)
    assert (sum(m.sum(-1) for m in chosen) == 33).all()
    taken = chosen[0].gather(-1, parts[0].exact[..., None, :].expand(2, 2, 3, 9))
    assert not taken.any(), "tokens kept whole are not chosen again"
    everything = ref.choose([ref.part_scores(q, p) for p in parts], 10_000)
    assert (sum(m.sum(-1) for m in everything) == 201 + 77 - 9).all()
    assert ref.choose([], 5) == []


def test_one_row_and_one_query_a_part_are_asked_for() -> None:
    parts, recent, _ = many()
    q = torch.randn(2, 6, 2, 64)
    with pytest.raises(InvalidInput, match="2 queries for 2 parts"):
        ref.attention([q, q], parts, recent, Layout(64), count=1, scale=1.0)
    with pytest.raises(InvalidInput, match="2 rows"):
        cpu.decode([q] * 3, parts, recent, Layout(64), count=1, scale=1.0)
    with pytest.raises(InvalidInput, match="Hq a multiple of 4"):
        group_mean(q, 4)
    with pytest.raises(InvalidInput, match="0 tokens"):
        ref.fit_tables(torch.zeros(1, 0, 64), torch.zeros(1, 0, 64), Layout(64))
