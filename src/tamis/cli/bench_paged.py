"""`tamis bench paged`: what reading documents at any offset costs."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer

from tamis.cli.bench import Kept, Results, app
from tamis.cli.options import Device, Json


@app.command("paged")
def paged(
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            help="prefill/DOCUMENTSxTOKENS/ROWS or decode/DOCUMENTSxTOKENS/bREQUESTS; repeatable. Default: by device.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds after a warm-up; medians are reported.")] = 30,
    tune: Annotated[bool, typer.Option("--tune", help="Also time other cuts of the Triton kernels.")] = False,
    results: Results = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Overhead and rate of attention over documents kept at their own positions, checked before it is timed."""
    from tamis.bench.paged import bench_paged

    kept = Kept("paged", results)
    made = bench_paged(case or [], rounds=rounds, tune=tune, device=device, note=kept.note, keep=kept.keep)
    if json:
        print(jsonlib.dumps(made | {"results": kept.file}))
        return
    for measured in made["measured"] + made["tuned"]:
        _print(measured)
    for what, why in made["left_out"].items():
        print(f"left out: {what}: {why}")


def _print(measured: dict[str, Any]) -> None:
    cut = f"  cut {measured['cut']}" if measured["cut"] else ""
    print(f"{measured['case']}  {measured['provider']}{cut}")
    for name, run in measured["runs"].items():
        rate = f"{run['tflops']:.4g} TFLOP/s" if "tflops" in run else f"{run['tb_per_s']:.4g} TB/s"
        low, mid, high = (run["overhead"][p] * 100 for p in ("p20", "p50", "p80"))
        print(f"  {name:34} {run['ms']:9.3f} ms  {rate:>15}  {mid:+6.2f} % [{low:+.2f}, {high:+.2f}]")
