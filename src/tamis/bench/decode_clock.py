"""Times of contenders in turn, so that a change of clocks meets all alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

WARMUP = 3  # rounds


def timed(
    runs: dict[str, Callable[[], Any]], where: torch.device, rounds: int, *, calls: int = 1
) -> dict[str, list[float]]:
    """Seconds of one call of each, round by round, in turn; on a GPU from graphs of so many calls (0: no graph)."""
    cuda = where.type == "cuda"
    with torch.inference_mode():
        timers = {n: (_graphed(r, calls) if calls else _events(r)) if cuda else _wall(r) for n, r in runs.items()}
        found: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(WARMUP + rounds):
            for name in list(timers) if i % 2 else reversed(list(timers)):
                seconds = timers[name]()
                if i >= WARMUP:
                    found[name].append(seconds)
    return found


def _wall(run: Callable[[], Any]) -> Callable[[], float]:
    def once() -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    return once


def _events(run: Callable[[], Any]) -> Callable[[], float]:
    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return once


def _graphed(run: Callable[[], Any], calls: int) -> Callable[[], float]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    replay = _events(graph.replay)
    return lambda: replay() / calls
