"""Several prompts in one call against a call for each."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import interpreted_packed
import pytest
import torch
from attention_cases import Shape, errors, truth, within
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import joined, prompts

from tamis.core.errors import InvalidInput, Unavailable
from tamis.kernels import dispatch
from tamis.kernels.dispatch import packed_causal_attention
from tamis.kernels.lists import TileLists, Tiling, counted, lists_from_mask
from tamis.kernels.packed import MOST_KEYS, concat_lists, every_tile_of
from tamis.kernels.reference.block_sparse import unpack

TILE = 16
BASE = Shape((), tile=TILE, dim=16)
HEADS = ((1, 1), (2, 1), (4, 2), (3, 3))
a_length = st.one_of(st.integers(1, 70), st.sampled_from([1, TILE - 1, TILE, TILE + 1, 2 * TILE]))
some_lengths = st.lists(a_length, min_size=1, max_size=4)


def close(made: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Equal but for the order of float32 sums."""
    return all(torch.allclose(a, b, rtol=1e-5, atol=2e-6) for a, b in zip(made, expected, strict=True))


def visits(lists: TileLists, head: int, tile: int) -> list[tuple[int, int]]:
    entries = lists.entries[head, tile].tolist()
    return [unpack(e) for e in entries[: int(lists.count[head, tile])]]


@given(lengths=some_lengths, heads=st.sampled_from(HEADS), first_offset=st.sampled_from([0, 0, TILE, 3 * TILE]))
@settings(max_examples=60, deadline=None)
def test_a_packed_call_gives_what_separate_calls_give(
    lengths: list[int], heads: tuple[int, int], first_offset: int
) -> None:
    parts, packed = prompts(lengths, replace(BASE, heads=heads), first_offset=first_offset)
    for kernel in ("reference", "cpu"):
        separate = [dispatch.block_sparse_attention(*part, BASE.scale, kernel=kernel) for part in parts]
        assert close(dispatch.block_sparse_attention(*packed, BASE.scale, kernel=kernel), joined(separate)), kernel


@given(lengths=some_lengths, first_offset=st.sampled_from([0, 5, TILE]))
@settings(max_examples=60, deadline=None)
def test_lists_are_moved_and_nothing_else(lengths: list[int], first_offset: int) -> None:
    parts, (_, k, _, packed) = prompts(lengths, BASE, first_offset=first_offset)
    row, tile, key = 0, 0, 0
    for (_, own_k, _, lists), n in zip(parts, lengths, strict=True):
        for i in range(lists.q_start.numel()):
            assert int(packed.q_start[tile + i]) == int(lists.q_start[i]) + row
            assert int(packed.q_len[tile + i]) == int(lists.q_len[i])
            for h in range(4):
                moved = [(a + key, b + key) for a, b in visits(lists, h, i)]
                assert visits(packed, h, tile + i) == moved
                assert int(packed.masked[h, tile + i]) == int(lists.masked[h, i])
        row, tile, key = row + n, tile + lists.q_start.numel(), key + own_k.shape[1]
    assert (row, tile, key) == (sum(lengths), packed.q_start.numel(), k.shape[1])
    assert packed.q_offset == first_offset and packed.tile == TILE
    assert packed.area == sum(counted(part[3].area) for part in parts)
    assert packed.causal_area == sum(part[3].causal_area for part in parts)


@pytest.mark.parametrize("fault", ["entries not moved", "rows not moved", "another offset"])
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_a_wrong_join_would_be_noticed(fault: str, kernel: str) -> None:
    parts, (q, k, v, packed) = prompts([48, 33], BASE)
    wrong = {
        "entries not moved": replace(packed, entries=_unmoved(parts)),
        "rows not moved": replace(packed, q_start=torch.cat([part[3].q_start for part in parts])),
        "another offset": replace(packed, q_offset=1),
    }[fault]
    expected = joined([dispatch.block_sparse_attention(*part, BASE.scale) for part in parts])
    try:
        made = dispatch.block_sparse_attention(q, k, v, wrong, BASE.scale, kernel=kernel)
    except InvalidInput:
        return  # the cpu kernel sees that tiles do not list their own keys
    assert not close(made, expected)


def _unmoved(parts: list) -> torch.Tensor:  # type: ignore[type-arg]
    width = max(part[3].entries.shape[2] for part in parts)
    entries = [part[3].entries for part in parts]
    return torch.cat([torch.nn.functional.pad(e, (0, width - e.shape[2])) for e in entries], 1)


def test_areas_made_on_a_device_stay_there() -> None:
    _, (_, _, _, one) = prompts([40], BASE)
    area = counted(one.area)
    there = replace(one, area=torch.full((4, 3), area, dtype=torch.int32))
    packed = concat_lists([one, there, there], [40, 40, 40])
    assert isinstance(packed.area, torch.Tensor)
    assert counted(packed.area) == area * 25
    assert packed.density == pytest.approx(area * 25 / (3 * one.causal_area))


@given(lengths=some_lengths, first_offset=st.sampled_from([0, 5, TILE]))
@settings(max_examples=60, deadline=None)
def test_aligned_is_said_only_where_it_holds(lengths: list[int], first_offset: int) -> None:
    _, (_, _, _, packed) = prompts(lengths, BASE, first_offset=first_offset)
    starts = [*((packed.q_start + first_offset) % TILE).tolist()]
    for h in range(4):
        starts += [a % TILE for i in range(packed.q_start.numel()) for a, _ in visits(packed, h, i)]
    assert packed.aligned == (not any(starts))


