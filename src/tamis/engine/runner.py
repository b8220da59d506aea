"""Prefill and decode of one prompt on one model: tokens in, tokens and timings out. Knows no text and no files."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from tamis.attention.caching import AnyDecoding, Caching, check_form
from tamis.attention.fused import FusedForecast
from tamis.attention.hook import install
from tamis.attention.offline import Indexer, Progress
from tamis.attention.planner import Plan, plan_prefill
from tamis.attention.policy import PAGED, Policy
from tamis.attention.report import DecodeReport, PrefillReport
from tamis.attention.reuse import ROOM_TOKENS, ReuseEngine, Session
from tamis.cache.formats import cache_argument
from tamis.core.errors import ContextOverflow, InvalidInput
from tamis.engine.sampling import Sampler, Sampling
from tamis.forecast.heads import Forecast
from tamis.model.family import geometry
from tamis.prompt.segments import Prompt


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A prompt that is ready to be continued. `logits` [vocabulary] of the first new token; times in seconds.

    cache: what `Runner.decode` goes on from, a transformers cache or a `Session` of pages, which `close` gives back.
    decoding: how new tokens read a transformers cache, and what they did so far. tokens: of the prompt.
    """

    logits: torch.Tensor
    cache: Any
    report: PrefillReport
    n_tokens: int
    plan_s: float
    index_s: float
    prefill_s: float
    decoding: AnyDecoding | None = None
    tokens: Sequence[int] = ()

    @property
    def decode_report(self) -> DecodeReport | None:
        """What was done with the cache so far; None for pages."""
        return None if self.decoding is None else self.decoding.report()

    def close(self) -> None:
        """Let go of pages and documents now rather than when this object goes. Closing twice is harmless."""
        if isinstance(self.cache, Session):
            self.cache.close()


