"""`tamis serve` as a process: keys, what it says when it listens, and that a signal ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: pip install 'tamis[server]'")


def test_a_key_is_printed_once_and_kept_as_a_hash(tamis: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    made = tamis("serve", "--new-key", "alice", "--key-limit", 3, "--api-key-file", file, "--json").json
    assert made["name"] == "alice" and made["key"] not in file.read_text() and file.read_text().endswith(" 3\n")
    again = tamis("serve", "--new-key", "alice", "--api-key-file", file)
    assert again.code == 2 and "holds a key named 'alice'" in again.err
    assert "needs --api-key-file" in tamis("serve", "--new-key", "bob").err


def test_it_listens_answers_and_stops(model_folder: str, tamis: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key = tamis("serve", "--new-key", "alice", "--api-key-file", file, "--json").json["key"]
    options = ["--port", "0", "--name", "tiny", "--cache-gb", "0.05", "--api-key-file", str(file), "--json"]
    command = [sys.executable, "-m", "tamis.cli.main", "serve", model_folder, "--device", "cpu", *options]
    env = os.environ | {"TAMIS_CACHE": str(tmp_path / "cache")}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        body = json.dumps({"model": "tiny", "prompt": "The lamp", "max_tokens": 4}).encode()
        headers = {"Content-Type": "application/json"}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(f"{url}/completions", body, headers))
        asked = urllib.request.Request(f"{url}/completions", body, headers | {"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] >= 1
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate(timeout=60)
        assert server.returncode == 0 and "Traceback" not in err, err
        assert key not in err
    finally:
        if server.poll() is None:
            server.kill()
            server.communicate()
