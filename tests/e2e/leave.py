"""Clients that leave in the midst of a stream, and documents that are deleted while they are read.

Nothing may be computed for who is gone, no page may stay taken, and who still reads a deleted document finishes.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path

import httpx
from serving import REUSE, Load, Server, Verdict, chat, main, serving, text

DOCUMENTS, CLIENTS = 4, 6


def run(model: str, folder: Path, *, seconds: float) -> Verdict:
    """Half the time clients leave, half the time documents go."""
    verdict = Verdict("clients that leave, documents that go")
    with serving(model, folder, "--store", str(folder / "store"), "--cache-gb", "0.25") as server:
        with server.http() as http:
            for i in range(DOCUMENTS):
                http.put(f"/v1/documents/doc{i}", json={"text": text(i), "warm": True}).raise_for_status()
        used = _share(server)
        left = _leaving(server, seconds / 2)
        verdict.must(server.idle(10), "something is computed for clients that are gone")
        verdict.seen["left in the midst"] = left
        verdict.seen["share of pages before, after"] = [used, _share(server)]
        verdict.must(left > 3, "hardly a client left")
        verdict.must(_share(server) <= used + 1e-9, "pages of clients that are gone are taken")
        _deleting(server, seconds / 2, verdict)
        verdict.must(server.idle(10), "requests are left")
        verdict.must(not server.errors, f"its log has {server.errors[:3]}")
        verdict.must(server.stop() == 0, "it stops with an error")
    return verdict


def _share(server: Server) -> float:
    """Of all pages, those in use."""
    return server.number("kv_cache_usage_perc")


def _leaving(server: Server, seconds: float) -> int:
    """Streams that are closed after a few events, several at once; how many."""
    url = f"{server.url}/v1/chat/completions"
    left, end, lock = 0, time.monotonic() + seconds, threading.Lock()

    def leave(i: int) -> None:
        nonlocal left
        draw = random.Random(i)
        while time.monotonic() < end:
            # dense: so that nothing of the prompt is kept afterwards, as prefixes would be
            body = chat("Tell all.", documents=[f"doc{i % DOCUMENTS}"], tamis={"prefill": "dense"}, max_tokens=400)
            with httpx.stream("POST", url, json=body | {"stream": True}, timeout=120) as answer:
                for n, _ in enumerate(answer.iter_lines()):
                    if n > draw.randrange(40):
                        break
            with lock:
                left += 1

    threads = [threading.Thread(target=leave, args=(i,)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return left


def _deleting(server: Server, seconds: float, verdict: Verdict) -> None:
    """Documents are deleted and put again while requests read them: answers, or 404 when they are away."""
    bodies = [chat("How?", documents=[f"doc{i}", f"doc{(i + 1) % DOCUMENTS}"], tamis=REUSE) for i in range(DOCUMENTS)]
    load = Load(server, [body | {"max_tokens": 16} for body in bodies]).start(CLIENTS)
    end, deleted = time.monotonic() + seconds, 0
    with server.http() as http:
        while time.monotonic() < end:
            name = f"doc{deleted % DOCUMENTS}"
            answer = http.delete(f"/v1/documents/{name}")
            verdict.must(answer.status_code == 200, f"a delete is answered {answer.status_code}")
            time.sleep(0.05)
            put = {"text": text(deleted % DOCUMENTS), "warm": deleted % 2 == 0}
            verdict.must(http.put(f"/v1/documents/{name}", json=put).status_code == 200, "a put fails")
            deleted += 1
            time.sleep(0.1)
        seen = load.stop()
        for i in range(DOCUMENTS):
            http.delete(f"/v1/documents/doc{i}")
    verdict.seen["deleted in use"], verdict.seen["answers meanwhile"] = deleted, dict(seen)
    verdict.must(set(seen) <= {"done", "404"} and seen["done"] > 0, f"requests ended otherwise: {dict(seen)}")


if __name__ == "__main__":
    sys.exit(main(run, __doc__, seconds=60.0))
