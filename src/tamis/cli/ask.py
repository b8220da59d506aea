"""`tamis ask`: answer a question from documents."""

from __future__ import annotations

import json as jsonlib
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from tamis.cli.options import (
    STARTED,
    AcceptBlock,
    Adapter,
    Blend,
    CacheDir,
    ChunkTokens,
    Decode,
    DecodeBudget,
    DecodeLocal,
    Device,
    Dtype,
    Forecast,
    Json,
    Kv,
    Model,
    Offload,
    Rebuild,
    Recompute,
    Store,
    Yarn,
    load,
    progress,
)
from tamis.core.errors import NothingFound

if TYPE_CHECKING:
    from tamis.corpus import AddReport, Hit
    from tamis.engine.answer import Answer, Comparison
    from tamis.engine.knowledge import Added, KnowledgeBase

SKIPPED_SHOWN = 3  # reasons in one error, at most


def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    docs: Annotated[list[str], typer.Option("--docs", "-d", help="Files, folders or globs; may be repeated.")],
    model: Model = "smollm2",
    prefill: Annotated[str, typer.Option(help="dense, sift, blocks, forecast, reuse, blend or prefix.")] = "sift",
    selector: Annotated[str, typer.Option(help="How sift chooses tiles: sampled, threshold, stored, …")] = "sampled",
    mass: Annotated[float, typer.Option(help="Share of the attention that sampled and oracle keep.")] = 0.9,
    min_tokens: Annotated[int | None, typer.Option(help="Prompt length from which sift is used.")] = None,
    chunk_tokens: ChunkTokens = None,
    recompute: Recompute = 0.15,
    blend: Blend = "attention",
    accept_block_attention: AcceptBlock = False,
    adapter: Adapter = None,
    cache_dir: CacheDir = None,
    kv: Kv = "auto",
    decode: Decode = "dense",
    decode_budget: DecodeBudget = 0.075,
    decode_local: DecodeLocal = None,
    forecast: Forecast = None,
    offload: Offload = "none",
    passages: Annotated[int, typer.Option("--passages", "-k", min=1, help="Passages in the prompt, at most.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer, at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the draw when temperature is not 0.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Run dense and --prefill on the same prompt.")] = False,
    recall: Annotated[bool, typer.Option("--recall", help="Measure the attention mass kept (slow).")] = False,
    store: Store = None,
    rebuild: Rebuild = False,
    device: Device = None,
    dtype: Dtype = None,
    yarn: Yarn = None,
    json: Json = False,
) -> None:
    """Answer QUESTION from documents, cite the passages, and report what was computed."""
    from tamis.engine.knowledge import default_store
    from tamis.engine.sampling import Sampling

    choices = {"selector": selector, "mass": mass, "min_tokens": min_tokens, "chunk_tokens": chunk_tokens}
    choices |= {"recompute": recompute, "blend": blend, "accept_block_attention": accept_block_attention}
    choices |= {"kv": kv, "decode": decode, "decode_budget": decode_budget, "decode_local": decode_local}
    choices |= {"forecast": forecast, "offload": offload, "adapter": adapter, "cache_dir": cache_dir}
    with (
        load(model, device, dtype, yarn, prefill=prefill, **choices) as llm,
        llm.corpus(store or default_store(llm.spec(llm.policy)), rebuild=rebuild) as base,
    ):
        with progress("indexing") as step:
            added = base.add_files(docs, observe=llm.policy.needs_records, on_index=step)
        begin = time.perf_counter()
        hits = _search(base, question, passages, added.files)
        documents = llm.fit(question, hits, room=max_tokens)
        took, notes = time.perf_counter() - begin, _notes(added, len(hits) - len(documents), begin - STARTED)
        # the instruction asks for a sentence or two; small models go round in circles after that
        sampling = Sampling(max_new_tokens=max_tokens, temperature=temperature, seed=seed, stop=("\n\n",))
        if compare:
            both = llm.compare(question, documents, sampling=sampling, measure_recall=recall)
            _print_comparison(both.with_retrieval(took, notes), json)
        else:
            show = None if json else _show
            answer = llm.generate(question, documents, sampling=sampling, on_text=show, measure_recall=recall)
            _print_answer(answer.with_retrieval(took, notes), json)


def _search(base: KnowledgeBase, question: str, passages: int, files: AddReport) -> list[Hit]:
    """The hits; where there are none, the error also names the files that could not be read."""
    try:
        return base.search(question, passages, within=files.sources)
    except NothingFound as e:
        skipped = "".join(f" Skipped: {s.reason}" for s in files.skipped[:SKIPPED_SHOWN])
        raise NothingFound(f"{e}{skipped}") from e


def _notes(added: Added, dropped: int, started_s: float) -> list[str]:
    files = added.files
    read = f"{len(files.sources)} files ({len(files.read)} read, {files.unchanged} unchanged)"
    notes = [f"{started_s:.1f} s from the start of the command to the question"]
    notes.append(f"{read}, {added.indexed} passages indexed")
    notes += [f"skipped {s.path}: {s.reason}" for s in files.skipped]
    notes += list(files.warnings)
    if dropped:
        notes.append(f"{dropped} of the passages found did not fit the model's context")
    return notes


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _print_answer(answer: Answer, json: bool) -> None:
    if json:
        print(jsonlib.dumps(answer.to_dict()))
        return
    print()
    _print_sources(answer)
    typer.echo(f"\n{answer.report}", err=True)


def _print_comparison(both: Comparison, json: bool) -> None:
    if json:
        print(jsonlib.dumps(both.to_dict()))
        return
    for name, answer in (("dense", both.dense), (both.sift.report.prefill.asked, both.sift)):
        print(f"{name}: {answer.text}\n{_indent(str(answer.report))}\n")
    _print_sources(both.sift)
    same = "same first token" if both.same_first_token else "another first token"
    print(f"\nspeed-up {both.speedup:.2f}x to the first token, KL {both.kl:.4f}, {same}")


def _print_sources(answer: Answer) -> None:
    print("\nSources, best match first (* bears the answer out):")
    best = max((s.support for s in answer.sources), default=0.0)
    for s in answer.sources:
        mark = "*" if s.support >= 0.5 and s.support >= 0.8 * best else " "
        place = os.path.relpath(s.place) if os.path.isabs(s.place) else s.place
        print(f" {mark} [{s.number}] {place if not place.startswith('..') else s.place}  {s.title}")


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
