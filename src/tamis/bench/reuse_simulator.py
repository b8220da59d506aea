"""One GPU, first come first served: requests wait, are prefilled in batches, and decode together until they are done.

Knows the order of events and the clock; what fits and hits is the provider's, how long work takes the executor's.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tamis.bench.reuse_cost import Executor
from tamis.bench.reuse_pool import DEVICE, Pool
from tamis.bench.reuse_providers import Admission, Provider, fallback
from tamis.bench.reuse_workload import Request

BATCH_TOKENS = 8192  # a prefill batch takes further requests until it has so many new tokens
MAX_RUNNING = 256
STEP_EVERY = 500

Progress = Callable[[int, int], None]


@dataclass
class Clock:
    """Simulated seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Outcome:
    """Sums over one replay. Tokens of prompts, of documents in them, and those served from the cache.

    fallbacks: requests that do not fit even an empty pool, computed whole outside of it.
    """

    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    seconds: float = 0.0
    prompt_tokens: int = 0
    document_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0
    prompt_hit_tokens: int = 0
    computed_tokens: int = 0
    copied_tokens: int = 0
    loaded_tokens: int = 0
    fallbacks: int = 0
    most_running: int = 0
    evictions: int = 0
    peak_bytes: int = 0
    peak_in_use_bytes: int = 0


class Simulator:
    """Replays one workload through one provider.

    A batch of prefills goes before decoding. Output lengths are known: their pages are owned from the start, so that
    nobody is preempted. With `concurrency`, a finished request makes room for the next one; without, they arrive
    when they say. max_running: so many at once, if they fit.
    """

    def __init__(
        self,
        provider: Provider,
        pool: Pool,
        executor: Executor,
        *,
        clock: Clock,
        concurrency: int | None = None,
        max_running: int = MAX_RUNNING,
    ) -> None:
        self._provider = provider
        self._pool = pool
        self._executor = executor
        self._clock = clock
        self._concurrency = concurrency
        self._limit = max_running
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[int, int, Admission, int]] = []  # (last step, number, memory, tokens at that step)
        self._steps = 0
        self._context = 0  # tokens of all that run, now
        self._started = 0
        self._next: Request | None = None
        self._outcome = Outcome()

    def run(self, requests: Iterator[Request], total: int, on_progress: Progress | None = None) -> Outcome:
        """Until all requests are done."""
        out = self._outcome
        shown = 0
        self._next = next(requests, None)
        for _ in range(self._concurrency or 0):
            self._submit(requests)
        while self._waiting or self._running or self._next is not None:
            self._arrivals(requests)
            if batch := self._admitted():
                self._prefill(batch, requests)
            elif self._running:
                self._decode(requests)
            elif self._next is not None:
                self._clock.now = max(self._clock.now, self._next.arrival_s)
            if on_progress is not None and len(out.ttft_s) - shown >= STEP_EVERY:
                shown = len(out.ttft_s)
                on_progress(shown, total)
        out.seconds = self._clock.now
        out.evictions = self._pool.statistics().tiers[DEVICE].evictions
        out.peak_bytes, out.peak_in_use_bytes = self._pool.peak_bytes, self._pool.peak_in_use_bytes
        self._pool.cache.check()
        return out

    def _submit(self, requests: Iterator[Request]) -> None:
        """One client sends its next request now."""
        if self._next is not None:
            self._waiting.append(self._next._replace(arrival_s=self._clock.now))
            self._next = next(requests, None)

    def _arrivals(self, requests: Iterator[Request]) -> None:
        if self._concurrency is not None:
            return
        while self._next is not None and self._next.arrival_s <= self._clock.now:
            self._waiting.append(self._next)
            self._next = next(requests, None)

    def _admitted(self) -> list[tuple[Request, Admission]]:
        """The head of the queue, as far as it fits; nobody overtakes."""
        batch: list[tuple[Request, Admission]] = []
        tokens = 0
        while self._waiting and tokens < BATCH_TOKENS and len(self._running) + len(batch) < self._limit:
            admission = self._provider.admit(self._waiting[0])
            if admission is None:
                if self._running or batch:
                    break
                admission = fallback(self._waiting[0])
            self._pool.note_peak()
            tokens += admission.work.new_tokens
            batch.append((self._waiting.popleft(), admission))
        return batch

    def _prefill(self, batch: list[tuple[Request, Admission]], requests: Iterator[Request]) -> None:
        self._outcome.most_running = max(self._outcome.most_running, len(self._running) + len(batch))
        self._clock.now += self._executor.prefill([r for r, _ in batch], [a.work for _, a in batch])
        for request, admission in batch:
            self._outcome.ttft_s.append(self._clock.now - request.arrival_s)
            prompt = self._count(request, admission)
            left = request.output_tokens - 1  # prefill gave the first
            if left:
                self._started += 1
                end = prompt + request.output_tokens
                heapq.heappush(self._running, (self._steps + left, self._started, admission, end))
                self._context += prompt + 1
            else:
                self._finish(admission, requests)

    def _decode(self, requests: Iterator[Request]) -> None:
        """Steps until somebody is done, or somebody arrives."""
        n, steps = len(self._running), self._running[0][0] - self._steps
        if self._concurrency is None and self._next is not None and not self._waiting:
            wait = self._next.arrival_s - self._clock.now
            steps = self._executor.steps_within(self._context, n, wait, steps)
        self._clock.now += self._executor.decode(self._context, n, steps)
        self._steps += steps
        self._context += n * steps
        while self._running and self._running[0][0] <= self._steps:
            _, _, admission, end = heapq.heappop(self._running)
            self._context -= end
            self._finish(admission, requests)

    def _finish(self, admission: Admission, requests: Iterator[Request]) -> None:
        admission.close()
        if self._concurrency is not None:
            self._submit(requests)

    def _count(self, request: Request, admission: Admission) -> int:
        """Add a request to the sums; its prompt's tokens."""
        out, work = self._outcome, admission.work
        prompt = sum(p.n_tokens for p in request.pieces)
        out.prompt_tokens += prompt
        out.document_tokens += sum(p.n_tokens for p in request.documents)
        out.output_tokens += request.output_tokens
        out.hit_tokens += admission.hit_tokens
        out.prompt_hit_tokens += admission.prompt_hit_tokens
        out.computed_tokens += work.new_tokens
        out.copied_tokens += work.copied
        out.loaded_tokens += work.loaded
        out.fallbacks += admission.fell_back
        return prompt
