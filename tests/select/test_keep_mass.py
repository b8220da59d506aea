"""The greedy choice of tiles against every subset there is."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tamis.select.scene import keep_mass

# Multiples of 1/64 and shares of 1/16 are exact in float32, so that a tile is never needed by rounding alone.
Row = list[tuple[int, bool, bool]]  # (mass in 64ths, forced, offered)
rows = st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.booleans()), min_size=1, max_size=7)


def keep(row: Row, share: float) -> list[bool]:
    mass, forced, offered = zip(*row, strict=True)
    kept = keep_mass(torch.tensor(mass) / 64, torch.tensor(forced), torch.tensor(offered), share)
    return [bool(x) for x in kept]


def fewest(row: Row, share: float) -> int:
    """How many offered tiles are needed beside the forced ones, by trying all subsets."""
    total = sum(m for m, _, _ in row)
    missing = share * total - sum(m for m, forced, _ in row if forced)
    free = [m for m, forced, offered in row if offered and not forced]
    for n in range(len(free) + 1):
        if max(sum(s) for s in itertools.combinations(free, n)) >= missing:
            return n
    return sum(m > 0 for m in free)


@given(rows, st.integers(0, 16))
@settings(max_examples=300, deadline=None)
@example([(10, False, True)] * 4, 8)  # equal masses
@example([(0, False, True), (0, True, True)], 16)  # nothing to keep
@example([(20, True, False), (1, False, True)], 8)  # the forced tile is enough
@example([(1, True, True), (9, False, False), (5, False, True)], 16)  # more is missing than is offered
def test_fewest_tiles_that_reach_the_share(row: Row, sixteenths: int) -> None:
    share = sixteenths / 16
    kept = keep(row, share)
    for k, (_, forced, offered) in zip(kept, row, strict=True):
        assert k or not forced, "a forced tile was dropped"
        assert forced or offered or not k, "a tile that was not offered was taken"
    taken = [m for k, (m, forced, _) in zip(kept, row, strict=True) if k and not forced]
    assert len(taken) == fewest(row, share)
    left = [m for k, (m, _, offered) in zip(kept, row, strict=True) if offered and not k]
    assert not taken or not left or min(taken) >= max(left), "a smaller tile was taken before a larger one"


def test_by_hand() -> None:
    row: Row = [(8, False, True), (32, False, True), (4, True, True), (16, False, True), (4, False, False)]
    assert keep(row, 0.5) == [False, True, True, False, False]  # 4 + 32 >= 32
    assert keep(row, 0.75) == [False, True, True, True, False]  # 4 + 32 < 48, with 16 it is 52
    assert keep(row, 0.875) == [True, True, True, True, False]  # 52 < 56


def test_forced_mass_counts_first() -> None:
    assert keep([(40, True, False), (14, False, True), (10, False, True)], 0.5) == [True, False, False]
    assert keep([(40, False, True), (14, True, True), (10, False, True)], 0.5) == [True, True, False]


def test_rows_are_judged_one_by_one() -> None:
    mass = torch.tensor([[[48, 16], [16, 48]], [[32, 32], [0, 64]]]) / 64
    forced = torch.tensor([[False, False], [False, False]])
    kept = keep_mass(mass, forced, torch.ones(2, 2, dtype=torch.bool), 0.75)
    assert kept.tolist() == [[[True, False], [False, True]], [[True, True], [False, True]]]


def test_rows_need_not_sum_to_one() -> None:
    """Sampled mass may leave out what lies in tiles that are computed anyway or not at all."""
    small = [(8, False, True), (4, False, True), (4, False, True)]
    assert keep(small, 0.5) == keep([(4 * m, f, o) for m, f, o in small], 0.5) == [True, False, False]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [8, 300])
def test_share_of_one_keeps_all_that_has_mass(seed: int, n: int) -> None:
    """A softmax spreads over many magnitudes: the small ones must not be lost to rounding."""
    draw = torch.Generator().manual_seed(seed)
    mass = (6 * torch.randn(16, n, generator=draw)).softmax(-1)
    forced = torch.rand(16, n, generator=draw) < 0.2
    offered = torch.rand(16, n, generator=draw) < 0.8
    kept = keep_mass(mass, forced, offered, 1.0)
    assert torch.equal(kept, forced | (offered & (mass > 0)))


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.95])
def test_a_smaller_share_keeps_fewer_tiles(share: float) -> None:
    mass = (2 * torch.randn(20, 60)).softmax(-1)
    nothing, everything = torch.zeros(60, dtype=torch.bool), torch.ones(60, dtype=torch.bool)
    kept = keep_mass(mass, nothing, everything, share)
    assert bool(((mass * kept).sum(-1) >= share * mass.sum(-1) - 1e-5).all())
    assert int(kept.sum()) < 0.8 * kept.numel()
    more = keep_mass(mass, nothing, everything, share + 0.04)
    assert int(more.sum()) > int(kept.sum()) and bool((more | ~kept).all())
