"""Many concurrent streams for minutes: none fails or is cut, and the server's memory does not grow.

The slope is fitted to what the process holds after a third of the time, when caches are full.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from serving import REUSE, Load, Verdict, chat, main, serving, text

EVERY_S = 0.5
MOST_MB_PER_MINUTE = 2.0


def run(model: str, folder: Path, *, seconds: float, streams: int, most: float = MOST_MB_PER_MINUTE) -> Verdict:
    """Load for so long; `most`: growth that is allowed, in MB a minute."""
    verdict = Verdict(f"{streams} concurrent streams")
    # a small cache, so that it is full soon, and prompts that come again and that do not
    with serving(model, folder, "--cache-gb", "0.15", "--max-running", "32") as server:
        bodies = [
            chat(f"Question {i}: {text(i % 37, 3)}", documents=[{"text": text(i % 11, 12)}], max_tokens=8 + i % 23)
            | ({"tamis": REUSE} if i % 2 else {})
            for i in range(1009)
        ]
        load, begin = Load(server, bodies).start(streams), time.monotonic()
        held: list[tuple[float, float]] = []
        while (now := time.monotonic() - begin) < seconds:
            held.append((now, server.rss / 1e6))
            time.sleep(EVERY_S)
        seen = load.stop()
        late = [(t, mb) for t, mb in held if t > seconds / 3]
        verdict.seen = {
            "answers": dict(seen),
            "tokens per second": round(server.number("generation_tokens_total") / seconds, 1),
            "MB at the start, after a third, at the end": [round(mb) for _, mb in (held[0], late[0], late[-1])],
            "MB a minute": round(60 * slope(late), 3),
        }
        verdict.must(set(seen) == {"done"}, f"requests ended otherwise: {dict(seen)}")
        verdict.must(60 * slope(late) <= most, f"memory grows by {60 * slope(late):.2f} MB a minute")
        verdict.must(server.idle(), "requests are left")
        verdict.must(not server.errors, f"its log has {server.errors[:3]}")
        verdict.must(server.stop() == 0, "it stops with an error")
    return verdict


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares: growth of the second number for 1 of the first."""
    n = len(points)
    x, y = sum(p[0] for p in points) / n, sum(p[1] for p in points) / n
    return sum((a - x) * (b - y) for a, b in points) / max(1e-9, sum((a - x) ** 2 for a, _ in points))


if __name__ == "__main__":
    sys.exit(main(run, __doc__, seconds=600.0, streams=24, most=MOST_MB_PER_MINUTE))
