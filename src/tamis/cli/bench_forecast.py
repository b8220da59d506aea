"""`tamis bench forecast-size`: how many parameters a forecast adds."""

from __future__ import annotations

import json as jsonlib

from tamis.cli.bench import Results, app, record
from tamis.cli.options import Json


@app.command("forecast-size")
def forecast_size(results: Results = None, json: Json = False) -> None:
    """Parameters that a forecast adds to models of all shapes that benchmarks know."""
    from tamis.bench.forecast_size import forecast_sizes

    sizes = forecast_sizes()
    kept = record([row for size in sizes for row in size.rows()], "forecast", results)
    if json:
        shown = {s.shape: {"added": s.added, "model": s.model, "share": s.share} for s in sizes}
        print(jsonlib.dumps({"shapes": shown, "results": kept}))
        return
    print(f"{'':18}{'added':>14}{'model':>18}{'share':>9}")
    for s in sizes:
        print(f"{s.shape:18}{s.added:14,}{s.model:18,}{s.share:9.2%}")
