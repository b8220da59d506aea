"""`tamis bench`: how fast it is, against what, on which machine."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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


@app.command("record-densities")
def record_densities(
    log: Annotated[str, typer.Option("--log", help="JSON-lines log of `tamis eval research`.")],
    out: Annotated[str, typer.Option("--out", help="File to write, such as results/densities/NAME.json.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Name of the model that was run.")],
    data: Annotated[str, typer.Option("--data", help="Name of the question set.")],
    json: Json = False,
) -> None:
    """Keep the densities per layer and head of a real model's runs, for `tamis bench ttft` to replay."""
    from tamis.bench.densities import from_log, save

    found = from_log(log, model, data)
    save(found, out)
    if json:
        print(jsonlib.dumps({"out": out, "settings": [[r.selector, r.tokens, r.prompts, r.kl] for r in found]}))
        return
    for r in found:
        print(f"{r.selector:40} {r.tokens:7} tokens  {r.prompts:3} prompts  KL {r.kl:.4f}")


@app.command()
def ttft(
    shape: Annotated[
        str, typer.Option(help="llama-3.1-8b, qwen3-8b, qwen2.5-14b, qwen3-235b-a22b, minimax-m2.5, tiny or tiny-moe.")
    ] = "llama-3.1-8b",
    tokens: Annotated[str, typer.Option(help="Prompt lengths, comma-separated.")] = "32768,65536,131072",
    dense: Annotated[
        str, typer.Option(help="dense-fa4, dense-cudnn, dense-tamis, comma-separated; 'all' that run here.")
    ] = "all",
    selectors: Annotated[
        str,
        typer.Option(
            help="Recorded variants to replay, 'all' (every tile), 'blocks:together=32' and 'blocks-forecast'; "
            "';'-separated."
        ),
    ] = "sampled:rows=4,mass=0.9,local=sampled;threshold:rows=4,theta=0.01,local=sampled",
    densities: Annotated[
        str, typer.Option(help="What `tamis bench record-densities` wrote.")
    ] = "results/densities/qwen2.5-coder-1.5b.json",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Build a slice of so many layers; times are scaled by layers, too.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs after a warm-up.")] = 3,
    fp8: Annotated[bool, typer.Option("--fp8", help="Linear layers in float8, for dense and sparse alike.")] = False,
    peer: Annotated[
        str | None, typer.Option(help="JSON lines of another engine's times, measured in the same sitting.")
    ] = None,
    results: Results = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Whole-model time to first token with random weights, dense against sparse, in one run."""
    from tamis.bench.ttft import Plan, bench_ttft
    from tamis.bench.ttft_report import table

    def note(what: str) -> None:
        typer.echo(what, err=True)

    plan = Plan(
        shape, lengths_of(tokens), _parts(dense, ","), _parts(selectors, ";"), densities, layers=layers,
        repeats=repeats, fp8=fp8, device=device, peer=peer,
    )  # fmt: skip
    made = bench_ttft(plan, note, lambda rows: record(rows, "ttft", results))
    print(jsonlib.dumps(made.to_dict()) if json else table(made))


def _parts(text: str, separator: str) -> list[str]:
    """What stands between separators, without blanks and what is empty."""
    return [part for word in text.split(separator) if (part := "".join(word.split()))]


def lengths_of(text: str, name: str = "tokens", example: str = "prompt lengths such as 8192,32768") -> list[int]:
    """Whole numbers from 1 on, written as `8192,32768`. Raises InvalidInput, in which the option has this name."""
    from tamis.core.errors import InvalidInput

    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise InvalidInput(f"{name} is {text!r}; give {example}.")
    return [int(word) for word in words]


class Kept:
    """Where the rows of a benchmark go while it runs (`keep`), and what it says meanwhile (`note`)."""

    def __init__(self, bench: str, results: str | None) -> None:
        self._bench, self._results = bench, results
        self.file: str | None = None

    def note(self, what: str) -> None:
        """A line on stderr."""
        typer.echo(what, err=True)

    def keep(self, rows: Sequence[Row]) -> None:
        """Append rows to the results folder, see `record`."""
        self.file = record(rows, self._bench, self._results)


def tell(made: dict[str, Any]) -> None:
    """Print the cases of a benchmark, see `bench.results.Case.to_dict`, and what was left out."""
    for case in made["cases"]:
        print(case["case"])
        for provider, metrics in case["found"].items():
            told = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            print(f"  {provider:34} {told}")
        if errors := case.get("errors"):
            print("  errors: " + ", ".join(f"{name} {value:.2g}" for name, value in errors.items()))
        for note in case["notes"]:
            print(f"  {note}")
    for what, why in made["left_out"].items():
        print(f"left out: {what}: {why}")


def record(rows: Sequence[Row], bench: str, folder: str | None) -> str | None:
    """Append rows to the results folder, if there is one or one is named. Returns the file.

    Where it cannot be written the rows go to stderr, for they took long to make, and InvalidInput is raised.
    """
    from tamis.bench.machine import describe_machine
    from tamis.bench.results import append_rows
    from tamis.core.errors import InvalidInput

    if folder is None and not Path("results").is_dir():
        return None
    command = " ".join(["tamis", *sys.argv[1:]])
    where = folder or "results"
    try:
        path = append_rows(rows, bench, machine=describe_machine(), command=command, folder=where)
    except OSError as e:
        for row in rows:
            typer.echo(
                f"{row.case},{row.provider},{row.metric},{row.p20:g},{row.p50:g},{row.p80:g},{row.unit}", err=True
            )
        raise InvalidInput(
            f"the rows above were not kept: {e}. Name a folder that can be written with --results."
        ) from e
    return str(path)


from tamis.cli import bench_attention as _bench_attention  # noqa: E402, F401 - adds its command to `app`
from tamis.cli import bench_decode as _bench_decode  # noqa: E402, F401 - adds its command to `app`
from tamis.cli import bench_forecast as _bench_forecast  # noqa: E402, F401 - adds its command to `app`
from tamis.cli import bench_index as _bench_index  # noqa: E402, F401 - adds its command to `app`
from tamis.cli import bench_offload as _bench_offload  # noqa: E402, F401 - adds its command to `app`
from tamis.cli import bench_paged as _bench_paged  # noqa: E402, F401 - adds its command to `app`
from tamis.cli import bench_reuse as _bench_reuse  # noqa: E402, F401 - adds its command to `app`
from tamis.cli import bench_serve as _bench_serve  # noqa: E402, F401 - adds its command to `app`
from tamis.cli import bench_vllm as _bench_vllm  # noqa: E402, F401 - adds its command to `app`
