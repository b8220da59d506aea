"""Time of a call and of the parts of a forward pass, read once at the end so that nothing waits in between; and calls
as CUDA graphs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Clock:
    """Marks are CUDA events where `cuda`, else the host's time. A clock that is not `split` times no `part`."""

    cuda: bool
    split: bool = True
    spans: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is launched inside."""
        if not self.split:
            yield
            return
        begin = self._mark()
        yield
        self.spans.setdefault(name, []).append((begin, self._mark()))

    @contextlib.contextmanager
    def watching(self, name: str, pairs: Iterable[tuple[torch.nn.Module, torch.nn.Module]]) -> Iterator[None]:
        """While inside, time from the call of each pair's first module to the return of its second one."""
        with contextlib.ExitStack() as hooks:
            for first, last in pairs:
                begun: list[Any] = []

                def start(*_: Any, begun: list[Any] = begun) -> None:
                    begun.append(self._mark())

                def stop(*_: Any, begun: list[Any] = begun) -> None:
                    self.spans.setdefault(name, []).append((begun.pop(), self._mark()))

                hooks.callback(first.register_forward_pre_hook(start).remove)
                hooks.callback(last.register_forward_hook(stop).remove)
            yield

    def seconds(self) -> dict[str, float]:
        """Total of each part."""
        if self.cuda:
            torch.cuda.synchronize()
            return {n: sum(a.elapsed_time(b) for a, b in s) / 1e3 for n, s in self.spans.items()}
        return {n: sum(b - a for a, b in s) for n, s in self.spans.items()}

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def launched(run: Callable[[], Any], cuda: bool) -> Callable[[], float]:
    """Call `run`, and give what says later how many seconds it took; on a GPU that waits for its end alone."""
    clock = Clock(cuda)
    with clock.part(""):
        run()
    (marks,) = clock.spans[""]

    def seconds() -> float:
        begin, end = marks
        if not cuda:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return seconds


def graphed(run: Callable[[], Any], *, calls: int = 1, warm: int = 2) -> Callable[[], Any]:
    """What replays a CUDA graph of so many calls. It is called `warm` times before, so that kernels are compiled."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph.replay
