"""The load of `tamis bench serve`, in a process of its own: requests sent at their times, whatever became of others.

`python -m tamis.bench.serve_load` reads one JSON object on stdin, `run`'s arguments, and writes what it gives. Only the
standard library is used, so that a client takes little of the machine that it measures.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

START_S = 0.2  # until the first request, for all to be made ready
DONE = b"[DONE]"
TOO_LATE, TOO_LATE_CODE = 504, "timeout"  # what a server says that ends a request for its time, before and in a stream


def in_process(
    url: str, requests: Sequence[Mapping[str, Any]], *, timeout_s: float = 600.0, limit_s: float | None = None
) -> list[dict[str, Any]]:
    """`run` in a second process. Raises OSError if that fails as a whole."""
    given = json.dumps({"url": url, "requests": list(requests), "timeout_s": timeout_s, "limit_s": limit_s})
    made = subprocess.run(
        [sys.executable, "-m", "tamis.bench.serve_load"], input=given, capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise OSError(f"the load's process ended with {made.returncode}: {made.stderr.strip()[-500:]}")
    found: list[dict[str, Any]] = json.loads(made.stdout)
    return found


async def run(
    url: str, requests: Sequence[Mapping[str, Any]], timeout_s: float, limit_s: float | None = None
) -> list[dict[str, Any]]:
    """Send each request to `url` (http://HOST:PORT) when its `at_s` has come; what came back, in the same order.

    limit_s: of the load as a whole, from the time 0; what is not done by then is cut, or not sent at all (its `late_s`
    is then below 0, so that it ends at the limit).

    A request has `at_s`, `path`, `body` (streamed) and perhaps `key`. An outcome has `late_s` (it was sent so much
    later than it should), seconds from being sent to each piece of text (`pieces_s`), to the chunk with the last
    `finish_reason` (`finish_s`; None: there was none) and to the end (`end_s`), `status`, `error` (or ""), `usage` and
    `tamis` as the server gave them, `stopped` (it ended by itself), `cut` (it ran out of time: this load's, or what the
    server gives a request).
    """
    host, _, port = url.removeprefix("http://").partition(":")
    start = time.perf_counter() + START_S

    async def one(request: Mapping[str, Any]) -> dict[str, Any]:
        due, last = start + request["at_s"], float("inf") if limit_s is None else start + limit_s
        await asyncio.sleep(max(0.0, min(due, last) - time.perf_counter()))
        out: dict[str, Any] = {"status": 0, "error": "", "pieces_s": [], "finish_s": None, "usage": None, "tamis": None}
        out |= {"stopped": False, "cut": False}
        sent = time.perf_counter()
        out["late_s"] = sent - due
        cut = f"cut at the limit of {limit_s} s"
        if sent >= last:
            return out | {"error": f"{cut}, not sent", "cut": True, "end_s": 0.0}
        try:
            async with asyncio.timeout(min(timeout_s, last - sent)):
                await _ask(host, int(port or 80), request, out, sent)
        except TimeoutError:
            out["error"] = cut if time.perf_counter() >= last else f"no end after {timeout_s:g} s"
            out["cut"] = True
        except (OSError, ValueError, asyncio.IncompleteReadError) as e:
            out["error"] = f"{type(e).__name__}: {e}"
        out["end_s"] = time.perf_counter() - sent
        return out

    return list(await asyncio.gather(*(one(request) for request in requests)))


async def _ask(host: str, port: int, request: Mapping[str, Any], out: dict[str, Any], sent: float) -> None:
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    try:
        body = json.dumps(request["body"]).encode()
        key = f"Authorization: Bearer {request['key']}\r\n" if request.get("key") else ""
        head = (
            f"POST {request['path']} HTTP/1.1\r\nHost: {host}:{port}\r\n{key}Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        out["status"] = int((await reader.readline()).split()[1])
        headers = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.strip().lower()] = value.strip()
        parts = _chunks(reader) if headers.get("transfer-encoding") == "chunked" else _rest(reader)
        if out["status"] != 200:
            text = b"".join([part async for part in parts])
            out["error"], out["cut"] = f"{out['status']}: {_message(text)}", out["status"] == TOO_LATE
            return
        await _events(parts, out, sent)
    finally:
        writer.close()


async def _events(parts: AsyncIterator[bytes], out: dict[str, Any], sent: float) -> None:
    left, ended = b"", False
    async for part in parts:
        now = time.perf_counter() - sent
        *events, left = (left + part).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == DONE:
                ended = True
                continue
            made = json.loads(data)
            if "error" in made:
                out["error"] = str(made["error"].get("message", made["error"]))[:300]
                out["cut"] = made["error"].get("code") == TOO_LATE_CODE
                continue
            out["usage"], out["tamis"] = made.get("usage") or out["usage"], made.get("tamis") or out["tamis"]
            finish = [c["finish_reason"] for c in made.get("choices", ()) if c.get("finish_reason")]
            out["finish_s"] = now if finish else out["finish_s"]
            out["stopped"] |= "stop" in finish
            if any(c.get("text") or c.get("delta", {}).get("content") for c in made.get("choices", ())):
                out["pieces_s"].append(now)
    if not ended and not out["error"]:
        out["error"] = "the stream broke off"


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The parts of a body in HTTP's chunks."""
    while size := int((await reader.readline()).strip() or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readline()


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(1 << 16):
        yield part


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def _main() -> None:
    given = json.load(sys.stdin)
    made = asyncio.run(run(given["url"], given["requests"], given["timeout_s"], given["limit_s"]))
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    _main()
