"""The scheduler against a memory that only counts: order, budgets, pages, preemption, and that everything ends once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.bench.scheduler import CountingMemory, scheduler_step_s
from tamis.core.errors import Busy, InvalidInput
from tamis.engine.scheduler import Limits, Scheduler, State, Step

PAGE = 4


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """A scheduler with a runner that computes nothing: every step takes a second."""

    pages: int = 64
    limits: dict[str, Any] = field(default_factory=dict)
    new: dict[int, int] = field(default_factory=dict)
    tokens: Counter[int] = field(default_factory=Counter)
    prompts: Counter[int] = field(default_factory=Counter)
    firsts: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock, self.memory = Clock(), CountingMemory(self.pages)
        limits = Limits(**{"page_tokens": PAGE, "step_tokens": 32, "max_running": 8} | self.limits)
        self.scheduler = Scheduler(self.memory, limits, self.clock)

    def submit(self, prompt: int, new: int = 1, *, priority: int = 0, parts: Sequence[int] | None = None) -> int:
        start = -(-prompt // PAGE)
        number = self.scheduler.submit(
            parts or [min(8, prompt - at) for at in range(0, prompt, 8)],
            priority=priority,
            start_pages=start,
            start_room=start * PAGE - prompt,
            most_pages=-(-(prompt + new) // PAGE),
        )
        self.new[number] = new
        return number

    def step(self) -> Step:
        step = self.scheduler.plan()
        self.clock.now += 1.0
        running = {n for n in self.new if self.scheduler.state(n) is State.RUNNING}
        assert {*step.decode, *(n for n, _ in step.parts), *step.resumed} <= running
        assert not set(step.decode) & {n for n, _ in step.parts}, "a prompt's end and its first step are two passes"
        for number, last in step.parts:
            self.prompts[number] += 1
            if last:
                self.firsts.append(number)
                self.token(number)
        for number in step.decode:
            self.token(number)
        self.ended += step.refused
        self.check()
        return step

    def token(self, number: int) -> None:
        self.tokens[number] += 1
        if self.tokens[number] == self.new[number]:
            assert self.scheduler.end(number)
            self.ended.append(number)

    def check(self) -> None:
        held = self.memory.held
        assert 0 <= held.total() <= self.pages
        for number in self.new:
            state = self.scheduler.state(number)
            assert (state is State.RUNNING) == (held[number] > 0)
            assert (state is State.PARKED) == (number in self.memory.parked)

    def finish(self, most: int = 3000) -> None:
        for _ in range(most):
            if not self.scheduler.n_running + self.scheduler.n_waiting:
                return
            self.step()
        raise AssertionError(f"{self.scheduler.n_running} run and {self.scheduler.n_waiting} wait after {most} steps")


class TestOrder:
    def test_first_tokens_in_order_of_arrival_within_a_class(self) -> None:
        bench = Bench(pages=512)
        numbers = [bench.submit(prompt, 5, priority=i % 2) for i, prompt in enumerate((30, 3, 20, 1, 9, 40, 2, 17))]
        bench.finish()
        for kind in (0, 1):
            mine = numbers[kind::2]
            assert [n for n in bench.firsts if n in mine] == mine
        assert bench.firsts[0] == numbers[0]

    def test_a_long_prompt_leaves_room_for_decoding(self) -> None:
        bench = Bench(pages=512, limits={"step_tokens": 9})
        short = bench.submit(4, 20)
        bench.step()
        bench.submit(80, 1)
        for _ in range(8):
            step = bench.step()
            assert short in step.decode and len(step.parts) == 1

    def test_a_part_longer_than_the_budget_goes_alone(self) -> None:
        bench = Bench(pages=512)
        bench.submit(100, 1, parts=[100])
        other = bench.submit(4, 1)
        assert bench.step().parts == ((0, True),)
        assert bench.step().parts == ((other, True),)

    def test_a_class_that_waits_long_counts_as_a_higher_one(self) -> None:
        bench = Bench(limits={"max_running": 1, "age_s": 10.0})
        low = bench.submit(4, 2, priority=3)
        for _ in range(60):
            bench.submit(4, 2)
            bench.step()
        assert low in bench.ended


class TestPages:
    def test_what_cannot_finish_alone_is_refused(self) -> None:
        bench = Bench(pages=4)
        with pytest.raises(InvalidInput, match="may need 5 pages of 4 tokens and the cache has 4"):
            bench.submit(8, 9)
        bench.submit(8, 8)
        bench.finish()
        assert bench.tokens.total() == 8

    def test_the_youngest_of_the_lowest_class_is_parked_and_resumed(self) -> None:
        bench = Bench(pages=8)
        old, low, young = bench.submit(8, 12), bench.submit(4, 12, priority=1), bench.submit(4, 12)
        parked: list[int] = []
        while not parked:
            parked += bench.step().parked
        assert parked[0] == low
        bench.finish()
        assert bench.tokens == {old: 12, low: 12, young: 12} and bench.scheduler.preemptions >= 1

    def test_a_higher_class_takes_the_place_of_a_lower_one(self) -> None:
        bench = Bench(limits={"max_running": 1})
        low = bench.submit(40, 50, priority=2)
        bench.step()
        high = bench.submit(4, 1)
        step = bench.step()
        assert step.parked == (low,) and step.parts == ((high, True),)
        assert bench.step().resumed == (low,)

    def test_pages_kept_for_good_by_others_end_a_request_instead_of_hanging(self) -> None:
        bench = Bench(pages=8)
        bench.submit(4, 28)
        bench.step()
        bench.memory.pages = 2  # the rest was pinned meanwhile
        bench.finish()
        assert bench.ended == [0] and bench.tokens[0] < 28

    def test_restart_waits_until_somebody_lets_go(self) -> None:
        bench = Bench(pages=16)
        first, second = bench.submit(4, 6), bench.submit(4, 2)
        bench.step()
        assert bench.scheduler.restart(second, [4])
        bench.tokens[second] = 0
        while bench.scheduler.state(first) is not State.ENDED:
            assert second not in [n for n, _ in bench.step().parts]
        bench.finish()
        assert bench.tokens[second] == 2
        lone = bench.submit(4, 6)
        bench.step()
        assert not bench.scheduler.restart(lone, [4]) and bench.scheduler.state(lone) is State.ENDED


class TestQueue:
    def test_a_full_queue_says_when_to_come_again(self) -> None:
        bench = Bench(limits={"max_waiting": 2, "max_running": 1})
        for _ in range(2):
            bench.submit(4, 3)
        with pytest.raises(Busy, match="2 requests wait") as refused:
            bench.submit(4, 3)
        assert refused.value.retry_after_s == 1
        for _ in range(40):
            while bench.scheduler.n_waiting < 2:
                bench.submit(4, 3)
            bench.step()
        while bench.scheduler.n_waiting < 2:
            bench.submit(4, 3)
        assert 3 <= bench.scheduler.retry_after_s() <= 4  # one ends every three steps

    def test_cancelled_in_every_state(self) -> None:
        bench = Bench(pages=8, limits={"max_running": 2})
        waiting = [bench.submit(8, 20) for _ in range(3)]
        assert bench.scheduler.end(waiting[1]) and not bench.scheduler.end(waiting[1])
        bench.step()
        assert bench.scheduler.end(waiting[0])
        parked: list[int] = []
        low = bench.submit(8, 20, priority=4)
        while not parked:
            parked += bench.step().parked
        assert parked == [low] and bench.scheduler.end(low)
        bench.finish()
        assert bench.memory.free() == 8

    @pytest.mark.parametrize("wrong", [{"max_running": 0}, {"step_tokens": 0}, {"age_s": 0.0}, {"max_waiting": 1.5}])
    def test_limits_out_of_range(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            Limits(**wrong)


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """(what, tokens of the prompt or which request, new tokens, class)."""
    row = st.tuples(
        st.sampled_from(["submit", "submit", "step", "step", "cancel", "restart"]),
        st.integers(1, 24),
        st.integers(1, 12),
        st.integers(0, 2),
    )
    return draw(st.lists(row, max_size=40))


@settings(max_examples=150, deadline=None)
@given(load=loads(), pages=st.integers(9, 20), running=st.integers(1, 4))
def test_every_request_ends_exactly_once_and_every_page_is_free_again(
    load: list[tuple[str, int, int, int]], pages: int, running: int
) -> None:
    bench = Bench(pages=pages, limits={"max_running": running, "step_tokens": 12})
    for what, a, b, c in load:
        if what == "submit":
            bench.submit(a, b, priority=c)
        elif what == "step":
            bench.step()
        elif what == "cancel" and a in bench.new:
            if bench.scheduler.end(a):
                bench.ended.append(a)
        elif what == "restart" and bench.scheduler.state(a) is State.RUNNING:
            if bench.scheduler.restart(a, [a]):
                bench.tokens[a] = 0
            else:
                bench.ended.append(a)
        bench.check()
    bench.finish()
    assert sorted(bench.ended) == sorted(bench.new)
    assert bench.memory.free() == pages and not bench.memory.parked


def test_a_step_is_quick_with_256_running() -> None:
    taken = sorted(scheduler_step_s(256, 600))
    assert taken[int(0.99 * len(taken))] < 0.005
