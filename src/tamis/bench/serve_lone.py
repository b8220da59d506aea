"""What a single user pays for the server: the same prompts in turn by the library and over HTTP, as ratios of one run.

Knows callables that answer a prompt, not servers; the machine's ups and downs hit both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tamis.bench.results import Row


class Took(NamedTuple):
    """Of one answer, seconds: to its first token, between two tokens in the mean, to its end."""

    ttft_s: float
    itl_s: float
    e2e_s: float


Answerer = Callable[[Sequence[int]], Took]  # token ids of a prompt


def compare(
    library: Answerer, server: Answerer, prompts: Sequence[Sequence[int]], *, warm: int = 1
) -> dict[str, list[Took]]:
    """Answers to `prompts` by both, in turn; the first `warm` are not counted."""
    made: dict[str, list[Took]] = {"library": [], "server": []}
    for i, prompt in enumerate(prompts):
        turn = [("library", library), ("server", server)]
        for name, answer in turn if i % 2 else turn[::-1]:
            took = answer(prompt)
            if i >= warm:
                made[name].append(took)
    return made


def summary(made: Mapping[str, Sequence[Took]]) -> dict[str, Any]:
    """Medians of both and, for each time, the median of the ratios server / library of pairs that ran together."""
    out: dict[str, Any] = {}
    for i, name in enumerate(Took._fields):
        pairs = list(zip(made["server"], made["library"], strict=True))
        out[name] = {
            "library": statistics.median(b[i] for _, b in pairs),
            "server": statistics.median(a[i] for a, _ in pairs),
            "ratio": statistics.median(a[i] / b[i] for a, b in pairs),
        }
    return out


def rows_of(case: str, made: Mapping[str, Sequence[Took]]) -> list[Row]:
    """Of results/serve.csv."""
    rows = []
    for i, name in enumerate(Took._fields):
        rows += [Row.of(case, f"lone-{who}", name, [t[i] for t in took], unit="s") for who, took in made.items()]
        ratios = [a[i] / b[i] for a, b in zip(made["server"], made["library"], strict=True)]
        rows.append(Row.of(case, "lone-server", f"{name[:-2]}_over_library", ratios, unit="1"))
    return rows
