"""`tamis eval`: how good the answers stay, beside how much was computed."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from tamis.cli import evaluate_answers, evaluate_decode, evaluate_forecast, evaluate_reuse, research
from tamis.cli.bench import Results, record
from tamis.cli.options import Device, Dtype, Json, Model, Yarn, load, progress

app = typer.Typer(help="Measure quality. Rows go to results/ where that folder exists.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `tamis eval` a group while it has few commands."""


app.add_typer(evaluate_answers.app)
app.add_typer(evaluate_reuse.app)
app.add_typer(evaluate_decode.app)
app.add_typer(evaluate_forecast.app)
app.add_typer(research.app)


@app.command()
def selectors(
    data: Annotated[str, typer.Option("--data", help="Questions with documents, JSON lines.")],
    model: Model = "smollm2",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many questions.")] = None,
    names: Annotated[str, typer.Option("--selectors", help="Comma-separated.")] = "stored,sampled,oracle,none",
    answer_tokens: Annotated[int, typer.Option(min=0, help="Tokens of an answer; 0 generates none.")] = 32,
    rows: Annotated[int, typer.Option(help="Rows that sampled scores per tile.")] = 8,
    mass: Annotated[float, typer.Option(help="Share of the attention that sampled and oracle keep.")] = 0.9,
    alpha: Annotated[float, typer.Option(help="Threshold of the LA bits.")] = 0.001,
    beta: Annotated[float, typer.Option(help="Threshold of the CA statistic.")] = 0.01,
    gamma: Annotated[float, typer.Option(help="Share that makes a CA bit.")] = 0.1,
    results: Results = None,
    device: Device = None,
    dtype: Dtype = None,
    yarn: Yarn = None,
    json: Json = False,
) -> None:
    """Density, recall, KL, agreement, F1 and EM of every selector on the same questions, against dense."""
    from pathlib import Path

    from tamis.bench.results import Row
    from tamis.eval.questions import load_questions
    from tamis.eval.selectors import eval_selectors

    questions = load_questions(data, limit)
    choices = {"rows": rows, "mass": mass, "alpha": alpha, "beta": beta, "gamma": gamma}
    with load(model, device, dtype, yarn, **choices) as llm, progress("questions") as step:
        scores = eval_selectors(
            llm, questions, [n.strip() for n in names.split(",")], answer_tokens=answer_tokens, note=step
        )
        case = f"{llm.name}/{Path(data).stem}/{len(questions)}"
        table = [
            Row.of(case, name, metric, getattr(score, metric), unit="nat" if metric == "kl" else "1")
            for name, score in scores.items()
            for metric in ("density", "recall", "kl", "agreement", "f1", "em")
            if getattr(score, metric)
        ]
    kept = record(table, "selectors", results)
    summary = {name: score.summary() for name, score in scores.items()}
    if json:
        print(jsonlib.dumps({"model": model, "data": data, "questions": len(questions), "results": kept, **summary}))
        return
    metrics = ("density", "recall", "kl", "agreement", "f1", "em")
    print(f"{'':10}" + "".join(f"{m:>22}" for m in metrics))
    for name, values in summary.items():
        cells = [
            f"{values[m]:.3f} [{values[m + '_ci95'][0]:.2f}, {values[m + '_ci95'][1]:.2f}]" if m in values else "-"
            for m in metrics
        ]
        print(f"{name:10}" + "".join(f"{c:>22}" for c in cells))
