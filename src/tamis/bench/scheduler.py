"""What the scheduler takes for a step, with a memory that only counts and nothing computed."""

from __future__ import annotations

import random
import time
from collections import Counter

from tamis.engine.scheduler import Limits, Scheduler


class CountingMemory:
    """Pages as numbers. See `engine.scheduler.Memory`."""

    def __init__(self, pages: int) -> None:
        self.pages, self.held = pages, Counter[int]()
        self.parked: set[int] = set()

    def capacity(self) -> int:
        """All of them."""
        return self.pages

    def free(self) -> int:
        """Those that nobody has."""
        return self.pages - self.held.total()

    def take(self, number: int, pages: int) -> bool:
        """Hand out, if there are so many."""
        if pages > self.free():
            return False
        self.held[number] += pages
        self.parked.discard(number)
        return True

    def park(self, number: int) -> None:
        """Take all back."""
        del self.held[number]
        self.parked.add(number)

    def drop(self, number: int) -> None:
        """Take all back, and forget."""
        self.held.pop(number, None)
        self.parked.discard(number)


def scheduler_step_s(running: int = 256, steps: int = 2000, *, seed: int = 0) -> list[float]:
    """Seconds of this thread for each step, `running` requests of mixed classes and lengths and twice as many waiting.

    Pages are short, so that requests are parked and resumed; one that ends is replaced by a new one.
    """
    draw, limits = random.Random(seed), Limits(max_running=running, max_waiting=4 * running)
    page = limits.page_tokens
    scheduler = Scheduler(CountingMemory(5 * running), limits)
    left: dict[int, int] = {}

    def submit() -> None:
        prompt, new = draw.randint(1, 600), draw.randint(1, 400)
        parts = [min(512, prompt - at) for at in range(0, prompt, 512)]
        start, most = -(-prompt // page), -(-(prompt + new) // page)
        number = scheduler.submit(
            parts, priority=draw.randint(0, 3), start_pages=start, start_room=start * page - prompt, most_pages=most
        )
        left[number] = new

    for _ in range(3 * running):
        submit()
    taken: list[float] = []
    while len(taken) < steps:
        begin = time.thread_time()
        step = scheduler.plan()
        took = time.thread_time() - begin
        for number in step.decode:
            left[number] -= 1
        ended = [number for number in step.decode if left[number] == 0]
        begin = time.thread_time()
        for number in ended:
            scheduler.end(number)
        taken.append(took + time.thread_time() - begin)
        for number in ended:
            del left[number]
            submit()
    return taken
