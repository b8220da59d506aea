"""The same workloads through a model: one request at a time, its documents in the engine's own cache, times measured.

Knows how each provider is asked for in a policy; what hits is what the engine's reports say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from tamis.bench.results import Row
from tamis.bench.reuse import Replay, budget_bytes, ratios_of, rows_of, summary
from tamis.bench.reuse_simulator import Outcome, Progress
from tamis.bench.reuse_workload import Piece, Request, Workload
from tamis.cache.spec import KVSpec, pages_of
from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown
from tamis.model.family import geometry
from tamis.prompt.segments import Prompt

if TYPE_CHECKING:
    from tamis.engine.llm import LLM
    from tamis.model.source import LoadedModel

COPIES = "block"
# Random text has no answer to be ruined, so block attention is accepted.
CHOICES: dict[str, dict[str, Any]] = {
    "recompute": {"prefill": "dense"},
    "prefix": {"prefill": "prefix"},
    COPIES: {"prefill": "reuse", "reuse_copies": True, "accept_block_attention": True},
    "lazy": {"prefill": "reuse", "accept_block_attention": True},
    "block-extra": {"prefill": "reuse", "reuse_copies": True, "accept_block_attention": True},
}
COMPUTED = "computed"
WARM_REQUESTS = 8
MEASURED = "Everything ran: cache, kernels and model; times are wall time of one client, one request after the other."


@dataclass(frozen=True)
class RealPlan:
    """What is replayed through a model.

    open_llm    a fresh engine whose documents' cache may take so many bytes; None: its own default
    providers   of CHOICES; the copies of "block" are taken off its budget, those of "block-extra" may come on top of it
    requests    the first so many of the workload, each piece of a prompt cut to `cut_tokens` (None: whole)
    """

    workload: Workload
    open_llm: Callable[[int | None], LLM]
    budgets: Sequence[str]
    providers: Sequence[str] = tuple(CHOICES)
    requests: int = 20
    cut_tokens: int | None = None
    seed: int = 0


def bench_real(
    plan: RealPlan,
    *,
    note: Callable[[str], None] = lambda _: None,
    keep: Callable[[list[Row]], object] = lambda _: None,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """`bench_reuse` with a model in place of the cost model: the same metrics where they have a meaning.

    Providers end in `-real`, cases name the model and how many requests ran. Raises InvalidInput.
    """
    for name in plan.providers:
        if name not in CHOICES:
            raise InvalidInput(unknown("provider of a real replay", name, list(CHOICES)))
    made: list[dict[str, Any]] = []
    model = ""
    for text in plan.budgets:
        size, replays = budget_bytes(text), []
        for provider in plan.providers:
            note(f"{plan.workload.name} at {text}: {provider}")
            what: dict[str, Any] = {"requests": plan.requests, "cut_tokens": plan.cut_tokens, "seed": plan.seed}
            with plan.open_llm(size) as llm:
                room = size
                if provider == COPIES and size is not None:
                    room = size - copies_bytes(llm, plan, size)
                    note(f"{provider}: {size - room} bytes of the budget are for the copies of the largest prompt")
                # kernels are built for the first requests, which no later one should wait for
                if llm.runner.model.device.type == "cuda":
                    replay_real(llm, plan.workload, provider, **what | {"requests": min(plan.requests, WARM_REQUESTS)})
            with plan.open_llm(room) as llm:
                model = llm.name
                outcome = replay_real(llm, plan.workload, provider, on_progress=progress, **what)
            ran = f"first-{len(outcome.ttft_s)}" + (f"-cut-{plan.cut_tokens}" if plan.cut_tokens else "")
            replays.append(Replay(f"{plan.workload.name}-{ran}/{model}/{text.lower()}", provider, (outcome,)))
        ratios = ratios_of(replays)
        keep([row for r in replays for row in rows_of(r, ratios[r.provider], "real")])
        made += [summary(r, ratios[r.provider]) for r in replays]
    return {
        "workload": plan.workload.name,
        "about": plan.workload.about,
        "requests": plan.requests,
        "policy": "lru",
        "seeds": [plan.seed],
        "times": MEASURED,
        "cost_model": {"about": f"none: measured on {model}"},
        "measured": made,
    }


def copies_bytes(llm: LLM, plan: RealPlan, size: int) -> int:
    """Bytes of the pages into which the largest prompt of the replay is copied; one page of `size` is left.

    The engine takes pages for copies from outside its cache where documents that are in use fill it, so that a replay
    whose copies were not taken off the budget would hold more than it says.
    """
    model = llm.runner.model
    spec = KVSpec.of(geometry(model.config), next(model.parameters()).dtype)
    requests = (_cut(r, plan.cut_tokens) for r in islice(plan.workload.requests(plan.seed), plan.requests))
    pages = max(sum(pages_of(p.n_tokens) for p in r.pieces) for r in requests)
    return min(pages * spec.page_bytes(), size - spec.page_bytes())


def shape_model(name: str) -> LoadedModel:
    """A model of that shape (`shapes.SHAPES`) with random weights, on the GPU in bfloat16 where there is one.

    Its tokenizer is a stand-in of one token: prompts here are token ids, no text goes through it.
    """
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from tamis.bench.shapes import random_model
    from tamis.model.source import LoadedModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    unknown_token = "<unk>"
    words = Tokenizer(models.WordLevel({unknown_token: 0}, unk_token=unknown_token))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token=unknown_token)
    return LoadedModel(random_model(name, device=device, dtype=dtype), tokenizer, name, "")


def replay_real(
    llm: LLM,
    workload: Workload,
    provider: str,
    *,
    seed: int = 0,
    requests: int = 20,
    cut_tokens: int | None = None,
    on_progress: Progress | None = None,
) -> Outcome:
    """Prefill the first `requests` one after the other with random tokens, each piece cut to cut_tokens; wall time.

    One client, nothing is decoded: TTFT is the prefill, and seconds their sum. The engine's cache must be its own
    (a fresh `LLM` for each provider), or what an earlier replay stored is hit. Raises InvalidInput for an unknown
    provider, or if the engine did something else than it was asked for.
    """
    if provider not in CHOICES:
        raise InvalidInput(unknown("provider of a real replay", provider, list(CHOICES)))
    _warm_up(llm, provider)
    out = Outcome(most_running=1)
    for number, whole in enumerate(islice(workload.requests(seed), requests), 1):
        request = _cut(whole, cut_tokens)
        prompt = _prompt(request, llm.runner.model.config.vocab_size)
        began = time.perf_counter()
        made = llm.prefill(prompt, room_tokens=0, **CHOICES[provider])
        took = time.perf_counter() - began
        made.close()
        report = made.report
        if report.used != report.asked:
            raise InvalidInput(f"{provider} ran as {report.used} instead of {report.asked}: {report.reason}")
        out.ttft_s.append(took)
        out.seconds += took
        _count(out, request, report)
        if on_progress is not None:
            on_progress(number, requests)
    return out


def _warm_up(llm: LLM, provider: str) -> None:
    """A short prefill that no request repeats: compiles kernels, tests the rotation, makes the pool."""
    ids = np.random.default_rng(2**31).integers(0, llm.runner.model.config.vocab_size, 160).tolist()
    llm.prefill(
        Prompt.of([("document", ids[:128]), ("question", ids[128:])]), room_tokens=0, **CHOICES[provider]
    ).close()


def _count(out: Outcome, request: Request, report: Any) -> None:
    prompt = sum(p.n_tokens for p in request.pieces)
    hit = sum(n for tier, n in report.reuse.by_tier.items() if tier != COMPUTED) if report.reuse else 0
    out.prompt_tokens += prompt
    out.output_tokens += 1
    out.computed_tokens += prompt - hit
    out.copied_tokens += report.reuse.copied if report.reuse else 0
    out.prompt_hit_tokens += hit
    documents = sum(p.n_tokens for p in request.documents)
    out.document_tokens += documents
    # an exact prefix covers the system prompt before it covers any document
    before = sum(p.n_tokens for p in request.prefix) if report.asked == "prefix" else 0
    out.hit_tokens += min(documents, max(0, hit - before))


def _cut(request: Request, n_tokens: int | None) -> Request:
    if n_tokens is None:
        return request
    short: Callable[[tuple[Piece, ...]], tuple[Piece, ...]] = lambda pieces: tuple(  # noqa: E731
        p._replace(n_tokens=min(p.n_tokens, n_tokens)) for p in pieces
    )
    return request._replace(prefix=short(request.prefix), documents=short(request.documents), own=short(request.own))


def _prompt(request: Request, vocabulary: int) -> Prompt:
    def tokens(*pieces: Piece) -> list[int]:
        drawn = [np.random.default_rng(p.first).integers(0, vocabulary, p.n_tokens) for p in pieces]
        return [int(i) for part in drawn for i in part]

    parts = [("prefix", tokens(*request.prefix))] if request.prefix else []
    parts += [("document", tokens(p)) for p in request.documents]
    parts += [("question", tokens(*request.own))]
    return Prompt.of(parts)
