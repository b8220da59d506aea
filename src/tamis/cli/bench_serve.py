"""`tamis bench serve`: a server under load from a second process, or what it costs a single user."""

from __future__ import annotations

import json as jsonlib
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tamis.cli.bench import Kept, Results, app
from tamis.cli.options import Json, Model

if TYPE_CHECKING:
    from tamis.bench.serve import Load, Outcomes, Slo
    from tamis.bench.serve_lone import Took
    from tamis.engine.llm import LLM

STOP_S = 60  # a server that was asked to stop has to be gone
Url = Annotated[str | None, typer.Option(help="A running server, http://HOST:PORT. Default: one is started.")]
Key = Annotated[str, typer.Option("--api-key", help="With --url: sent with every request.")]
Policies = Annotated[str, typer.Option(help="Of dense, sift, reuse, prefix, selfindex, and all: in turn, mixed.")]
Trace = Annotated[
    str | None, typer.Option(help="Folder of a RAGPulse or Mooncake trace, or Mooncake's JSONL file. Default: Zipf.")
]
Rate = Annotated[float | None, typer.Option(help="Poisson arrivals a second. Default: the trace's times; Zipf: 1.")]
Speed = Annotated[float, typer.Option(help="A trace's times so many times faster.")]
Cut = Annotated[int | None, typer.Option(min=1, help="Cut each piece of a prompt to so many tokens.")]
Output = Annotated[int | None, typer.Option(min=2, help="Tokens of an answer, at most.")]
ServeArgs = Annotated[str, typer.Option("--serve-args", help="More options for the server that is started.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds that a request may take.")]
Out = Annotated[Path | None, typer.Option(help="Write the numbers and every time to this JSON file.")]
Plot = Annotated[Path | None, typer.Option(help="Then draw them into this file (.svg, .png); needs matplotlib.")]
Lone = Annotated[bool, typer.Option("--lone", help="One user: the same prompts by the library and the server.")]


