"""kill -9 of the server under load, and a restart on the same store: nothing that was promised is lost.

Documents that were put, pins, and their keys and values must be there again; a request must show them as cached; what
was being written when the process died must not hurt.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from serving import REUSE, Load, Verdict, chat, main, serving, text

PINNED, WARM, CLIENTS = 2, 6, 8


def run(model: str, folder: Path, *, seconds: float, rounds: int) -> Verdict:
    """Load, kill, restart, look; several times."""
    verdict = Verdict("kill -9 and restart")
    options = ("--store", str(folder / "store"), "--cache-gb", "0.5")
    known: dict[str, dict[str, Any]] = {}
    killed_at = None
    for _ in range(rounds + 1):
        begin = time.monotonic()
        with serving(model, folder, *options) as server:
            verdict.seen.setdefault("seconds to start", []).append(round(time.monotonic() - begin, 1))
            with server.http() as http:
                listed = {d["id"]: d for d in http.get("/v1/documents", params={"limit": 1000}).json()["data"]}
                lost = [name for name in known if name not in listed]
                verdict.must(not lost, f"documents are gone: {lost}")
                for name, document in known.items():
                    if name in listed:
                        now = listed[name]
                        verdict.must(now["pinned"] == document["pinned"], f"{name} is pinned: {now['pinned']}")
                        verdict.must(now["tier"] is not None, f"keys and values of {name} are gone")
                if known:
                    body = chat("How many drops?", documents=sorted(known)[:3], tamis=REUSE, max_tokens=2)
                    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
                    want = sum(known[name]["tokens"] for name in sorted(known)[:3])
                    verdict.must(cached == want, f"{cached} tokens are cached, of {want}")
                    verdict.seen["cached tokens of the first request"] = cached
                if killed_at == rounds - 1:
                    verdict.must(server.stop() == 0, "it stops with an error")
                    break
                for i in range(PINNED + WARM):
                    put = {"text": text(i), "pin": i < PINNED, "warm": True}
                    answer = http.put(f"/v1/documents/doc{i}", json=put)
                    verdict.must(answer.status_code == 200, f"a put is answered {answer.status_code}")
                    known[f"doc{i}"] = answer.json()
            killed_at = _kill(verdict, server, seconds, killed_at)
        verdict.must(not server.errors, f"its log has {server.errors[:3]}")
    return verdict


def _kill(verdict: Verdict, server: Any, seconds: float, before: int | None) -> int:
    """Load the server and kill it in the midst; how often that was done before."""
    bodies = [
        chat(f"{text(100 + i, 2)} How?", max_tokens=12, documents=[f"doc{i % (PINNED + WARM)}"], tamis=REUSE)
        for i in range(40)
    ] + [chat("And?", documents=[{"text": text(200 + i, 5)}], tamis=REUSE, max_tokens=4) for i in range(20)]
    load = Load(server, bodies).start(CLIENTS)
    time.sleep(seconds)
    verdict.must(server.number("num_requests_running") > 0, "nothing ran when it was killed")
    server.kill()
    seen = load.stop()
    verdict.seen.setdefault("answers", []).append({k: n for k, n in seen.items() if k != "ConnectError"})
    verdict.must(seen["done"] > 0, "no request was answered before the kill")
    return 0 if before is None else before + 1


if __name__ == "__main__":
    sys.exit(main(run, __doc__, seconds=10.0, rounds=3))
