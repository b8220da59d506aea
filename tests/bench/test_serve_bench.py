"""The load of a server: what is sent and when, what is made of its outcomes, and one small run of everything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tamis.bench import serve_load
from tamis.bench.serve import (
    MIXED,
    POLICIES,
    Outcomes,
    Pace,
    Slo,
    case_of,
    requests_of,
    rows_of,
    run_policy,
    table,
    warm_up,
    waves_of,
    workload_of,
)
from tamis.bench.serve_lone import Took, compare, summary
from tamis.bench.serve_lone import rows_of as lone_rows
from tamis.bench.serve_words import shape_with_words, words
from tamis.core.errors import InvalidInput, UnknownName


def _outcome(*pieces_s: float, new: int | None = None, error: str = "", cut: bool = False) -> dict[str, Any]:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": new or len(pieces_s),
        "prompt_tokens_details": {"cached_tokens": 40},
    }
    report = {"used": "dense", "reason": ""}
    return {
        "status": 200, "error": error, "pieces_s": list(pieces_s), "end_s": max(pieces_s, default=0.0), "late_s": 0.0,
        "usage": usage, "tamis": [{"report": report}], "finish_s": None if error else max(pieces_s, default=0.3),
        "stopped": False, "cut": cut,
    }  # fmt: skip


class TestRequests:
    def test_poisson_arrivals_at_the_rate_and_texts_of_the_cut_length(self) -> None:
        workload = workload_of(None)
        made = requests_of(workload, Pace(requests=200, rate=10.0, cut_tokens=7, output_tokens=5))
        gaps = [b["at_s"] - a["at_s"] for a, b in pairwise(made)]
        assert min(gaps) > 0 and 0.07 < sum(gaps) / len(gaps) < 0.14
        body = made[0]["body"]
        assert len(body["documents"]) == 4 and all(len(d["text"].split()) == 7 for d in body["documents"])
        assert body["max_tokens"] == 5 and body["stream"]
        assert made == requests_of(workload, Pace(requests=200, rate=10.0, cut_tokens=7, output_tokens=5))

    def test_mooncakes_file_at_its_own_times(self, tmp_path: Path) -> None:
        rows = [
            {"timestamp": 1000 * i, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2 + i]}
            for i in range(3)
        ]
        file = tmp_path / "like_mooncake.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        made = requests_of(workload_of(str(file), speed=2.0), Pace(requests=3))
        assert [r["at_s"] for r in made] == [0.0, 0.5, 1.0]
        assert made[0]["body"]["documents"] == made[1]["body"]["documents"] != []
        assert made[0]["body"]["messages"] != made[1]["body"]["messages"]

    def test_what_cannot_be_sent_in_time_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="all at once"):
            requests_of(workload_of(None), Pace(requests=2))
        with pytest.raises(InvalidInput, match="rate is 0"):
            Pace(rate=0.0)

    def test_the_same_seed_gives_the_same_words(self) -> None:
        assert words(3, 50) == words(3, 50) != words(4, 50)


class TestWarm:
    def test_waves_have_the_lengths_of_the_load_in_other_words(self) -> None:
        workload, pace = workload_of(None), Pace(requests=6, rate=1.0, cut_tokens=9, output_tokens=4)
        waves = waves_of(workload, pace, 5)
        assert [len(wave) for wave in waves] == [1, 2, 4, 5]
        bodies = [one["body"] for wave in waves for one in wave]
        texts = [d["text"] for body in bodies for d in body["documents"]]
        assert all(len(text.split()) == 9 for text in texts) and {b["max_tokens"] for b in bodies} == {4}
        read = {d["text"] for r in requests_of(workload, pace) for d in r["body"]["documents"]}
        assert not read & set(texts) and all(one["at_s"] < 0.01 for wave in waves for one in wave)
        assert waves_of(workload, pace, 0) == [] and [len(w) for w in waves_of(workload, pace, 1)] == [1]

    def test_no_wave_begins_after_the_limit(self) -> None:
        keys, now = [], [0.0]

        def load(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
            keys.append([r["key"] for r in requests])
            now[0] += 4.0
            return [_outcome(0.1) for _ in requests[1:]] + [_outcome(error="429: full")]

        waves: list[list[dict[str, Any]]] = [[{"at_s": 0.0, "body": {}}] * n for n in (1, 2, 4)]
        made = warm_up("dense", waves, load, "m", key="own", limit_s=6.0, clock=lambda: now[0])
        assert made == {"requests": 3, "done": 1, "at_once": 4, "seconds": 8.0} and keys == [["own"], ["own"] * 2]


class TestOutcomes:
    def test_summary(self) -> None:
        raw = [_outcome(0.5, 0.6, 0.7), _outcome(3.0, 3.1), _outcome(0.2, 0.9, new=2), _outcome(error="429: full")]
        sent = [{"at_s": float(i)} for i in range(4)]
        found = Outcomes("dense", raw)
        made = found.summary(sent, Slo(ttft_s=1.0, itl_s=0.2))
        assert made["done"] == 3 and made["failures"] == {"429: full": 1}
        assert made["ttft_s"]["p50"] == 0.5 and made["good_share"] == 0.25
        assert made["span_s"] == pytest.approx(4.1) and made["goodput_rps"] == pytest.approx(1 / 4.1)
        assert made["output_tokens_per_s"] == pytest.approx(7 / 4.1) and made["cached_share"] == 0.4
        metrics = {row.metric: row.p50 for row in rows_of("case", found, made)}
        assert metrics["failed_share"] == 0.25 and metrics["ttft_p99_s"] == pytest.approx(2.95)
        assert "1 failed: 429: full" in table({"case": "case", "policies": [made]})

    def test_an_empty_answer_is_one(self) -> None:
        """Its first token ended it: what it took is the time to that."""
        found = Outcomes("dense", [_outcome(new=1), _outcome(0.5, 0.6), _outcome() | {"finish_s": None}])
        made = found.summary([{"at_s": 0.0}] * 3, Slo(ttft_s=0.4, itl_s=0.2))
        assert (made["done"], made["empty"], made["good_share"]) == (2, 1, pytest.approx(1 / 3))
        assert found.values()["ttft_s"] == [0.3, 0.5] and len(found.values()["itl_s"]) == 1
        assert made["failures"] == {"no text, and no finish_reason": 1} and made["cut_share"] == 0

    def test_what_ran_out_of_time_is_not_good(self) -> None:
        cut = _outcome(0.1, 0.2, error="cut at the limit of 1 s", cut=True)
        found = Outcomes("dense", [_outcome(0.1, 0.2), cut, cut, _outcome(error="429: full")])
        made = found.summary([{"at_s": 0.0}] * 4, Slo())
        assert (made["done"], made["good_share"], made["cut_share"]) == (1, 0.25, 0.5)
        metrics = {row.metric: row.p50 for row in rows_of("case", found, made)}
        assert (metrics["cut_share"], metrics["failed_share"]) == (0.5, 0.75)
        assert "50% ran out of time" in table({"case": "case", "policies": [made]})

    def test_nothing_came_back(self) -> None:
        found = Outcomes("dense", [_outcome(error="OSError: refused")])
        made = found.summary([{"at_s": 0.0}], Slo())
        assert made["done"] == 0 and made["ttft_s"] == {}
        assert {row.metric for row in rows_of("case", found, made)} >= {"failed_share", "goodput_rps"}

    def test_policies_are_mixed_in_turn(self) -> None:
        seen: list[Mapping[str, Any]] = []

        def load(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
            seen.extend(requests)
            return [_outcome(0.1) for _ in requests]

        run_policy("all", [{"at_s": 0.0, "body": {}}] * 5, load, "m", key="k")
        assert [r["body"]["tamis"] for r in seen] == [POLICIES[MIXED[i % 4]] for i in range(5)]
        assert {r["key"] for r in seen} == {"k"}
        with pytest.raises((InvalidInput, UnknownName)):
            run_policy("fast", [], load, "m")


def test_a_lone_user_is_compared_pair_by_pair() -> None:
    prompts = [[1], [2], [3], [4], [5]]
    made = compare(lambda p: Took(1.0, p[0], 2.0, 9), lambda p: Took(1.1, p[0] * 2, 2.0, 9 - (p == [3])), prompts)
    assert len(made["server"]) == len(made["library"]) == 3, "the first pair, and one of two lengths, do not count"
    found = summary(made)
    assert found["itl_s"]["ratio"] == 2.0 and found["ttft_s"]["ratio"] == pytest.approx(1.1)
    assert found["itl_s"]["ratio_p20"] <= found["itl_s"]["ratio"] <= found["itl_s"]["ratio_p80"]
    assert {row.metric for row in lone_rows("case", made)} >= {"itl_s", "itl_over_library"}
    one = compare(lambda p: Took(1.0, 0.0, 2.0, p[0]), lambda p: Took(1.0, 0.0, 2.0, p[0]), [[9], [0], [1], [2]])
    assert [t.tokens for t in one["server"]] == [2], "no time lies between fewer than two tokens"
    with pytest.raises(InvalidInput, match="no pair"):
        summary({"server": [], "library": []})


def test_every_token_of_a_shape_has_a_text() -> None:
    loaded = shape_with_words("shape:tiny")
    text = words(1, 20)
    ids = loaded.tokenizer(text).input_ids
    assert len(ids) == 20 and loaded.tokenizer.decode(ids) == text
    assert loaded.tokenizer.decode([500])


class TestLoad:
    """Against a server that says what it is told to."""

    EMPTY = b'data: {"choices":[{"delta":{"content":""}}]}\n\n'
    ONE = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    LAST = b'data: {"choices":[{"text":"b"}],"usage":{"completion_tokens":2}}\n\n'
    END = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    DONE = b"data: [DONE]\n\n"
    ANSWERS = (
        (200, [EMPTY, ONE + LAST[:3], LAST[3:], DONE]),
        (200, [ONE]),
        (429, [b'{"error": {"message": "full"}}']),
        (200, [ONE, b'data: {"error": {"message": "too late", "code": "timeout"}}\n\n', DONE]),
        (504, [b'{"error": {"message": "too late", "code": "timeout"}}']),
        (200, [EMPTY, END, DONE]),
        (200, [EMPTY, b'data: {"error": {"message": "no"}}\n\n', DONE]),
    )

    def test_what_is_made_of_answers(self) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            status, parts = self.ANSWERS[json.loads(await reader.readexactly(length))["n"]]
            writer.write(f"HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            for part in [*parts, b""]:
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
            writer.close()

        async def ask() -> list[dict[str, Any]]:
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                sent = [{"at_s": 0.0, "path": "/x", "body": {"n": n}, "key": "k"} for n in range(len(self.ANSWERS))]
                return await serve_load.run(f"http://127.0.0.1:{port}", sent, 10.0)

        good, broken, full, late, later, empty, failed = asyncio.run(ask())
        assert not good["error"] and len(good["pieces_s"]) == 2 and good["usage"]["completion_tokens"] == 2
        assert "broke off" in broken["error"] and full["error"] == "429: full" and late["error"] == "too late"
        assert [one["cut"] for one in (good, broken, full, late, later, empty, failed)] == [False] * 3 + [True] * 2 + [
            False
        ] * 2
        assert later["error"] == "504: too late" and failed["error"] == "no"
        assert not empty["error"] and empty["pieces_s"] == [] and 0 < empty["finish_s"] <= empty["end_s"]
        assert empty["stopped"] and late["finish_s"] is None
        assert [len(Outcomes("dense", [one]).done) for one in (good, broken, late, empty)] == [1, 0, 0, 1]

    def test_what_is_not_done_at_the_limit_is_cut(self) -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        async def ask() -> list[dict[str, Any]]:
            server = await asyncio.start_server(silent, "127.0.0.1", 0)
            async with server:
                url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                sent = [{"at_s": at, "path": "/x", "body": {}} for at in (0.0, 60.0)]
                return await serve_load.run(url, sent, 10.0, limit_s=0.3)

        begun, never = asyncio.run(ask())
        assert (
            begun["cut"] and never["cut"] and begun["error"] == "cut at the limit of 0.3 s" and 0.2 < begun["end_s"] < 5
        )
        assert never["error"].endswith("not sent") and 0 <= 60 + never["late_s"] < 5

    def test_nobody_listens(self) -> None:
        (made,) = serve_load.in_process("http://127.0.0.1:9", [{"at_s": 0.0, "path": "/x", "body": {}}])
        assert "Error" in made["error"] and made["pieces_s"] == []


def test_the_whole_command(tmp_path: Path) -> None:
    """A server of random weights in a second process, the load in a third, every policy, numbers and picture."""
    from typer.testing import CliRunner

    from tamis.cli.main import app

    out, plot = tmp_path / "made.json", tmp_path / "made.svg"
    asked = ["bench", "serve", "-m", "shape:tiny", "--requests", "4", "--rate", "50", "--output-tokens", "6"]
    asked += [
        "--cut-tokens",
        "40",
        "--warm",
        "2",
        "--limit-s",
        "100",
        "--policies",
        "reuse,all",
        "--out",
        str(out),
        "--plot",
        str(plot),
    ]
    ran = CliRunner().invoke(app, [*asked, "--results", str(tmp_path / "results"), "--json"])
    assert ran.exit_code == 0, ran.output
    made = json.loads(out.read_text(encoding="utf-8"))
    assert [one["done"] for one in made["policies"]] == [4, 4], made["policies"]
    assert [one["warm"]["done"] for one in made["policies"]] == [3, 3] and made["policies"][0]["limit_s"] == 100
    assert made["policies"][0]["used"] == {"reuse": 4} and made["policies"][0]["cached_share"] > 0
    assert made["case"] == case_of("tiny", workload_of(None), Pace(4, 50.0, 40, 6))
    assert plot.stat().st_size > 1000 and (tmp_path / "results/serve.csv").is_file()
