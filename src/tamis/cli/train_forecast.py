"""`tamis train forecast`: projections that say one layer ahead which blocks of keys will be read."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tamis.cli.options import Device, Dtype, Json, Model, Yarn
from tamis.cli.train import app, converting, progress_bar

if TYPE_CHECKING:
    from tamis.kernels.blocks import BlockRule
    from tamis.train.forecast import TrainedForecast

Data = Annotated[
    list[str] | None,
    typer.Option("--data", help="Question sets, text files, or folders of them. May be repeated. Default: built-in."),
]
Top = Annotated[int | None, typer.Option(min=1, help="Blocks of 64 tokens that a token reads, forced ones included.")]
Local = Annotated[int | None, typer.Option(min=0, help="Blocks before its own that a token reads in any case.")]


@app.command("forecast")
def forecast(
    out: Annotated[str, typer.Option("--out", help="Folder of the forecast; a run that was stopped goes on there.")],
    data: Data = None,
    model: Model = "smollm2",
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 600,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop and save before so many minutes are over.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of a sequence.")] = 8192,
    rows: Annotated[int, typer.Option(min=0, help="Query rows of a sequence that are learnt from; 0 for all.")] = 2048,
    accumulate: Annotated[int, typer.Option(help="Sequences of one step.")] = 1,
    top: Top = None,
    local: Local = None,
    dense_tokens: Annotated[int | None, typer.Option(help="Contexts up to so many tokens are read in full.")] = None,
    holdout: Annotated[float, typer.Option(help="Share of the texts that is never trained on.")] = 0.1,
    checks: Annotated[int, typer.Option(min=0, help="Held-out sequences that are measured before and after.")] = 4,
    route: Annotated[
        str, typer.Option(help="What the frozen model reads meanwhile: dense, or the teacher's blocks.")
    ] = ("dense"),
    teacher: Annotated[
        str, typer.Option(help="fine (windows of two tokens, as published) or own (the layer's own selection).")
    ] = "fine",
    outcomes: Annotated[
        str, typer.Option(help="What the loss tells apart: chosen (as published), or free: all blocks not forced.")
    ] = "chosen",
    start: Annotated[str, typer.Option(help="Weights to begin with: query (the layers' own) or uniform.")] = "query",
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 5e-4,
    schedule: Annotated[str, typer.Option(help="linear (rises, then falls to 0) or constant.")] = "linear",
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
    yarn: Yarn = None,
    json: Json = False,
) -> None:
    """Teach projections, one for each layer of a frozen model, which blocks the next layer will read (SparDA)."""
    from tamis.forecast.texts import Texts
    from tamis.model.source import load_model
    from tamis.train.forecast import train_forecast
    from tamis.train.settings import ForecastSettings

    settings = ForecastSettings(
        steps=steps, tokens=tokens, rows=rows or None, accumulate=accumulate, rule=rule_of(top, local, dense_tokens),
        teacher=teacher, outcomes=outcomes, route=route, start=start, lr=lr, schedule=schedule, seed=seed,
    )  # fmt: skip
    texts = Texts.split(*_texts(data), holdout)
    loaded = load_model(model, device=device, dtype=dtype, yarn=yarn, on_convert=converting)
    with progress_bar("steps") as note:
        made = train_forecast(loaded, texts, settings, out, checks=checks, minutes=minutes, note=note)
    if json:
        total = sum(p.numel() for p in loaded.model.parameters())
        shown = {"model": model, "texts": len(texts.taught), "parameters_share": made.parameters / total}
        print(jsonlib.dumps(shown | made.to_dict()))
    else:
        _show(made, len(texts.taught))


def rule_of(top: int | None, local: int | None, dense_tokens: int | None, base: BlockRule | None = None) -> BlockRule:
    """The rule `base` (none: MiniCPM4.1's) with what was given on the command line."""
    from dataclasses import replace

    from tamis.kernels.blocks import BlockRule

    given = {"top": top, "local": local, "dense_tokens": dense_tokens}
    return replace(base or BlockRule(), **{name: value for name, value in given.items() if value is not None})


def _texts(data: list[str] | None) -> tuple[list[str], list[str]]:
    from tamis.cli.texts import texts_of

    return texts_of(data or [])


def _show(made: TrainedForecast, texts: int) -> None:
    """Where it is, and the held-out texts before and after."""
    early = ", the time was up" if made.out_of_time else ""
    print(f"{made.folder}: {made.parameters:,} parameters, {made.info.steps} steps on {texts} texts{early}")
    before: dict[str, Any] = made.info.result["before"]
    after: dict[str, Any] = made.info.result["after"]
    for key, name in {"kl": "KL", "recall": "recall"}.items():
        if key in before:
            print(f"held out, {name:8} {before[key]:.4f} -> {after[key]:.4f}")
