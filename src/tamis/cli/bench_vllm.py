"""`tamis bench vllm`: stock vLLM beside vLLM with Tamis."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from tamis.cli.bench import Kept, Results, app, lengths_of
from tamis.cli.options import Json

Trace = Annotated[
    str | None, typer.Option(help="Folder of a RAGPulse or Mooncake trace for the load. Default: Zipf's law.")
]
Densities = Annotated[
    str | None, typer.Option(help="What `tamis bench record-densities` wrote. Default: the selector's own choice.")
]
Parts = Annotated[str, typer.Option(help="Of throughput, ttft, load, tp, pp.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="A tiny model, short prompts: minutes on a CPU, no claim of speed.")]


@app.command("vllm")
def vllm(
    shape: Annotated[
        str, typer.Option(help="A dense shape of `tamis bench ttft`, with random weights.")
    ] = "llama-3.1-8b",
    tokens: Annotated[str, typer.Option(help="Prompt lengths, comma-separated.")] = "16384,32768,65536,131072",
    parts: Parts = "throughput,ttft,load,tp",
    repeats: Annotated[int, typer.Option(min=1, help="Timed prompts after a warm-up.")] = 3,
    selector: Annotated[str, typer.Option(help="Of mode sift.")] = "threshold:rows=4,theta=0.01,local=sampled",
    densities: Densities = None,
    trace: Trace = None,
    requests: Annotated[int, typer.Option(min=1, help="Of the load.")] = 64,
    warm: Annotated[
        str, typer.Option(help="Requests of the load before those, all at once, unmeasured; several: one load each.")
    ] = "0",
    rate: Annotated[float, typer.Option(help="Poisson arrivals a second.")] = 8.0,
    cut_tokens: Annotated[int | None, typer.Option(min=1, help="Cut each piece of a loaded prompt.")] = None,
    load_tokens: Annotated[str, typer.Option(help="Of each answer to the workload; several numbers: in turn.")] = "1",
    gpus: Annotated[int, typer.Option(min=2, help="GPUs that tp and pp split a model over; on a CPU processes.")] = 2,
    block_size: Annotated[int, typer.Option(min=1, help="Of the engine with Tamis.")] = 64,
    deadline: Annotated[float, typer.Option(help="Seconds, of everything.")] = 1800.0,
    tiny: Tiny = False,
    results: Results = None,
    json: Json = False,
) -> None:
    """First tokens, documents used again under load, long answers, several GPUs: vLLM alone and with Tamis.

    All in one sitting. Needs an environment with vLLM; rows go to results/vllm.csv as they come.
    """
    from tamis.bench.reuse_workload import Zipf
    from tamis.bench.reuse_workload import trace as read_trace
    from tamis.bench.vllm import Plan, bench_vllm
    from tamis.bench.vllm_prompts import Answers, Sizes
    from tamis.bench.vllm_report import table
    from tamis.core.errors import InvalidInput

    words = [word.strip() for word in warm.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise InvalidInput(f"warm is {warm!r}; give numbers of requests such as 0,64.")
    warm_ups = [int(word) for word in words]
    if tiny:
        shape, tokens, repeats, requests, block_size = "tiny", "256,512", min(repeats, 2), min(requests, 6), 32
        warm_ups = [min(n, 6) for n in warm_ups]
    if trace is not None:
        workload = read_trace(trace, limit=max(warm_ups) + requests)
    else:
        count = max(Zipf.requests, max(warm_ups) + requests)
        short = Zipf(documents=8, document_tokens=64, per_prompt=3, question_tokens=20, requests=count)
        workload = (short if tiny else Zipf(documents=50, document_tokens=512, requests=count)).workload()
    plan = Plan(
        shape, lengths_of(tokens), workload, [p.strip() for p in parts.split(",") if p.strip()], repeats=repeats,
        selector=selector, densities=densities, requests=requests, rate=rate, cut_tokens=cut_tokens, warm=warm_ups,
        load_tokens=lengths_of(load_tokens, "load-tokens", "answers such as 1,64"), gpus=gpus, block_size=block_size,
        deadline_s=deadline, sizes=Sizes(16, 64, 20) if tiny else Sizes(),
        answers=Answers(4, 64, 16) if tiny else Answers(),
    )  # fmt: skip
    kept = Kept("vllm", results)
    made = bench_vllm(plan, kept.note, kept.keep)
    print(jsonlib.dumps(made | {"results": kept.file}) if json else table(made))
