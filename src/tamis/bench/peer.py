"""Times of another engine, measured by another program on the same machine in the same sitting."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tamis.core.errors import InvalidInput, NothingFound

ENGINES = ("vllm",)  # a line belongs to the engine whose version it gives
NEAR = 0.01  # lengths that differ by less count as one


@dataclass(frozen=True)
class PeerTime:
    """Time to first token of `provider` for a prompt of `tokens`; seconds, one per repetition."""

    provider: str
    tokens: int
    ttft_s: tuple[float, ...]


def load_peers(path: Path | str) -> list[PeerTime]:
    """The lines of `path` such as {"vllm": "0.26.0", "tokens": 32768, "ttft_s": 1.2, "all": [1.19, 1.2, 1.21]}.

    A line may start with "RESULT "; `all` may be left out; lines without a `ttft_s` are skipped. Raises
    NothingFound without the file, and InvalidInput for a file without a result or with a wrong one.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as e:
        raise NothingFound(f"there is no peer's file at {path}; run the peer first, or leave --peer out.") from e
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidInput(f"{path} cannot be read as text: {e}. Give the JSON lines that the peer wrote.") from e
    found = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line.strip().removeprefix("RESULT "))
        except ValueError:
            continue
        for engine in ENGINES:
            if isinstance(value, dict) and engine in value and "ttft_s" in value:  # else what it says of itself
                found.append(_peer(engine, value, f"line {number} of {path}"))
    if not found:
        raise InvalidInput(
            f'{path} holds no result of a peer; expected lines such as {{"vllm": "0.26.0", "tokens": 32768, '
            '"ttft_s": 1.2}.'
        )
    return found


def nearest_peers(peers: Iterable[PeerTime], tokens: int) -> list[PeerTime]:
    """Of every provider the time whose length is closest to `tokens`, if it is within 1 % of it."""
    best: dict[str, PeerTime] = {}
    for peer in peers:
        gap = abs(peer.tokens - tokens)
        held = best.get(peer.provider)
        if gap <= NEAR * tokens and (held is None or gap < abs(held.tokens - tokens)):
            best[peer.provider] = peer
    return list(best.values())


def _peer(engine: str, value: dict[str, Any], where: str) -> PeerTime:
    tokens, one, every = value.get("tokens"), value.get("ttft_s"), value.get("all")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise InvalidInput(f"{where}: tokens is {tokens!r}; expected the prompt's length, a number above 0.")
    times = [one] if every in (None, []) else every
    if not isinstance(times, list) or not all(_is_time(t) for t in [one, *times]):
        raise InvalidInput(f"{where}: ttft_s is {one!r} and all is {every!r}; expected seconds above 0.")
    return PeerTime(f"{engine}-{value[engine]}", tokens, tuple(float(t) for t in times))


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
