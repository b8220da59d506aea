"""`tamis bench offload`: decode steps whose blocks come from host memory; and what it replays."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from tamis.cli.bench import Kept, Results, app, lengths_of, tell
from tamis.cli.options import Device, Dtype, Json, Model
from tamis.cli.texts import texts_of


@app.command("record-locality")
def record_locality(
    out: Annotated[str, typer.Option("--out", help="File to write, such as results/locality/NAME.json.")],
    model: Model = "smollm2",
    data: Annotated[
        list[str] | None, typer.Option("--data", help="Text files, or folders of them. Default: built-in.")
    ] = None,
    forecast: Annotated[
        str | None, typer.Option("--forecast", help="Also of the choices of what tamis train forecast wrote.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of the text, its last ones the steps.")] = 8192,
    steps: Annotated[int, typer.Option(min=40, help="Tokens that are looked at, in a row.")] = 192,
    block: Annotated[int, typer.Option(min=8, help="Tokens of a block; windows are half as long.")] = 16,
    top: Annotated[int, typer.Option(min=3, help="Blocks a token reads.")] = 24,
    local: Annotated[int, typer.Option(min=0, help="Blocks before its own that a token reads in any case.")] = 8,
    stick: Annotated[
        float, typer.Option(min=0, help="Also of a rule that sticks so much to what was read of late; 0: not.")
    ] = 0.25,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Keep how much of a real model's choices of blocks stays from token to token, for `tamis bench offload`.

    The default rule reads the same share of 8,192 tokens in smaller blocks as MiniCPM4.1's reads of 131,072.
    """
    from tamis.bench.locality import record, save
    from tamis.core.errors import InvalidInput
    from tamis.forecast.heads import Forecast
    from tamis.kernels.blocks import BlockRule
    from tamis.model.source import load_model

    pieces, names = texts_of(data or [])
    rule = BlockRule(top, 1, local, block, block // 2, block // 4, dense_tokens=0)
    loaded = load_model(model, device=device, dtype=dtype)
    heads = Forecast.load(forecast, loaded.model, loaded.tokenizer) if forecast else None
    text: list[int] = loaded.tokenizer("\n\n".join(pieces), add_special_tokens=False)["input_ids"][:tokens]
    if len(text) < tokens:
        raise InvalidInput(f"the texts have {len(text)} tokens; give more with --data, or fewer --tokens.")
    found = record(loaded, text, rule, steps, data="+".join(names), forecast=heads, stick=stick)
    how = (
        f"tamis bench record-locality --model {model} --tokens {tokens} --steps {steps} --block {block} --top {top} "
        f"--local {local}{' --forecast F' if forecast else ''} --stick {stick:g}: "
        "choices at the last tokens of a text, one pass"
    )
    save(found, out, how=how)
    if json:
        shown = {one.provider: {"kept": one.kept_mean, "misses": one.misses, "recall": one.recall} for one in found}
        print(jsonlib.dumps({"out": out, **shown}))
        return
    for one in found:
        misses = "  ".join(f"{n} x: {miss:.3f}" for n, miss in one.misses.items())
        print(f"{one.provider:14} kept {one.kept_mean:.3f}  misses by slots {misses}  recall {one.recall:.3f}")


Tokens = Annotated[
    str | None, typer.Option(help="Tokens of each sequence, comma-separated. Default: 131072; 4096 where tiny.")
]


@app.command("offload")
def offload(
    shape: Annotated[str, typer.Option(help="minicpm4.1-8b, llama-3.1-8b, another without experts, or tiny.")] = (
        "minicpm4.1-8b"
    ),
    tokens: Tokens = None,
    batch: Annotated[str, typer.Option(help="Sequences of a step, comma-separated.")] = "4,16,64",
    slots: Annotated[
        str, typer.Option(help="Slots of the device for each block that a token reads, comma-separated.")
    ] = "2",
    providers: Annotated[str, typer.Option(help="Some of those below, comma-separated.")] = (
        "sparse-offload,infinigen,forecast-no-prefetch,forecast,sparse-offload-stick,forecast-stick"
    ),
    only: Annotated[
        str, typer.Option("--only", help="Some of copy,resident,cells,dense-offload,selection.")
    ] = "copy,resident,cells,dense-offload,selection",
    locality: Annotated[
        str, typer.Option(help="What `tamis bench record-locality` wrote.")
    ] = "results/locality/smollm2-stick.json",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Build so many layers; times are scaled by layers, and rows say so.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps after a warm-up; medians are reported.")] = 20,
    programs: Annotated[int, typer.Option(min=1, help="Of the copy kernel, each on a multiprocessor at most.")] = 8,
    warps: Annotated[int, typer.Option(help="Of such a program: 1, 2, 4, 8 or 16.")] = 8,
    host_gb: Annotated[
        float | None, typer.Option(help="Pinned host memory, shared by what does not fit. Default: 16; 0.5 on a CPU.")
    ] = None,
    kv_cap_gb: Annotated[
        float | None, typer.Option(help="Room for keys and values on the device. Default: what a card of 80 GB leaves.")
    ] = None,
    timeline: Annotated[
        str | None, typer.Option(help="JSON file to add the layers' times to, for scripts/plots.py.")
    ] = None,
    check_only: Annotated[bool, typer.Option("--check-only", help="Compare with the reference, time nothing.")] = False,
    kernel: Annotated[str, typer.Option(help="auto, triton or reference.")] = "auto",
    results: Results = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Whole decode steps whose blocks come from host memory, checked against the reference before anything is timed.

    sparse-offload copies when a layer has chosen, forecast while the layer before works; infinigen chooses by the
    layer's own queries on the layer before's input; forecast-no-prefetch chooses as early and copies late. With -stick
    behind it a choice prefers what was read of late, as the locality says, so that less moves. Beside them full
    attention, resident and from host memory, copies alone, and what choosing costs a prefill.
    """
    from tamis.bench.offload import OffloadPlan, bench_offload

    kept = Kept("offload", results)
    sequences = lengths_of(batch, "batch", "numbers of sequences such as 4,16")
    lengths = lengths_of(tokens or ("4096" if shape == "tiny" else "131072"))
    plan = OffloadPlan(
        shape, lengths, sequences, _numbers(slots), _words(providers), _words(only), locality, layers,
        rounds, programs, warps, host_gb, kv_cap_gb, timeline, check_only, device, kernel,
    )  # fmt: skip
    made = bench_offload(plan, kept.note, kept.keep)
    if json:
        print(jsonlib.dumps(made | {"results": kept.file}))
        return
    tell(made)


def _numbers(text: str) -> list[float]:
    from tamis.core.errors import InvalidInput

    try:
        return [float(word) for word in text.split(",")]
    except ValueError as e:
        raise InvalidInput(f"slots is {text!r}; give numbers such as 1,2.") from e


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]
