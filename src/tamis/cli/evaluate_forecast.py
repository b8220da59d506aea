"""`tamis eval forecast`: how many of the blocks that each layer reads are known one layer ahead."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated

import typer

from tamis.cli.bench import Results, record
from tamis.cli.options import Device, Dtype, Json, Model, Yarn, progress
from tamis.cli.train import converting
from tamis.cli.train_forecast import Data, Local, Top
from tamis.core.dtypes import name_of
from tamis.core.errors import InvalidInput

if TYPE_CHECKING:
    from tamis.eval.forecast import Found
    from tamis.forecast.heads import Forecast
    from tamis.model.source import LoadedModel

app = typer.Typer()
SMALL_TOP, SMALL_LOCAL = 24, 8
Folder = Annotated[
    str | None,
    typer.Option("--forecast", help="Folder that tamis train forecast wrote. Default: the weights it starts with."),
]
Tokens = Annotated[
    int | None,
    typer.Option(min=64, help="Length of a text and what is generated behind it. Default: 8,192; 2,048 on a CPU."),
]
Judged = Annotated[
    int | None, typer.Option(min=1, help="Texts, all of them kept out of training. Default: 4; 1 on a CPU.")
]
Generated = Annotated[
    int | None,
    typer.Option(min=0, help="Tokens made behind a text, judged as decode rows; 0: none. Default: 32; 8 on a CPU."),
]


@app.command("forecast")
def forecast(
    folder: Folder = None,
    data: Data = None,
    model: Model = "smollm2",
    tokens: Tokens = None,
    texts: Judged = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a text that are judged.")] = 128,
    generated: Generated = None,
    top: Top = None,
    local: Local = None,
    results: Results = None,
    device: Device = None,
    dtype: Dtype = None,
    yarn: Yarn = None,
    json: Json = False,
) -> None:
    """Recall by layer of the layers' own choices and of the exact attention's best blocks, on held-out texts.

    forecast and infinigen (the layer's own query projection on the previous layer's hidden states) look one layer
    ahead; own is the layer's choice itself. Forced blocks are left out of a recall, and rows that may read everything.
    On a CPU, where nothing is said of --tokens, --top and --local, little is read: 24 blocks, 8 of them local.
    Each also prefills the text with its blocks only: KL, agreement and density against dense. And each decodes what was
    generated with blocks from host memory: what moved, and what came late; forecast-unfetched copies nothing ahead.
    """
    from tamis.bench.machine import device_of
    from tamis.bench.results import Row
    from tamis.cli.texts import texts_of
    from tamis.cli.train_forecast import rule_of
    from tamis.eval.forecast import Plan, eval_forecast
    from tamis.forecast.heads import Forecast
    from tamis.forecast.texts import Sequences, Texts
    from tamis.model.source import load_model

    small = device_of(device).type == "cpu"
    if small and (tokens, top, local) == (None, None, None):
        top, local = SMALL_TOP, SMALL_LOCAL
    tokens = tokens or (2048 if small else 8192)
    generated = (8 if small else 32) if generated is None else generated
    if generated >= tokens:
        raise InvalidInput(f"generated is {generated} of {tokens} tokens; give fewer, for a text must stand before.")
    if folder is not None and not Forecast.read(folder).info.holdout:
        raise InvalidInput(f"{folder} was trained with holdout 0: no text was kept out of it. Train one with more.")
    pieces, names = texts_of(data or [])
    loaded = load_model(model, device=device, dtype=dtype, yarn=yarn, on_convert=converting)
    heads = Forecast.load(folder, loaded.model, loaded.tokenizer) if folder is not None else _untrained(loaded)
    info = heads.info
    rule = rule_of(top, local, None, info.rule)
    kept = Sequences(loaded.tokenizer, Texts.split(pieces, names, info.holdout).kept, tokens - generated)
    some = [kept.get(i) for i in range(min(texts or (1 if small else 4), len(kept)))]
    with progress("texts") as step:
        found = eval_forecast(loaded, heads, some, Plan(rule, rows=rows, generated=generated), note=step)
    dtype_name = name_of(loaded.model.dtype)
    case = f"{loaded.name}/{dtype_name}/{'+'.join(names)}/{tokens}/top-{rule.top}{'' if folder else '/untrained'}"
    table = [Row.of(f"{case}/{w}", p, metric, values, unit=unit) for w, p, metric, values, unit in found.rows()]
    kept_in = record(table, "forecast", results)
    if json:
        shown = {"model": model, "forecast": folder, "steps": info.steps, "tokens": tokens, "texts": found.texts}
        print(jsonlib.dumps(shown | {"rule": rule.to_dict(), "results": kept_in, **found.summary()}))
        return
    _show(found)


def _untrained(loaded: LoadedModel) -> Forecast:
    """The weights that training begins with: the layers' own mean queries. No text was seen."""
    from tamis.attention.layer_inputs import decoder_layers
    from tamis.forecast.heads import Forecast, ForecastInfo, first_weights
    from tamis.kernels.blocks import BlockRule
    from tamis.model.adapter_info import base_of
    from tamis.model.family import geometry

    shape, model = geometry(loaded.model.config), loaded.model
    weight, bias = first_weights(decoder_layers(model), shape.n_kv_heads, shape.head_dim, start="query")
    info = ForecastInfo(base_of(model, loaded.tokenizer), loaded.name, BlockRule(), holdout=1.0)
    return Forecast(weight, bias, shape.n_kv_heads, info).to(loaded.device)


def _show(found: Found) -> None:
    """Means of the layers that look ahead, the recall of every layer, and what reading those blocks only does."""
    from tamis.eval.forecast import METRICS, MOVES, QUALITY

    summary = found.summary()
    tables = [("prefill by blocks", QUALITY, summary.pop("quality", {}))]
    tables.append(("decode, KV on host", MOVES, summary.pop("offload", {})))
    print(f"{'':20}" + "".join(f"{m:>18}" for m in METRICS))
    for rows, providers in summary.items():
        for name, values in providers.items():
            print(f"{rows + ' ' + name:20}" + "".join(f"{values[m]:18.3f}" for m in METRICS))
    for rows, providers in summary.items():
        print(f"\n{rows}: recall by layer")
        for name, values in providers.items():
            if name != "own":
                print(f"{name:10}" + " ".join(f"{v:.2f}" for v in values["recall_by_layer"]))
    for title, metrics, providers in tables:
        if providers:
            print(f"\n{title:20}" + "".join(f"{m:>18}" for m in metrics))
        for name, values in providers.items():
            print(f"{name:20}" + "".join(f"{values[m]:18.4f}" for m in metrics))
