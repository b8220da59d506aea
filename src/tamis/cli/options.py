"""Options that several commands share, and how they show progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tamis.engine.llm import LLM

STARTED = time.perf_counter()  # the command line imports this first of all

Model = Annotated[
    str, typer.Option("--model", "-m", help="smollm2, a directory, a .gguf file, or a hub name.", show_default=True)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Store = Annotated[
    str | None, typer.Option("--store", help="Folder of the store. Default: one per model in the cache folder.")
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, … Default: CUDA where there is one.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16. Default: by device.")]

Yarn = Annotated[
    float | None, typer.Option("--yarn", help="Stretch the model's context by this factor with YaRN, such as 4.")
]
Recompute = Annotated[
    float, typer.Option(min=0, max=1, help="blend: share of the documents' tokens that are computed again.")
]
Blend = Annotated[str, typer.Option(help="How blend chooses them: attention, bits_attention, cacheblend, …")]
AcceptBlock = Annotated[
    bool, typer.Option("--accept-block-attention", help="Allow reuse on a model not trained for it: answers suffer.")
]
Adapter = Annotated[str | None, typer.Option("--adapter", help="Folder of an adapter by tamis train block-adapter.")]
CacheDir = Annotated[
    str | None, typer.Option("--cache-dir", help="reuse, blend, prefix: keep stored documents in this folder.")
]
ChunkTokens = Annotated[int | None, typer.Option(min=1, help="Prefill in chunks of so many tokens, at most.")]
Rebuild = Annotated[bool, typer.Option("--rebuild", help="Drop a store that does not fit, and make it again.")]
Kv = Annotated[str, typer.Option("--kv", help="How keys and values are kept: auto, bf16 or selfindex (5x smaller).")]
Decode = Annotated[str, typer.Option(help="How new tokens read them: dense, or a share: selfindex, blocks, forecast.")]
DecodeBudget = Annotated[float, typer.Option(min=0, max=1, help="decode, not dense: the share a token reads.")]
DecodeLocal = Annotated[
    int | None, typer.Option(min=0, help="decode blocks, forecast: blocks before a token that it reads in any case.")
]
Forecast = Annotated[
    str | None, typer.Option("--forecast", help="decode forecast: folder that tamis train forecast wrote.")
]
Offload = Annotated[str, typer.Option(help="host: keys and values in host memory, slots on the device; or none.")]


def load(model: str, device: str | None, dtype: str | None, yarn: float | None = None, **choices: Any) -> LLM:
    """The model, with a line on stderr while a GGUF file is converted; "shape:NAME": random weights of that shape."""
    from tamis.engine.llm import LLM

    if model.startswith("shape:"):
        from tamis.bench.serve_words import shape_with_words

        return LLM(shape_with_words(model), **choices)

    def note(name: str) -> None:
        typer.echo(f"converting {name} once; later starts use the result …", err=True)

    return LLM(model, device=device, dtype=dtype, yarn=yarn, on_convert=note, **choices)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr that appears with the first step and vanishes at the end; none outside a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = None

    def step(done: int, total: int) -> None:
        nonlocal task
        if total:
            if task is None:
                task = bars.add_task(what, total=total)
                bars.start()
            bars.update(task, completed=done, total=total)

    try:
        yield step
    finally:
        if task is not None:
            bars.stop()
