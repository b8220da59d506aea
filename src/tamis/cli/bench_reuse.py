"""`tamis bench reuse`: document reuse under a byte budget, replayed through the real cache."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tamis.cli.bench import Kept, Results, app
from tamis.cli.options import Json, progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from tamis.bench.reuse_workload import Workload
    from tamis.engine.llm import LLM

Host = Annotated[str | None, typer.Option(help="Bytes of a second tier in host memory, such as 64GB.")]
Exponent = Annotated[float, typer.Option(min=0, help="Zipf: how skewed.")]
Repeats = Annotated[int, typer.Option(min=1, help="Zipf: so many seeds; numbers are medians over them.")]
Costs = Annotated[str, typer.Option(help="Measured prefills that the cost model is fitted to.")]
Real = Annotated[
    str | None, typer.Option(help="Run this model, or random weights of a shape such as llama-3.1-8b: all is measured.")
]
Cut = Annotated[int | None, typer.Option(min=1, help="With --real: cut each piece of a prompt to so many tokens.")]
MODELLED = "recompute,prefix,block,block-tuned,cacheblend,lazy"
RAN = "recompute,prefix,block,lazy"


@app.command("reuse")
def reuse(
    trace: Annotated[
        str | None, typer.Option(help="Folder of a RAGPulse or Mooncake trace. Default: synthetic Zipf requests.")
    ] = None,
    budgets: Annotated[
        str, typer.Option(help="Bytes of keys and values, comma-separated; 1GB is 2**30.")
    ] = "1GB,10GB,50GB,unlimited",
    providers: Annotated[
        str | None, typer.Option(help=f"Of {MODELLED}. Default: all; with --real {RAN}, or block-extra.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Eviction: lru, gdsf or ttl.")] = "lru",
    ttl_s: Annotated[float | None, typer.Option("--ttl", help="Seconds, for --policy ttl.")] = None,
    host: Host = None,
    speed: Annotated[float, typer.Option(help="Replay a trace so many times faster than it was recorded.")] = 1.0,
    recorded_order: Annotated[
        bool, typer.Option("--recorded-order", help="RAGPulse: all of a system prompt before the passages.")
    ] = False,
    requests: Annotated[
        int | None, typer.Option(min=1, help="How many. Default: a whole trace, 200 synthetic ones.")
    ] = None,
    exponent: Exponent = 2.1,
    documents: Annotated[int, typer.Option(min=1, help="Zipf: documents in the pool.")] = 100,
    document_tokens: Annotated[int, typer.Option(min=1, help="Zipf: tokens of each.")] = 2048,
    per_prompt: Annotated[int, typer.Option(min=1, help="Zipf: documents in a prompt.")] = 5,
    question_tokens: Annotated[int, typer.Option(min=1, help="Zipf: tokens of a question.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=1, help="Zipf: generated tokens.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Zipf: clients.")] = 16,
    repeat: Annotated[bool, typer.Option("--repeat", help="Zipf: a prompt may hold a document twice.")] = False,
    seed: Annotated[int, typer.Option(help="Zipf: first seed.")] = 0,
    repeats: Repeats = 5,
    costs: Costs = "results/ttft.csv",
    real: Real = None,
    cut_tokens: Cut = None,
    results: Results = None,
    json: Json = False,
) -> None:
    """Hit rates, TTFT and throughput of reuse and its baselines. The cache is real; times are modelled, or with --real
    measured."""
    from tamis.bench.reuse import Plan, bench_reuse, table
    from tamis.bench.reuse_real import RealPlan, bench_real
    from tamis.bench.reuse_workload import Zipf
    from tamis.bench.reuse_workload import trace as read_trace

    workload: Workload
    if trace is not None:
        workload = read_trace(trace, speed=speed, limit=requests, recorded_order=recorded_order)
    else:
        shape = (exponent, documents, document_tokens, per_prompt, question_tokens, output_tokens, requests or 200)
        workload = Zipf(*shape, concurrency, repeat).workload()
    names, kept = _words(providers or (RAN if real else MODELLED)), Kept("reuse", results)
    hooks: dict[str, Any] = {"note": kept.note, "keep": kept.keep}
    with progress("requests") as step:
        if real is None:
            plan = Plan(workload, _words(budgets), names, policy, ttl_s, host, seed, repeats, costs)
            made = bench_reuse(plan, progress=step, **hooks)
        else:
            opened = _opener(real)
            ran = RealPlan(workload, opened, _words(budgets), names, requests or 20, cut_tokens, seed)
            made = bench_real(ran, progress=step, **hooks)
    print(jsonlib.dumps(made | {"results": kept.file}) if json else table(made))


def _opener(name: str) -> Callable[[int | None], LLM]:
    """Makes engines around one model: `name` is what `--model` takes, or a shape whose weights are then random."""
    from tamis.bench.reuse_real import shape_model
    from tamis.bench.shapes import SHAPES
    from tamis.engine.llm import LLM
    from tamis.model.source import load_model

    loaded = shape_model(name) if name in SHAPES else load_model(name)
    return lambda size: LLM(loaded, cache_bytes=size)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
