"""Pooled keys, scores and choices of blocks against loops that follow the published rule token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.core.errors import InvalidInput
from tamis.kernels.blocks import BlockRule
from tamis.kernels.reference.blocks import (
    COARSE,
    attend_blocks,
    best_blocks,
    block_mass,
    block_numbers,
    block_scores,
    forced_blocks,
    own_scores,
    pool_keys,
    raw_scores,
    select_blocks,
)

SMALL = BlockRule(top=5, first=1, local=1, block=16, window=8, stride=4, dense_tokens=0)
SCALE = 0.125


def tensors(heads: tuple[int, int], n: int, d: int = 64, seed: int = 0) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    shapes = (heads[0], n, d), (heads[1], n, d), (heads[1], n, d)
    return tuple(torch.randn(shape, generator=draw) * (3 if i == 0 else 1) for i, shape in enumerate(shapes))


def choice_by_loops(q: torch.Tensor, k: torch.Tensor, rule: BlockRule, row: int, head: int, group: int) -> set[int]:
    """The blocks of one row and KV head; q [Hq, T, D]."""
    windows = [j for j in range(10**6) if rule.stride * j + rule.window <= row + 1] if row < 64 else None
    windows = windows or [j for j in range(row) if rule.stride * j + rule.window <= row + 1]
    own = row // rule.block
    forced = {b for b in range(own + 1) if b < rule.first or b >= own - rule.local}
    total = dict.fromkeys(windows, 0.0)
    for g in range(group):
        logits = torch.tensor(
            [
                float(q[head * group + g, row] @ k[head, rule.stride * j : rule.stride * j + rule.window].mean(0))
                * SCALE
                for j in windows
            ]
        )
        for j, p in zip(windows, logits.softmax(0).tolist() if windows else [], strict=True):
            total[j] += p
    score = {}
    for b in range(own + 1):
        # every window that shares a token with the block
        touching = [
            total[j]
            for j in windows
            if rule.stride * j < (b + 1) * rule.block and rule.stride * j + rule.window > b * rule.block
        ]
        score[b] = max(touching, default=-math.inf)
    free = sorted((b for b in range(own + 1) if b not in forced), key=lambda b: (-score[b], b))
    return forced | set(free[: rule.chosen])


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("n", [1, 63, 111, 300])
def test_a_layers_own_choice(heads: tuple[int, int], n: int) -> None:
    q, k, _ = tensors(heads, n)
    positions = torch.arange(n)
    scores = own_scores(q, pool_keys(k, SMALL.window, SMALL.stride), positions, SMALL, scale=SCALE)
    chosen = select_blocks(block_scores(scores, SMALL, SMALL.n_blocks(n)), positions, SMALL)
    for row in {0, n // 3, n // 2, n - 1}:
        for head in range(heads[1]):
            wanted = choice_by_loops(q, k, SMALL, row, head, heads[0] // heads[1])
            assert set(chosen[head, row].nonzero().flatten().tolist()) == wanted, (row, head)


def test_windows_of_published_sizes() -> None:
    """32 heads, 2 KV heads, head_dim 128 and 96 blocks of 64, at a length where blocks are chosen."""
    rule, n = BlockRule(), 64 * 130 + 7
    draw = torch.Generator().manual_seed(1)
    k = torch.randn((2, n, 128), generator=draw)
    q = torch.randn((32, 3, 128), generator=draw) * 2
    positions = torch.tensor([64 * 40, 64 * 100, n - 1])
    pooled = pool_keys(k, rule.window, rule.stride)
    assert pooled.shape[1] == rule.n_pooled(n) == (n - 32) // 16 + 1
    scores = block_scores(own_scores(q, pooled, positions, rule, scale=128**-0.5), rule, rule.n_blocks(n))
    assert scores.shape == (2, 3, 131)
    chosen = select_blocks(scores, positions, rule)
    assert chosen.sum(-1).tolist() == [[41, 96, 96]] * 2, "all of few blocks, 96 of many"
    assert bool(chosen[:, :, 0].all()) and bool(chosen[:, 2, 130 - 32 :].all()), "the first, the own and 32 before it"
    assert rule.forced == 34 and rule.chosen == 62
    numbers = block_numbers(chosen, rule.top)
    assert numbers.shape == (2, 3, 96) and numbers.dtype == torch.int32
    assert numbers[0, 0, 40] == 40 and bool((numbers[0, 0, 41:] == -1).all())


@given(n=st.integers(1, 200), local=st.integers(0, 3), first=st.integers(0, 2), more=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_every_row_has_its_own_block_and_no_later_one(n: int, local: int, first: int, more: int) -> None:
    rule = BlockRule(top=first + local + 1 + more, first=first, local=local, block=16, window=8, stride=4)
    positions = torch.arange(n)
    scores = torch.randn((2, n, rule.n_blocks(n)))
    chosen = select_blocks(scores, positions, rule)
    own = positions // rule.block
    assert bool(chosen[:, positions, own].all())
    assert not bool((chosen & (torch.arange(rule.n_blocks(n)) > own[:, None])).any())
    expected = torch.minimum(own + 1, torch.tensor(rule.top)).clamp(min=0)
    late = own >= rule.forced
    assert torch.equal(chosen.sum(-1)[:, late], expected[late].expand(2, -1))
    assert bool(chosen[:, forced_blocks(positions, rule, rule.n_blocks(n))].all())


def test_equal_scores_go_to_the_earlier_block() -> None:
    positions = torch.tensor([16 * 9])
    best = best_blocks(torch.zeros(1, 1, 10), positions, SMALL)
    assert best.tolist() == [[[1, 2]]]


def test_blocks_with_a_hole_are_not_filled_up() -> None:
    scores = torch.full((1, 1, 10), -math.inf)
    scores[..., 4] = 1.0
    assert best_blocks(scores, torch.tensor([159]), SMALL).tolist() == [[[4, -1]]]


def test_the_coarse_normaliser_is_near_the_exact_one() -> None:
    q, k, _ = tensors((8, 2), 600)
    k = k.cumsum(1) / 12  # neighbouring keys are alike, as a model's are
    rule, positions = SMALL, torch.arange(600)
    pooled, wide = pool_keys(k, 8, 4), pool_keys(k, 8 * COARSE, 4 * COARSE)
    exact = own_scores(q * 0.3, pooled, positions, rule, scale=SCALE)
    rough = own_scores(q * 0.3, pooled, positions, rule, scale=SCALE, coarse=wide)
    assert torch.equal(rough[:, :31], exact[:, :31]), "no coarse window has ended yet"
    ratio = (rough[:, 200:] / exact[:, 200:]).nan_to_num(1.0)
    assert not torch.equal(rough[:, 200:], exact[:, 200:]) and float(ratio.min()) > 0.4 and float(ratio.max()) < 2.5
    picks = [select_blocks(block_scores(s, rule, rule.n_blocks(600)), positions, rule) for s in (exact, rough)]
    assert float((picks[0] & picks[1]).sum() / picks[0].sum()) > 0.95


def test_raw_scores_rank_as_one_head_does() -> None:
    q, k, _ = tensors((2, 2), 300)
    positions, pooled = torch.arange(300), pool_keys(k, 8, 4)
    own = select_blocks(block_scores(own_scores(q, pooled, positions, SMALL, scale=SCALE), SMALL, 19), positions, SMALL)
    raw = select_blocks(block_scores(raw_scores(q, pooled, positions, SMALL), SMALL, 19), positions, SMALL)
    assert torch.equal(own, raw), "a softmax does not change the order of one head's scores"


@pytest.mark.parametrize("n", [1, 17, 111, 300])
def test_all_blocks_are_dense_attention(n: int) -> None:
    q, k, v = tensors((6, 2), n)
    positions = torch.arange(n)
    chosen = torch.ones((2, n, SMALL.n_blocks(n)), dtype=torch.bool)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=SCALE, enable_gqa=True
    )[0]
    torch.testing.assert_close(attend_blocks(q, k, v, chosen, positions, block=16, scale=SCALE), dense)


def test_blocks_left_out_are_not_read() -> None:
    q, k, v = tensors((6, 2), 300)
    positions = torch.arange(300)
    scores = own_scores(q, pool_keys(k, 8, 4), positions, SMALL, scale=SCALE)
    chosen = select_blocks(block_scores(scores, SMALL, 19), positions, SMALL)
    row, head = 290, 1
    out = attend_blocks(
        q[:, row : row + 1], k, v, chosen[:, row : row + 1], positions[row : row + 1], block=16, scale=SCALE
    )
    tokens = chosen[head, row].repeat_interleave(16)[:300] & (torch.arange(300) <= row)
    weights = (q[5, row] @ k[head, tokens].T * SCALE).softmax(0)
    torch.testing.assert_close(out[5, 0], weights @ v[head, tokens])
    wrong = weights.roll(1) @ v[head, tokens]
    assert float((out[5, 0] - wrong).abs().max()) > 0.02, "another key's weight is seen"


def test_mass_of_blocks_is_the_attention_they_get() -> None:
    q, k, _ = tensors((6, 2), 111)
    positions = torch.tensor([5, 60, 110])
    mass = block_mass(q[:, positions], k, positions, SMALL, scale=SCALE)
    assert mass.shape == (2, 3, 7)
    torch.testing.assert_close(mass.sum(-1), torch.ones(2, 3))
    direct = torch.stack([(q[3 + g, 60] @ k[1, :61].T * SCALE).softmax(0) for g in range(3)]).mean(0)
    torch.testing.assert_close(mass[1, 1, 3], direct[48:61].sum())
    assert float(mass[0, 0, 1:].sum()) == 0


def test_pooling_is_a_mean_of_whole_windows() -> None:
    _, k, _ = tensors((1, 1), 31)
    assert pool_keys(k, 32, 16).shape == (1, 0, 64)
    pooled = pool_keys(k, 8, 4)
    assert pooled.shape == (1, 6, 64)
    torch.testing.assert_close(pooled[0, 5], k[0, 20:28].mean(0))
    assert pool_keys(k.bfloat16(), 8, 4).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"top": 3}, "forced"),
        ({"stride": 5}, "whole multiples"),
        ({"window": 8}, "whole multiples"),
        ({"window": 128}, "fits one block"),
        ({"local": -1}, "local is -1"),
        ({"block": 64.0}, "whole number"),
    ],
)
def test_rules_are_checked(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        BlockRule(**wrong)  # type: ignore[arg-type]


def test_too_few_places_or_blocks_are_said() -> None:
    with pytest.raises(InvalidInput, match="give 3 or more"):
        block_numbers(torch.ones(1, 1, 3, dtype=torch.bool), 2)
    with pytest.raises(InvalidInput, match="give all blocks"):
        block_scores(torch.zeros(1, 1, 9), SMALL, 2)
