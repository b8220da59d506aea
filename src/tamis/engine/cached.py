"""A request whose keys and values lie in a cache of a form of its own, beside the pages of the others.

Its prompt is computed in parts like others', each exactly as the library's chunks are. Its tokens are rows of a pass
over all such requests, see `CachedBatch`; those that a forecast chooses for are passes of their own, because the
forecast is part of the product that makes a lone token's queries. Pages are taken as for any request, though nothing is
written there: they bound how many such caches there are at once. A parked one keeps its cache, which is the smaller
form, and gives its pages back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tamis.attention.caching import AnyDecoding, Caching
from tamis.attention.decode import Decoding
from tamis.attention.decode_bank import Seat
from tamis.attention.offline import Indexer
from tamis.attention.planner import Plan, chunks_of, plan_prefill
from tamis.attention.policy import BLOCKS, PAGED, Policy
from tamis.attention.report import DecodeReport, PrefillReport
from tamis.attention.reuse import ReuseEngine
from tamis.cache.formats import cache_argument, stored_dtype
from tamis.engine.member import Member
from tamis.engine.request import Request


def member_for(
    request: Request, engine: ReuseEngine, indexer: Callable[[], Indexer], caching: Caching, *, chunk_tokens: int
) -> Member:
    """What computes a request; `caching` is the model's. Raises InvalidInput for what cannot be done."""
    if cached(request.policy, next(engine.model.parameters()).dtype):
        return CachedMember(request, engine, indexer, caching, chunk_tokens=chunk_tokens)
    return Member(request, engine, indexer, chunk_tokens=chunk_tokens)


def cached(policy: Policy, dtype: torch.dtype) -> bool:
    """Whether a request's keys and values are not kept in pages of the model's dtype."""
    if policy.prefill in PAGED:
        return False
    return (
        policy.prefill in BLOCKS or policy.kv_form in ("selfindex", "blocks") or stored_dtype(policy.kv, dtype) != dtype
    )


class CachedMember(Member):
    """See the module. chunk_tokens: of a part of its prompt, where its policy does not say; parts end where a sparse
    prefill's tiles do."""

    def __init__(
        self,
        request: Request,
        engine: ReuseEngine,
        indexer: Callable[[], Indexer],
        caching: Caching,
        *,
        chunk_tokens: int,
    ) -> None:
        super().__init__(request, engine, indexer, chunk_tokens=chunk_tokens)
        self._caching = caching
        policy = request.policy
        self._policy = replace(policy, chunk_tokens=policy.chunk_tokens or max(chunk_tokens, policy.tile))
        self._chunks = chunks_of(request.prompt, self._policy)
        self._done = 0  # of these
        self._prefilled: Plan | None = None
        self.cache: Any = None
        self.decoding: AnyDecoding | None = None
        self._seat: Seat | None = None

    @property
    def seat(self) -> Seat | None:
        """For steps in which all rows are one launch; None where its cache is none for them. Its prompt was run."""
        decoding = self.decoding
        if self._seat is None and isinstance(decoding, Decoding) and decoding.budget is not None:
            sequences = decoding.sequences()
            self._seat = None if sequences is None else Seat(sequences, decoding.budget)
        return self._seat

    @property
    def together(self) -> bool:
        """Whether its next token may be a row of a pass over several requests."""
        return self.request.policy.decode != "forecast"

    @property
    def left(self) -> list[int]:
        """See `Member`."""
        return [end - first for first, end in self._chunks[self._done :]]

    @property
    def room(self) -> int:
        """See `Member`."""
        return self.placing.needs()["start_room"]

    def run_part(self) -> torch.Tensor | None:
        """See `Member`."""
        engine, request, caching = self.engine, self.request, self._caching
        with engine.store.lock:
            if self._prefilled is None:
                self._prefilled = plan_prefill(
                    engine.model, request.prompt, self._policy, self.indexer, forecast=caching.forecast
                )
                behind = sum(self.left[1:]) + request.sampling.max_new_tokens
                self.cache = caching.new_cache(request.policy, room=behind)
                self.decoding = caching.decoding(self.cache, request.policy)
            first, end = self._chunks[self._done]
            plan, decoding = self._prefilled, self.decoding
            assert decoding is not None, "made with the plan"
            ids = torch.tensor([request.prompt.tokens[first:end]], device=self.device)
            with (
                torch.inference_mode(),
                plan.running(engine.switch),
                decoding.running(engine.switch, step=False),
                plan.passing(first, end),
            ):
                logits = self._forward(ids, logits_to_keep=1)
        self._done += 1
        return None if self._done < len(self._chunks) else logits

    def step(self) -> torch.Tensor:
        """Logits [vocabulary] behind the newest token, in a pass of its own."""
        engine = self.engine
        assert self.decoding is not None, "its prompt was run"
        self._bring_back()
        with engine.store.lock, torch.inference_mode(), self.decoding.running(engine.switch, step=True):
            return self._forward(torch.tensor([[self.new[-1]]], device=self.device))

    def park(self) -> None:
        """See `Member`."""
        self._bring_back()
        super().park()

    def restart(self) -> None:
        """See `Member`."""
        self.close()
        self.new = []

    def close(self) -> None:
        """See `Member`."""
        self._let_go()
        if self._seat is not None:
            with torch.inference_mode():
                self._seat.leave()
        self._seat = None
        self.cache, self.decoding, self._prefilled, self._done = None, None, None, 0

    def report(self) -> PrefillReport:
        """See `Member`."""
        assert self._prefilled is not None, "the prompt was run"
        return self._prefilled.report()

    @property
    def decode_report(self) -> DecodeReport | None:
        """What was done with the cache so far."""
        return None if self.decoding is None else self.decoding.report()

    def _bring_back(self) -> None:
        """Into the cache what steps with others left elsewhere."""
        if self._seat is not None:
            with self.engine.store.lock, torch.inference_mode():
                self._seat.bring_back()

    def _forward(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        model = self.engine.model
        made: torch.Tensor = model(ids, **{cache_argument(model): self.cache}, use_cache=True, **options).logits[0, -1]
        return made
