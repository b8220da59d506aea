"""What a single user pays for the server: the same prompts in turn by the library and over HTTP, as ratios of one run.

Knows callables that answer a prompt, not servers; the machine's ups and downs hit both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tamis.bench.results import Row
from tamis.core.errors import InvalidInput


class Took(NamedTuple):
    """Of one answer, seconds: to its first token, between two tokens in the mean, to its end; and its tokens."""

    ttft_s: float
    itl_s: float
    e2e_s: float
    tokens: int = 0


TIMES = Took._fields[:3]
LEAST_TOKENS = 2  # of an answer that has a time between tokens
Answerer = Callable[[Sequence[int]], Took]  # token ids of a prompt


def compare(
    library: Answerer, server: Answerer, prompts: Sequence[Sequence[int]], *, warm: int = 1
) -> dict[str, list[Took]]:
    """Answers to `prompts` by both, in turn; the first `warm` are not counted, nor pairs that differ in length or have
    fewer than two tokens, between which there is no time."""
    made: dict[str, list[Took]] = {"library": [], "server": []}
    for i, prompt in enumerate(prompts):
        turn, took = [("library", library), ("server", server)], {}
        for name, answer in turn if i % 2 else turn[::-1]:
            took[name] = answer(prompt)
        if i >= warm and took["library"].tokens == took["server"].tokens >= LEAST_TOKENS:
            for name, one in took.items():
                made[name].append(one)
    return made


def summary(made: Mapping[str, Sequence[Took]]) -> dict[str, Any]:
    """Medians of both and, for each time, the median of the ratios server / library of pairs that ran together, with
    the quantiles 0.2 and 0.8. Raises InvalidInput without any pair."""
    pairs, out = list(zip(made["server"], made["library"], strict=True)), {}
    if not pairs:
        raise InvalidInput(
            "no pair of answers was equally long, of two tokens or more. Give more requests, or fewer output tokens."
        )
    for i, name in enumerate(TIMES):
        p20, p50, p80 = np.quantile([a[i] / b[i] for a, b in pairs], [0.2, 0.5, 0.8]).tolist()
        out[name] = {
            "library": statistics.median(b[i] for _, b in pairs),
            "server": statistics.median(a[i] for a, _ in pairs),
            "ratio": p50,
            "ratio_p20": p20,
            "ratio_p80": p80,
        }
    return out


def rows_of(case: str, made: Mapping[str, Sequence[Took]]) -> list[Row]:
    """Of results/serve.csv."""
    rows = []
    for i, name in enumerate(TIMES):
        rows += [Row.of(case, f"lone-{who}", name, [t[i] for t in took], unit="s") for who, took in made.items()]
        ratios = [a[i] / b[i] for a, b in zip(made["server"], made["library"], strict=True)]
        rows.append(Row.of(case, "lone-server", f"{name[:-2]}_over_library", ratios, unit="1"))
    return rows
