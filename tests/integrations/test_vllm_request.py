"""What requests to vLLM may say, how their blocks are named and where chunks may end; none of it needs vLLM."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.core.errors import InvalidInput
from tamis.integrations.vllm.client import request
from tamis.integrations.vllm.config import Settings, policy_of, settings_of
from tamis.integrations.vllm.hashing import Root, block_names
from tamis.integrations.vllm.request import Asked, parse
from tamis.integrations.vllm.sift import borders_of, chunk_end, parts_of
from tamis.kernels.lists import Tiling

BLOCK = 16
ROOT = Root("model", "settings")
PREFIX, A, B, QUESTION = list(range(21)), list(range(100, 170)), list(range(200, 245)), list(range(300, 311))


def named(asked: dict[str, Any], root: Root = ROOT) -> list[str]:
    """The names of a request's blocks, with a digest in place of vLLM's."""
    tokens = asked["prompt"]
    told = parse(asked["kv_transfer_params"]["tamis"], tokens, block_size=BLOCK)

    def make(parent: Any, own: Any, extra: Any) -> str:
        return hashlib.sha256(repr((parent, list(own), extra)).encode()).hexdigest()

    return block_names(told, tokens, [], block=BLOCK, root=root, make=make)


def reuse(*documents: list[int], **choices: Any) -> dict[str, Any]:
    return request(PREFIX, documents, QUESTION, mode="reuse", block_size=BLOCK, **choices)


def test_documents_are_named_alike_wherever_they_stand() -> None:
    first, swapped = named(reuse(A, B)), named(reuse(B, A))
    assert first[:2] == swapped[:2], "the prefix"
    assert first[2:7] == swapped[5:10] and first[7:10] == swapped[2:5], "both documents, every block"
    assert len(set(first)) == len(first)
    other = named(reuse(A, B, pad_id=7))
    assert other == first, "pads are not read, so their ids do not count"


def test_what_follows_documents_is_named_after_all_before_it() -> None:
    long = list(range(400, 440))
    asked = [request(PREFIX, d, long, mode="reuse", block_size=BLOCK) for d in ((A, B), (B, A), (A,))]
    tails = [named(one)[-2:] for one in asked]
    assert len({name for tail in tails for name in tail}) == 6


@pytest.mark.parametrize(
    "other",
    [
        lambda: named(reuse(A, B, namespace="mine")),
        lambda: named(reuse(A, B), Root("other model", "settings")),
        lambda: named(reuse(A, B), Root("model", "settings", ("adapter", ""))),
        lambda: named(request(PREFIX, [A, B], QUESTION, mode="sift")),
    ],
    ids=["namespace", "model", "adapter", "mode"],
)
def test_nothing_is_shared_across(other: Any) -> None:
    assert not set(named(reuse(A, B))) & set(other())


def test_sift_blocks_change_with_a_documents_last_token() -> None:
    """Which tiles its first rows read depends on later rows of the tile."""
    one = named(request(PREFIX, [A, B], QUESTION, mode="sift"))
    two = named(request(PREFIX, [[*A[:-1], 1], B], QUESTION, mode="sift"))
    assert one[:1] == two[:1] and not set(one[1:]) & set(two)
    moved = named(request(PREFIX, [A, B], QUESTION, mode="sift", selector="all"))
    assert not set(one) & set(moved)


def test_names_go_on_with_generated_tokens() -> None:
    asked = reuse(A, B)
    told = parse(asked["kv_transfer_params"]["tamis"], asked["prompt"], block_size=BLOCK)
    tokens = asked["prompt"] + list(range(40))
    make = lambda parent, own, extra: hash((parent, tuple(own), extra))  # noqa: E731
    known = block_names(told, asked["prompt"], [], block=BLOCK, root=ROOT, make=make)
    rest = block_names(told, tokens, known, block=BLOCK, root=ROOT, make=make)
    assert known + rest == block_names(told, tokens, [], block=BLOCK, root=ROOT, make=make)


def test_positions_do_not_count_pads() -> None:
    asked = reuse(A, B)
    told = parse(asked["kv_transfer_params"]["tamis"], asked["prompt"])
    assert [(u.start, u.end, u.full, u.position) for u in told.units] == [
        (0, 21, 32, 0), (32, 102, 112, 21), (112, 157, 160, 91),
    ]  # fmt: skip
    assert told.position(160) == 136 and told.position(175) == 151, "the question, and what is generated behind it"


def test_a_document_that_ends_the_prompt_is_computed_in_place() -> None:
    told = parse(
        {"v": 1, "mode": "reuse", "segments": [[0, 16, "document", None], [16, 20, "document", None]]}, range(20)
    )
    assert [u.start for u in told.units] == [0]


def test_settings_are_strict() -> None:
    with pytest.raises(InvalidInput, match="Did you mean 'selector'"):
        Settings.of({"selectr": "all"})
    with pytest.raises(InvalidInput, match="stored bits"):
        Settings.of({"selector": "sampled"})
    with pytest.raises(InvalidInput, match="Did you mean 'theta'"):
        Settings.of({"selector": "threshold:tehta=1"})
    assert settings_of(object()) is None


def test_short_prompts_and_those_without_documents_are_stock() -> None:
    told = request(PREFIX, [A], QUESTION, mode="sift")
    how = {"block_size": BLOCK, "device_type": "cpu"}
    assert Settings().asked(told["kv_transfer_params"], told["prompt"], **how) is None
    assert Settings(min_tokens=0).asked(told["kv_transfer_params"], told["prompt"], **how) is not None
    none = {"tamis": {"v": 1, "mode": "sift", "segments": [[0, 9, "question", None]]}}
    assert Settings(min_tokens=0).asked(none, range(9), **how) is None
    assert Settings().asked({"other": 1}, range(9), **how) is None


def sift(lengths: list[tuple[str, int]]) -> Asked:
    rows, at = [], 0
    for kind, n in lengths:
        rows.append([at, at + n, kind, None])
        at += n
    return parse({"v": 1, "mode": "sift", "segments": rows}, range(at))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["prefix", "document", "question"]), st.integers(1, 700)), min_size=1, max_size=6
    ),
    st.integers(256, 600),
    st.booleans(),
)
def test_chunks_end_on_borders_and_reach_the_end(lengths: list[tuple[str, int]], budget: int, paired: bool) -> None:
    asked = sift(lengths)
    policy = policy_of(f"threshold:local=sampled,paired={paired}", Settings())
    borders, at, made = borders_of(asked, policy), 0, [0]
    while at < asked.n_tokens:
        at = chunk_end(borders, at, min(at + budget, asked.n_tokens))
        made.append(at)
        assert made[-1] > made[-2], "two tiles always fit"
    assert set(made) <= set(borders) and at == asked.n_tokens
    assert chunk_end(borders, at, at + 1) == at + 1, "decoding is not held up"


@settings(deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=5), st.data())
def test_parts_cover_a_chunk_and_cut_no_tile(lengths: list[int], data: st.DataObject) -> None:
    tiling = Tiling.of_segments(lengths)
    start = data.draw(st.integers(0, tiling.n_tokens - 1))
    end = data.draw(st.integers(start + 1, tiling.n_tokens + 50))
    parts = parts_of(tiling, start, end)
    assert parts[0].start == start and parts[-1].end == end
    assert all(one.end == two.start for one, two in pairwise(parts))
    for part in parts:
        if not part.dense:
            assert {part.start, part.end} <= set(tiling.starts)
    inside = [b for b in tiling.starts if start <= b <= min(end, tiling.n_tokens)]
    assert sum(p.end - p.start for p in parts if not p.dense) == (inside[-1] - inside[0] if inside else 0)
