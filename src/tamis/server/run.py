"""Runs the application until it is asked to stop, and then lets every request finish or hands it back."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from fastapi import FastAPI

AFTER_S = 5  # for answers that were handed back to reach their clients


class GracefulServer(uvicorn.Server):
    """uvicorn's server. When it is asked to stop, no more requests are taken, those that are here have `grace_s` to
    finish, and the rest is told to come again. `on_start` is told the port once it listens."""

    def __init__(
        self, app: FastAPI, *, host: str, port: int, on_start: Callable[[int], None] = lambda port: None
    ) -> None:
        self.serving, self._on_start = app.state.serving, on_start
        grace_s = self.serving.settings.grace_s
        super().__init__(
            uvicorn.Config(
                app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=int(grace_s) + AFTER_S
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal asks to stop, a second Ctrl-C to stop at once. It is not raised again: stores are closed after."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See the class."""
        await super().startup(sockets)
        if self.started:
            self._on_start(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See the class."""
        self.serving.engine.stop_taking()
        drained = asyncio.create_task(asyncio.to_thread(self.serving.engine.drain, self.serving.settings.grace_s))
        await super().shutdown(sockets)
        await drained
