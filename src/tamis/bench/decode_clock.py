"""Times of contenders in turn, so that a change of clocks meets all alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tamis.bench.clock import graphed, launched

WARMUP = 3  # rounds


def timed(
    runs: dict[str, Callable[[], Any]], where: torch.device, rounds: int, *, calls: int = 1
) -> dict[str, list[float]]:
    """Seconds of one call of each, round by round, in turn; on a GPU from graphs of so many calls (0: no graph)."""
    cuda = where.type == "cuda"
    with torch.inference_mode():
        timers = {name: _timer(run, cuda, calls) for name, run in runs.items()}
        found: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(WARMUP + rounds):
            for name in list(timers) if i % 2 else reversed(list(timers)):
                seconds = timers[name]()
                if i >= WARMUP:
                    found[name].append(seconds)
    return found


def _timer(run: Callable[[], Any], cuda: bool, calls: int) -> Callable[[], float]:
    """Seconds of one call."""
    graph = cuda and calls > 0
    one, each = (graphed(run, calls=calls), calls) if graph else (run, 1)

    def once() -> float:
        return launched(one, cuda)() / each

    return once
