"""`tamis bench`: how fast it is, against what, on which machine."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tamis.cli.options import Device, Dtype, Json, Model, load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tamis.bench.results import Row

app = typer.Typer(help="Measure speed. Rows go to results/ where that folder exists.", no_args_is_help=True)

Results = Annotated[
    str | None, typer.Option("--results", help="Folder to append rows to. Default: results/ if it exists.")
]


@app.callback()
def _group() -> None:
    """Keeps `tamis bench` a group while it has few commands."""


@app.command()
def prefill(
    model: Model = "smollm2",
    tokens: Annotated[int, typer.Option(min=256, help="Prompt length, cut to the model's context.")] = 8192,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds after a warm-up; medians are reported.")] = 3,
    selector: Annotated[str, typer.Option(help="sampled, stored, oracle, all or none.")] = "sampled",
    rows: Annotated[int, typer.Option(help="Rows that sampled scores per tile.")] = 8,
    mass: Annotated[float, typer.Option(help="Share of the attention that sampled keeps.")] = 0.9,
    docs: Annotated[list[str] | None, typer.Option("--docs", help="Text for the prompt. Default: built-in.")] = None,
    results: Results = None,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Time to first token of one long prompt, dense against sift, in turn in one run."""
    from tamis.bench.prefill import bench_prefill

    def note(what: str) -> None:
        typer.echo(f"{what} …", err=True)

    with load(model, device, dtype, selector=selector, rows=rows, mass=mass) as llm:
        result = bench_prefill(llm, tokens, repeats=repeats, docs=docs or [], note=note)
        kept = record(result.rows(llm.dtype), "prefill", results)
    if json:
        print(jsonlib.dumps(result.to_dict() | {"results": kept}))
        return
    for name, value in result.to_dict().items():
        print(f"{name:18} {value:.4g}" if isinstance(value, float) else f"{name:18} {value}")


def record(rows: Sequence[Row], bench: str, folder: str | None) -> str | None:
    """Append rows to the results folder, if there is one or one is named. Returns the file."""
    from tamis.bench.machine import describe_machine
    from tamis.bench.results import append_rows

    if folder is None and not Path("results").is_dir():
        return None
    command = " ".join(["tamis", *sys.argv[1:]])
    path = append_rows(rows, bench, machine=describe_machine(), command=command, folder=folder or "results")
    return str(path)
