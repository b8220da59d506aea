"""`tamis eval reuse`: what answers from stored documents are worth, plain, blended, copied and with an adapter."""

from __future__ import annotations

import json as jsonlib
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tamis.cli.bench import Results, record
from tamis.cli.evaluate_answers import haystack_of, rows_of
from tamis.cli.options import Device, Dtype, Json, Model, Yarn, load, progress
from tamis.core.errors import InvalidInput

if TYPE_CHECKING:
    from tamis.eval.answers import Answers

app = typer.Typer()
NEEDLE_TOKENS, NEEDLE_DEPTH, NEEDLE_ANSWER = 512, 0.5, 8
Data = Annotated[
    list[str] | None,
    typer.Option("--data", help="Question sets, or folders of them. May be repeated. Default: built-in needles."),
]
PerSet = Annotated[
    int | None, typer.Option(min=1, help="Questions per set. Default: 100; 1 needle, in the middle of its prompt.")
]
Filled = Annotated[
    int | None,
    typer.Option(min=64, help="Fill prompts to so many tokens with other questions' passages. Needles: 512."),
]
SHOWN = ("kl", "kl_own", "agreement", "f1", "em", "recomputed")


@app.command()
def reuse(
    data: Data = None,
    model: Model = "smollm2",
    limit: PerSet = None,
    fill: Filled = None,
    shares: Annotated[str, typer.Option(help="Shares of tokens that blend recomputes.")] = "0.05,0.1,0.16,0.3",
    rules: Annotated[str | None, typer.Option(help="Rules of blend, comma-separated. Default: all.")] = None,
    variants: Annotated[
        str | None, typer.Option(help="These instead, as in `tamis eval answers`, such as reuse,blend:recompute=0.1.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="Folder of `tamis train block-adapter`; questions it has seen are left out.")
    ] = None,
    answer_tokens: Annotated[int | None, typer.Option(min=1, help="Limit of an answer. Default: 24.")] = None,
    deadline_s: Annotated[float | None, typer.Option(min=0, help="Begin nothing that ends later than this.")] = None,
    log: Annotated[str | None, typer.Option(help="JSON-lines file of all answers, kept and resumed.")] = None,
    results: Results = None,
    device: Device = None,
    dtype: Dtype = None,
    yarn: Yarn = None,
    json: Json = False,
) -> None:
    """KL of the first answer token, agreement, F1, EM and tokens recomputed of every variant on the same questions."""
    from pathlib import Path

    from tamis.eval.answers import Log, eval_answers, settings_of
    from tamis.eval.needle import needle_tasks
    from tamis.eval.prefills import variant_names
    from tamis.eval.reuse import reuse_tasks
    from tamis.eval.tasks import Fill, question_files
    from tamis.model.adapter_info import AdapterInfo

    names = variant_names(variants) if variants is not None else _variants(shares, rules, adapter is not None)
    info = AdapterInfo.read(adapter) if adapter else None
    files = question_files(data) if data else []
    with ExitStack() as stack:
        llm = stack.enter_context(load(model, device, dtype, yarn))
        if info is not None:
            info.check(llm.runner.model, llm.tokenizer)
        adapted = stack.enter_context(load(model, device, dtype, yarn, adapter=adapter)) if adapter else None
        if files:
            tasks, left_out = reuse_tasks(files, limit or 100, None if fill is None else Fill(llm.template, fill), info)
        else:
            lengths, left_out = [fill or NEEDLE_TOKENS], 0
            passages = haystack_of(llm, [], lengths)
            tasks = needle_tasks(llm.template, passages, lengths, size=limit or 1, depths=[NEEDLE_DEPTH])
            answer_tokens = answer_tokens or NEEDLE_ANSWER
        settings = settings_of(llm) | {"adapter": adapted.spec(adapted.policy).digest.hex() if adapted else None}
        options = {"log": Log(Path(log) if log else None, settings), "deadline_s": deadline_s, "adapted": adapted}
        step = stack.enter_context(progress("questions"))
        found = eval_answers(llm, tasks, names, answer_tokens=answer_tokens, note=step, **options)  # type: ignore[arg-type]
        case = f"{llm.name}/{llm.dtype}"
    if not found.outcomes:
        raise InvalidInput("not one question was answered: give shorter prompts (--fill) or a later --deadline-s.")
    report: dict[str, Any] = {"model": model, "adapter": adapter, "left_out_as_seen": left_out}
    report["results"] = record(rows_of(found, case), "reuse_quality", results)
    report |= {"complete": found.complete, "skipped": list(found.skipped)}
    _print(found, report, json=json)


def _print(found: Answers, report: dict[str, Any], *, json: bool) -> None:
    """One JSON object, or a table per group with a line per variant."""
    from tamis.eval.reuse import curve

    groups = found.summary()
    if json:
        print(jsonlib.dumps(report | {"tasks": groups, "curves": {g: curve(found, g) for g in groups}}))
        return
    for group, variants in groups.items():
        n, wide = next(iter(variants["dense"].values()))["n"], max(map(len, variants)) + 1
        print(f"{group}, {n} questions\n{'':{wide}}" + "".join(f"{m:>22}" for m in SHOWN))
        for name, metrics in variants.items():
            cells = [_cell(metrics.get(metric)) for metric in SHOWN]
            print(f"{name:{wide}}" + "".join(f"{c:>22}" for c in cells))
    if report["left_out_as_seen"]:
        print(f"left out because the adapter may have seen them: {report['left_out_as_seen']}")
    if not found.complete:
        print("the deadline came first; with --log the same command goes on.")


def _cell(entry: dict[str, Any] | None) -> str:
    return "-" if entry is None else f"{entry['mean']:.3f} [{entry['ci95'][0]:.2f}, {entry['ci95'][1]:.2f}]"


def _variants(shares: str, rules: str | None, adapter: bool) -> list[str]:
    from tamis.eval.reuse import variants_of

    chosen = [name.strip() for name in rules.split(",")] if rules else []
    try:
        found = [float(part) for part in shares.split(",") if part.strip()]
    except ValueError as e:
        raise InvalidInput(f"--shares is {shares!r}; give shares of 0 to 1, such as 0.05,0.1.") from e
    return variants_of(list(dict.fromkeys(found)), adapter=adapter, rules=chosen)
