"""A server on loopback, in a thread of the tests' process, and clients of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tamis.engine.library import Library
from tamis.engine.llm import LLM
from tamis.engine.scheduler import Limits
from tamis.engine.service import Engine
from tamis.server.app import create_app
from tamis.server.keys import KeyRing
from tamis.server.run import GracefulServer
from tamis.server.settings import ServerSettings


@dataclass
class Live:
    """A server that listens on loopback."""

    engine: Engine
    server: GracefulServer
    thread: threading.Thread
    url: str

    def client(self, key: str = "none", **options: Any) -> Any:
        """The official client."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120, **options)

    def http(self, key: str | None = None) -> Any:
        """A plain one."""
        import httpx

        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120)

    def stop(self) -> None:
        """As a signal would."""
        self.server.should_exit = True
        self.thread.join(60)


@contextmanager
def live(
    llm: LLM,
    *,
    limits: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    keys: KeyRing | None = None,
    store: Path | None = None,
    index: Any = None,
) -> Iterator[Live]:
    """A server on a free port, in a thread, until the block ends."""
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(llm, Limits(**(limits or {})), chunk_tokens=256))
        library = Library(engine, store, index)
        stack.callback(library.close)
        app = create_app(engine, library, ServerSettings(**({"name": "tiny", "grace_s": 5.0} | (settings or {}))), keys)
        server = GracefulServer(app, host="127.0.0.1", port=0)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        running = Live(engine, server, thread, f"http://127.0.0.1:{port}")
        try:
            yield running
        finally:
            running.stop()
            assert not thread.is_alive(), "the server did not stop"
