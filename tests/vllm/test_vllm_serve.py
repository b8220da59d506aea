"""vLLM's own server with Tamis: documents over HTTP, requests that name them, numbers, a restart that keeps them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from vllm_ray import environment as of_ray

from tamis.integrations.vllm.client import request, signed_namespace, warm
from tiny_chat import tiny_tokenizer

BLOCK = 32
START_S = 240
ENVIRONMENT = {
    "VLLM_PLUGINS": "tamis",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
}
GPU = torch.cuda.is_available()
MEMORY = ("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(1 << 30))
PLACE = ("--dtype", "bfloat16", *MEMORY) if GPU else ("--dtype", "float32")
TEXTS = ["alpha beta gamma " * 12, "delta epsilon zeta eta " * 15, "theta iota kappa " * 9]


@dataclass
class Server:
    """A running server and a client of it."""

    port: int
    key: str = "one"

    def ask(self, method: str, path: str, body: Any = None, *, key: str | None = None) -> tuple[int, Any]:
        """Status and answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key or self.key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=120) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            status, text = e.code, e.read().decode()
        return status, json.loads(text) if text.startswith(("{", "[")) else text

    def complete(self, body: dict[str, Any], tokens: int = 6) -> tuple[str, int]:
        """The greedy answer, and how many tokens of the prompt were not computed."""
        sampling = {"model": "tiny", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        status, answer = self.ask("POST", "/v1/completions", body | sampling)
        assert status == 200, answer
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0]["text"], details.get("cached_tokens") or 0

    def metric(self, name: str) -> float:
        """Sum over all labels."""
        text = self.ask("GET", "/metrics")[1]
        return sum(float(n) for n in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M))


