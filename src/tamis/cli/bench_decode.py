"""`tamis bench decode`: a decode step over the self-indexed cache against full attention."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer

from tamis.cli.bench import Kept, Results, app, lengths_of
from tamis.cli.options import Device, Json


@app.command("decode")
def decode(
    shape: Annotated[
        str, typer.Option(help="llama-3.1-8b, qwen3-8b, qwen2.5-14b, tiny, or one with experts (attention alone).")
    ] = "llama-3.1-8b",
    tokens: Annotated[str, typer.Option(help="Tokens of each sequence, comma-separated.")] = "8192,65536,131072",
    batch: Annotated[str, typer.Option(help="Sequences of a step, comma-separated.")] = "1,8",
    budget: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the tokens that a step reads.")] = 0.075,
    only: Annotated[
        str, typer.Option("--only", help="Some of attention,token,prefill; attention is always timed.")
    ] = "attention,token,prefill",
    kernel: Annotated[
        str, typer.Option(help="auto: the fastest that is right. Or triton, nvrtc, cpu, reference.")
    ] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds after a warm-up; medians are reported.")] = 20,
    tune: Annotated[bool, typer.Option("--tune", help="First find the best cuts of the kernels.")] = False,
    check_only: Annotated[bool, typer.Option("--check-only", help="Compare with the reference, time nothing.")] = False,
    results: Results = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Attention alone and a whole token, checked against the reference before anything is timed."""
    from tamis.bench.decode import DecodePlanned, bench_decode

    kept = Kept("decode", results)
    measures = [word for part in only.split(",") if (word := part.strip())]
    sequences = lengths_of(batch, "batch", "numbers of sequences such as 1,8")
    plan = DecodePlanned(
        shape, lengths_of(tokens), sequences, budget, measures, rounds, tune, check_only, device, kernel
    )  # fmt: skip
    made = bench_decode(plan, kept.note, kept.keep)
    if json:
        print(jsonlib.dumps(made | {"results": kept.file}))
        return
    for case in made["cases"]:
        _print(case)
    for what, why in made["left_out"].items():
        print(f"left out: {what}: {why}")


def _print(case: dict[str, Any]) -> None:
    print(case["case"])
    for provider, metrics in case["found"].items():
        told = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(f"  {provider:34} {told}")
    if case["errors"]:
        print("  errors: " + ", ".join(f"{name} {value:.2g}" for name, value in case["errors"].items()))
    for note in case["notes"]:
        print(f"  {note}")
