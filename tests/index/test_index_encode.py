from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.core.errors import InvalidInput
from tamis.index.encode import Bits, encode, pack, trivial_bits, unpack
from tamis.index.spec import DocumentStats, Thresholds, n_pages, payload_bytes
from tamis.index.stats import metadata_ratio, random_stats, ratio_table

# Two heads of one layer, three tiles. LA rows of head 0: 1 / 0 1 / 1 0 1, of head 1: 1 / 1 1 / 0 0 1;
# CA 1 0 1 and 0 1 1. In order: 101101 111001 101 011, that is 10110111 10011010 11 and six zeros.
BY_HAND = bytes([0b10110111, 0b10011010, 0b11000000])


def hand_bits() -> Bits:
    la = torch.tensor([[[[1, 0, 0], [0, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [0, 0, 1]]]], dtype=torch.bool)
    return Bits(la, torch.tensor([[[1, 0, 1], [0, 1, 1]]], dtype=torch.bool))


def assert_order(packer: object) -> None:
    assert packer(hand_bits(), 20, 8) == BY_HAND  # type: ignore[operator]


def test_bit_order_is_the_written_one() -> None:
    assert_order(pack)
    assert unpack(BY_HAND, n_layers=1, n_heads=2, n_tokens=20, tile=8).equal(hand_bits())


def _least_first(bits: Bits, n_tokens: int, tile: int) -> bytes:
    whole = np.unpackbits(np.frombuffer(pack(bits, n_tokens, tile), np.uint8))
    return np.packbits(whole, bitorder="little").tobytes()


def _column_major(bits: Bits, n_tokens: int, tile: int) -> bytes:
    # the same bits, taken down the columns of the lower triangle
    order = [(r, c) for c in range(bits.n_pages) for r in range(c, bits.n_pages)]
    la = torch.stack([bits.la[..., r, c] for r, c in order], -1)
    return np.packbits(torch.cat([la.flatten(), bits.ca.flatten()]).numpy()).tobytes()


def _heads_interleaved(bits: Bits, n_tokens: int, tile: int) -> bytes:
    rows, columns = torch.tril_indices(bits.n_pages, bits.n_pages)
    return np.packbits(torch.cat([bits.la[..., rows, columns], bits.ca], -1).flatten().numpy()).tobytes()


@pytest.mark.parametrize("mutant", [_least_first, _column_major, _heads_interleaved])
def test_the_order_test_can_fail(mutant: object) -> None:
    with pytest.raises(AssertionError):
        assert_order(mutant)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 300), st.integers(1, 130), st.integers(0, 1 << 30))
def test_round_trip(
    random_bits: Callable[..., Bits], layers: int, heads: int, n_tokens: int, tile: int, seed: int
) -> None:
    bits = random_bits(layers, heads, n_pages(n_tokens, tile), seed)
    packed = pack(bits, n_tokens, tile)
    assert len(packed) == payload_bytes(layers, heads, n_tokens, tile)
    assert unpack(packed, n_layers=layers, n_heads=heads, n_tokens=n_tokens, tile=tile).equal(bits)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="tiles"):
        pack(hand_bits(), 33, 8)
    with pytest.raises(InvalidInput, match="take 3"):
        unpack(BY_HAND + b"\0", n_layers=1, n_heads=2, n_tokens=20, tile=8)
    with pytest.raises(InvalidInput, match="padding"):
        unpack(BY_HAND[:-1] + b"\xc1", n_layers=1, n_heads=2, n_tokens=20, tile=8)
    with pytest.raises(InvalidInput, match="expected bool"):
        Bits(torch.zeros(1, 1, 2, 3, dtype=torch.bool), torch.zeros(1, 1, 2, dtype=torch.bool))


def _probabilities(n_tokens: int, seed: int) -> torch.Tensor:
    """Causal post-softmax scores [L=2, H=2, T, T] with a few strong keys."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 2, n_tokens, n_tokens, generator=draw) * 4
    hidden = torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


def _observe(p: torch.Tensor, tile: int, beta: float) -> DocumentStats:
    layers, heads, n = p.shape[:3]
    pages = n_pages(n, tile)
    top, mass = torch.zeros(layers, heads, pages, pages), torch.zeros(layers, heads, pages, pages)
    later_high = torch.zeros(layers, heads, n, dtype=torch.int32)
    later_rows = torch.zeros(n, dtype=torch.int32)
    for i in range(pages):
        for j in range(pages):
            part = p[..., i * tile : (i + 1) * tile, j * tile : (j + 1) * tile]
            top[..., i, j], mass[..., i, j] = part.amax((-1, -2)), part.sum((-1, -2)) / part.shape[-2]
    for t in range(n):
        later = p[..., (t // tile + 1) * tile :, t]
        later_high[..., t], later_rows[t] = (later > beta).sum(-1), later.shape[-1]
    return DocumentStats(n, top, mass, later_high, later_rows, tile)


def _page_bit(p: torch.Tensor, page: range, after: int, rules: Thresholds) -> bool:
    """The rules, read off one head's probabilities one token at a time."""
    rows = range(after, p.shape[0])
    if not rows:
        return True
    looked = [sum(float(p[r, k]) > np.float32(rules.beta) for r in rows) for k in page]
    if rules.ca_rule == "any":
        return sum(n > 0 for n in looked) / len(page) > rules.gamma
    return any(n / len(rows) > rules.gamma for n in looked)


