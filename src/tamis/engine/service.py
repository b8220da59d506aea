"""The engine: one thread that runs the scheduler's steps on a model, for requests that come from any thread.

Knows no HTTP and no users: who may ask for what is decided above. Only that thread runs the model or touches its
device. `submit`, in its caller's thread, lays out a prompt: integers, as many as it has tokens.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tamis.attention.policy import Policy
from tamis.core.errors import Busy, Cancelled, ContextOverflow, InvalidInput
from tamis.core.log import logger
from tamis.engine.apart import apart
from tamis.engine.cached import member_for
from tamis.engine.grammar import Grammars
from tamis.engine.request import Listener, Request
from tamis.engine.sampling import TextStream
from tamis.engine.scheduler import Limits
from tamis.engine.steps import Steps, Ticket

if TYPE_CHECKING:
    from tamis.engine.llm import LLM

log = logger("engine")
CHUNK_TOKENS = {"cpu": 512, "cuda": 2048}  # of a part of a prompt; a GPU waits for the launches of smaller ones
T = TypeVar("T")


@dataclass(frozen=True)
class EngineStatistics:
    """Now: requests running and waiting, pages in use of all. So far: requests preempted, steps, their seconds."""

    running: int
    waiting: int
    pages: int
    pages_used: int
    preemptions: int
    steps: int
    busy_s: float


class Engine:
    """Serves an `LLM` to many. Use it in a `with` block, or `close` it; the LLM stays open.

    chunk_tokens: prompts are computed in parts of at most so many tokens between steps of the others; None: 512, on a
        GPU 2,048.
    exact: on a CPU in float32, a request's logits do not depend on the others to the last bit.
    graphs: decode steps on a GPU are recorded and replayed.
    """

    def __init__(
        self,
        llm: LLM,
        limits: Limits | None = None,
        *,
        chunk_tokens: int | None = None,
        exact: bool = True,
        graphs: bool = True,
    ) -> None:
        self.llm = llm
        self.grammars = Grammars(llm.tokenizer, llm.runner.model.config.vocab_size, llm.stop_tokens)
        self.reuse = apart(llm.reuse_engine)
        self.pool = self.reuse.store.pool
        usual = CHUNK_TOKENS.get(self.pool.keys.device.type, CHUNK_TOKENS["cuda"])
        self.chunk_tokens = usual if chunk_tokens is None else chunk_tokens
        limits = limits or Limits(page_tokens=self.pool.page)
        if limits.page_tokens != self.pool.page:
            raise InvalidInput(f"page_tokens is {limits.page_tokens}; pages have {self.pool.page} here.")
        self._wake = threading.Condition()
        self._work = Steps(self.reuse, limits, self._wake, llm.stop_tokens, exact=exact, graphs=graphs)
        self.memory, self._tickets = self._work.memory, self._work.tickets
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._cancelled: dict[int, str] = {}
        self._draining = self._closed = False
        self._steps, self._busy_s = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="tamis-engine", daemon=True)
        self._thread.start()

    @property
    def taking(self) -> bool:
        """Whether requests are taken."""
        return not (self._draining or self._closed) and self._thread.is_alive()

    def submit(self, request: Request, listener: Listener) -> int:
        """Queue a request; its number. `listener` gets its events: `Piece`s, then one `End` or `Failed`.

        Raises at once what no waiting would help: Busy, ContextOverflow, InvalidInput, ModelUnsupported.
        """
        n, limit = len(request.prompt.tokens), self.llm.runner.geometry.context_tokens
        most = request.sampling.max_new_tokens
        if n + most > limit:
            raise ContextOverflow(
                f"the prompt has {n} tokens and max_tokens is {most}; this model takes {limit} in all. Give a shorter "
                "prompt or fewer max_tokens."
            )
        indexer = functools.partial(self.llm._indexer, request.policy)
        runner = self.llm.runner
        runner.check(request.policy)
        member = member_for(request, self.reuse, indexer, runner.caching, chunk_tokens=self.chunk_tokens)
        text = TextStream(self.llm.tokenizer, request.sampling.stop, strip=False)
        ticket = Ticket(member, listener, text, most, time.monotonic())
        parts, needs = member.left, member.placing.needs()
        with self._wake:
            if self._draining or self._closed:
                raise Busy("the engine is shutting down and takes no more requests.", retry_after_s=5)
            number = self._work.scheduler.submit(parts, priority=request.priority, **needs)
            self._tickets[number] = ticket
            self._wake.notify()
        return number

    def policy(self, choices: Mapping[str, Any]) -> Policy:
        """The LLM's policy with `choices`. Raises InvalidInput."""
        return Policy.of(self.llm.policy, **choices)

    def cancel(self, number: int, why: str = "cancelled by who asked") -> None:
        """End a request at the next step, wherever it is; its listener gets `Failed`. Nothing happens if it ended."""
        with self._wake:
            if number in self._tickets:
                self._cancelled.setdefault(number, why)
                self._wake.notify()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Do something between two steps, where nothing else runs on the model."""
        future: Future[T] = Future()
        with self._wake:
            if self._closed:
                raise Cancelled("the engine is closed.")
            self._calls.append((work, future))
            self._wake.notify()
        return future

    def statistics(self) -> EngineStatistics:
        """A snapshot."""
        with self._wake:
            scheduler, tier = self._work.scheduler, self.memory.tier
            return EngineStatistics(
                running=scheduler.n_running,
                waiting=scheduler.n_waiting,
                pages=self.pool.allocator.n_pages,
                pages_used=tier.used_bytes // self.pool.page_bytes,
                preemptions=scheduler.preemptions,
                steps=self._steps,
                busy_s=self._busy_s,
            )

    def stop_taking(self) -> None:
        """Refuse new requests from now on; those that are here go on."""
        with self._wake:
            self._draining = True

    def drain(self, timeout_s: float) -> int:
        """Take no more requests and finish those that are here; after `timeout_s` hand back the rest: how many."""
        self.stop_taking()
        end = time.monotonic() + timeout_s
        with self._wake:
            while self._tickets and not self._closed and (left := end - time.monotonic()) > 0:
                self._wake.wait(min(left, 0.05))
            rest = list(self._tickets)
        for number in rest:
            self.cancel(number, "the server is shutting down; send the request again")
        with self._wake:
            while self._tickets and self._thread.is_alive():
                self._wake.wait(0.05)
        return len(rest)

    def close(self) -> None:
        """End all requests and the thread. Closing twice is harmless."""
        if not self._closed:
            self.drain(0.0)
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        self._work.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except Exception as e:
            log.error("the engine stopped: %s", type(e).__name__, exc_info=e)
            for number in list(self._tickets):
                self._work.fail(number, e)
        with self._wake:
            self._closed = True
            for _, future in self._calls:
                future.set_exception(Cancelled("the engine is closed."))
            self._wake.notify_all()

    def _round(self) -> bool:
        """One step, when there is something to do; False when the engine is closed."""
        with self._wake:
            while not (self._calls or self._cancelled or self._closed or self._some_work()):
                self._wake.wait()
            if self._closed:
                return False
            calls, cancelled = list(self._calls), dict(self._cancelled)
            self._calls.clear()
            self._cancelled.clear()
        begin = time.monotonic()
        for number, why in cancelled.items():
            self._work.fail(number, Cancelled(f"the request was ended: {why}."))
        for work, future in calls:
            _do(work, future)
        with self._wake:
            step = self._work.scheduler.plan()
        if step.idle and not (step.parked or step.refused or calls or cancelled):
            time.sleep(0.001)  # all pages are with others than the engine's requests
        self._work.run(step)
        with self._wake:
            self._steps += 1
            self._busy_s += time.monotonic() - begin
            self._wake.notify_all()
        return True

    def _some_work(self) -> bool:
        return bool(self._work.scheduler.n_running + self._work.scheduler.n_waiting)


def _do(work: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as e:
        future.set_exception(e)
