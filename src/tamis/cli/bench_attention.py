"""`tamis bench attention`: the attention kernels alone."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from tamis.cli.bench import Kept, Results, app
from tamis.cli.options import Device, Json


@app.command("attention")
def attention(
    case: Annotated[
        list[str] | None, typer.Option("--case", help="TOKENS/dHEAD_DIM/DENSITY; repeatable. Default: by device.")
    ] = None,
    provider: Annotated[
        list[str] | None, typer.Option("--provider", help="Such as gluon or fa4-dense; repeatable. Default: by device.")
    ] = None,
    results: Results = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """TFLOP/s of the attention kernels on random inputs, sparse against dense, each checked before it is timed."""
    from tamis.bench.attention import bench_attention

    kept = Kept("attention", results)
    made = bench_attention(case or [], provider or [], device=device, note=kept.note, keep=kept.keep)
    if json:
        print(jsonlib.dumps(made | {"results": kept.file}))
        return
    print(f"{'case':16} {'provider':12} {'TFLOP/s p20':>11} {'p50':>9} {'p80':>9} {'ms':>9}  speed-up")
    for m in made["measured"]:
        p20, p50, p80 = (f"{m['tflops'][p]:.4g}" for p in ("p20", "p50", "p80"))
        gain = f"{m['speedup']:.2f}x over {m['over']}" if m["over"] else "no dense provider was timed"
        print(f"{m['case']:16} {m['provider']:12} {p20:>11} {p50:>9} {p80:>9} {m['ms']:9.3f}  {gain}")
    for what, why in made["left_out"].items():
        print(f"left out: {what}: {why}")
