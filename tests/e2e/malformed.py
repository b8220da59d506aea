"""Thousands of requests that are wrong, or right but strange: each gets a documented answer, and the server lives on.

Half come from schemathesis, out of the server's own OpenAPI document; half are bytes: bodies cut short, flipped,
nested too deep or too large, with numbers and texts that JSON allows and programs trip over, in a policy's choices and
in a query as well, and heads that are no HTTP.
"""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

from serving import Server, Verdict, chat, main, serving, tiny

from tamis.attention.policy import Policy

DOCUMENTED = {200, 400, 401, 404, 405, 413, 429, 503, 504}
BODY_BYTES = 200_000  # that a request may have
POSITIONS = 160  # of the model: no request takes long
# a request that fits the document may still be refused: for its length, or for two fields that do not go together
UNCHECKED = "positive_data_acceptance"

SAMPLING = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1, "priority": 0} | {
    f"{kind}_penalty": 1 for kind in ("presence", "frequency", "repetition")
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(
        "Where?", max_tokens=2, stop=["x"], tamis={"prefill": "dense"}, n=1, logprobs=True, **SAMPLING
    ),
    "/v1/completions": {"model": "m", "prompt": "The", "max_tokens": 2, "documents": [{"text": "a"}], **SAMPLING},
    "/v1/documents": {"text": "The lamp.", "title": "Lamp", "warm": False},
    "/v1/documents/search": {"query": "lamp", "top_k": 2},
    "/tokenize": {"prompt": "The lamp", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
ODD = {
    "tamis": (*(f.name for f in fields(Policy)), "search", "choices"),
    "stream_options": ("include_usage",),
    "response_format": ("type", "json_schema"),
}
VALUES = (
    "NaN",
    "-Infinity",
    "1e999",
    "-0",
    "1" * 5000,
    '"\\ud800"',
    '"\\u0000"',
    '"\ufffe"',
    "null",
    "true",
    "{}",
    "[]",
    '""',
    "-1",
    "1.5",
    "[" * 900 + "]" * 900,
    '{"\\udfff":1}',
    '"' + "a" * 50_000 + '"',
    "1" + "0" * 30,
    "9223372036854775807",
    "5e-324",
    '"auto"',
    '["a", 1, null, {}]',
)


def requests(draw: random.Random) -> tuple[bytes, bool]:
    """One request as it goes over the wire, and whether the server may wait for more of it."""
    path, body = draw.choice(list(BODIES.items()))
    text = json.dumps(body)
    kind = draw.randrange(12)
    if kind == 0:
        data = text.encode()[: draw.randrange(len(text))]
    elif kind == 1:
        data = bytearray(text.encode())
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif kind in (2, 3, 4):
        name = draw.choice(list(body))
        made = json.dumps(body | {name: "\0"}).replace('"\\u0000"', draw.choice(VALUES))
        data = made.encode("utf-8", "surrogatepass")
    elif kind == 5:
        extra = draw.choice(('"\\ud800"', '"temprature"', '""', '"tools"', '"__class__"', '"model"'))
        data = f"{text[:-1]}, {extra}: {draw.choice(VALUES)}}}".encode("utf-8", "surrogatepass")
    elif kind == 6:
        data = draw.choice((b"", b"[]", b"null", b"\xff\xfe", b"{", b"[" * 100_000, b'{"a":' * 20_000, b"\0" * 100))
    elif kind == 7:
        return _head(draw, path, text.encode()), True
    elif kind == 8:
        name, inner = draw.choice([(name, inner) for name, all_inner in ODD.items() for inner in all_inner])
        asked = BODIES["/v1/chat/completions"] | {"stream": draw.random() < 0.5, name: {inner: "\0"}}
        if name == "tamis":
            asked[name] |= {"prefill": draw.choice(("dense", "sift", "prefix"))} if inner != "prefill" else {}
        if name == "response_format" and inner != "type":
            asked[name]["type"] = "json_schema"
        made = json.dumps(asked).replace('"\\u0000"', draw.choice(VALUES))
        path, data = "/v1/chat/completions", made.encode("utf-8", "surrogatepass")
    elif kind == 9:
        value = draw.choice(
            ("%ff", "%00", "-1", "0", "1e3", "1" * 5000, "", "%ED%A0%80", "1&limit=2", "NaN", "%F0%9F%98%80")
        )
        return _request("GET", f"/v1/documents?{draw.choice(('after', 'limit', 'x'))}={value}", b""), False
    elif kind == 10:
        data = json.dumps({"text": "a" * (BODY_BYTES + draw.choice((-100, -9, 0, 100)))}).encode()
        path = draw.choice(("/v1/documents", "/v1/documents/large"))
        return _request("PUT" if path.endswith("large") else "POST", path, data), False
    else:
        name = draw.choice(("..%2f..", "%00", "%ff", "a" * 5000, "x%20y", "-", "\u00e9"))
        method = draw.choice(("GET", "PUT", "DELETE", "POST", "PATCH", "HEAD"))
        return _request(method, f"/v1/documents/{name}", text.encode()), False
    return _request("POST", path, bytes(data)), False


def _head(draw: random.Random, path: str, data: bytes) -> bytes:
    """A head that is odd, or no HTTP at all."""
    odd = (
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "\xff"},
        {"Authorization": "Bearer \xe9\xff"},
        {"Content-Length": str(len(data) + 7)},
        {"Content-Length": "-1"},
        {"Content-Length": "9" * 30},
        {"Transfer-Encoding": "chunked"},
        {"X" * 70_000: "y"},
    )
    if draw.random() < 0.1:
        return draw.choice((b"\0\0\0", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\0\x01"))
    return _request("POST", path, data, draw.choice(odd))


def _request(method: str, path: str, data: bytes, headers: dict[str, str] | None = None) -> bytes:
    base = {"Host": "x", "Connection": "close", "Content-Type": "application/json", "Content-Length": str(len(data))}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in (base | (headers or {})).items())]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass") + data


def send(server: Server, data: bytes, *, waits: bool) -> tuple[int, bytes]:
    """(status, body) of the answer; 0: the connection was closed without one, or what `waits` got none."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=0.3 if waits else 60) as wire:
        got = b""
        try:
            wire.sendall(data)
            while part := wire.recv(1 << 16):
                got += part
        except ConnectionError:
            pass
        except TimeoutError:
            if not waits:
                raise
    head, _, body = got.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.1 (\d+)", head)
    return (int(status[1]) if status else 0), body


def bytes_by_bytes(server: Server, verdict: Verdict, n: int, seed: int) -> Counter[int]:
    """Send n of `requests`; how often each status came."""
    draw, seen = random.Random(seed), Counter[int]()
    for _ in range(n):
        data, waits = requests(draw)
        status, body = send(server, data, waits=waits)
        seen[status] += 1
        shown = f"{status} {body[:200]!r} for {data[:300]!r}"
        verdict.must(not status or status in DOCUMENTED, f"an undocumented status: {shown}")
        verdict.must(b"internal_error" not in body, f"a fault of the server: {shown}")
        if status in (404, 413, 429, 503, 504) and body:
            verdict.must(b'"error"' in body, f"an error of another form: {shown}")
    return seen


def schemathesis(server: Server, verdict: Verdict, examples: int, seed: int, folder: Path) -> int:
    """Run it with so many examples an operation; how many requests it made."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    options = ("--max-examples", str(examples), "--seed", str(seed), "--exclude-checks", UNCHECKED, "--no-color")
    options += ("--request-timeout", "120")
    command += [*options, "--continue-on-failure"]
    made = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    failures = made.stdout.partition("= FAILURES =")[2][:3000] or made.stdout[-2000:] + made.stderr[-2000:]
    verdict.must(made.returncode == 0, f"schemathesis: {failures}")
    found = re.search(r"([\d,]+) generated", made.stdout)
    return int(found[1].replace(",", "")) if found else 0


def run(model: str, folder: Path, *, examples: int, raw: int, seed: int) -> Verdict:
    """Both kinds against one server, which must then answer as before."""
    verdict = Verdict("malformed requests")
    path = tiny(folder / "short", positions=POSITIONS)
    with serving(path, folder, "--max-body-mb", str(BODY_BYTES / 1e6), "--timeout", "60") as server:
        before = server.rss
        made = schemathesis(server, verdict, examples, seed, folder)
        statuses = bytes_by_bytes(server, verdict, raw, seed)
        verdict.seen = {
            "from the document": made,
            "bytes": raw,
            "statuses of these": {str(status): n for status, n in sorted(statuses.items())},
            "MB before and after": [before // 10**6, server.rss // 10**6],
        }
        verdict.must(server.idle(), "requests are left")
        with server.http() as http:
            answer = http.post("/v1/chat/completions", json=chat("Where?", max_tokens=3))
        verdict.must(answer.status_code == 200, f"the server answers {answer.status_code} afterwards")
        verdict.must(not server.errors, f"its log has {server.errors[:5]}")
        verdict.must(server.stop() == 0, "it stops with an error")
    return verdict


if __name__ == "__main__":
    sys.exit(main(run, __doc__, examples=500, raw=5000, seed=1))
