"""Kernels that the first requests of a kind would wait for, seconds each, are built before the server is ready.

Small made-up requests go through the attention of one layer: nothing is written to its cache, and what comes out is
thrown away. Builds stay on the disk, so that the next start takes a moment.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from tamis.core.log import logger
from tamis.integrations.vllm import compat
from tamis.integrations.vllm.config import policy_of
from tamis.integrations.vllm.request import Asked, Span
from tamis.integrations.vllm.reuse import plan_rows
from tamis.integrations.vllm.rows import Worker
from tamis.integrations.vllm.sift import SiftJob
from tamis.integrations.vllm.step import Row
from tamis.prompt.segments import Kind

log = logger("vllm")
DOCUMENT = 512  # tokens: some tiles


def build_kernels(worker: Worker, impl: Any, cache: torch.Tensor) -> float:
    """Run what one layer (its implementation and cache) may be asked for; seconds that it took, 0 on a CPU."""
    if cache.device.type != "cuda":
        return 0.0
    begin = time.monotonic()
    if worker.rotary is not None:
        _reuse(worker, impl, cache)
    if "sift" in worker.settings.served:
        _sift(worker, impl, cache)
    torch.cuda.synchronize(cache.device)
    taken = time.monotonic() - begin
    log.info("built the kernels of %s in %.0f s", ", ".join(worker.settings.served), taken)
    return taken


def rows_of_kinds(block: int, blocks: int) -> Iterator[Row]:
    """Rows that differ in what their kernels are built for: with and without documents that are turned, with and
    without slots that are no keys; prompts, and tokens that are generated. As far as so many blocks hold them."""
    texts = ((4 * block, 8 * block), (4 * block, 8 * block - 3), (4 * block,), (4 * block - 3,))
    for ends in texts:
        asked = _asked("reuse", *ends, ends[-1] + 2 * block)
        n, pages = asked.n_tokens, tuple(range(-(-asked.n_tokens // block)))
        if len(pages) > blocks:
            continue
        for computed, end in ((0, ends[-1]), (0, n), (n - 1, n)):
            yield Row("warm-up", asked, computed, end - computed, pages[: -(-end // block)])


def _asked(mode: str, *ends: int) -> Asked:
    """A prefix, documents and a question that end there."""
    kinds = (Kind.PREFIX, *[Kind.DOCUMENT] * (len(ends) - 2), Kind.QUESTION)
    spans = (Span(start, end, str(kind)) for (start, end), kind in zip(pairwise((0, *ends)), kinds, strict=True))
    return Asked(mode, tuple(spans))


def _reuse(worker: Worker, impl: Any, cache: torch.Tensor) -> None:
    assert worker.rotary is not None, "asked before"
    keys, values = compat.pages(cache, impl.head_size)
    for row in rows_of_kinds(worker.block, cache.shape[0]):
        plan = plan_rows(
            [(0, row)], worker.rotary.angles, page=worker.block, kv_heads=worker.kv_heads, device=cache.device
        )
        q = torch.zeros(row.scheduled, impl.num_heads, impl.head_size, dtype=cache.dtype, device=cache.device)
        plan.attend(q, keys, values, impl.scale, torch.empty_like(q))


def _sift(worker: Worker, impl: Any, cache: torch.Tensor) -> None:
    """A prompt of four documents in one chunk and in two: its tiles are chosen as the server's policy says."""
    asked = _asked("sift", 64, *(64 + DOCUMENT * i for i in range(1, 5)), 164 + 4 * DOCUMENT)
    policy = policy_of(worker.settings.selector, worker.settings)
    n, middle = asked.n_tokens, asked.spans[2].end
    draw = torch.Generator(cache.device).manual_seed(0)
    heads = (impl.num_heads, worker.kv_heads, worker.kv_heads)
    q, k, v = (torch.randn(h, n, impl.head_size, generator=draw, device=cache.device).to(cache.dtype) for h in heads)
    for chunks in ([(0, n)], [(0, middle), (middle, n)]):
        job = SiftJob("warm-up", asked, policy, cache.device, first=0)
        for start, end in chunks:
            job.attend(0, q[:, start:end], k[:, :end], v[:, :end], impl.scale, start)
