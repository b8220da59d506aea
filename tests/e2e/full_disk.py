"""A disk that fills up under the store: requests are answered as before, puts are refused, and room brings them back.

The disk is a small tmpfs where one may be mounted; else no file of the process may grow beyond a limit, which gives
the same kind of error at the same calls.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving import REUSE, Server, Verdict, chat, main, serving, text

DISK_MB, DOCUMENTS = 24, 60


@contextmanager
def disk(folder: Path) -> Iterator[bool]:
    """A small disk at `folder`; False: it could not be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def limit(server: Server) -> None:
    """No file of its process grows beyond this from now on."""
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (DISK_MB * 10**6 // 16, resource.RLIM_INFINITY))


def run(model: str, folder: Path, *, documents: int) -> Verdict:
    """Put documents until nothing fits any more, ask all the while, make room, put again, restart."""
    verdict = Verdict("a full disk")
    store = folder / "disk"
    with disk(store) as mounted:
        verdict.seen["the disk"] = f"tmpfs of {DISK_MB} MB" if mounted else "a limit for each file"
        options = ("--store", str(store / "store"), "--cache-gb", "0.5")
        with serving(model, folder, *options) as server, server.http() as http:
            if not mounted:
                limit(server)
            puts, answers = Counter[int](), Counter[int]()
            kept: list[str] = []
            filler = store / "filler"
            for i in range(documents):
                if mounted and i == documents // 3:
                    _fill(filler)
                put = http.put(f"/v1/documents/doc{i}", json={"text": text(i, 30), "warm": True})
                puts[put.status_code] += 1
                kept += [f"doc{i}"] if put.status_code == 200 else []
                body = chat("How?", documents=[{"text": text(i)}], tamis=REUSE, max_tokens=2)
                answers[http.post("/v1/chat/completions", json=body).status_code] += 1
            verdict.must(set(answers) == {200}, f"requests without documents of the store: {dict(answers)}")
            verdict.must(set(puts) <= {200, 503}, f"puts are answered {dict(puts)}")
            verdict.must(not mounted or puts[503] > 0, "the disk was never full")
            verdict.must(http.get("/health").status_code == 200, "the server is not well")
            body = chat("How?", documents=kept[:2], tamis=REUSE, max_tokens=2)
            verdict.must(
                http.post("/v1/chat/completions", json=body).status_code == 200, "kept documents cannot be read"
            )
            filler.unlink(missing_ok=True)
            if mounted:
                put = http.put("/v1/documents/after", json={"text": text(999)})
                verdict.must(put.status_code == 200, f"with room again a put is answered {put.status_code}")
                kept.append("after")
            verdict.seen |= {"puts": {str(k): n for k, n in puts.items()}, "answers": dict(answers)}
            verdict.must(server.stop() == 0, "it stops with an error")
            tracebacks = [line for line in server.errors if "Traceback" in line]
            verdict.must(not tracebacks, "its log has tracebacks")
        with serving(model, folder, *options) as server, server.http() as http:
            listed = {d["id"] for d in http.get("/v1/documents", params={"limit": 1000}).json()["data"]}
            lost = [name for name in kept if name not in listed]
            verdict.must(not lost, f"lost after a restart: {lost}")
            verdict.seen["documents after a restart"] = len(listed)
            server.stop()
    return verdict


def _fill(path: Path) -> None:
    """Take all that is left."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 9, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue


if __name__ == "__main__":
    sys.exit(main(run, __doc__, documents=DOCUMENTS))
