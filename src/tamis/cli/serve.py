"""`tamis serve`: the model over HTTP, as OpenAI's clients know it."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tamis.cli.options import (
    AcceptBlock,
    Adapter,
    Device,
    Dtype,
    Forecast,
    Json,
    Recompute,
    Store,
    Yarn,
    load,
)
from tamis.core.errors import InvalidInput, Unavailable

if TYPE_CHECKING:
    from tamis.engine.knowledge import KnowledgeBase
    from tamis.engine.llm import LLM
    from tamis.engine.scheduler import Limits
    from tamis.server.keys import KeyRing
    from tamis.server.settings import ServerSettings


Part = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of a part of a prompt, between steps of others. Default: 512; 2,048 on a GPU."),
]


def serve(
    model: Annotated[str, typer.Argument(help="smollm2, a directory, a .gguf file, or a hub name.")] = "smollm2",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model. Default: as it is given.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File of hashed API keys. Default: everybody.")] = None,
    new_key: Annotated[str | None, typer.Option(help="Add a key of this name to the file, print it, and end.")] = None,
    key_limit: Annotated[int | None, typer.Option(min=1, help="With --new-key: its requests at once.")] = None,
    store: Store = None,
    prefill: Annotated[str, typer.Option(help="dense, sift, blocks, forecast, reuse, blend or prefix.")] = "prefix",
    recompute: Recompute = 0.15,
    accept_block_attention: AcceptBlock = False,
    cache_gb: Annotated[float | None, typer.Option(min=0, help="GB for keys and values. Default: a share.")] = None,
    host_gb: Annotated[float, typer.Option(min=0, help="GB of host memory for what the GPU evicts.")] = 0.0,
    max_running: Annotated[int, typer.Option(min=1, help="Requests in one step.")] = 32,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are refused.")] = 256,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one step, at most.")] = 1024,
    chunk_tokens: Part = None,
    exact: Annotated[
        bool, typer.Option(help="On a CPU: logits independent of other requests to the last bit; slower when alone.")
    ] = True,
    graphs: Annotated[bool, typer.Option(help="On a GPU: record decode steps as CUDA graphs and replay them.")] = True,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens where a request does not say.")] = 512,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="MB of one request.")] = 16.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a request may take.")] = 600.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds to finish requests when asked to stop.")] = 30.0,
    device: Device = None,
    dtype: Dtype = None,
    yarn: Yarn = None,
    adapter: Adapter = None,
    forecast: Forecast = None,
    json: Json = False,
) -> None:
    """Serve MODEL: /v1/chat/completions, /v1/completions, /v1/documents, /metrics and more."""
    from tamis.engine.apart import apart
    from tamis.engine.scheduler import Limits

    _check_installed()
    from tamis.server.keys import KeyRing
    from tamis.server.settings import ServerSettings

    if new_key is not None:
        _add_key(api_key_file, new_key, key_limit, json=json)
        return
    keys = KeyRing() if api_key_file is None else KeyRing.read(api_key_file)
    body_bytes = int(max_body_mb * 1e6)
    settings = ServerSettings(name or model, max_tokens, body_bytes=body_bytes, timeout_s=timeout, grace_s=grace)
    choices: dict[str, Any] = {"prefill": prefill, "recompute": recompute, "adapter": adapter, "forecast": forecast}
    choices["accept_block_attention"] = accept_block_attention
    cache: dict[str, Any] = {"host_bytes": int(host_gb * 1e9)}
    if cache_gb is not None:
        cache["cache_bytes"] = int(cache_gb * 1e9)
    folder = None if store is None else Path(store).expanduser()
    if folder is not None:
        cache["cache_dir"] = folder / "kv"
    limits = Limits(max_running=max_running, max_waiting=max_queue, step_tokens=step_tokens)
    loaded = apart(lambda: load(model, device, dtype, yarn, **choices, **cache))
    with loaded as llm, apart(lambda: llm.corpus(folder)) as base:
        ground = Ground(folder, base, limits, chunk_tokens, exact, graphs)
        _run(llm, Address(host, port), ground, settings, keys, json=json)


def _add_key(file: Path | None, name: str, limit: int | None, *, json: bool) -> None:
    """Print a new key, the only time that it is seen."""
    from tamis.server.keys import new_key

    if file is None:
        raise InvalidInput("--new-key needs --api-key-file, the file that it is added to.")
    key = new_key(file, name, limit)
    print(jsonlib.dumps({"name": name, "key": key}) if json else key)


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int


class Ground(NamedTuple):
    """What the engine stands on."""

    folder: Path | None
    base: KnowledgeBase
    limits: Limits
    chunk_tokens: int | None
    exact: bool
    graphs: bool


def _check_installed() -> None:
    try:
        import fastapi
        import prometheus_client
        import uvicorn
    except ImportError as e:
        raise Unavailable(f"{e.name} is not installed. pip install 'tamis[server]' brings what serving needs.") from e
    _ = (fastapi, prometheus_client, uvicorn)


def _run(llm: LLM, address: Address, ground: Ground, settings: ServerSettings, keys: KeyRing, *, json: bool) -> None:
    """Serve until a signal asks to stop; with `json`, say on stdout where, once it listens."""
    from tamis.engine.library import Library
    from tamis.engine.service import Engine
    from tamis.server.app import create_app
    from tamis.server.run import GracefulServer

    def started(port: int) -> None:
        url = f"http://{address.host}:{port}/v1"
        typer.echo(f"serving {settings.name} at {url} (Ctrl-C ends it)", err=True)
        if json:
            print(jsonlib.dumps({"model": settings.name, "url": url}), flush=True)

    options: dict[str, Any] = {"chunk_tokens": ground.chunk_tokens, "exact": ground.exact, "graphs": ground.graphs}
    with Engine(llm, ground.limits, **options) as engine:
        library = Library(engine, ground.folder, ground.base)
        try:
            app = create_app(engine, library, settings, keys)
            server = GracefulServer(app, host=address.host, port=address.port, on_start=started)
            server.run()
        finally:
            library.close()