@pytest.mark.parametrize("ca_rule", ["any", "share"])
@pytest.mark.parametrize(("n_tokens", "tile"), [(40, 8), (37, 8), (9, 8), (30, 7)])
@pytest.mark.parametrize("gamma", [0.1, 0.25, 0.5])
def test_bits_against_the_definition(ca_rule: str, n_tokens: int, tile: int, gamma: float) -> None:
    rules = Thresholds(alpha=0.3, beta=0.1, gamma=gamma, ca_rule=ca_rule)  # type: ignore[arg-type]
    p = _probabilities(n_tokens, seed=n_tokens)
    bits = encode(_observe(p, tile, rules.beta), rules)
    spans = [range(a, min(a + tile, n_tokens)) for a in range(0, n_tokens, tile)]
    for layer in range(2):
        for head in range(2):
            one = p[layer, head]
            for i, q in enumerate(spans):
                for j, k in enumerate(spans[: i + 1]):
                    wanted = i == j or bool((one[q.start : q.stop, k.start : k.stop] >= rules.alpha).any())
                    assert bool(bits.la[layer, head, i, j]) == wanted, (layer, head, i, j)
                assert bool(bits.ca[layer, head, i]) == _page_bit(one, q, q.stop, rules), (layer, head, i)


def _stats(later_high: list[int], later_rows: list[int], tile: int) -> DocumentStats:
    pages = n_pages(len(later_rows), tile)
    return DocumentStats(
        len(later_rows),
        torch.zeros(1, 1, pages, pages),
        torch.zeros(1, 1, pages, pages),
        torch.tensor([[later_high]], dtype=torch.int32),
        torch.tensor(later_rows, dtype=torch.int32),
        tile,
    )


def test_the_two_rules_differ_and_equality_does_not_exceed() -> None:
    # one of ten keys is seen, by all ten later rows: 10 % of the tokens, 100 % of its rows
    stats = _stats([10] + [0] * 9 + [0] * 10, [10] * 10 + [0] * 10, 10)
    assert encode(stats, Thresholds(ca_rule="any")).ca.tolist() == [[[False, True]]]
    assert encode(stats, Thresholds(ca_rule="share")).ca.tolist() == [[[True, True]]]
    # every key is seen once in ten rows: all tokens, 10 % of the rows
    stats = _stats([1] * 10 + [0] * 10, [10] * 10 + [0] * 10, 10)
    assert encode(stats, Thresholds(ca_rule="any")).ca.tolist() == [[[True, True]]]
    assert encode(stats, Thresholds(ca_rule="share")).ca.tolist() == [[[False, True]]]


def test_one_token_in_a_large_page_is_enough_for_the_share_rule() -> None:
    stats = _stats([100] + [0] * 227, [100] * 128 + [0] * 100, 128)
    assert encode(stats, Thresholds(ca_rule="share")).ca.tolist() == [[[True, True]]]
    assert encode(stats, Thresholds(ca_rule="any")).ca.tolist() == [[[False, True]]]


def test_diagonal_last_page_and_upper_triangle_whatever_the_thresholds() -> None:
    strict = Thresholds(alpha=1.0, beta=1.0, gamma=1.0)
    bits = encode(_stats([0] * 20, [12] * 8 + [4] * 8 + [0] * 4, 8), strict)
    assert torch.equal(bits.la[0, 0], torch.eye(3, dtype=torch.bool))
    assert bits.ca.tolist() == [[[False, False, True]]]
    loose = encode(random_stats(2, 2, 300), Thresholds(alpha=0.0))
    assert torch.equal(loose.la, torch.ones_like(loose.la).tril())


def test_what_is_not_a_number_is_kept() -> None:
    stats = _stats([0] * 16, [8] * 8 + [0] * 8, 8)
    stats.tile_max[..., 1, 0] = float("nan")
    assert encode(stats, Thresholds()).la[0, 0].tolist() == [[True, False], [True, True]]


def test_half_precision_maxima() -> None:
    stats = random_stats(2, 3, 600)
    half = DocumentStats(
        600, stats.tile_max.half(), stats.tile_mass, stats.later_high, stats.later_rows, tile=stats.tile
    )
    far = (stats.tile_max - 0.001).abs() > 1e-5
    same = encode(half, Thresholds()).la == encode(stats, Thresholds()).la
    assert bool(same[far].all())


def test_one_tile_needs_no_observation() -> None:
    bits = trivial_bits(2, 3, 5, 128)
    assert bits.la.all()
    assert bits.ca.all()
    assert bits.equal(encode(random_stats(2, 3, 5), Thresholds(alpha=1.0, gamma=1.0)))
    with pytest.raises(InvalidInput, match="2 tiles"):
        trivial_bits(2, 3, 129, 128)


def test_size_is_the_papers() -> None:
    llama = metadata_ratio(32, 32, 8, 128)
    assert llama["bytes_per_layer_head"] == 5.5
    assert llama["payload_bytes"] * 4 == 22 * 1024  # SIFT table 1: 22.00 KiB per 4,096 tokens
    assert llama["kv_bytes"] == 128 << 20
    assert llama["kv_to_metadata_ratio"] >= 23_000
    table = ratio_table()
    assert table["llama-3.1-8b"] == llama
    assert table["minimax-m2.5"]["payload_bytes"] * 4 / 1024 == pytest.approx(63.94, abs=0.005)
    assert table["qwen3-235b-a22b"]["payload_bytes"] * 4 / 1024 == 129.25
    assert table["qwen3-235b-a22b"]["kv_bytes"] / table["qwen3-235b-a22b"]["payload_bytes"] == pytest.approx(
        5958, abs=1
    )


def test_packing_a_large_model_is_quick(random_bits: Callable[..., Bits]) -> None:
    bits = random_bits(32, 32, 8)
    took = []
    for _ in range(5):
        start = time.perf_counter()
        unpack(pack(bits, 1024, 128), n_layers=32, n_heads=32, n_tokens=1024, tile=128)
        took.append(time.perf_counter() - start)
    assert min(took) < 5e-3
