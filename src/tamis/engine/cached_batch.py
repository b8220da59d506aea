"""One decode step of many requests whose keys and values lie in caches of their own: one pass, each row its own cache.

Knows caches and what reads them, one layer at a time; not pages. Linear layers read their weights once for all rows.
What a row attends to is computed as it would be alone, so that on a CPU in float32 a request's logits do not depend on
the others to the last bit, where `Products` or a multiple of four rows sees to that for the linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from tamis.attention.hook import DecodeJob, Switch, attention_layers
from tamis.attention.reuse import ReuseEngine
from tamis.engine.batch import bucket, forward_rows, least_rows
from tamis.engine.cached import CachedMember
from tamis.engine.products import products_of


@dataclass
class CachedPass:
    """The job of one step. `caches` and `jobs`: of the first rows, in order; the other rows are nobody's.

    failed: rows that found no room, for example, and why; the pass goes on for the others.
    """

    modules: Sequence[Any]
    caches: Sequence[Any]
    jobs: list[DecodeJob | None]
    failed: dict[int, Exception] = field(default_factory=dict)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        """See `Job.attend`: q [Hq, R, D], k and v [Hkv, R, D]."""
        out = torch.zeros_like(q)
        for i in range(len(self.caches)):
            if i in self.failed:
                continue
            try:
                mine = [t[None, :, i : i + 1].contiguous() for t in (q, k, v)]
                out[:, i] = self._row(layer, i, mine, scale)
            except Exception as e:
                self.failed[i] = e
        return out, None

    def _row(self, layer: int, i: int, qkv: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
        """[Hq, D], as `attention_forward` makes it of a lone token."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        q, job = qkv[0], self.jobs[i]
        keys, values = self.caches[i].update(qkv[1], qkv[2], layer)
        found = None if job is None else job.attend(layer, q, scale)
        if found is None:
            made, _ = sdpa_attention_forward(self.modules[layer], q, keys, values, None, scaling=scale)
            found = made.transpose(1, 2)
        if job is not None:
            job.observe(layer, q)
        row: torch.Tensor = found[0, :, 0]
        return row


class CachedBatch:
    """Decodes members together whose caches are their own. exact: see `Batch`."""

    def __init__(self, engine: ReuseEngine, *, exact: bool = True) -> None:
        self.engine = engine
        self._products = products_of(engine.model)
        self._modules = attention_layers(engine.model)
        self._least = least_rows(engine, exact=exact)

    def step(self, members: Sequence[CachedMember]) -> tuple[torch.Tensor, dict[int, Exception]]:
        """Logits [n, vocabulary] behind the newest token of each, and which of them failed with what."""
        engine, n = self.engine, len(members)
        device, rows = engine.store.pool.keys.device, bucket(n, self._least)
        job = CachedPass(self._modules, [m.cache for m in members], [None] * n)
        nobody = [0] * (rows - n)
        made = torch.tensor([[m.new[-1] for m in members] + nobody, [m.position for m in members] + nobody])
        inputs = made.to(device)
        with engine.store.lock, torch.inference_mode(), ExitStack() as passing:
            for i, member in enumerate(members):
                self._begin(job, i, member, passing)
            with self._products.running():
                logits = forward_rows(engine, job, inputs[:1], inputs[1:])
        return logits[:n], job.failed

    def _begin(self, job: CachedPass, i: int, member: CachedMember, passing: ExitStack) -> None:
        """What a row's cache needs around a pass. The model's own switch has one job, which asks the rows' jobs."""
        assert member.decoding is not None, "its prompt was run"
        own = Switch()
        try:
            passing.enter_context(member.decoding.running(own, step=True))
        except Exception as e:
            job.failed[i] = e
        job.jobs[i] = own.decode
