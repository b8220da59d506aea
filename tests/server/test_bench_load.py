"""What `tamis bench serve` makes of answers that this server gives: empty ones are answers, ended ones are not good."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from live_server import Live

from tamis.bench import serve_load
from tamis.bench.serve import Outcomes, Slo
from tamis.cli.bench_serve_lone import _by_server

BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Where?"}],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def load(live: Live, **fields: Any) -> Outcomes:
    sent = [{"at_s": 0.0, "path": "/v1/chat/completions", "body": BODY | fields}]
    return Outcomes("dense", asyncio.run(serve_load.run(live.url, sent, 60.0)))


def test_a_first_token_that_ends_the_answer(serve: Callable[..., Live]) -> None:
    live = serve(stop_tokens=frozenset(range(512)))
    found = load(live, max_tokens=5)
    made = found.summary([{"at_s": 0.0}], Slo(60.0, 60.0))
    assert (made["done"], made["empty"], made["good_share"], made["failures"]) == (1, 1, 1.0, {})
    assert 0 < found.values()["ttft_s"][0] <= found.values()["e2e_s"][0] and found.raw[0]["stopped"]
    took = _by_server(live.url, "", "tiny", [5, 6, 7], 4)
    assert took.tokens == 0 and 0 < took.ttft_s <= took.e2e_s


def test_what_the_server_ends_for_its_time(serve: Callable[..., Live]) -> None:
    found = load(serve(settings={"timeout_s": 0.3}), max_tokens=1000)
    made = found.summary([{"at_s": 0.0}], Slo(60.0, 60.0))
    assert (made["done"], made["good_share"], made["cut_share"]) == (0, 0.0, 1.0), made["failures"]
    assert found.raw[0]["finish_s"] is None and "longer than 0.3 s" in next(iter(made["failures"]))


def test_a_whole_answer_is_neither(serve: Callable[..., Live]) -> None:
    made = load(serve(), max_tokens=3).summary([{"at_s": 0.0}], Slo(60.0, 60.0))
    assert (made["done"], made["empty"], made["cut_share"], made["good_share"]) == (1, 0, 0.0, 1.0)
