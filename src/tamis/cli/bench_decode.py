"""`tamis bench decode`: a decode step over the self-indexed cache against full attention."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from tamis.cli.bench import Kept, Results, app, lengths_of, tell
from tamis.cli.options import Device, Json


@app.command("decode")
def decode(
    shape: Annotated[
        str, typer.Option(help="llama-3.1-8b, qwen3-8b, qwen2.5-14b, tiny, or one with experts (attention alone).")
    ] = "llama-3.1-8b",
    tokens: Annotated[
        str | None,
        typer.Option(help="Tokens of each sequence. Default: 8192,65536,131072; 8192 on a CPU."),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Sequences of a step, comma-separated. Default: 1,8; 1 on a CPU.")
    ] = None,
    budget: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the tokens that a step reads.")] = 0.075,
    only: Annotated[
        str | None, typer.Option("--only", help="Some of attention,token,prefill. Default: all; no prefill on a CPU.")
    ] = None,
    kernel: Annotated[
        str, typer.Option(help="auto: the fastest that is right. Or triton, nvrtc, cpu, reference.")
    ] = "auto",
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Timed rounds after a warm-up. Default: 20; 3 on a CPU."),
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="First find the best cuts of the kernels.")] = False,
    check_only: Annotated[bool, typer.Option("--check-only", help="Compare with the reference, time nothing.")] = False,
    results: Results = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Attention alone and a whole token, checked against the reference before anything is timed."""
    from tamis.bench.decode import DecodePlanned, bench_decode
    from tamis.bench.machine import device_of

    small = device_of(device).type == "cpu"  # where the default of a GPU takes most of an hour
    kept = Kept("decode", results)
    only = only or ("attention,token" if small else "attention,token,prefill")
    measures = [word for part in only.split(",") if (word := part.strip())]
    lengths = lengths_of(tokens or ("8192" if small else "8192,65536,131072"))
    sequences = lengths_of(batch or ("1" if small else "1,8"), "batch", "numbers of sequences such as 1,8")
    plan = DecodePlanned(
        shape, lengths, sequences, budget, measures, rounds or (3 if small else 20), tune, check_only, device, kernel
    )  # fmt: skip
    made = bench_decode(plan, kept.note, kept.keep)
    if json:
        print(jsonlib.dumps(made | {"results": kept.file}))
        return
    tell(made)
