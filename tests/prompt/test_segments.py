"""Segments, their spans, and finding documents in a finished token row."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tamis.core.errors import InvalidInput
from tamis.index.record import document_id as index_document_id
from tamis.prompt.segments import Kind, Prompt, Segment, document_id, find_documents

PREFIX, DOCUMENT, HISTORY, QUESTION = Kind.PREFIX, Kind.DOCUMENT, Kind.HISTORY, Kind.QUESTION
tokens = st.lists(st.integers(0, 3), max_size=8)


def parts(prompt: Prompt) -> list[tuple[str, list[int]]]:
    return [(str(s.kind), list(s.tokens)) for s in prompt.segments]


class TestPrompt:
    def test_spans_lengths_and_tokens(self) -> None:
        prompt = Prompt.of([("prefix", [9, 8]), ("document", [1, 2, 3]), ("history", [7]), ("question", [4, 5])])
        assert prompt.spans == [(0, 2), (2, 5), (5, 6), (6, 8)]
        assert prompt.lengths == [2, 3, 1, 2]
        assert prompt.tokens == [9, 8, 1, 2, 3, 7, 4, 5]
        assert prompt.documents == [Segment(DOCUMENT, (1, 2, 3))]

    @given(st.lists(st.tuples(st.sampled_from(list(Kind)), tokens), min_size=1, max_size=6))
    @settings(max_examples=100)
    def test_spans_cut_the_tokens(self, given_parts: list[tuple[Kind, list[int]]]) -> None:
        if not any(ids for _, ids in given_parts):
            with pytest.raises(InvalidInput, match="holds no tokens"):
                Prompt.of(given_parts)
            return
        prompt = Prompt.of(given_parts)
        assert [prompt.tokens[a:b] for a, b in prompt.spans] == [ids for _, ids in given_parts if ids]
        assert prompt.spans[0][0] == 0 and prompt.spans[-1][1] == len(prompt.tokens)

    def test_an_unknown_kind_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'answer' is not a valid Kind"):
            Prompt.of([("answer", [1])])

    def test_numbers_of_other_types_become_ints(self) -> None:
        import numpy as np

        prompt = Prompt.of([("question", np.array([3, 4]))])
        assert prompt.segments[0].tokens == (3, 4) and type(prompt.tokens[0]) is int


class TestDocumentId:
    @given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40))
    @settings(max_examples=100)
    def test_is_the_index_s_own(self, ids: list[int]) -> None:
        assert document_id(ids) == index_document_id(ids) == Segment(DOCUMENT, tuple(ids)).id

    def test_by_hand(self) -> None:
        raw = b"\x01\x00\x00\x00\x00\x02\x00\x00"
        assert document_id([1, 512]) == hashlib.blake2b(raw, digest_size=16).digest()

    def test_depends_on_tokens_and_order_not_on_the_kind(self) -> None:
        assert len({document_id(x) for x in ([1, 2], [2, 1], [1], [1, 2, 0])}) == 4
        assert Segment(HISTORY, (1, 2)).id == Segment(DOCUMENT, (1, 2)).id


class TestFindDocuments:
    def test_prefix_documents_history_question(self) -> None:
        found = find_documents([9, 1, 2, 3, 8, 8, 4, 5, 7], [[1, 2, 3], [4, 5]])
        assert parts(found) == [
            ("prefix", [9]),
            ("document", [1, 2, 3]),
            ("history", [8, 8]),
            ("document", [4, 5]),
            ("question", [7]),
        ]

    def test_the_order_of_the_prompt_counts_not_that_of_the_list(self) -> None:
        found = find_documents([4, 5, 1, 2, 3, 7], [[1, 2, 3], [4, 5]])
        assert parts(found) == [("document", [4, 5]), ("document", [1, 2, 3]), ("question", [7])]

    def test_the_same_document_twice(self) -> None:
        row = [9, 1, 2, 8, 1, 2, 7]
        twice = [("prefix", [9]), ("document", [1, 2]), ("history", [8]), ("document", [1, 2]), ("question", [7])]
        assert parts(find_documents(row, [[1, 2], [1, 2]])) == twice
        assert parts(find_documents(row, [[1, 2]])) == [
            ("prefix", [9]),
            ("document", [1, 2]),
            ("question", [8, 1, 2, 7]),
        ]
        assert len(find_documents(row, [[1, 2]] * 3).documents) == 2

    @pytest.mark.parametrize("documents", [[[1, 2, 3], [2, 3]], [[2, 3], [1, 2, 3]]], ids=["long first", "short first"])
    def test_a_document_that_lies_in_another(self, documents: list[list[int]]) -> None:
        assert parts(find_documents([1, 2, 3, 7], documents)) == [("document", [1, 2, 3]), ("question", [7])]
        assert parts(find_documents([1, 2, 3, 2, 3, 7], documents)) == [
            ("document", [1, 2, 3]),
            ("document", [2, 3]),
            ("question", [7]),
        ]
        assert parts(find_documents([2, 3, 1, 2, 3, 7], documents)) == [
            ("document", [2, 3]),
            ("document", [1, 2, 3]),
            ("question", [7]),
        ]

    def test_documents_that_overlap(self) -> None:
        assert parts(find_documents([1, 2, 3, 4, 5, 7], [[1, 2, 3], [3, 4]])) == [
            ("document", [1, 2, 3]),
            ("question", [4, 5, 7]),
        ]

    def test_documents_that_are_not_there(self) -> None:
        assert parts(find_documents([1, 2, 3], [[5, 6], [3, 2]])) == [("question", [1, 2, 3])]
        assert parts(find_documents([1, 2, 3], [])) == [("question", [1, 2, 3])]
        assert parts(find_documents([1, 2, 3], [[], [1, 2, 3, 4]])) == [("question", [1, 2, 3])]

    def test_bytes_that_only_look_like_the_document(self) -> None:
        # [1 << 8, 2 << 8] is 00 01 00 00 00 02 00 00: the bytes of [1, 2] stand in it one byte off
        row = [1 << 8, 2 << 8, 0, 5]
        assert parts(find_documents(row, [[1, 2]])) == [("question", row)]
        assert parts(find_documents([*row, 1, 2, 7], [[1, 2]])) == [
            ("prefix", row),
            ("document", [1, 2]),
            ("question", [7]),
        ]

    def test_the_whole_row_is_one_document(self) -> None:
        assert parts(find_documents([1, 2], [[1, 2]])) == [("document", [1, 2])]

    def test_no_tokens(self) -> None:
        with pytest.raises(InvalidInput, match="holds no tokens"):
            find_documents([], [[1]])

    @given(tokens, st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=4))
    @settings(max_examples=300)
    @example([0, 0, 0, 0], [[0, 0], [0]])
    def test_nothing_is_lost_or_moved(self, row: list[int], documents: list[list[int]]) -> None:
        if not row:
            return
        found = find_documents(row, documents)
        assert found.tokens == row
        left = sorted(map(tuple, documents))
        for document in found.documents:
            left.remove(document.tokens)  # raises if it was not given, or more often than it was
        kinds = [s.kind for s in found.segments]
        first = kinds.index(DOCUMENT) if DOCUMENT in kinds else len(kinds)
        last = len(kinds) - 1 - kinds[::-1].index(DOCUMENT) if DOCUMENT in kinds else -1
        assert set(kinds[:first]) <= {PREFIX, QUESTION} and set(kinds[last + 1 :]) <= {QUESTION}
        assert set(kinds[first : last + 1]) <= {DOCUMENT, HISTORY}
        longest = max((d for d in documents if d), key=len, default=None)
        if longest is not None and any(row[i : i + len(longest)] == longest for i in range(len(row))):
            assert any(len(d.tokens) == len(longest) for d in found.documents), "the longest document was not found"


def test_the_room_needs_no_torch() -> None:
    code = "import sys, tamis.prompt.segments; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
