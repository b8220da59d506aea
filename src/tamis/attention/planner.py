"""From a prompt and a policy to a prefill: makes missing records, builds the scene, or says why it stays dense."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tamis.attention.block_choices import FusedChoice
from tamis.attention.block_prefill import BlockPrefill
from tamis.attention.fused import FusedForecast
from tamis.attention.hook import Switch, chunk_pass
from tamis.attention.offline import Indexer, Progress
from tamis.attention.policy import BLOCKS, PAGED, Policy
from tamis.attention.prefill import SparsePrefill
from tamis.attention.report import PrefillReport
from tamis.core.errors import InvalidInput
from tamis.kernels.blocks import BlockRule
from tamis.kernels.lists import Tiling
from tamis.prompt.segments import Prompt
from tamis.select.scene import DocumentBits, Scene


@dataclass
class Plan:
    """What is going to be done for one prompt. `job` is None where the prefill is dense; `reason` then says why.

    chunks: the half-open token ranges of the forward passes, in order. around: what else must be on meanwhile.
    """

    prompt: Prompt
    policy: Policy
    job: SparsePrefill | BlockPrefill | None
    reason: str = ""
    indexed: int = 0
    index_s: float = 0.0
    fallbacks: list[str] = field(default_factory=list)
    chunks: tuple[tuple[int, int], ...] = ()
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __post_init__(self) -> None:
        self.chunks = self.chunks or ((0, len(self.prompt.tokens)),)

    @contextmanager
    def running(self, switch: Switch) -> Iterator[None]:
        """Make the forward passes over the prompt inside this block: one for each of `chunks`."""
        if self.job is None:
            yield
            return
        before = dict(switch.refused)
        borders: Iterable[int] = ()
        if len(self.chunks) > 1:
            own = None if isinstance(self.job, BlockPrefill) else self.job.scene.tiling.starts
            borders = {n for chunk in self.chunks for n in chunk} if own is None else own
        with self.around(), switch.running(self.job, len(self.prompt.tokens), borders):
            yield
        for reason, n in switch.refused.items():
            if n > before.get(reason, 0):
                what = "layers" if len(self.chunks) == 1 else "layers of chunks"
                self.fallbacks.append(f"{n - before.get(reason, 0)} {what} dense: {reason}")

    def passing(self, begin: int, end: int) -> AbstractContextManager[None]:
        """Around the pass over tokens [begin, end), one of `chunks`, inside `running`."""
        return nullcontext() if self.job is None else chunk_pass(begin, end)

    def report(self) -> PrefillReport:
        """What was done; call it after the pass."""
        job, documents = self.job, self.prompt.documents
        made = PrefillReport(
            asked=self.policy.prefill,
            used="dense",
            selector="",
            kernel="sdpa",
            prompt_tokens=len(self.prompt.tokens),
            documents=len(documents),
            document_tokens=sum(len(d.tokens) for d in documents),
            reason=self.reason,
            indexed=self.indexed,
            fallbacks=tuple(self.fallbacks),
            chunks=len(self.chunks),
        )
        if isinstance(job, BlockPrefill) and (density := job.density):
            shares = tuple(share for _, share in sorted(density.items()))
            mean = sum(shares) / len(shares)
            made = replace(made, used=self.policy.prefill, selector="pooled keys", kernel=job.kernel)
            return replace(made, density=mean, layers=shares)
        if job is None or isinstance(job, BlockPrefill) or not job.layers:
            why = self.reason or ("" if self.policy.prefill == "dense" else "; ".join(self.fallbacks))
            return replace(made, reason=why)
        return replace(
            made,
            used="sift",
            selector=self.policy.selector,
            kernel=job.used_kernel,
            density=job.density,
            recall=job.recall,
            layers=job.densities,
            select_s=sum(t.select_s for t in job.layers.values()),
            attend_s=sum(t.attend_s for t in job.layers.values()),
        )


def plan_prefill(
    model: Any,
    prompt: Prompt,
    policy: Policy,
    indexer: Callable[[], Indexer],
    *,
    measure_recall: bool = False,
    on_index: Progress | None = None,
    forecast: FusedForecast | None = None,
) -> Plan:
    """Decide how `prompt` is prefilled under `policy`.

    `indexer` gives the record store's indexer and is only called where the selector works from stored bits; documents
    without a record are observed on the spot. With `measure_recall` the pass also measures the attention mass kept.
    `forecast` lies in the model, where there is one: what prefill="forecast" chooses by.
    A dense prefill is cut into chunks as well, where the policy asks for them.
    """
    if policy.prefill in PAGED:
        raise InvalidInput(
            f"prefill={policy.prefill!r} needs a cache of documents, which tamis.LLM has; a transformers model with "
            "Tamis's attention takes 'dense', 'sift', 'blocks' and, with a forecast, 'forecast'."
        )
    device = next(model.parameters()).device
    trained = forecast.forecast.info.rule if forecast is not None and policy.prefill == "forecast" else None
    reason = dense_reason(prompt, policy, device, trained)
    chunks = chunks_of(prompt, policy)
    if policy.prefill == "dense" or reason:
        return Plan(prompt, policy, None, reason, chunks=chunks)
    if policy.prefill in BLOCKS:
        return _by_blocks(prompt, policy, chunks, forecast)
    plan = Plan(prompt, policy, None, chunks=chunks)
    selector = policy.make_selector()
    documents = [d.tokens for d in prompt.documents]
    bits: list[DocumentBits | None] = [None] * len(documents)
    if selector.needs_records:
        begin = time.perf_counter()
        made = indexer()
        if made.spec.tile != policy.tile:
            raise InvalidInput(f"records are in tiles of {made.spec.tile} tokens, the policy asks for {policy.tile}.")
        plan.indexed = made.index(documents, on_index)
        records = made.records(documents)
        bits = [r.bits() if r is not None else None for r in records]
        plan.index_s = time.perf_counter() - begin
    plan.job = SparsePrefill(Scene.of(prompt, bits, policy.tile, device), selector, policy.kernel, measure_recall)
    return plan


def _by_blocks(
    prompt: Prompt, policy: Policy, chunks: tuple[tuple[int, int], ...], forecast: FusedForecast | None
) -> Plan:
    if policy.prefill == "blocks":
        return Plan(prompt, policy, BlockPrefill.of(policy.prefill_rule()), chunks=chunks)
    assert forecast is not None, "`caching.check_form` refuses it"
    rule = policy.prefill_rule(forecast.forecast.info.rule)
    job = BlockPrefill.of(rule, FusedChoice(rule, forecast))
    return Plan(prompt, policy, job, chunks=chunks, around=forecast.running)


def chunks_of(prompt: Prompt, policy: Policy) -> tuple[tuple[int, int], ...]:
    """The half-open token ranges of the passes over a prompt. Blocks are counted from its start, whatever it holds."""
    lengths = [len(prompt.tokens)] if policy.prefill in BLOCKS else prompt.lengths
    return chunk_ranges(Tiling.of_segments(lengths, policy.tile), policy.chunk_tokens)


def chunk_ranges(tiling: Tiling, chunk_tokens: int | None) -> tuple[tuple[int, int], ...]:
    """Half-open token ranges that cover `tiling`: whole tiles, as many as `chunk_tokens` hold but one at least.

    None: one range. An empty tiling has none.
    """
    starts = tiling.starts
    if chunk_tokens is None:
        return ((0, tiling.n_tokens),) if len(tiling) else ()
    ranges, at = [], 0
    while at < len(tiling):
        end = max(at + 1, bisect_right(starts, starts[at] + chunk_tokens) - 1)
        ranges.append((starts[at], starts[end]))
        at = end
    return tuple(ranges)


def dense_reason(prompt: Prompt, policy: Policy, device: torch.device, trained: BlockRule | None = None) -> str:
    """Why a sparse prefill cannot win on this prompt; "" if it can. trained: see `Policy.prefill_rule`."""
    if policy.prefill == "dense":
        return ""
    n = len(prompt.tokens)
    if policy.prefill in BLOCKS:
        rule = policy.prefill_rule(trained)
        least = rule.top * rule.block if policy.min_tokens is None else policy.min_tokens
        return f"the prompt has {n} tokens, and blocks are chosen above {least}" if n <= least else ""
    least = policy.crossover_tokens(device.type)
    if n < least:
        return f"the prompt has {n} tokens and a sparse prefill pays from {least} on this {device.type}"
    if not prompt.documents:
        return "the prompt holds no document, and only documents' rows may skip tiles"
    return ""
