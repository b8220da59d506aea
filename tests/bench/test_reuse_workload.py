"""Workloads of the reuse bench: what is drawn, what is read, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tamis.bench.reuse_workload import Piece, Request, Zipf, trace
from tamis.core.errors import InvalidInput

TABLES = {
    "1_sys_prompt.jsonl": ("sys_prompt_id", {0: 512, 1: 512, 2: 4}),
    "2_passages.jsonl": ("passage_id", {0: 300, 1: 200}),
    "3_history.jsonl": ("history_id", {10: 11}),
    "4_user_input.jsonl": ("user_input_id", {20: 7}),
    "5_web_search.jsonl": ("web_search_id", {30: 50}),
}
ROW = {
    "timestamp": "100", "input_length": 1, "output_length": 5,
    "hash_ids": {"sys_prompt": [0, 1, 2], "passages_ids": [1, 0], "history": [10], "web_search": [30],
                 "user_input": [20]},
}  # fmt: skip


def lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")


@pytest.fixture
def ragpulse(tmp_path: Path) -> Path:
    for file, (column, lengths) in TABLES.items():
        lines(tmp_path / file, [{column: number, "token_length": n} for number, n in lengths.items()])
    lines(tmp_path / "0_trace.jsonl", [ROW | {"timestamp": "110"}, ROW])
    return tmp_path


def lengths(pieces: tuple[Piece, ...]) -> list[int]:
    return [p.n_tokens for p in pieces]


class TestRagpulse:
    def test_requests_in_order_of_time(self, ragpulse: Path) -> None:
        made = trace(ragpulse, speed=2)
        assert (made.name, made.n_requests, made.concurrency) == ("ragpulse-x2", 2, None)
        first, second = made.requests(0)
        assert (first.arrival_s, second.arrival_s, first.output_tokens) == (0, 5, 5)
        assert lengths(first.prefix) == [512] and lengths(first.documents) == [200, 300]
        assert lengths(first.own) == [512, 4, 11, 50, 7], "volatile system prompts stand behind the passages"
        spans = sorted((p.first, p.first + p.n_tokens) for p in first.pieces)
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), "no two pieces share a token"

    def test_recorded_order(self, ragpulse: Path) -> None:
        made = trace(ragpulse, recorded_order=True)
        first = next(made.requests(0))
        assert made.name == "ragpulse-recorded" and lengths(first.prefix) == [512, 512, 4]
        assert lengths(first.own) == [11, 50, 7]

    @pytest.mark.parametrize(
        ("file", "rows", "message"),
        [
            ("2_passages.jsonl", [{"passage_id": 0, "token_length": 3}], "passages_ids cannot be looked up"),
            ("2_passages.jsonl", [{"passage_id": 0, "token_length": "many"}], "token_length 'many'"),
            ("2_passages.jsonl", [{"passage_id": 0, "token_length": 0}], "lengths are 1 or more"),
            ("0_trace.jsonl", [{"timestamp": 1}], "cannot be looked up"),
            ("0_trace.jsonl", [[1]], "expected an object a line"),
            ("0_trace.jsonl", [], "is empty"),
        ],
    )
    def test_a_wrong_file_is_refused(self, ragpulse: Path, file: str, rows: list[Any], message: str) -> None:
        lines(ragpulse / file, rows)
        with pytest.raises(InvalidInput, match=message):
            trace(ragpulse)

    def test_a_file_that_is_not_json_or_not_there(self, ragpulse: Path, tmp_path_factory: Any) -> None:
        (ragpulse / "3_history.jsonl").write_text("id,length\n")
        with pytest.raises(InvalidInput, match=r"3_history.jsonl, line 1: not JSON"):
            trace(ragpulse)
        (ragpulse / "3_history.jsonl").unlink()
        with pytest.raises(InvalidInput, match=r"3_history.jsonl cannot be read"):
            trace(ragpulse)
        with pytest.raises(InvalidInput, match=r"holds no trace"):
            trace(tmp_path_factory.mktemp("empty"))

    def test_speed_is_above_zero(self, ragpulse: Path) -> None:
        with pytest.raises(InvalidInput, match="speed is 0"):
            trace(ragpulse, speed=0)


def test_mooncake_blocks(tmp_path: Path) -> None:
    row = {"timestamp": 3000, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1, 2]}
    lines(tmp_path / "conversation_trace.jsonl", [row])
    (only,) = trace(tmp_path).requests(0)
    assert only.arrival_s == 3 and lengths(only.documents) == [512, 512] and lengths(only.own) == [76]
    lines(tmp_path / "conversation_trace.jsonl", [row | {"input_length": 9000}])
    with pytest.raises(InvalidInput, match="do not cover"):
        trace(tmp_path)


class TestZipf:
    def test_the_same_seed_draws_the_same(self) -> None:
        made = Zipf(requests=30).workload()
        draw = lambda seed: [r.documents for r in made.requests(seed)]  # noqa: E731
        assert draw(3) == draw(3) != draw(4)

    def test_documents_of_a_prompt_differ_unless_they_may_repeat(self) -> None:
        def most_of_one(zipf: Zipf) -> int:
            return max(r.documents.count(d) for r in zipf.workload().requests(0) for d in r.documents)

        assert most_of_one(Zipf(requests=300)) == 1
        assert most_of_one(Zipf(requests=300, repeat=True)) > 1

    def test_popularity_follows_the_exponent(self) -> None:
        flat, steep = (
            sum(Piece(0, 2048) in r.documents for r in Zipf(e, requests=1000, per_prompt=1).workload().requests(0))
            for e in (0.0, 2.1)
        )
        assert flat < 30 and 590 < steep < 690, "of 1,000: 1 % without skew, 1 / zeta_100(2.1) = 64 % with it"

    def test_names_say_what_differs(self) -> None:
        assert Zipf().name == "zipf2.1"
        assert Zipf(0.6, document_tokens=512, repeat=True).name == "zipf0.6-t512-repeat"

    @pytest.mark.parametrize("wrong", [{"documents": 3}, {"exponent": -1}, {"requests": 0}, {"concurrency": 0}])
    def test_impossible_ones_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput):
            Zipf(**wrong)


def test_pieces_of_a_request() -> None:
    a, b, c = Piece(0, 1), Piece(1, 2), Piece(3, 4)
    assert Request(0.0, (a,), (b,), (c,), 1).pieces == (a, b, c)
