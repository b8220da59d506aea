"""`tamis bench serve`: a server under load from a second process, or what it costs a single user."""

from __future__ import annotations

import json as jsonlib
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tamis.cli.bench import Kept, Results, app
from tamis.cli.options import Json, Model

if TYPE_CHECKING:
    from tamis.bench.serve import Load, Outcomes, Slo

STOP_S = 60  # a server that was asked to stop has to be gone
Url = Annotated[str | None, typer.Option(help="A running server, http://HOST:PORT. Default: one is started.")]
Key = Annotated[str, typer.Option("--api-key", help="With --url: sent with every request.")]
Policies = Annotated[str, typer.Option(help="Of dense, sift, reuse, prefix, selfindex, and all: in turn, mixed.")]
Trace = Annotated[
    str | None, typer.Option(help="Folder of a RAGPulse or Mooncake trace, or Mooncake's JSONL file. Default: Zipf.")
]
Rate = Annotated[
    float | None, typer.Option(help="Poisson arrivals a second. Default: the trace's times; Zipf: 1, on a CPU 0.5.")
]
Speed = Annotated[float, typer.Option(help="A trace's times so many times faster.")]
Cut = Annotated[
    int | None, typer.Option(min=1, help="Cut each piece of a prompt to so many tokens. Default: whole; 64 on a CPU.")
]
Output = Annotated[
    int | None, typer.Option(min=2, help="Tokens of an answer, at most. Default: the load's; 16 on a CPU.")
]
ServeArgs = Annotated[str, typer.Option("--serve-args", help="More options for the server that is started.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds that a request may take.")]
Warm = Annotated[
    int | None,
    typer.Option(min=0, help="Before each policy: 1, 2, 4, … and N unmeasured at once. Default: 4; 2 on a CPU."),
]
Limit = Annotated[float | None, typer.Option(min=1, help="Seconds of each policy; what is not done by then is cut.")]
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
    requests: Annotated[
        int | None, typer.Option(min=1, help="How many, of each policy. Default: 32; 6 on a CPU.")
    ] = None,
    rate: Rate = None,
    speed: Speed = 1.0,
    cut_tokens: Cut = None,
    output_tokens: Output = None,
    slo_ttft: Annotated[float, typer.Option(help="Seconds to the first token that are good.")] = 2.0,
    slo_itl: Annotated[float, typer.Option(help="Seconds between tokens, in an answer's mean, that are good.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of arrivals and synthetic documents.")] = 0,
    timeout: Timeout = 300.0,
    warm: Warm = None,
    limit_s: Limit = None,
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
    from tamis.bench.serve import Pace, Slo, case_of, requests_of, table, waves_of, workload_of

    kept = Kept("serve", results)
    if lone:
        from tamis.cli.bench_serve_lone import lone_table, run_lone

        made = run_lone(model, prompt_tokens, output_tokens or 64, requests or 32, serve_args, kept)
        print(jsonlib.dumps(made | {"results": kept.file}) if json else lone_table(made))
        return
    workload, usual = workload_of(trace, speed=speed), _usual(url)
    rate = rate if rate or trace else usual.rate
    pace = Pace(
        requests or usual.requests, rate, cut_tokens or usual.cut_tokens, output_tokens or usual.output_tokens, seed
    )
    waves = waves_of(workload, pace, usual.warm if warm is None else warm)
    load = Plan(requests_of(workload, pace), waves, Slo(slo_ttft, slo_itl), limit_s)
    names = [name.strip() for name in policies.split(",") if name.strip()]
    with server_of(model, url, api_key, names, serve_args, timeout=timeout, limit_s=limit_s) as server:
        case = case_of(server.model.removeprefix("shape:"), workload, pace)
        made = _measure(server, names, load, case, kept)
    made |= {"workload": workload.about, "model": model}
    if out is not None:
        out.write_text(jsonlib.dumps(made, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        from tamis.bench.serve_plot import draw

        draw(made, plot)
    del made["values"]
    print(jsonlib.dumps(made | {"results": kept.file}) if json else table(made))


class Usual(NamedTuple):
    """What is sent where nothing is said."""

    requests: int = 32
    rate: float = 1.0
    cut_tokens: int | None = None
    output_tokens: int | None = None
    warm: int = 4


def _usual(url: str | None) -> Usual:
    """Little on a CPU, which takes seconds for a prompt; a server elsewhere may have anything."""
    from tamis.bench.machine import device_of

    small = url is None and device_of(None).type == "cpu"
    return Usual(6, 0.5, 64, 16, 2) if small else Usual()


class Server(NamedTuple):
    """Where requests go: its load, its model's name, and the keys of each policy, the measured requests' and the warm
    ones', whose stored documents are their own."""

    load: Load
    model: str
    keys: dict[str, tuple[str, str]]
    address: str


class Plan(NamedTuple):
    """What each policy is sent, and before it; what is good; and the seconds that it may take."""

    sent: list[dict[str, Any]]
    waves: list[list[dict[str, Any]]]
    slo: Slo
    limit_s: float | None


def _measure(server: Server, names: Sequence[str], plan: Plan, case: str, kept: Kept) -> dict[str, Any]:
    """One policy after the other; one that fails as a whole is told and does not keep the others from running."""
    from tamis.bench.serve import rows_of, run_policy, warm_up

    summaries, values, slo = [], {}, plan.slo
    for name in names:
        key, warm_key = server.keys[name]
        try:
            kept.note(f"{name}: {sum(map(len, plan.waves))} requests to get warm …")
            warm = warm_up(name, plan.waves, server.load, server.model, key=warm_key, limit_s=plan.limit_s)
            kept.note(f"{name}: warm after {warm['seconds']:.1f} s; {len(plan.sent)} requests …")
            found: Outcomes = run_policy(name, plan.sent, server.load, server.model, key=key)
        except OSError as e:
            kept.note(f"{name} failed: {e}")
            continue
        summaries.append(found.summary(plan.sent, slo) | {"warm": warm, "limit_s": plan.limit_s})
        values[name] = found.values()
        kept.keep(rows_of(case, found, summaries[-1]))
        kept.note(f"{name}: {summaries[-1]['done']} of {len(plan.sent)} in {summaries[-1]['span_s']:.1f} s")
    limits = {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s}
    return {"case": case, "slo": limits, "policies": summaries, "values": values}


@contextmanager
def server_of(
    model: str,
    url: str | None,
    key: str,
    names: Sequence[str],
    more: str,
    *,
    timeout: float,
    limit_s: float | None = None,
) -> Iterator[Server]:
    """The server that runs, or one that is started for the block, with two keys for each policy."""
    import functools

    from tamis.bench.serve_load import in_process

    if url is not None:
        address = url.rstrip("/").removesuffix("/v1")
        load = functools.partial(in_process, address, timeout_s=timeout, limit_s=limit_s)
        yield Server(load, _model_at(address, key), dict.fromkeys(names, (key, key)), address)
        return
    from tamis.server.keys import new_key

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        keys = {name: (new_key(file, name), new_key(file, f"{name}-warm")) for name in names}
        command = [sys.executable, "-m", "tamis.cli.main", "serve", model, "--port", "0", "--json", "--name", model]
        command += ["--prefill", "dense", "--api-key-file", str(file), "--grace", "5", *shlex.split(more)]
        with _started(command, Path(folder) / "log") as address:
            load = functools.partial(in_process, address, timeout_s=timeout, limit_s=limit_s)
            yield Server(load, model, keys, address)


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
