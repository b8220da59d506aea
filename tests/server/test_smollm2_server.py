"""The server with the real small model: many clients at once, the command line, and what one user notices of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_server import Live, live

from tamis.attention.policy import Policy
from tamis.engine.llm import LLM

QUESTIONS = ("What is a lighthouse?", "Name a colour.", "What is the capital of France?", "Count to five.")
TEXT = " ".join(f"The lamp of station {i} is cleaned with {i + 3} drops of oil." for i in range(40))
REUSE = {"prefill": "reuse", "accept_block_attention": True}


@pytest.fixture
def served(smollm2: Any) -> Iterator[Live]:
    with LLM(smollm2, policy=Policy(prefill="prefix"), cache_bytes=1 << 30) as llm, live(llm) as running:
        yield running


def test_sixteen_streaming_clients_and_what_each_gets_alone(served: Live) -> None:
    client = served.client()

    def one(i: int) -> str:
        chunks = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": QUESTIONS[i % 4]}],
            max_tokens=12 + i,
            temperature=0,
            stream=True,
        )
        return "".join(c.choices[0].delta.content or "" for c in chunks)

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(one, range(16)))
    assert together == [one(i) for i in range(16)]
    assert "Paris" in together[2]


def test_fifty_requests_for_one_missing_document_compute_it_once(served: Live) -> None:
    client = served.client()
    with served.http() as http:
        name = http.post("/v1/documents", json={"text": TEXT}).json()["id"]
    extra = {"documents": [name], "tamis": REUSE}

    def one(i: int) -> int:
        made = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"How many drops for station {i % 40}?"}],
            max_tokens=3,
            extra_body=extra,
        )
        return int(made.usage.prompt_tokens_details.cached_tokens)

    with ThreadPoolExecutor(50) as pool:
        cached = list(pool.map(one, range(50)))
    assert sorted(cached)[0] == 0 and sum(c == 0 for c in cached) == 1
    assert served.engine.reuse.store.passes == 1


@pytest.mark.slow
def test_the_command_line_serves_and_stops(smollm2: Any, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tamis.cli.main",
        "serve",
        "smollm2",
        "--port",
        "0",
        "--store",
        str(tmp_path / "s"),
    ]
    for _ in range(2):
        begin = time.monotonic()
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"TAMIS_LOG": "info"})
        try:
            assert server.stderr is not None
            line = next(line for line in server.stderr if "serving smollm2 at" in line)
            assert time.monotonic() - begin < 120
            from openai import OpenAI

            client = OpenAI(base_url=line.split(" at ")[1].split(" ")[0], api_key="none")
            made = client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                max_tokens=12,
                temperature=0,
            )
            assert "Paris" in made.choices[0].message.content
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
