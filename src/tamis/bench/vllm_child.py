"""An engine of `vllm_engine` in a child process: asked in turn, with a time limit, and ended whole."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tamis.bench.vllm_engine import MARK
from tamis.core.errors import Unavailable

SAID = 1500  # characters of a log that an error shows


class Child:
    """Starts at once; `started` waits until the engine is open. What it logs goes to `log`."""

    def __init__(self, setup: Mapping[str, Any], log: Path, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tamis.bench.vllm_engine", json.dumps(setup)]
        self.log = log
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._file = log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            text=True,
            env=os.environ | dict(environment),
            start_new_session=True,  # so that its workers can be ended with it
        )
        threading.Thread(target=self._read, daemon=True).start()

    def started(self, seconds: float) -> dict[str, Any]:
        """What the engine says of itself. Raises Unavailable, the child ended, if it fails or takes longer."""
        about: dict[str, Any] = self._answer(seconds)["started"]
        return about

    def ask(self, job: Mapping[str, Any], seconds: float) -> list[dict[str, Any]]:
        """The rows of a job. Raises Unavailable if it fails, and ends the child if it takes longer than that."""
        assert self._process.stdin is not None, "it was asked for"
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except OSError as e:
            raise Unavailable(f"the engine's process is gone ({e}): {self._said()}") from e
        rows: list[dict[str, Any]] = self._answer(seconds)["rows"]
        return rows

    def close(self) -> None:
        """End the process and its workers."""
        for sent, wait_s in ((signal.SIGTERM, 10), (signal.SIGKILL, 30)):
            try:
                os.killpg(self._process.pid, sent)
            except ProcessLookupError:
                break
            try:
                self._process.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
            if sent == signal.SIGTERM:
                continue  # its workers may not have been as quick
        self._file.close()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it was asked for"
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._answers.put(line[len(MARK) :])
            else:
                self._log(line)
        self._answers.put(None)

    def _log(self, line: str) -> None:
        try:
            self._file.write(line)
        except ValueError:
            return  # it was closed: the child is being ended

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            self.close()
            raise Unavailable(f"the engine gave no answer within {seconds:.0f} s and was ended.") from None
        if line is None:
            self.close()
            raise Unavailable(f"the engine's process ended: {self._said()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Unavailable(f"the engine failed: {answer['error']}. Its log ends: {self._said()}")
        return answer

    def _said(self) -> str:
        with suppress(ValueError):
            self._file.flush()
        return self.log.read_text(encoding="utf-8", errors="replace").strip()[-SAID:]
