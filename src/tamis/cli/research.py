"""`tamis eval research` and `tamis eval calibrate`: selector variants on long prompts, thresholds made from them."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tamis.cli.bench import Results, record
from tamis.cli.options import Device, Dtype, Json, Model, Yarn, load, progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tamis.bench.results import Row
    from tamis.eval.metrics import Interval

app = typer.Typer()

Data = Annotated[str, typer.Option("--data", help="Questions with documents, JSON lines.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many questions.")]
Tokens = Annotated[
    int | None, typer.Option(min=64, help="Prompt length, filled with other questions' passages. Default: as they are.")
]


@app.command()
def research(
    data: Data,
    model: Model = "smollm2",
    tokens: Tokens = None,
    limit: Limit = None,
    variants: Annotated[
        str | None, typer.Option("--variants", help="Separated by ';', such as 'sampled:rows=4,mass=0.95'.")
    ] = None,
    log: Annotated[str | None, typer.Option("--log", help="JSON-lines file of results; a second run goes on.")] = None,
    deadline_s: Annotated[float | None, typer.Option("--deadline-s", min=0, help="Begin nothing later.")] = None,
    results: Results = None,
    device: Device = None,
    dtype: Dtype = None,
    yarn: Yarn = None,
    json: Json = False,
) -> None:
    """Density, recall, KL and agreement of many selector variants against one dense pass per prompt."""
    from tamis.core.errors import InvalidInput, NothingFound
    from tamis.eval.questions import load_questions
    from tamis.eval.research import METRICS, Study, summarise
    from tamis.eval.research import research as run
    from tamis.eval.variants import DEFAULT_VARIANTS, parse_variant

    chosen = [parse_variant(v) for v in (variants.split(";") if variants else DEFAULT_VARIANTS) if v.strip()]
    chosen = list({v.spec: v for v in chosen}.values())
    if not chosen:
        raise InvalidInput(f"--variants {variants!r} names none; give some, such as 'stored;sampled:rows=4'.")
    questions = load_questions(data)  # all of them: the others' passages fill the prompts
    with load(model, device, dtype, yarn) as llm, progress("variants") as step:
        case = f"{llm.name}/{Path(data).stem}/{tokens or 'own'}"
        study = Study(case, tokens, Path(log) if log else None, deadline_s, limit)
        found = run(llm, questions, chosen, study, note=step)
    wanted = {v.spec for v in chosen}
    found = [r for r in found if r["variant"] in wanted]
    if not found:
        raise NothingFound(f"the deadline of {deadline_s} s left no time for a variant; give more, or none.")
    table = study_rows(case, found)
    kept = record(table, "selectors", results)
    summary = summarise(found)
    if json:
        print(jsonlib.dumps({"case": case, "results": kept, "variants": _plain(summary)}))
        return
    print(case)
    _print(summary, METRICS)


def study_rows(case: str, found: Sequence[dict[str, Any]]) -> list[Row]:
    """For results/selectors.csv, of every variant: quantiles over the prompts, the mean, and how many prompts."""
    from tamis.bench.results import Row
    from tamis.eval.research import METRICS

    table = []
    for spec in dict.fromkeys(r["variant"] for r in found):
        own = [r for r in found if r["variant"] == spec]
        table.append(Row.of(case, spec, "prompts", [len(own)], unit="1"))
        for metric in METRICS:
            values, unit = [float(r[metric]) for r in own], "nat" if metric.startswith("kl") else "1"
            table.append(Row.of(case, spec, metric, values, unit=unit))
            table.append(Row.of(case, spec, f"{metric}_mean", [sum(values) / len(values)], unit=unit))
    return table


@app.command()
def calibrate(
    data: Data,
    out: Annotated[str, typer.Option("--out", help="Thresholds file to write, for 'calibrated:file=...'.")],
    density: Annotated[float, typer.Option(help="Share of the causal area that may be computed.")] = 0.2,
    model: Model = "smollm2",
    tokens: Tokens = None,
    skip: Annotated[int, typer.Option(min=0, help="Questions left out at the beginning: those to test on.")] = 0,
    limit: Limit = 4,
    rows: Annotated[int, typer.Option(help="Sampled rows per tile that the thresholds are used with.")] = 8,
    device: Device = None,
    dtype: Dtype = None,
    yarn: Yarn = None,
    json: Json = False,
) -> None:
    """One share of the attention per layer and head, so that the least is lost at a density."""
    from tamis.core.errors import InvalidInput
    from tamis.eval.questions import load_questions
    from tamis.eval.research import calibrate_on

    questions = load_questions(data)
    left = len(questions) - skip
    if left < 1:
        raise InvalidInput(f"--skip {skip} leaves none of the {len(questions)} questions of {data}; skip fewer.")
    limit = min(limit or left, left)  # beyond them come those to test on, whose passages alone are of use
    questions = questions[skip:] + questions[:skip]
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with load(model, device, dtype, yarn) as llm, progress("prompts") as step:
        found = calibrate_on(llm, questions, density, tokens=tokens, rows=rows, limit=limit, note=step)
        found.save(out, model=llm.name, density=density, rows=rows, tokens=tokens or "own", questions=limit)
    layers, heads = len(found.mass), len(found.mass[0])
    if json:
        print(jsonlib.dumps({"out": out, "layers": layers, "heads": heads, "density": density}))
        return
    print(f"{out}: {layers} layers of {heads} heads")


def _plain(summary: dict[str, dict[str, Interval]]) -> dict[str, Any]:
    return {
        spec: {metric: {"mean": i.mean, "ci95": [i.low, i.high], "n": i.n} for metric, i in values.items()}
        for spec, values in summary.items()
    }


def _print(summary: dict[str, dict[str, Interval]], metrics: tuple[str, ...]) -> None:
    wide = max(map(len, summary))
    print(f"{'':{wide}} {'n':>3} " + " ".join(f"{m:>24}" for m in metrics))
    for spec, values in summary.items():
        cells = [f"{i.mean:.4f} [{i.low:.4f}, {i.high:.4f}]" for i in (values[m] for m in metrics)]
        print(f"{spec:{wide}} {values[metrics[0]].n:>3} " + " ".join(f"{c:>24}" for c in cells))