def lists_of(n: int, *, tile: int = TILE, heads: int = 2, offset: int = 0) -> TileLists:
    rows, keys = Tiling.of_segments([n], tile), Tiling.of_segments([offset, n], tile)
    return lists_from_mask(torch.ones(heads, len(rows), len(keys), dtype=torch.bool), rows, keys, offset)


class TestRefusals:
    """What is said where lists cannot share a call."""

    @pytest.mark.parametrize(
        ("lists", "lengths", "message"),
        [
            ([], [], "0 lists and 0 lengths; give one or more"),
            ([lists_of(5)], [5, 6], "1 lists and 2 lengths"),
            ([lists_of(5), lists_of(5, tile=32)], [5, 5], r"tiles of \[16, 32\] tokens.* must agree"),
            ([lists_of(5), lists_of(5, heads=3)], [5, 5], r"\[2, 3\] heads"),
            ([lists_of(5), lists_of(5, offset=8)], [5, 5], r"q_offset \[0, 8\]; only the first of a call may be"),
            ([lists_of(5, offset=8), lists_of(5, offset=8)], [5, 5], r"q_offset \[8, 8\]"),
            ([lists_of(5), lists_of(20)], [5, 21], "prompt 1 has length 21, which its lists of 2 query tiles"),
            ([lists_of(5), lists_of(20)], [5, 200], "prompt 1 has length 200"),
        ],
    )
    def test_message(self, lists: list[TileLists], lengths: list[int], message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            concat_lists(lists, lengths)

    def test_more_than_entries_can_address(self) -> None:
        part = replace(lists_of(5), q_offset=MOST_KEYS - 5)
        assert concat_lists([part], [5]).q_offset == MOST_KEYS - 5
        with pytest.raises(InvalidInput, match=f"address at most {MOST_KEYS}. Pack fewer"):
            concat_lists([part, lists_of(5)], [5, 5])


class TestPackedCausal:
    """Dense attention of a batch."""

    @pytest.mark.parametrize("kernel", ["auto", "cpu", "reference"])
    @pytest.mark.parametrize("lengths", [[1], [300], [1, 127, 128, 129, 1], [200, 200]])
    def test_against_a_call_for_each(self, kernel: str, lengths: list[int]) -> None:
        q, k, v = (torch.randn(h, sum(lengths), 32) for h in (4, 2, 2))
        parts = [t.split(lengths, 1) for t in (q, k, v)]
        expected = joined([dispatch.causal_attention(*part, 0.2) for part in zip(*parts, strict=True)])
        assert close(packed_causal_attention(q, k, v, 0.2, lengths, kernel=kernel), expected)

    @pytest.mark.parametrize(
        ("lengths", "shown"), [([], "[], in all 0"), ([10, 0, 20], "[10, 0, 20]"), ([9, 20], "29"), ([-1, 31], "-1")]
    )
    def test_lengths_that_do_not_fit(self, lengths: list[int], shown: str) -> None:
        q, k = torch.randn(2, 30, 16), torch.randn(1, 30, 16)
        with pytest.raises(InvalidInput) as e:
            packed_causal_attention(q, k, k, 1.0, lengths)
        assert shown in str(e.value) and "for 30 packed tokens" in str(e.value)

    def test_what_no_kernel_takes(self) -> None:
        q, k = torch.randn(2, 30, 16), torch.randn(1, 31, 16)
        with pytest.raises(InvalidInput, match="q has 30 tokens, k 31"):
            packed_causal_attention(q, k, k, 1.0, [10, 20])
        with pytest.raises(Unavailable, match="'gluon' cannot be used"):
            packed_causal_attention(q, k[:, :30], k[:, :30], 1.0, [10, 20], kernel="gluon")

    def test_lists_are_made_once(self) -> None:
        first = every_tile_of((130, 5), 4, torch.device("cpu"))
        assert every_tile_of((130, 5), 4, torch.device("cpu")) is first
        assert first.density == 1.0 and first.entries.shape == (4, 3, 2)
        assert first.causal_area == 4 * (130 * 131 // 2 + 15)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float | str]]:
    """Differences of every interpreted case; one process for all of them."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(here / "interpreted_packed.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {row.pop("case"): row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
class TestInterpreted:
    """The Triton kernel on a CPU."""

    @pytest.mark.parametrize("name", interpreted_packed.CASES)
    def test_gives_what_separate_calls_give(self, interpreted: dict, name: str) -> None:  # type: ignore[type-arg]
        found = interpreted[name]
        assert max(found["row"], found["rms"], found["lse"]) < 1e-6, found

    def test_a_wrong_join_would_be_noticed(self, interpreted: dict) -> None:  # type: ignore[type-arg]
        assert interpreted["entries not moved"]["row"] > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["gluon", "triton"])
def test_on_a_gpu(kernel: str) -> None:
    if (reason := dispatch.available()[kernel]) is not None:
        pytest.skip(f"{kernel}: {reason}")
    base = Shape((), heads=(8, 2), dim=128, dtype=torch.bfloat16)
    _, packed = prompts([1, 127, 128, 1000, 333], base, first_offset=256, device="cuda")
    made = dispatch.block_sparse_attention(*packed, base.scale, kernel=kernel)
    assert within(errors(made, truth(*packed, base.scale)), torch.bfloat16)


@pytest.mark.gpu
def test_dense_batch_on_a_gpu() -> None:
    lengths = [300, 1, 128, 700]
    q, k, v = (torch.randn(h, sum(lengths), 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    made = packed_causal_attention(q, k, v, 0.1, lengths)
    lists = every_tile_of(tuple(lengths), 8, q.device)
    assert within(errors(made, truth(q, k, v, lists, 0.1)), torch.bfloat16)
