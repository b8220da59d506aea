"""A request whose keys and values lie in a cache of a form of its own, beside the pages of the others.

Its prompt is one part and its tokens are steps of their own, exactly as the library makes them; such requests take
turns with the batches. Pages are taken as for any request, though nothing is written there: they bound how many such
caches there are at once. A parked one keeps its cache, which is the smaller form, and gives its pages back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tamis.attention.caching import AnyDecoding, Caching, check_form
from tamis.attention.offline import Indexer
from tamis.attention.planner import Plan, plan_prefill
from tamis.attention.policy import PAGED, Policy
from tamis.attention.report import DecodeReport, PrefillReport
from tamis.attention.reuse import ReuseEngine
from tamis.cache.formats import cache_argument, stored_dtype
from tamis.core.errors import CacheFull, InvalidInput, PoolFull
from tamis.engine.member import Member
from tamis.engine.request import Request


def member_for(request: Request, engine: ReuseEngine, indexer: Callable[[], Indexer], *, chunk_tokens: int) -> Member:
    """What computes a request. Raises InvalidInput, ModelUnsupported for what cannot be done."""
    kind = CachedMember if cached(request.policy, next(engine.model.parameters()).dtype) else Member
    return kind(request, engine, indexer, chunk_tokens=chunk_tokens)


def cached(policy: Policy, dtype: torch.dtype) -> bool:
    """Whether a request's keys and values are not kept in pages of the model's dtype."""
    if policy.prefill in PAGED:
        return False
    return (
        policy.prefill == "blocks"
        or policy.kv_form in ("selfindex", "blocks")
        or stored_dtype(policy.kv, dtype) != dtype
    )


class CachedMember(Member):
    """See the module; `step` takes the place of a row in a batch."""

    def __init__(
        self, request: Request, engine: ReuseEngine, indexer: Callable[[], Indexer], *, chunk_tokens: int
    ) -> None:
        if request.policy.decode == "forecast":
            raise InvalidInput(
                "decode='forecast' is not served: its forecast belongs to one loaded model of the library. Use "
                "decode='blocks' or 'selfindex', or tamis.LLM(…, forecast=FOLDER)."
            )
        check_form(request.policy, engine.model)
        super().__init__(request, engine, indexer, chunk_tokens=len(request.prompt.tokens))
        self._cache: Any = None
        self._decoding: AnyDecoding | None = None
        self._prefilled: Plan | None = None

    @property
    def left(self) -> list[int]:
        """See `Member`: the whole prompt, or nothing."""
        return [] if self._prefilled is not None else [len(self.request.prompt.tokens)]

    @property
    def room(self) -> int:
        """See `Member`."""
        return self.placing.needs()["start_room"]

    def run_part(self) -> torch.Tensor | None:
        """The whole prompt; logits [vocabulary] behind it."""
        engine, request = self.engine, self.request
        model, switch, caching = engine.model, engine.switch, Caching(engine.model)
        with engine.store.lock:
            plan = plan_prefill(model, request.prompt, request.policy, self.indexer)
            cache = caching.new_cache(request.policy, room=request.sampling.max_new_tokens)
            decoding = caching.decoding(cache, request.policy)
            with torch.inference_mode(), plan.running(switch):
                ids = torch.tensor([request.prompt.tokens], device=self.device)
                for first, end in plan.chunks:
                    with decoding.running(switch, step=False):
                        logits: torch.Tensor = self._forward(ids[:, first:end], cache, logits_to_keep=1)
        self._cache, self._decoding, self._prefilled = cache, decoding, plan
        return logits

    def step(self) -> torch.Tensor:
        """Logits [vocabulary] behind the newest token."""
        engine = self.engine
        assert self._decoding is not None, "its prompt was run"
        with engine.store.lock, torch.inference_mode(), self._decoding.running(engine.switch, step=True):
            ids = torch.tensor([[self.new[-1]]], device=self.device)
            return self._forward(ids, self._cache)

    def take(self, pages: int) -> bool:
        """See `Member`."""
        store = self.engine.store
        try:
            if self._own is None:
                self._own = store.cache.own(pages * store.pool.page)
            else:
                self._own.extend(pages * store.pool.page)
        except (CacheFull, PoolFull):
            return False
        return True

    @property
    def parked(self) -> bool:
        """See `Member`: its pages hold nothing, so that to come back is to take some."""
        return False

    def park(self) -> None:
        """See `Member`."""
        self._let_go()

    def restart(self) -> None:
        """See `Member`."""
        self.close()
        self.new = []

    def close(self) -> None:
        """See `Member`."""
        self._let_go()
        self._cache, self._decoding, self._prefilled = None, None, None

    def report(self) -> PrefillReport:
        """See `Member`."""
        assert self._prefilled is not None, "the prompt was run"
        return self._prefilled.report()

    @property
    def decode_report(self) -> DecodeReport | None:
        """What was done with the cache so far."""
        return None if self._decoding is None else self._decoding.report()

    def _forward(self, ids: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
        model = self.engine.model
        made: torch.Tensor = model(ids, **{cache_argument(model): cache}, use_cache=True, **options).logits[0, -1]
        return made
