"""Prefill and decode of one prompt on one model: tokens in, tokens and timings out. Knows no text and no files."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tamis.attention.hook import Switch, install
from tamis.attention.offline import Indexer, Progress
from tamis.attention.planner import Plan, plan_prefill
from tamis.attention.policy import PAGED, Policy
from tamis.attention.report import PrefillReport
from tamis.attention.reuse import ROOM_TOKENS, ReuseEngine, Session
from tamis.cache.formats import new_cache
from tamis.core.errors import ContextOverflow, InvalidInput
from tamis.engine.sampling import Sampler, Sampling
from tamis.model.family import geometry
from tamis.prompt.segments import Prompt


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A prompt that is ready to be continued. `logits` [vocabulary] of the first new token; times in seconds.

    cache: what `Runner.decode` goes on from, a transformers cache or a `Session` of pages, which `close` gives back.
    """

    logits: torch.Tensor
    cache: Any
    report: PrefillReport
    n_tokens: int
    plan_s: float
    index_s: float
    prefill_s: float

    def close(self) -> None:
        """Let go of pages and documents now rather than when this object goes. Closing twice is harmless."""
        if isinstance(self.cache, Session):
            self.cache.close()


class Runner:
    """A model with Tamis's attention installed. `close` puts the stock attention back.

    Safe to use from many threads: `lock` is held during every pass of the model, which takes one at a time.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.lock = threading.RLock()
        self.geometry = geometry(model.config)
        self.switch: Switch
        self._uninstall: Callable[[], None]
        self.switch, self._uninstall = install(model)
        # transformers 5.24 renamed the argument and warns about the old name
        new = "cache" in inspect.signature(type(model).forward).parameters
        self._cache = "cache" if new else "past_key_values"

    def close(self) -> None:
        """Take Tamis's attention out of the model again. Closing twice is harmless."""
        uninstall, self._uninstall = self._uninstall, _nothing
        uninstall()

    def check_fits(self, n_tokens: int) -> None:
        """Raises ContextOverflow if a prompt of that length leaves no room for one new token."""
        limit = self.geometry.context_tokens
        if n_tokens >= limit:
            raise ContextOverflow(
                f"the prompt has {n_tokens} tokens; this model takes {limit}, one of them for the answer. "
                "Give fewer or shorter documents, or a shorter question."
            )

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
        if policy.prefill in PAGED:
            if reuse is None:
                raise InvalidInput(f"prefill={policy.prefill!r} needs a cache of documents, which tamis.LLM has.")
            return self._prefill_paged(prompt, policy, reuse(), room_tokens)
        with self.lock:
            return self._prefill(prompt, policy, indexer, measure_recall=measure_recall, on_index=on_index)

    def _prefill_paged(self, prompt: Prompt, policy: Policy, reuse: ReuseEngine, room_tokens: int) -> Prefilled:
        begin = time.perf_counter()
        room = min(room_tokens, self.geometry.context_tokens - len(prompt.tokens))
        session = reuse.begin(prompt, policy, room_tokens=room)
        try:
            planned = time.perf_counter()
            logits = session.prefill()
        except BaseException:
            session.close()
            raise
        took, plan_s = time.perf_counter() - planned, planned - begin - session.hold_s
        return Prefilled(logits, session, session.report(), len(prompt.tokens), plan_s, session.hold_s, took)

    def _prefill(
        self,
        prompt: Prompt,
        policy: Policy,
        indexer: Callable[[], Indexer],
        *,
        measure_recall: bool,
        on_index: Progress | None,
    ) -> Prefilled:
        begin = time.perf_counter()
        plan: Plan = plan_prefill(self.model, prompt, policy, indexer, measure_recall=measure_recall, on_index=on_index)
        planned = time.perf_counter()
        cache = new_cache(policy.kv, self.model.config)
        with torch.inference_mode(), plan.running(self.switch):
            ids = torch.tensor([prompt.tokens], device=next(self.model.parameters()).device)
            for first, end in plan.chunks:
                part = ids[:, first:end]
                logits = self.model(part, **{self._cache: cache}, use_cache=True, logits_to_keep=1).logits[0, -1]
            if logits.is_cuda:
                torch.cuda.synchronize()
        took = time.perf_counter() - planned
        return Prefilled(
            logits, cache, plan.report(), len(prompt.tokens), planned - begin - plan.index_s, plan.index_s, took
        )

    def most_tokens(self, start: Prefilled, sampling: Sampling) -> int:
        """New tokens that `decode` yields at most: what was asked for, or what the context takes."""
        return min(sampling.max_new_tokens, self.geometry.context_tokens - start.n_tokens)

    def decode(self, start: Prefilled, sampling: Sampling, stop: frozenset[int]) -> Iterator[int]:
        """New tokens one by one, the stop token not among them. Uses up `start`'s cache."""
        sampler = Sampler(sampling, start.logits.device)
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
                logits = self._step(start.cache, token)
        finally:
            start.close()

    def _step(self, cache: Any, token: int) -> torch.Tensor:
        """Logits [vocabulary] behind one more token."""
        if isinstance(cache, Session):
            return cache.step(token)
        with self.lock, torch.inference_mode():
            ids = torch.tensor([[token]], device=next(self.model.parameters()).device)
            logits: torch.Tensor = self.model(ids, **{self._cache: cache}, use_cache=True).logits[0, -1]
        return logits


def _nothing() -> None:
    pass
