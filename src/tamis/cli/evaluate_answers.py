"""`tamis eval answers`: what sparse prefills do to the answers, with intervals and paired differences to dense."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tamis.cli.bench import Results, record
from tamis.cli.options import Device, Dtype, Json, Model, Yarn, load, progress
from tamis.core.errors import InvalidInput

if TYPE_CHECKING:
    from tamis.bench.results import Row
    from tamis.engine.llm import LLM
    from tamis.eval.answers import Answers
    from tamis.eval.questions import Passage
    from tamis.eval.tasks import Task

app = typer.Typer()
KINDS = ("qa", "needle", "ruler")
Theta = Annotated[float, typer.Option(help="Attention mass from which threshold keeps a tile.")]
Power = Annotated[float, typer.Option(help="How threshold's bar falls with the context, 0: not at all.")]
Local = Annotated[str, typer.Option(help="Threshold's own tiles: by 'stored' bits, or 'sampled' like the rest.")]


@app.command()
def answers(
    data: Annotated[
        list[str] | None, typer.Option("--data", help="Question sets, or folders of them. May be repeated.")
    ] = None,
    model: Model = "smollm2",
    names: Annotated[
        str, typer.Option("--tasks", help="Comma-separated: qa, needle, ruler, or single RULER tasks such as vt.")
    ] = "qa",
    tokens: Annotated[str, typer.Option(help="Prompt lengths of needle and RULER tasks, comma-separated.")] = "4096",
    limit: Annotated[int, typer.Option(min=1, help="Questions per set and items per task.")] = 100,
    variants: Annotated[
        str, typer.Option(help="Comma-separated: dense (always first), selectors, prefills (blend:recompute=0.1).")
    ] = "dense,sampled,stored",
    fill: Annotated[
        int | None, typer.Option(min=64, help="Fill qa prompts to so many tokens with other questions' passages.")
    ] = None,
    docs: Annotated[list[str] | None, typer.Option("--docs", help="Text for haystacks. Default: built-in.")] = None,
    seed: Annotated[int, typer.Option(help="Of needle and RULER items.")] = 0,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, help="Limit of an answer. Default: 24, and RULER's own.")
    ] = None,
    deadline_s: Annotated[float | None, typer.Option(min=0, help="Begin nothing that ends later than this.")] = None,
    log: Annotated[
        str | None,
        typer.Option(help="JSON-lines file of all answers, kept and resumed. Default: one kept until the run is done."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows that sampled scores per tile.")] = 8,
    mass: Annotated[float, typer.Option(help="Share of the attention that sampled and oracle keep.")] = 0.9,
    theta: Theta = 0.01,
    power: Power = 0.0,
    local: Local = "stored",
    results: Results = None,
    device: Device = None,
    dtype: Dtype = None,
    yarn: Yarn = None,
    json: Json = False,
) -> None:
    """Scores, KL, agreement and density of every variant on the same prompts, and how far the scores are from dense."""
    from tamis.eval.answers import Log, eval_answers, settings_of
    from tamis.eval.prefills import variant_names

    chosen, lengths = variant_names(variants), _lengths(tokens)
    options = {"rows": rows, "mass": mass, "theta": theta, "power": power, "local": local}
    with load(model, device, dtype, yarn, **options) as llm, progress("questions") as step:
        tasks = tasks_of(llm, _names(names), data or [], docs or [], limit=limit, lengths=lengths, seed=seed, fill=fill)
        settings = settings_of(llm)
        path = Path(log) if log else _default_log(settings)
        found = eval_answers(
            llm, tasks, chosen, log=Log(path, settings), deadline_s=deadline_s, answer_tokens=answer_tokens, note=step
        )
        case = f"{llm.name}/{llm.dtype}"
    if log is None and found.complete:
        path.unlink(missing_ok=True)
    report: dict[str, Any] = {"model": model, "log": str(path) if path.exists() else None}
    report |= {"complete": found.complete, "skipped": list(found.skipped)}
    report["results"] = record(rows_of(found, case), "answers", results)
    if json:
        print(jsonlib.dumps(report | {"tasks": found.summary()}))
    else:
        _show(found, report)


def rows_of(found: Answers, case: str) -> list[Row]:
    """The rows of all cells, each with its number of questions at the end of its case."""
    from tamis.bench.results import Row

    counts = {cell.group: len(cell.values) for cell in found.cells}
    return [
        Row(f"{case}/{group}/{counts[group]}", variant, metric, *values, unit)
        for group, variant, metric, values, unit in found.rows()
    ]


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


def _lengths(tokens: str) -> list[int]:
    try:
        found = [int(n) for n in _names(tokens)]
    except ValueError as e:
        raise InvalidInput(f"--tokens is {tokens!r}; give whole numbers, such as 4096,8192.") from e
    if not found or min(found) < 1:
        raise InvalidInput(f"--tokens is {tokens!r}; give one length or more, each at least 1.")
    return list(dict.fromkeys(found))


def _default_log(settings: dict[str, Any]) -> Path:
    """A file in the cache folder that belongs to these settings and this state of the code."""
    from hashlib import blake2b

    from tamis.bench.machine import describe_machine
    from tamis.core.env import cache_dir

    told = jsonlib.dumps([settings, describe_machine().commit], sort_keys=True)
    return cache_dir() / "answers" / f"{blake2b(told.encode(), digest_size=8).hexdigest()}.jsonl"


def haystack_of(llm: LLM, docs: Sequence[str], lengths: Sequence[int]) -> list[Passage]:
    """Passages for prompts of these lengths, from files or built-in text. Raises ContextOverflow for a length that the
    model does not take."""
    from tamis.bench.text import passages
    from tamis.eval.questions import Passage

    for length in lengths:
        llm.runner.check_fits(length)
    return [Passage(p.title, p.text) for p in passages(max(lengths) * 3 // 2, llm.template.count, docs)]


def tasks_of(
    llm: LLM,
    names: list[str],
    data: list[str],
    docs: list[str],
    *,
    limit: int,
    lengths: list[int],
    seed: int,
    fill: int | None,
) -> list[Task]:
    """The tasks in the order named. Without question sets, "ruler" leaves its two qa tasks out and says so."""
    from tamis.core.errors import NothingFound
    from tamis.core.registry import unknown
    from tamis.eval.needle import needle_tasks
    from tamis.eval.questions import load_questions
    from tamis.eval.ruler import QA, RULER, Ruler, ruler_tasks
    from tamis.eval.tasks import Fill, qa_tasks, question_files

    for name in names:
        if name not in (*KINDS, *RULER):
            raise InvalidInput(unknown("task", name, [*KINDS, *RULER]))
    if not names:
        raise InvalidInput(f"--tasks names none. Choices: {', '.join((*KINDS, *RULER))}.")
    if fill is not None and "qa" not in names:
        raise InvalidInput(
            f"--fill {fill} fills qa prompts, and --tasks names {', '.join(names)}; add qa and its --data, or leave "
            "--fill out (needle and RULER prompts are as long as --tokens says)."
        )
    files = question_files(data)
    if "qa" in names and not files:
        raise NothingFound("qa needs question sets: name files or folders with --data.")
    haystack = [] if names == ["qa"] else haystack_of(llm, docs, lengths)
    questions = [q for file in files for q in load_questions(file)] if names != ["qa"] else []
    tasks: list[Task] = []
    for name in dict.fromkeys(names):
        if name == "qa":
            tasks += qa_tasks(files, limit, None if fill is None else Fill(llm.template, fill))
        elif name == "needle":
            tasks += needle_tasks(llm.template, haystack, lengths, size=limit, seed=seed)
        else:
            wanted = [name] if name in RULER else list(RULER)
            if name == "ruler" and not questions:
                typer.echo("qa_1 and qa_2 are left out: they need question sets (--data).", err=True)
                wanted = [w for w in wanted if w not in QA]
            for length in lengths:
                ruler = Ruler(llm.template, length, haystack, questions, seed)
                tasks += ruler_tasks(ruler, wanted, size=limit)
    if twice := {t.name for t in tasks if [u.name for u in tasks].count(t.name) > 1}:
        raise InvalidInput(f"{', '.join(sorted(twice))} would run twice; name each task once, and no two files alike.")
    return tasks


def _show(found: Answers, report: dict[str, Any]) -> None:
    """One line per group, variant and metric."""
    print(f"{'task':32}{'variant':12}{'metric':12}{'n':>5}  {'mean and 95 %':24}{'minus dense'}")
    for cell in found.cells:
        difference = f"{cell.difference}" if found.compared(cell) else ""
        if found.compared(cell) and cell.within_1pct is not None:
            difference += "  within 1 %" if cell.within_1pct else "  not shown to be within 1 %"
        mean = cell.mean
        print(f"{cell.group:32}{cell.variant:12}{cell.metric:12}{mean.n:>5}  {mean!s:24}{difference}".rstrip())
    if found.skipped:
        print(f"left out, too long for the model: {len(found.skipped)} ({', '.join(found.skipped[:3])} …)")
    if not found.complete:
        print(f"the deadline came first; the same command goes on from {report['log']}")
