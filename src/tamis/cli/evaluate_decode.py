"""`tamis eval decode`: what reading a share of the keys, or smaller ones, does to answers and to long texts."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tamis.cli.bench import Results, record
from tamis.cli.evaluate_answers import tasks_of
from tamis.cli.options import Device, Dtype, Json, Model, Yarn, load, progress
from tamis.core.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tamis.bench.results import Row
    from tamis.engine.llm import LLM
    from tamis.eval.decode import Decoded, Text
    from tamis.eval.decode_overlap import Found
    from tamis.eval.decoders.base import Method

app = typer.Typer()
QUESTIONS = ("qa", "ruler", "needle")
TEXT_TASKS = ("perplexity", "overlap")
METHODS = "full,selfindex,quest,quest-equal,snapkv,doublesparse,int4"
SHOWN = ("f1", "em", "match_all", "match_part", "found", "perplexity", "perplexity_ratio", "kl", "agreement", "density")


@app.command()
def decode(
    data: Annotated[
        list[str] | None, typer.Option("--data", help="Question sets, or folders of them. May be repeated.")
    ] = None,
    model: Model = "smollm2",
    methods: Annotated[str, typer.Option(help="Comma-separated; full always runs. Also kvpress:NAME.")] = METHODS,
    budgets: Annotated[str, typer.Option(help="Shares of the tokens.")] = "0.02,0.05,0.075,0.15,0.3,1.0",
    names: Annotated[
        str, typer.Option("--tasks", help="Comma-separated: qa, ruler, needle, perplexity, overlap.")
    ] = "qa,needle",
    tokens: Annotated[int, typer.Option(min=64, help="Length of every prompt.")] = 4096,
    generated: Annotated[int, typer.Option(min=2, help="Tokens that follow a prompt of the perplexity task.")] = 4096,
    limit: Annotated[int, typer.Option(min=1, help="Questions per set and items per task.")] = 20,
    texts: Annotated[int, typer.Option(min=1, help="Texts of the perplexity task.")] = 1,
    dense_layers: Annotated[
        int, typer.Option(min=0, help="First layers that quest and doublesparse read in full; 2 as published.")
    ] = 2,
    share: Annotated[float, typer.Option(help="Share of the tokens that the overlap task chooses.")] = 0.075,
    docs: Annotated[list[str] | None, typer.Option("--docs", help="Long texts, haystacks. Default: built-in.")] = None,
    seed: Annotated[int, typer.Option(help="Of needle and RULER items.")] = 0,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, help="Limit of an answer. Default: 24, and RULER's own.")
    ] = None,
    deadline_s: Annotated[float | None, typer.Option(min=0, help="Begin nothing that ends later than this.")] = None,
    log: Annotated[str | None, typer.Option(help="JSON-lines file of all outcomes, kept and resumed.")] = None,
    results: Results = None,
    device: Device = None,
    dtype: Dtype = None,
    yarn: Yarn = None,
    json: Json = False,
) -> None:
    """Scores, KL, agreement, perplexity and bytes of ways to attend while an answer is made, at equal prompts.

    All go on from the same prefill with exact attention. quest-equal is Quest at the bytes that selfindex reads.
    """
    from tamis.eval.answers import Log, settings_of
    from tamis.eval.decode import eval_decode
    from tamis.eval.decode_overlap import overlap_study
    from tamis.eval.decoders.methods import methods_of

    asked = _parts(names)
    chosen = methods_of(_parts(methods), _shares(budgets), dense_layers=dense_layers)
    with load(model, device, dtype, yarn) as llm, progress("prompts") as step:
        questions = [name for name in asked if name not in TEXT_TASKS]
        given = {"limit": limit, "lengths": [tokens], "seed": seed, "fill": tokens if "qa" in questions else None}
        tasks = tasks_of(llm, questions, data or [], docs or [], **given) if questions or not asked else []  # type: ignore[arg-type]
        reading = _texts(llm, docs or [], tokens, generated, texts) if "perplexity" in asked else []
        settings = settings_of(llm) | {"dense_layers": dense_layers}
        kept = {"log": Log(Path(log) if log else None, settings), "deadline_s": deadline_s, "note": step}
        found = eval_decode(llm, tasks, chosen, texts=reading, answer_tokens=answer_tokens, **kept)  # type: ignore[arg-type]
        overlap: list[Found] = []
        if "overlap" in asked and found.complete:
            overlap = overlap_study(llm, _long_text(llm, docs or [], tokens), share=share)
        sizes, case = size_table(llm, chosen, tokens), f"{llm.name}/{llm.dtype}"
    if not found.outcomes and not overlap:
        raise InvalidInput("nothing was measured: give shorter prompts (--tokens) or a later --deadline-s.")
    rows = rows_of(found, case, tokens) + _size_rows(sizes, f"{case}/bytes/{tokens}")
    rows += _overlap_rows(overlap, f"{case}/overlap/{tokens}")
    report = {"model": model, "tokens": tokens, "results": record(rows, "decode_quality", results)}
    _print(report, found, sizes, overlap, json=json)


def rows_of(found: Decoded, case: str, tokens: int) -> list[Row]:
    """The rows of all cells; a group of several tasks gets the prompts' length into its case, as single tasks have."""
    from tamis.bench.results import Row

    made = []
    for group, n, variant, metric, values, unit in found.rows():
        named = group if "/" in group else f"{group}/{tokens}"
        made.append(Row(f"{case}/{named}/{n}", variant, metric, *values, unit))
    return made