@app.command("serve")
def serve(
    model: Model = "smollm2",
    url: Url = None,
    api_key: Key = "",
    policies: Policies = "dense,sift,reuse,selfindex,all",
    trace: Trace = None,
    requests: Annotated[int, typer.Option(min=1, help="How many, of each policy.")] = 32,
    rate: Rate = None,
    speed: Speed = 1.0,
    cut_tokens: Cut = None,
    output_tokens: Output = None,
    slo_ttft: Annotated[float, typer.Option(help="Seconds to the first token that are good.")] = 2.0,
    slo_itl: Annotated[float, typer.Option(help="Seconds between tokens, in an answer's mean, that are good.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of arrivals and synthetic documents.")] = 0,
    timeout: Timeout = 300.0,
    serve_args: ServeArgs = "",
    lone: Lone = False,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="--lone: tokens of a prompt.")] = 256,
    out: Out = None,
    plot: Plot = None,
    results: Results = None,
    json: Json = False,
) -> None:
    """TTFT, inter-token and end-to-end percentiles, goodput and tokens/s of a server under an open loop of requests.

    MODEL may be shape:NAME, such as shape:llama-3.1-8b: random weights, for speed alone.
    """
    from tamis.bench.serve import Pace, Slo, case_of, requests_of, table, workload_of

    kept = Kept("serve", results)
    if lone:
        made = _lone(model, prompt_tokens, output_tokens or 64, requests, kept)
        print(jsonlib.dumps(made | {"results": kept.file}) if json else _lone_table(made))
        return
    workload = workload_of(trace, speed=speed)
    pace = Pace(requests, rate if rate or trace else 1.0, cut_tokens, output_tokens, seed)
    sent = requests_of(workload, pace)
    names = [name.strip() for name in policies.split(",") if name.strip()]
    with _server(model, url, api_key, names, serve_args, timeout) as server:
        case = case_of(server.model.removeprefix("shape:"), workload, pace)
        made = _measure(server, names, sent, case, Slo(slo_ttft, slo_itl), kept)
    made |= {"workload": workload.about, "model": model}
    if out is not None:
        out.write_text(jsonlib.dumps(made, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        from tamis.bench.serve_plot import draw

        draw(made, plot)
    del made["values"]
    print(jsonlib.dumps(made | {"results": kept.file}) if json else table(made))


class Server(NamedTuple):
    """Where requests go: its load, its model's name, and the key of each policy, whose stored documents are its own."""

    load: Load
    model: str
    keys: dict[str, str]


def _measure(
    server: Server, names: Sequence[str], sent: list[dict[str, Any]], case: str, slo: Slo, kept: Kept
) -> dict[str, Any]:
    """One policy after the other; one that fails as a whole is told and does not keep the others from running."""
    from tamis.bench.serve import rows_of, run_policy

    summaries, values = [], {}
    for name in names:
        kept.note(f"{name}: {len(sent)} requests …")
        try:
            found: Outcomes = run_policy(name, sent, server.load, server.model, key=server.keys.get(name, ""))
        except OSError as e:
            kept.note(f"{name} failed: {e}")
            continue
        summaries.append(found.summary(sent, slo))
        values[name] = found.values()
        kept.keep(rows_of(case, found, summaries[-1]))
        kept.note(f"{name}: {summaries[-1]['done']} of {len(sent)} in {summaries[-1]['span_s']:.1f} s")
    limits = {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s}
    return {"case": case, "slo": limits, "policies": summaries, "values": values}


@contextmanager
def _server(
    model: str, url: str | None, key: str, names: Sequence[str], more: str, timeout_s: float
) -> Iterator[Server]:
    """The server that runs, or one that is started for the block, with a key for each policy."""
    import functools

    from tamis.bench.serve_load import in_process

    if url is not None:
        address = url.rstrip("/").removesuffix("/v1")
        load = functools.partial(in_process, address, timeout_s=timeout_s)
        yield Server(load, _model_at(address, key), dict.fromkeys(names, key))
        return
    from tamis.server.keys import new_key

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        keys = {name: new_key(file, name) for name in names}
        command = [sys.executable, "-m", "tamis.cli.main", "serve", model, "--port", "0", "--json", "--name", model]
        command += ["--prefill", "dense", "--api-key-file", str(file), "--grace", "5", *shlex.split(more)]
        with _started(command, Path(folder) / "log") as address:
            yield Server(functools.partial(in_process, address, timeout_s=timeout_s), model, keys)


@contextmanager
def _started(command: Sequence[str], log: Path) -> Iterator[str]:
    """A server's process until the block ends; its address."""
    from tamis.core.errors import Unavailable

    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None, "it was asked for"
            line = process.stdout.readline()
            if not line:
                process.wait()
                said = log.read_text(encoding="utf-8").strip()[-1500:]
                raise Unavailable(f"the server ended with {process.returncode} before it listened: {said}")
            yield str(jsonlib.loads(line)["url"]).removesuffix("/v1")
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _model_at(address: str, key: str) -> str:
    import urllib.request

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    asked = urllib.request.Request(f"{address}/v1/models", headers=headers)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return str(jsonlib.load(answer)["data"][0]["id"])


def _lone(model: str, prompt_tokens: int, output_tokens: int, requests: int, kept: Kept) -> dict[str, Any]:
    """The library and a server on the same model in this process; the server's user is another process."""
    import numpy as np

    from tamis.bench.serve_lone import compare, rows_of, summary
    from tamis.cli.options import load as load_model

    with load_model(model, None, None, prefill="dense") as llm, ExitStack() as stack:
        llm.stop_tokens = frozenset()  # answers of one length
        address = stack.enter_context(_live(llm, model))
        chance = np.random.default_rng(0)
        most = llm.runner.model.config.vocab_size
        prompts = [chance.integers(0, most, prompt_tokens).tolist() for _ in range(requests + 1)]

        def library(prompt: Sequence[int]) -> Took:
            return _by_library(llm, prompt, output_tokens)

        def server(prompt: Sequence[int]) -> Took:
            return _by_server(address, model, prompt, output_tokens)

        made = compare(library, server, prompts)
    case = f"{model.removeprefix('shape:')}/lone/{prompt_tokens}+{output_tokens}"
    kept.keep(rows_of(case, made))
    return {"case": case, "requests": requests, **summary(made)}


@contextmanager
def _live(llm: LLM, name: str) -> Iterator[str]:
    """A server of `llm` on loopback, in a thread of this process; its address."""
    import asyncio
    import threading

    from tamis.engine.library import Library
    from tamis.engine.service import Engine
    from tamis.server.app import create_app
    from tamis.server.run import GracefulServer
    from tamis.server.settings import ServerSettings

    listening, ports = threading.Event(), []

    def started(port: int) -> None:
        ports.append(port)
        listening.set()

    with Engine(llm) as engine:
        library = Library(engine, None)
        app = create_app(engine, library, ServerSettings(name, grace_s=5.0))
        server = GracefulServer(app, host="127.0.0.1", port=0, on_start=started)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
        thread.start()
        try:
            if not listening.wait(STOP_S):
                raise OSError("the server did not listen in time.")
            yield f"http://127.0.0.1:{ports[0]}"
        finally:
            server.should_exit = True
            thread.join(STOP_S)
            library.close()


def _by_library(llm: LLM, prompt: Sequence[int], output_tokens: int) -> Took:
    """As `LLM.generate` does it, without a question's words."""
    import time

    from tamis.bench.serve_lone import Took
    from tamis.engine.sampling import Sampling, TextStream
    from tamis.prompt.segments import Prompt

    begin = time.perf_counter()
    start = llm.prefill(Prompt.of([("question", list(prompt))]), room_tokens=output_tokens)
    text, first = TextStream(llm.tokenizer, ()), 0.0
    for token in llm.runner.decode(start, Sampling(max_new_tokens=output_tokens), frozenset()):
        text.push(token)
        first = first or time.perf_counter()
    text.finish()
    end = time.perf_counter()
    return Took(first - begin, (end - first) / max(1, output_tokens - 1), end - begin)


def _by_server(address: str, model: str, prompt: Sequence[int], output_tokens: int) -> Took:
    from tamis.bench.serve_load import in_process
    from tamis.bench.serve_lone import Took

    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    (made,) = in_process(address, [{"at_s": 0.0, "path": "/v1/completions", "body": body}])
    if made["error"] or not made["pieces_s"]:
        raise OSError(f"the server did not answer: {made['error'] or 'no text'}")
    first, new = made["pieces_s"][0], made["usage"]["completion_tokens"]
    return Took(first, (made["end_s"] - first) / max(1, new - 1), made["end_s"])


def _lone_table(made: dict[str, Any]) -> str:
    lines = [made["case"], f"{'':8} {'library':>9} {'server':>9} {'ratio':>7}"]
    for name in ("ttft_s", "itl_s", "e2e_s"):
        one = made[name]
        lines.append(f"{name:8} {one['library']:>9.4f} {one['server']:>9.4f} {one['ratio']:>7.3f}")
    return "\n".join(lines)
