"""`tamis bench index`: what the offline pass costs."""

from __future__ import annotations

import contextlib
import json as jsonlib
from typing import Annotated

import typer

from tamis.cli.bench import Results, app, record
from tamis.cli.options import Device, Dtype, Json, Model, load
from tamis.core.dtypes import ITEM_BYTES
from tamis.core.errors import InvalidInput


@app.command("index")
def index(
    model: Model = "smollm2",
    shape: Annotated[
        str | None, typer.Option(help="Random weights of this shape instead of a model, such as llama-3.1-8b.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Build only so many layers of the shape.")] = None,
    documents: Annotated[int, typer.Option(min=1, help="Number of documents.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each document.")] = 512,
    pack_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of one pass. Default: by device.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds after a warm-up; medians are reported.")] = 3,
    docs: Annotated[list[str] | None, typer.Option("--docs", help="Text to cut up. Default: built-in.")] = None,
    results: Results = None,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Time to observe and store documents, against their dense prefill in the same packs, in turn in one run."""
    import torch

    from tamis.bench.index import bench_index, shape_subject, text_subject
    from tamis.bench.machine import device_of

    if shape is None and layers is not None:
        raise InvalidInput(f"--layers {layers} cuts a --shape; name one, or leave --layers out.")
    if shape is not None and docs:
        raise InvalidInput("--shape is timed on random tokens; leave --docs out, or give a --model instead.")

    def note(what: str) -> None:
        typer.echo(f"{what} …", err=True)

    with contextlib.ExitStack() as stack:
        if shape is None:
            llm = stack.enter_context(load(model, device, dtype))
            subject = text_subject(llm, documents, tokens, docs or [])
        else:
            where = device_of(device)
            name = dtype or ("bfloat16" if where.type == "cuda" else "float32")
            if name not in ITEM_BYTES:
                raise InvalidInput(f"dtype is {name!r}; allowed are float32, bfloat16 and float16.")
            made = shape_subject(shape, documents, tokens, device=str(where), dtype=getattr(torch, name), layers=layers)
            subject = stack.enter_context(made)
        result = bench_index(subject, repeats=repeats, pack_tokens=pack_tokens, note=note)
        kept = record(result.rows(), "index", results)
    if json:
        print(jsonlib.dumps(result.to_dict() | {"results": kept}))
        return
    for key, value in result.to_dict().items():
        print(f"{key:16} {value:.4g}" if isinstance(value, float) else f"{key:16} {value}")