def size_table(llm: LLM, methods: Sequence[Method], tokens: int) -> dict[str, dict[str, float]]:
    """For each method and budget the bytes of a token and KV head, a mean over layers: "held", and "read" in a step.

    For selfindex also the share of its tokens that Quest may read for the same bytes, in pages of 16 and in the pages
    of quest-equal; below 0 its bounds alone are more.
    """
    from tamis.eval.decoders.methods import labels
    from tamis.eval.decoders.quest import PAGE
    from tamis.eval.decoders.selfindex import equal_page, equal_share

    shape = llm.runner.geometry
    table: dict[str, dict[str, float]] = {}
    for method in methods:
        made = method.sizes(tokens, shape.head_dim, shape.n_layers)
        page = equal_page(min(s.read for s in made), shape.head_dim)
        for label, size in zip(labels(method), made, strict=True):
            table[label] = {"held": size.held, "read": size.read}
            if method.name == "selfindex":
                for n in dict.fromkeys((PAGE, page)):
                    table[label][f"quest_share_page{n}"] = equal_share(size.read, shape.head_dim, n)
    return table


def _texts(llm: LLM, docs: list[str], tokens: int, generated: int, count: int) -> list[Text]:
    from tamis.eval.decode import Text

    each = tokens + generated + 1
    stream = _long_text(llm, docs, each * count)
    return [
        Text(f"perplexity/{tokens}+{generated}", str(i), tuple(stream[i * each : (i + 1) * each]), tokens)
        for i in range(count)
    ]


def _long_text(llm: LLM, docs: list[str], tokens: int) -> list[int]:
    """So many tokens of text. Raises NothingFound where there are fewer."""
    from tamis.bench.text import passages
    from tamis.core.errors import NothingFound

    found = passages(tokens * 5 // 4, llm.template.count, docs)
    made: list[int] = llm.tokenizer("\n\n".join(p.text for p in found), add_special_tokens=False)["input_ids"]
    if len(made) < tokens:
        raise NothingFound(
            f"the text has {len(made)} tokens; {tokens} are needed. Name more with --docs, or ask for less."
        )
    return made[:tokens]


def _parts(listed: str) -> list[str]:
    return [part.strip() for part in listed.split(",") if part.strip()]


def _shares(listed: str) -> list[float]:
    try:
        return [float(part) for part in _parts(listed)]
    except ValueError as e:
        raise InvalidInput(f"--budgets is {listed!r}; give shares of the tokens, such as 0.05,0.075.") from e


def _size_rows(sizes: dict[str, dict[str, float]], case: str) -> list[Row]:
    from tamis.bench.results import Row

    units = {"held": ("bytes_per_token", "B"), "read": ("read_bytes_per_token", "B")}
    return [
        Row(case, label, *_named(units.get(name, (name, "1")), value))
        for label, row in sizes.items()
        for name, value in row.items()
    ]


def _overlap_rows(found: Sequence[Found], case: str) -> list[Row]:
    from tamis.bench.results import Row

    units = {"overlap": "1", "mass": "1", "bytes": "B"}
    made = []
    for f in found:
        where = case if f.layer == "mean" else f"{case}/layer-{f.layer}"
        for name, unit in units.items():
            metric = "read_bytes_per_token" if name == "bytes" else name
            made.append(Row(where, f.scorer, *_named((metric, unit), getattr(f, name))))
    return made


def _named(metric: tuple[str, str], value: float) -> tuple[str, float, float, float, str]:
    return metric[0], value, value, value, metric[1]


def _print(
    report: dict[str, Any],
    found: Decoded,
    sizes: dict[str, dict[str, float]],
    overlap: Sequence[Found],
    *,
    json: bool,
) -> None:
    """One JSON object, or tables."""
    if json:
        report |= {"complete": found.complete, "skipped": list(found.skipped), "bytes_per_token": sizes}
        print(jsonlib.dumps(report | {"tasks": found.summary(), "overlap": [vars(f) for f in overlap]}))
        return
    _show(found, sizes, overlap)
    if not found.complete:
        print("the deadline came first; with --log the same command goes on.")


def _show(found: Decoded, sizes: dict[str, dict[str, float]], overlap: Sequence[Found]) -> None:
    """Bytes, then a table for each group, then the study."""
    print(f"{'bytes a token and KV head':28}{'held':>9}{'read':>9}  Quest's share for the same bytes")
    for label, row in sizes.items():
        equal = [f"{v:.3f} ({n.rpartition('page')[2]}-token pages)" for n, v in row.items() if n.startswith("quest")]
        print(f"{label:28}{row['held']:9.1f}{row['read']:9.1f}  {', '.join(equal)}".rstrip())
    summary = found.summary()
    for group, variants in summary.items():
        metrics = [m for m in SHOWN if any(m in values for values in variants.values())]
        n = max(entry["n"] for entry in variants["full"].values())
        print(f"\n{f'{group}, {n}':28}" + "".join(f"{m:>24}" for m in metrics))
        for name, values in variants.items():
            print(f"{name:28}" + "".join(f"{_cell(values.get(m)):>24}" for m in metrics))
    if found.skipped:
        print(f"left out, too long for the model: {len(found.skipped)} ({', '.join(found.skipped[:3])} …)")
    if overlap:
        print(f"\n{'overlap study':44}{'layer':>6}{'bytes':>9}{'overlap':>9}{'mass':>9}")
    for f in overlap:
        print(f"{f.scorer:44}{f.layer:>6}{f.bytes:9.1f}{f.overlap:9.3f}{f.mass:9.3f}")


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "-"
    return f"{entry['mean']:.3f} [{entry['ci95'][0]:.3f}, {entry['ci95'][1]:.3f}]"
