"""A `tamis serve` process and clients that load it: what the scripts beside this file share."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tiny_chat, where this is run as a script

REUSE = {"prefill": "reuse", "accept_block_attention": True}
START_S = 180


def text(i: int, sentences: int = 20) -> str:
    """The i-th document: unlike all others."""
    return " ".join(f"The lamp {i}.{j} of station {i + j} burns {j + 3} drops of oil." for j in range(sentences))


def tiny(folder: Path, *, positions: int = 16384, vocabulary: int = 512) -> str:
    """A random model of two small layers with a tokenizer, saved in `folder`; its path."""
    import torch
    import transformers as hf

    from tiny_chat import tiny_tokenizer

    config = hf.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=positions,
        eos_token_id=3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        hf.LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@dataclass
class Server:
    """A process that serves. `url` is its root."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def rss(self) -> int:
        """Bytes of memory that are its own and in use."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def errors(self) -> list[str]:
        """Lines of its log that tell of a fault."""
        return [line for line in self.log.read_text().splitlines() if "ERROR" in line or "Traceback" in line]

    def http(self, **options: Any) -> httpx.Client:
        """A client of it."""
        return httpx.Client(base_url=self.url, timeout=300, **options)

    def number(self, name: str) -> float:
        """One of its metrics, summed over labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == f"tamis:{name}")

    def idle(self, within_s: float = 30) -> bool:
        """Whether nothing is left to do, soon."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if self.number("num_requests_running") + self.number("num_requests_waiting") == 0:
                return True
            time.sleep(0.05)
        return False

    def kill(self) -> None:
        """As a power cut would."""
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> int:
        """As a service manager would; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def serving(model: str, folder: Path, *options: str) -> Iterator[Server]:
    """`tamis serve MODEL` on a free port until the block ends; its log goes to `folder`."""
    command = [sys.executable, "-m", "tamis.cli.main", "serve", model, "--name", "m", "--port", "0", "--json", *options]
    log = folder / f"server-{time.monotonic_ns()}.log"
    with log.open("w") as err:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)
    try:
        assert process.stdout is not None
        stuck = threading.Timer(START_S, process.kill)
        stuck.start()
        line = process.stdout.readline()
        stuck.cancel()
        if not line:
            raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")
        yield Server(process, json.loads(line)["url"].removesuffix("/v1"), log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(30)


@dataclass
class Load:
    """Threads that ask one after another until they are told to stop. `seen`: how requests ended."""

    server: Server
    bodies: Sequence[dict[str, Any]]
    stream: bool = True
    seen: Counter[str] = field(default_factory=Counter)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, threads: int) -> Load:
        """Begin with so many at once."""
        self._threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> Counter[str]:
        """Let each finish what it has begun; how all ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a client waits for ever"
        return self.seen

    def _ask(self, i: int) -> None:
        with self.server.http() as http:
            while not self._stop.is_set():
                body = self.bodies[i % len(self.bodies)] | {"stream": self.stream}
                i += len(self._threads)
                try:
                    self.seen[ended(http.post("/v1/chat/completions", json=body))] += 1
                except httpx.HTTPError as e:
                    self.seen[type(e).__name__] += 1
                    time.sleep(0.02)


def ended(response: httpx.Response) -> str:
    """How an answer ended: "done", "cut" (a stream without its end), or the status or code of its error."""
    if response.status_code != 200:
        return str(response.status_code)
    if '"error":' in response.text:
        return "error in stream"
    whole = '"finish_reason":"' in response.text
    return "done" if whole and ("data:" not in response.text or "[DONE]" in response.text) else "cut"


def chat(question: str, **fields: Any) -> dict[str, Any]:
    """The body of a question."""
    return {"model": "m", "messages": [{"role": "user", "content": question}], "temperature": 0} | fields


@dataclass
class Verdict:
    """What a script saw. It fails where something that must hold does not."""

    name: str
    seen: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def must(self, holds: bool, what: str) -> None:
        """`what` is true of the server, or the script fails."""
        if not holds:
            self.wrong.append(what)

    def tell(self) -> int:
        """Print it; the exit status."""
        told = {"name": self.name, "ok": not self.wrong, "wrong": self.wrong, "seen": self.seen}
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
        return int(bool(self.wrong))


def main(run: Callable[..., Verdict], what: str, **options: Any) -> int:
    """The command line of a script: --model, --seconds and `options`; runs in a folder of its own."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--model", default="smollm2", help='served; "tiny": a random one of two layers')
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        model = given.pop("model")
        path = tiny(Path(folder) / "tiny") if model == "tiny" else model
        return run(path, Path(folder), **given).tell()
