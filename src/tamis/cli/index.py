"""`tamis index`: build or refresh a store, list it, verify it, remove from it."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tamis.cli.options import Device, Dtype, Json, Model, Store, Yarn, load, progress
from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown

if TYPE_CHECKING:
    from tamis.engine.knowledge import KnowledgeBase


def index(
    docs: Annotated[list[str] | None, typer.Argument(help="Files, folders or globs to read and observe.")] = None,
    model: Model = "smollm2",
    store: Store = None,
    target_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a passage, about.")] = 384,
    listing: Annotated[bool, typer.Option("--list", help="List files and passages.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every record through and check it.")] = False,
    remove: Annotated[list[str] | None, typer.Option("--remove", help="Forget a file or folder.")] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Drop records that do not fit this model.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Sizes: of the store, or of a model's --shape.")] = False,
    shape: Annotated[str | None, typer.Option(help="With --stats: a model shape, such as llama-3.1-8b.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    yarn: Yarn = None,
    json: Json = False,
) -> None:
    """Read DOCS and observe what is new; or list, verify, remove, or count."""
    if stats and shape is not None:
        _show(_shape_stats(shape), json)
        return
    if shape is not None:
        raise InvalidInput("--shape only goes with --stats.")
    if not (docs or listing or verify or remove or stats or rebuild):
        raise InvalidInput("nothing to do; name documents, or one of --list, --verify, --remove, --stats, --rebuild.")
    from tamis.engine.knowledge import default_store

    with (
        load(model, device, dtype, yarn) as llm,
        llm.corpus(store or default_store(llm.spec(llm.policy)), rebuild=rebuild) as base,
    ):
        _show(_run(base, docs or [], remove or [], listing, verify, stats, target_tokens, rebuild), json)


def _run(
    base: KnowledgeBase,
    docs: list[str],
    remove: list[str],
    listing: bool,
    verify: bool,
    stats: bool,
    target_tokens: int,
    rebuild: bool,
) -> dict[str, Any]:
    from dataclasses import asdict

    result: dict[str, Any] = {"store": str(base.corpus.path)}
    if remove:
        counts = {path: base.corpus.remove(path) for path in remove}
        unknown_paths = [path for path, n in counts.items() if not n]
        if unknown_paths:
            raise InvalidInput(f"the store knows no file under {', '.join(unknown_paths)}. See tamis index --list.")
        result["removed_files"] = sum(counts.values())
        result["removed_records"] = base.drop_unused()
    if docs:
        with progress("indexing") as step:
            added = base.add_files(docs, target_tokens=target_tokens, on_index=step)
        result |= {
            "files": len(added.files.sources),
            "read": len(added.files.read),
            "unchanged": added.files.unchanged,
            "indexed": added.indexed,
            "skipped": [f"{s.path}: {s.reason}" for s in added.files.skipped],
            "warnings": list(added.files.warnings),
        }
    elif rebuild:
        with progress("indexing") as step:
            result["indexed"] = base.index(on_progress=step)
    if verify:
        result["problems"] = [
            {"document": p.document_id.hex(), "reason": p.reason} for p in base.indexer.store.verify()
        ]
        result["verified"] = len(base.indexer.store)
    if listing:
        found = sorted(base.corpus.passages(), key=lambda p: (p.source, p.first_line))
        result["passages"] = [{"id": p.id, "place": p.place, "title": p.title} for p in found]
    if stats:
        result["stats"] = asdict(base.indexer.store.stats())
    return result


def _shape_stats(shape: str) -> dict[str, Any]:
    from dataclasses import asdict

    from tamis.index.stats import SHAPES, metadata_ratio

    if shape not in SHAPES:
        raise InvalidInput(unknown("shape", shape, list(SHAPES)))
    return {"shape": shape, **metadata_ratio(**asdict(SHAPES[shape]))}


def _show(result: dict[str, Any], json: bool) -> None:
    if json:
        print(jsonlib.dumps(result))
    else:
        for name, value in result.items():
            if isinstance(value, dict):
                print(f"{name}:")
                for part, number in value.items():
                    print(f"  {part}: {number:.4g}" if isinstance(number, float) else f"  {part}: {number}")
            elif isinstance(value, list):
                print(f"{name}: {len(value)}")
                for row in value:
                    print("  " + (row if isinstance(row, str) else "  ".join(str(v) for v in row.values())))
            else:
                print(f"{name}: {value}")
    if result.get("problems"):
        raise typer.Exit(1)
