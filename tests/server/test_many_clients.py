"""Sixty-four clients stream at once: none fails, none starves, first tokens come in order of arrival in each class."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live_server import Live, live

from tamis.attention.policy import Policy
from tamis.engine.llm import LLM
from tamis.engine.request import Event, Listener, Piece, Request

CLIENTS = 64
NEW = 12


class Watch:
    """Stands before an engine: who arrived when, and whose tokens came in which order."""

    def __init__(self, running: Live) -> None:
        self.engine, self._submit = running.engine, running.engine.submit
        self.priority: dict[int, int] = {}
        self.tokens: list[int] = []  # whose it is, one for each token
        running.engine.submit = self.submit  # type: ignore[method-assign]

    def submit(self, request: Request, listener: Listener) -> int:
        mine: list[int] = []

        def listens(event: Event) -> None:
            if isinstance(event, Piece):
                self.tokens.append(mine[0])
            listener(event)

        with self.engine._wake:  # no step begins before the number is known
            mine.append(self._submit(request, listens))
        self.priority[mine[0]] = request.priority
        return mine[0]

    @property
    def firsts(self) -> dict[int, list[int]]:
        """Numbers of requests in the order of their first tokens, by class."""
        made: dict[int, list[int]] = defaultdict(list)
        for number in dict.fromkeys(self.tokens):
            made[self.priority[number]].append(number)
        return made

    def most_between(self) -> int:
        """The most tokens that any request got between two tokens of another one."""
        most = 0
        since: dict[int, Counter[int]] = {}
        for number in self.tokens:
            if number in since:
                most = max(most, *since[number].values(), 0)
            since[number] = Counter()
            for other, counts in since.items():
                if other != number:
                    counts[number] += 1
        return most


def ask(running: Live, i: int, **fields: Any) -> tuple[int, str]:
    """(tokens, how it ended) of the i-th client."""
    body = {"model": "tiny", "max_tokens": NEW, "stream": True, "stream_options": {"include_usage": True}}
    content = f"Client {i}: " + "where is the lamp? " * (1 + i % 7)
    body |= {"messages": [{"role": "user", "content": content}], "temperature": 0} | fields
    with running.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    (end,) = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]]
    return chunks[-1]["usage"]["completion_tokens"], end


def at_once(running: Live, fields: Callable[[int], dict[str, Any]]) -> list[tuple[int, str]]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda i: ask(running, i, **fields(i)), range(CLIENTS)))


def test_of_one_class(serve: Callable[..., Live]) -> None:
    running = serve()
    watch = Watch(running)
    assert at_once(running, lambda i: {}) == [(NEW, "length")] * CLIENTS
    assert watch.firsts[0] == sorted(watch.priority), "first tokens in order of arrival"
    assert len(watch.tokens) == CLIENTS * NEW
    # a step gives each one a token; the first one of a prompt comes before those of the same step
    assert watch.most_between() <= 2, "nobody waits while another is served more than once or twice"
    assert running.engine.statistics().preemptions == 0


def test_of_three_classes(serve: Callable[..., Live]) -> None:
    running = serve(limits={"max_running": 8})
    watch = Watch(running)
    assert at_once(running, lambda i: {"priority": i % 3}) == [(NEW, "length")] * CLIENTS
    for numbers in watch.firsts.values():
        assert numbers == sorted(numbers), "first tokens in order of arrival, class by class"
    places = {number: place for place, number in enumerate(dict.fromkeys(watch.tokens))}
    means = [sum(places[n] for n in numbers) / len(numbers) for _, numbers in sorted(watch.firsts.items())]
    assert means == sorted(means), "higher classes come sooner"


@pytest.fixture
def served(smollm2: Any) -> Iterator[Live]:
    with LLM(smollm2, policy=Policy(prefill="prefix"), cache_bytes=1 << 30) as llm, live(llm) as running:
        yield running


@pytest.mark.slow
def test_with_the_real_model(served: Live) -> None:
    watch = Watch(served)
    ended = at_once(served, lambda i: {"max_tokens": 6})
    assert all(1 <= n <= 6 and end in ("stop", "length") for n, end in ended)
    assert watch.firsts[0] == sorted(watch.priority)
    assert watch.most_between() <= 2
