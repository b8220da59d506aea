"""What is sent to a vLLM server with Tamis: the layout, its borders, and what has to be computed first."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tamis.core.errors import InvalidInput
from tamis.integrations.vllm.client import layout, request, warm, warm_for
from tamis.integrations.vllm.hashing import Root, block_names
from tamis.integrations.vllm.request import parse
from tamis.prompt.segments import document_id

ids = st.lists(st.integers(1, 500), max_size=40)
some = st.lists(st.integers(1, 500), min_size=1, max_size=40)


@given(ids, st.lists(some, max_size=5), ids, some, st.sampled_from([None, 1, 7, 16]))
def test_segments_cover_the_prompt_and_give_every_part_back(
    prefix: list[int], documents: list[list[int]], history: list[int], question: list[int], block: int | None
) -> None:
    made = layout(prefix, documents, question, history=history, block_size=block, pad_id=0)
    assert [s[0] for s in made.segments] == [0, *(s[1] for s in made.segments[:-1])]
    assert made.segments[-1][1] == len(made.tokens)
    parts = {
        kind: [t for s in made.segments if s[2] == kind for t in made.tokens[s[0] : s[1]]]
        for kind in ("prefix", "history", "question", "pad")
    }
    assert (parts["prefix"], parts["history"], parts["question"]) == (prefix, history, question)
    assert [list(made.tokens[a:b]) for a, b in made.documents] == documents
    assert [s[3] for s in made.segments if s[2] == "document"] == [document_id(d).hex() for d in documents]
    assert all(s[3] is None for s in made.segments if s[2] != "document")
    assert parts["pad"] == [0] * made.pads
    if block is None:
        assert not made.pads
    else:
        assert all(start % block == 0 for start, _ in made.documents)
        after = next(s for s in made.segments if s[2] in ("history", "question"))
        assert not documents or after[0] % block == 0


def test_a_request_says_what_the_server_needs() -> None:
    made = request([1, 2], [[3, 4, 5]], [6], mode="reuse", block_size=4, namespace="document/a", pad_id=9)
    assert made["prompt"] == [1, 2, 9, 9, 3, 4, 5, 9, 6]
    key = document_id([3, 4, 5]).hex()
    assert made["kv_transfer_params"]["tamis"] == {
        "v": 1,
        "mode": "reuse",
        "segments": [
            [0, 2, "prefix", None],
            [2, 4, "pad", None],
            [4, 7, "document", key],
            [7, 8, "pad", None],
            [8, 9, "question", None],
        ],
        "namespace": "document/a",
    }
    sift = request([1, 2], [[3, 4, 5]], [6], mode="sift", block_size=4, selector="threshold")
    assert sift["prompt"] == [1, 2, 3, 4, 5, 6]
    assert sift["kv_transfer_params"]["tamis"]["selector"] == "threshold"


def keys(body: dict[str, Any]) -> list[str]:
    return [s[3] for s in body["kv_transfer_params"]["tamis"]["segments"] if s[3]]


def key(ids: list[int]) -> str:
    return document_id(ids).hex()


def test_only_missing_documents_are_warmed_each_once_and_together_as_far_as_they_fit() -> None:
    a, b, c = [1] * 5, [2] * 6, [3] * 4
    made = warm([a, b, a, c], [key(b)], block_size=4, pack_tokens=12)
    assert [keys(r) for r in made] == [[key(a), key(c)]]
    spans = made[0]["kv_transfer_params"]["tamis"]["segments"]
    assert [s[2] for s in spans] == ["document", "pad", "document", "question"]
    assert [len(r["prompt"]) for r in warm([a, b, c], block_size=1, pack_tokens=5)] == [7, 6, 5], "none is cut"
    assert [len(keys(r)) for r in warm([a, b, c], block_size=4, pack_tokens=12)] == [2, 1], "pads take room, too"
    assert warm([a], [key(a)]) == []


@given(st.lists(some, max_size=9, unique_by=tuple), st.integers(1, 80))
def test_packs_hold_what_they_may_and_no_two_would_fit_one(documents: list[list[int]], most: int) -> None:
    packs = [keys(r) for r in warm(documents, block_size=8, pack_tokens=most)]
    assert sorted(k for pack in packs for k in pack) == sorted(key(d) for d in documents)
    room = {key(d): -(-len(d) // 8) * 8 for d in documents}
    sizes = sorted(sum(room[k] for k in pack) for pack in packs)
    assert all(len(pack) == 1 or sum(room[k] for k in pack) <= most for pack in packs)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > most


A, B, C, D = ([i] * 5 for i in range(1, 5))


@pytest.mark.parametrize(
    ("documents", "known", "computed"),
    [
        ([A, B], [], []),
        ([A, B], [A, B], []),
        ([A, C], [A], []),
        ([A, C, B], [A, B], [C]),
        ([C, A, D], [A], [C]),
        ([C, D, A, B], [A], [C, D]),
        ([C, C], [], [C]),
        ([C, D, C, B], [], [C, D]),
        ([], [], []),
    ],
)
@pytest.mark.parametrize("leads", [False, True])
def test_before_a_prompt_only_what_stands_before_something_known_is_warmed(
    documents: list[list[int]], known: list[list[int]], computed: list[list[int]], leads: bool
) -> None:
    """With and without the first one as the prefix: it counts as a document."""
    prefix, *rest = documents if leads and documents else [[], *documents]
    made = warm_for(prefix, rest, map(key, known), block_size=4, namespace="n")
    assert [k for r in made for k in keys(r)] == [key(d) for d in computed]
    assert all(r["kv_transfer_params"]["tamis"]["namespace"] == "n" for r in made)


def test_a_prefix_and_a_document_of_the_same_tokens_have_the_same_blocks() -> None:
    """What was warmed as a document is found as a prefix, pads behind it included."""
    (warmed,) = warm([A], block_size=8)
    asked = request(A, [B], C, block_size=8)
    names = []
    for body in (warmed, asked):
        told = parse(body["kv_transfer_params"]["tamis"], body["prompt"], block_size=8)
        make = lambda parent, tokens, extra: (parent, tuple(tokens), extra)  # noqa: E731
        names.append(block_names(told, body["prompt"], [], block=8, root=Root("model", ""), make=make))
    assert names[0][0] == names[1][0] != names[1][1]


@pytest.mark.parametrize(
    ("choices", "word"),
    [
        ({"mode": "fast"}, "mode"),
        ({"block_size": 0}, "block_size"),
        ({"budget": 3}, "budget"),
        ({"mode": "reuse", "selector": "all"}, "selector"),
    ],
)
def test_wrong_requests_are_refused(choices: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        request([1], [[2]], [3], **choices)  # type: ignore[arg-type]


@pytest.mark.parametrize(("documents", "question"), [([[]], [1]), ([[1]], [])])
def test_empty_parts_are_refused(documents: list[list[int]], question: list[int]) -> None:
    with pytest.raises(InvalidInput, match="empty"):
        request([], documents, question)


def test_the_client_needs_neither_vllm_nor_torch() -> None:
    code = "import sys, tamis.integrations.vllm.client; assert not {'vllm', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (("a text", [[1]], [2]), "the prefix is no row of token ids"),
        (([1], [[1], "a text"], [2]), "document 2 is no row of token ids (it is a text)"),
        (([1], [[1], []], [2]), "document 2 is empty"),
        (([1], "a text", [2]), "documents are a text"),
        (([1], [[1]], "42"), "the question is no row of token ids"),
        (([1], [[1.5, 2.7]], [2]), "document 1 is no row of token ids"),
        (([1], [[1]], [None]), "the question is no row of token ids"),
    ],
)
def test_what_is_no_token_ids_is_named(parts: tuple[Any, Any, Any], says: str) -> None:
    with pytest.raises(InvalidInput) as e:
        request(*parts, block_size=16)
    assert says in str(e.value)
    with pytest.raises(InvalidInput):
        warm_for(*parts[:2], block_size=16) if says.startswith(("document", "the prefix")) else request(*parts)


@pytest.mark.parametrize("block_size", ["64", 0, 1.5, -1])
def test_a_block_is_a_whole_number(block_size: Any) -> None:
    for make in (lambda b: request([1], [[2]], [3], block_size=b), lambda b: warm([[2]], block_size=b)):
        with pytest.raises(InvalidInput, match="block_size is"):
            make(block_size)


def test_rows_of_numbers_of_any_kind_will_do() -> None:
    plain = request([1], [[2, 3]], [4], block_size=16)
    assert request(np.array([1]), [np.array([2, 3], dtype=np.int32)], (4,), block_size=16) == plain