def free_port() -> int:
    """Below those that the system gives to clients: what is free now is not taken before a server has started."""
    for port in Random().sample(range(20000, 32000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def wait_for(server: Server, running: list[subprocess.Popen[bytes]], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        ended = any(process.poll() is not None for process in running)
        assert not ended and time.monotonic() < deadline, log.read_text()[-3000:]
        try:
            if server.ask("GET", "/health")[0] == 200:
                return
        except OSError:
            time.sleep(0.5)


@pytest.fixture(scope="module")
def served(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`served(directory, *options, setting=…)`: a server whose shelf is there; None: without the connector."""
    tiny_tokenizer().save_pretrained(tiny_path)
    logs = tmp_path_factory.mktemp("logs")

    @contextmanager
    def serve(directory: Path | None, *more: str, **settings: Any) -> Iterator[Server]:
        command = [
            *(sys.executable, str(Path(__file__).with_name("vllm_cli.py")), "serve", str(tiny_path)),
            *("--served-model-name", "tiny", "--enforce-eager", *PLACE),
            *("--max-model-len", "1024", "--max-num-seqs", "4", "--block-size", str(BLOCK)),
            *more,
        ]
        if directory is not None:
            extra = {"directory": str(directory), "accept_block_attention": True, "min_tokens": 1} | settings
            connector = {
                "kv_connector": "TamisConnector",
                "kv_connector_module_path": "tamis.integrations.vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
            command += ["--kv-transfer-config", json.dumps(connector)]
        port = free_port()
        front = [
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
            "--enable-prompt-tokens-details",
            "--api-key",
            "one",
            "two",
        ]
        every = [[*command, *front]]
        if "--nnodes" in more:
            nodes = ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--node-rank"]
            every = [[*command, *front, *nodes, "0"], [*command, *nodes, "1", "--headless"]]
        server, running = Server(port), []
        stack = ExitStack()
        variables = os.environ | ENVIRONMENT
        if "ray" in more and not GPU:
            variables |= stack.enter_context(of_ray(ENVIRONMENT["VLLM_PLUGINS"]))
        try:
            for i, one in enumerate(every):
                log = logs / f"{port}-{i}.log"
                with log.open("w") as out:
                    running.append(subprocess.Popen(one, stdout=out, stderr=out, env=variables, start_new_session=True))
            wait_for(server, running, logs / f"{port}-0.log")
            yield server
        finally:
            for process in running:
                process.terminate()
            for process in running:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(30)
            stack.close()

    return serve


def put_all(server: Server, **choices: bool) -> list[dict[str, Any]]:
    found = []
    for i, text in enumerate(TEXTS):
        status, shown = server.ask("PUT", f"/v1/documents/d{i}", {"text": text, "title": f"Title {i}"} | choices)
        assert status == 200, shown
        found.append(server.ask("GET", f"/v1/documents/d{i}")[1])
    return found


def question_of(documents: list[dict[str, Any]], order: list[int]) -> dict[str, Any]:
    ids = [documents[i]["token_ids"] for i in order]
    return request([], ids, [7, 8, 9], block_size=BLOCK, namespace=documents[0]["namespace"])


@pytest.mark.slow
def test_documents_are_kept_shared_pinned_and_outlive_the_server(served: Callable[..., Any], tmp_path: Path) -> None:
    with served(tmp_path) as server:
        documents = put_all(server, warm=True)
        total = sum(d["tokens"] for d in documents)
        _check_documents(server, documents)
        first, cached = server.complete(question_of(documents, [0, 1, 2]))
        assert cached >= total, "every document was warmed"
        again, cached = server.complete(question_of(documents, [2, 0, 1]))
        assert cached >= total, "in another order, too"
        assert server.ask("POST", "/v1/documents/d1/pin")[1]["pinned"]
        assert server.metric("vllm:tamis_documents_saved_total") >= 3
        assert server.metric("vllm:tamis_active") == 2, "both modes"
        assert server.metric("vllm:tamis_reused_tokens_total") >= 2 * total
        _check_sift(server, documents)
        _check_put_again(server)
    with served(tmp_path) as server:
        status, listed = server.ask("GET", "/v1/documents")
        assert status == 200 and [d["id"] for d in listed["data"]] == ["d0", "d1", "d2"]
        assert [d["tier"] for d in listed["data"]] == ["shelf"] * 3
        assert [d["pinned"] for d in listed["data"]] == [False, True, False]
        loaded, cached = server.complete(question_of(documents, [0, 1, 2]))
        assert (loaded, cached >= total) == (first, True), "loaded, not computed, and the same answer"
        assert server.metric("vllm:tamis_documents_loaded_total") >= 3
        assert server.complete(question_of(documents, [2, 0, 1]))[0] == again
        assert server.ask("POST", "/v1/documents/d1/unpin")[1]["pinned"] is False
        assert server.ask("DELETE", "/v1/documents/d1")[1]["deleted"]
        assert server.ask("GET", "/v1/documents/d1")[0] == 404


@pytest.mark.slow
@pytest.mark.parametrize("payload", ["auto", "selfindex"])
def test_replicas_share_one_directory(served: Callable[..., Any], tmp_path: Path, payload: str) -> None:
    with served(tmp_path, payload=payload) as one, served(tmp_path, payload=payload, host_bytes=1 << 24) as two:
        documents = put_all(one, pin=True)  # pinned: it is on the shelf when the answer comes
        total = sum(d["tokens"] for d in documents)
        assert [d["tier"] for d in two.ask("GET", "/v1/documents")[1]["data"]] == ["shelf"] * 3
        computed, _ = one.complete(question_of(documents, [1, 2, 0]))
        loaded, cached = two.complete(question_of(documents, [1, 2, 0]))
        assert cached >= total and two.metric("vllm:tamis_documents_loaded_total") >= 3
        if payload == "auto":
            assert loaded == computed
        assert two.ask("DELETE", "/v1/documents/d2")[0] == 200
        assert one.ask("GET", "/v1/documents/d2")[0] == 404, "deleted for all"


@pytest.mark.slow
def test_signed_namespaces_belong_to_their_api_keys(served: Callable[..., Any], tmp_path: Path) -> None:
    """What one key's documents lie under cannot be named by whoever was not told its signed name."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"sixteen bytes and more\n")
    with served(tmp_path / "shelf", namespaces="signed", namespace_secret=str(secret)) as server:
        documents = put_all(server, pin=True)
        total = sum(d["tokens"] for d in documents)
        own = documents[0]["namespace"]
        assert server.ask("GET", "/v1/documents")[1]["namespace"] == own
        assert server.ask("GET", "/v1/documents", key="two")[1]["namespace"] != own
        assert server.complete(question_of(documents, [2, 0, 1]))[1] >= total
        plain = own.rpartition("~")[0]
        for wrong in (
            None,
            "",
            plain,
            f"{plain}~{'0' * 32}",
            own.upper(),
            signed_namespace(b"another secret..", plain),
        ):
            body = question_of([d | {"namespace": wrong} for d in documents], [2, 0, 1])
            status, told = server.ask("POST", "/v1/completions", body | {"model": "tiny", "max_tokens": 1})
            assert status == 400 and "not signed" in told["error"]["message"], told
        other = signed_namespace(secret.read_bytes().strip(), "document/other")
        assert server.complete(question_of([d | {"namespace": other} for d in documents], [0, 1, 2]))[1] == 0
        assert server.complete({"prompt": documents[0]["token_ids"]})[0], "stock requests need none"


PARALLEL = {
    "tensor": ("--tensor-parallel-size", "2"),
    "data": ("--data-parallel-size", "2"),
    "nodes": ("--tensor-parallel-size", "2", "--nnodes", "2", "--distributed-executor-backend", "mp"),
    # not eager: on a CPU vLLM makes the buffer between stages when it warms up, and does not warm up an eager engine
    "pipeline": ("--pipeline-parallel-size", "2", "--no-enforce-eager"),
    "ray": ("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray"),
}


def answers_of(server: Server, documents: list[dict[str, Any]]) -> list[str]:
    sparse = request([3, 4], [d["token_ids"] for d in documents], [5, 6], mode="sift")
    asked = [question_of(documents, [0, 1, 2]), question_of(documents, [2, 1, 0]), sparse]
    return [server.complete(body)[0] for body in asked]


@pytest.fixture(scope="module")
def answers(served: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one engine answers."""
    with served(tmp_path_factory.mktemp("one")) as server:
        return answers_of(server, put_all(server))


@pytest.mark.slow
@pytest.mark.parametrize("way", list(PARALLEL))
def test_parallel_engines_answer_as_one_does(
    served: Callable[..., Any], answers: list[str], tmp_path: Path, way: str
) -> None:
    if way == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed here; `pip install ray` beside vLLM runs this, too")
    with served(tmp_path, *PARALLEL[way]) as many:
        documents = put_all(many)
        computed = 4 + sum(len(d["token_ids"]) for d in documents)
        for turn in range(2):  # a second time from another engine, or from blocks that are there
            assert answers_of(many, documents) == answers
            assert turn or many.metric("vllm:tamis_sift_tokens_total") == computed, "not once for every worker"
        engines = 2 if way == "data" else 1
        assert many.metric("vllm:tamis_active") == 2 * engines, "each mode of each engine"
        for turn in range(1, 7):
            _check_refused(many, documents)
            assert many.metric("vllm:tamis_refused_total") == turn, "of every process that takes requests in"
        assert many.metric("vllm:tamis_documents_saved_total") >= 3
        put_all(many, pin=True)
        assert [d["tier"] for d in many.ask("GET", "/v1/documents")[1]["data"]] == ["shelf"] * 3
        assert many.ask("POST", "/reset_prefix_cache")[0] == 200
        assert answers_of(many, documents) == answers
        assert many.metric("vllm:tamis_documents_loaded_total") >= 3, "every worker's share is read again"


def _check_documents(server: Server, documents: list[dict[str, Any]]) -> None:
    assert [d["text"] for d in documents] == TEXTS
    assert server.ask("PUT", "/v1/documents/d0", {"text": "another"})[0] == 400
    assert server.ask("PUT", "/v1/documents/-", {"text": "x"})[0] == 400
    assert server.ask("GET", "/v1/documents/d0", key="two")[0] == 404, "another key has documents of its own"
    assert server.ask("GET", "/v1/documents", key="two")[1]["data"] == []
    assert server.ask("GET", "/v1/documents", key="three")[0] == 401
    made = server.ask("POST", "/v1/documents", {"text": TEXTS[0]}, key="two")[1]
    assert made["id"].startswith("doc-") and made["namespace"] != documents[0]["namespace"]
    assert made["tier"] is None, "what one key has computed is not the other's"
    assert server.ask("POST", "/v1/documents/nothing/warm")[0] == 404
    known = [d["key"] for d in documents]
    assert warm([d["token_ids"] for d in documents], known, block_size=BLOCK) == []


def _check_sift(server: Server, documents: list[dict[str, Any]]) -> None:
    ids = [d["token_ids"] for d in documents]
    answer, _ = server.complete(request([3, 4], ids, [5, 6], mode="sift", selector="all"))
    plain, _ = server.complete({"prompt": [3, 4, *(i for d in ids for i in d), 5, 6]})
    assert answer == plain, "every tile is dense attention"
    before = server.metric("vllm:tamis_refused_total")
    _check_refused(server, documents)
    assert server.metric("vllm:tamis_refused_total") == before + 1


def _check_put_again(server: Server) -> None:
    """Its blocks are there; no request computes any of it."""
    for turn in range(2):
        assert server.ask("DELETE", "/v1/documents/d0")[0] == 200
        put = server.ask("PUT", "/v1/documents/d0", {"text": TEXTS[0], "title": "Title 0"})[1]
        assert (put["tier"], put["pinned"]) == (None, False), turn
        shown = server.ask("POST", "/v1/documents/d0/pin")[1]
        assert shown.get("pinned") and shown["tier"] == "shelf", shown
    server.ask("POST", "/v1/documents/d0/unpin")
    told = server.ask("PUT", "/v1/documents/long", {"text": "a" * 2000})[1]["error"]["message"]
    assert "at most 992 fit" in told and "--max-model-len 1024" in told
    beside = int(told.split()[3]) - 2000  # the tokenizer has one for each letter, and some around a document
    assert server.ask("PUT", "/v1/documents/long", {"text": "a" * (993 - beside)})[0] == 400
    longest = server.ask("PUT", "/v1/documents/long", {"text": "a" * (992 - beside), "warm": True})
    assert longest[0] == 200 and longest[1]["tokens"] == 992, longest
    assert server.ask("DELETE", "/v1/documents/long")[0] == 200


def _check_refused(server: Server, documents: list[dict[str, Any]]) -> None:
    wrong = request([3], [d["token_ids"] for d in documents], [5], block_size=BLOCK)
    wrong["kv_transfer_params"]["tamis"]["segments"][2][3] = "0" * 32
    status, told = server.ask("POST", "/v1/completions", wrong | {"model": "tiny", "max_tokens": 1})
    assert status == 400 and "key" in told["error"]["message"], told


@pytest.mark.slow
def test_without_the_connector_the_endpoint_says_so_and_vllm_is_itself(served: Callable[..., Any]) -> None:
    with served(None) as server:
        status, told = server.ask("GET", "/v1/documents")
        assert status == 503 and "TamisConnector" in told["error"]["message"]
        assert server.complete({"prompt": list(range(3, 100))})[0]
        assert "tamis" not in server.ask("GET", "/metrics")[1]