class Runner:
    """A model with Tamis's attention installed. `close` puts the stock attention back.

    Safe to use from many threads: `lock` is held during every pass of the model, which takes one at a time. Raises
    ModelUnsupported at once where `policy`, the one of most requests, asks for a cache that the model cannot have.
    forecast: what decode and prefill="forecast" choose by; it lies under the model's QKV matrices until `close`.
    """

    def __init__(self, model: Any, policy: Policy | None = None, forecast: Forecast | None = None) -> None:
        self.model = model
        self.lock = threading.RLock()
        self.geometry = geometry(model.config)
        self._cache = cache_argument(model)
        with ExitStack() as undo:
            self.switch, uninstall = install(model)
            undo.callback(uninstall)
            fused = None if forecast is None else FusedForecast(model, forecast)
            if fused is not None:
                undo.callback(fused.close)
            check_form(policy or Policy(), model, fused)
            self._undo = undo.pop_all()
        self.caching = Caching(model, fused)
        self._closed = False

    def close(self) -> None:
        """Take Tamis's attention and forecast out of the model again. Closing twice is harmless."""
        self._closed = True
        self._undo.close()

    def check_fits(self, n_tokens: int) -> None:
        """Raises ContextOverflow if a prompt of that length leaves no room for one new token."""
        limit = self.geometry.context_tokens
        if n_tokens >= limit:
            raise ContextOverflow(
                f"the prompt has {n_tokens} tokens; this model takes {limit}, one of them for the answer. "
                "Give fewer or shorter documents, or a shorter question."
            )

    def check(self, policy: Policy) -> None:
        """Raises ModelUnsupported or InvalidInput for a cache or a forecast that this model does not have, and
        InvalidInput once the runner is closed."""
        self.check_open()
        check_form(policy, self.model, self.caching.forecast)

    def prefill(
        self,
        prompt: Prompt,
        policy: Policy,
        indexer: Callable[[], Indexer],
        *,
        measure_recall: bool = False,
        on_index: Progress | None = None,
        reuse: Callable[[], ReuseEngine] | None = None,
        room_tokens: int = ROOM_TOKENS,
    ) -> Prefilled:
        """Run the prompt through the model, in the plan's chunks. Raises ContextOverflow before any work.

        `reuse` gives the engine of stored documents and is only called where the policy reads from it; `room_tokens`
        are reserved there for the answer.
        """
        self.check_fits(len(prompt.tokens))
        self.check(policy)
        if policy.prefill in PAGED:
            if reuse is None:
                raise InvalidInput(f"prefill={policy.prefill!r} needs a cache of documents, which tamis.LLM has.")
            begin = functools.partial(reuse().begin, indexer=indexer, on_index=on_index)
            return self._prefill_paged(prompt, policy, begin, room_tokens)
        options: dict[str, Any] = {"measure_recall": measure_recall, "on_index": on_index}
        with self.lock:
            return self._prefill(prompt, policy, indexer, room_tokens=room_tokens, **options)

    def _prefill_paged(
        self, prompt: Prompt, policy: Policy, begin_session: Callable[..., Session], room_tokens: int
    ) -> Prefilled:
        begin = time.perf_counter()
        room = min(room_tokens, self.geometry.context_tokens - len(prompt.tokens))
        session = begin_session(prompt, policy, room_tokens=room)
        try:
            planned = time.perf_counter()
            logits = session.prefill()
        except BaseException:
            session.close()
            raise
        took, plan_s = time.perf_counter() - planned, planned - begin - session.hold_s
        report, n = session.report(), len(prompt.tokens)
        return Prefilled(logits, session, report, n, plan_s, session.hold_s, took, tokens=prompt.tokens)

    def _prefill(
        self,
        prompt: Prompt,
        policy: Policy,
        indexer: Callable[[], Indexer],
        *,
        measure_recall: bool,
        on_index: Progress | None,
        room_tokens: int,
    ) -> Prefilled:
        begin = time.perf_counter()
        plan: Plan = plan_prefill(
            self.model, prompt, policy, indexer, measure_recall=measure_recall, on_index=on_index,
            forecast=self.caching.forecast,
        )  # fmt: skip
        planned = time.perf_counter()
        room = min(room_tokens, self.geometry.context_tokens - len(prompt.tokens))
        cache = self.caching.new_cache(policy, room=room)
        decoding = self.caching.decoding(cache, policy, measure=measure_recall)
        with torch.inference_mode(), plan.running(self.switch):
            ids = torch.tensor([prompt.tokens], device=next(self.model.parameters()).device)
            for first, end in plan.chunks:
                part = ids[:, first:end]
                with decoding.running(self.switch, step=False), plan.passing(first, end):
                    logits = self.model(part, **{self._cache: cache}, use_cache=True, logits_to_keep=1).logits[0, -1]
            if logits.is_cuda:
                torch.cuda.synchronize()
        took = time.perf_counter() - planned
        return Prefilled(
            logits,
            cache,
            plan.report(),
            len(prompt.tokens),
            planned - begin - plan.index_s,
            plan.index_s,
            took,
            decoding,
            prompt.tokens,
        )

    def most_tokens(self, start: Prefilled, sampling: Sampling) -> int:
        """New tokens that `decode` yields at most: what was asked for, or what the context takes."""
        return min(sampling.max_new_tokens, self.geometry.context_tokens - start.n_tokens)

    def decode(self, start: Prefilled, sampling: Sampling, stop: frozenset[int]) -> Iterator[int]:
        """New tokens one by one, the stop token not among them. Uses up `start`'s cache."""
        sampler = Sampler(sampling, start.logits.device, start.tokens)
        logits = start.logits
        most = self.most_tokens(start, sampling)
        try:
            for n in range(most):
                token = sampler.draw(logits)
                if token in stop:
                    return
                yield token
                if n + 1 == most:
                    return
                logits = self._step(start, token)
        finally:
            start.close()

    def _step(self, start: Prefilled, token: int) -> torch.Tensor:
        """Logits [vocabulary] behind one more token."""
        if isinstance(start.cache, Session):
            return start.cache.step(token)
        assert start.decoding is not None, "a prefill into a transformers cache gives one"
        self.check_open()
        with self.lock, torch.inference_mode(), start.decoding.running(self.switch, step=True):
            ids = torch.tensor([[token]], device=next(self.model.parameters()).device)
            logits: torch.Tensor = self.model(ids, **{self._cache: start.cache}, use_cache=True).logits[0, -1]
        return logits

    def check_open(self) -> None:
        """Raises InvalidInput once the runner is closed."""
        if self._closed:
            raise InvalidInput("this LLM was closed, and the model is without Tamis's attention; make another one.")
