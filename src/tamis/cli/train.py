"""`tamis train`: small additions to a stock model, learnt from the model itself."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tamis.cli.options import Device, Dtype, Json, Model

if TYPE_CHECKING:
    from tamis.train.block_adapter import Trained, TrainingData

app = typer.Typer(help="Train additions to a stock model.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `tamis train` a group while it has few commands."""


@app.command("block-adapter")
def block_adapter(
    data: Annotated[list[str], typer.Option("--data", help="Question sets, or folders of them. May be repeated.")],
    out: Annotated[str, typer.Option("--out", help="Folder of the adapter; a run that was stopped goes on there.")],
    model: Model = "smollm2",
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 600,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop and save before so many minutes are over.")] = None,
    tokens: Annotated[int, typer.Option(help="Longest prompt.")] = 4096,
    documents: Annotated[str, typer.Option(help="Fewest and most documents of a prompt.")] = "4-20",
    holdout: Annotated[float, typer.Option(help="Share of the questions that is never trained on.")] = 0.25,
    checks: Annotated[int, typer.Option(min=0, help="Held-out questions that are measured before and after.")] = 16,
    accumulate: Annotated[int, typer.Option(help="Prompts of one step.")] = 4,
    rank: Annotated[int, typer.Option(help="Rank of the adapter.")] = 16,
    targets: Annotated[str, typer.Option(help="attention (q, k, v, o), or all: the MLP's projections too.")] = (
        "attention"
    ),
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-4,
    answers: Annotated[str, typer.Option(help="Answers to follow: gold, teacher (the model's own), or both.")] = "both",
    question_weight: Annotated[float, typer.Option(help="Weight of the question's rows beside the answer's.")] = 0.3,
    ce: Annotated[float, typer.Option(help="Weight of the cross entropy on the answers beside the KL.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    checkpointing: Annotated[
        bool | None, typer.Option(help="Recompute activations: less memory, a third more time. Default: on a GPU.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Teach a model to read documents that were encoded alone, so that `prefill=reuse` answers as dense does."""
    from tamis.model.adapter_info import import_peft
    from tamis.model.source import load_model
    from tamis.train.block_adapter import train_block_adapter
    from tamis.train.settings import TrainSettings

    settings = TrainSettings(
        steps=steps, tokens=tokens, documents=_range(documents), accumulate=accumulate, rank=rank, alpha=2 * rank,
        targets=targets, lr=lr, answers=answers, question_weight=question_weight, ce=ce, seed=seed,
        checkpointing=checkpointing,
    )  # fmt: skip
    import_peft()  # raises before the model is loaded
    asked = training_data(data, holdout, checks)
    loaded = load_model(model, device=device, dtype=dtype, on_convert=converting)
    with progress_bar("steps") as note:
        made = train_block_adapter(loaded, asked, settings, out, minutes=minutes, note=note)
    if json:
        print(jsonlib.dumps({"model": model, "questions": len(asked.examples)} | made.to_dict()))
    else:
        _show(made, len(asked.examples))


def training_data(data: Sequence[str], holdout: float, checks: int) -> TrainingData:
    """The questions of the sets, split by `model.adapter.held_out`; the first `checks` held-out ones of each set in
    turn are measured. Raises what `load_questions` does, and InvalidInput for a share that leaves none."""
    from tamis.core.errors import InvalidInput
    from tamis.eval.questions import Question, load_questions
    from tamis.eval.tasks import SHORT, question_files
    from tamis.model.adapter_info import held_out
    from tamis.train.block_adapter import TrainingData
    from tamis.train.layouts import Example

    def example(q: Question) -> Example:
        return Example(f"{q.question} {SHORT}", q.answers, tuple((d.title, d.text) for d in q.docs), q.gold)

    files = question_files(data)
    sets = [load_questions(file) for file in files]
    taught = [example(q) for questions in sets for q in questions if not held_out(q.question, holdout)]
    kept = [[example(q) for q in questions if held_out(q.question, holdout)] for questions in sets]
    most = max(map(len, kept), default=0)
    measured = [examples[i] for i in range(most) for examples in kept if i < len(examples)][:checks]
    if not taught:
        raise InvalidInput(f"--holdout {holdout} keeps all {sum(map(len, sets))} questions out of training; lower it.")
    return TrainingData(taught, measured, tuple(file.stem for file in files), holdout)


def converting(name: str) -> None:
    """A line on stderr while a GGUF file is converted."""
    typer.echo(f"converting {name} once; later starts use the result …", err=True)


def _range(text: str) -> tuple[int, int]:
    from tamis.core.errors import InvalidInput

    few, _, many = text.partition("-")
    if not (few.isascii() and few.isdigit() and (many or few).isascii() and (many or few).isdigit()):
        raise InvalidInput(f"--documents is {text!r}; give the fewest and the most, such as 4-20.")
    return int(few), int(many or few)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar that also says how far the student is from its teacher."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        task = bars.add_task("", total=None)

        def note(done: int, total: int, words: str) -> None:
            bars.update(task, completed=done, total=total, description=words)

        yield note


def _show(made: Trained, questions: int) -> None:
    """Where it is, and the held-out questions before and after."""
    early = ", the time was up" if made.out_of_time else ""
    print(f"{made.folder}: {made.info.steps} steps on {questions} questions{early}")
    before: dict[str, Any] = made.info.result["before"]
    after: dict[str, Any] = made.info.result["after"]
    names = {"kl": "KL, first token", "kl_answer": "KL, answer", "agreement": "agreement"}
    for key, name in names.items():
        if key in before:
            print(f"held out, {name:16} {before[key]:.4f} -> {after[key]:.4f}")


from tamis.cli import train_forecast as _train_forecast  # noqa: E402, F401 - adds its command to `app`
