"""What the vLLM bench found, as rows and for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tamis.bench.results import Row


def load_rows(
    case: str, provider: str, asked: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
) -> tuple[list[Row], float]:
    """What a load showed, of those that asked and not of those that only warmed documents; and the median time to the
    first token. A request's time between tokens is the mean over its answer."""
    measured = [(a, f) for a, f in zip(asked, found, strict=True) if a["measured"]]
    times = [f["ttft_s"] for _, f in measured]
    # pads that are computed and documents that are warmed count as work
    worked = sum(len(a["prompt"]) - f["cached"] for a, f in zip(asked, found, strict=True))
    rate = max(0.0, 1 - worked / sum(a["real"] for a, _ in measured))
    rows = [Row.of(case, provider, "ttft_s", times, unit="s")]
    rows.append(Row.of(case, provider, "ttft_p90_s", [sorted(times)[int(0.9 * (len(times) - 1))]], unit="s"))
    rows.append(Row.of(case, provider, "token_hit_rate", [rate], unit="1"))
    between = [(f["done_s"] - f["ttft_s"]) / (len(f["tokens"]) - 1) for _, f in measured if len(f["tokens"]) > 1]
    if between:
        rows.append(Row.of(case, provider, "time_per_token_s", between, unit="s"))
    return rows, median(times)


def table(made: Mapping[str, Any]) -> str:
    """The measured numbers for people."""
    lines = [
        f"{e['provider']}: vLLM {e['vllm']}, {e['gpu'] or 'CPU'}, {e['start_s']:.0f} s to start"
        for e in made["engines"]
    ]
    lines += [
        f"{m['case']:44} {m['provider']:30} {m['metric']:18} {m['p50']:10.4g} {m['unit']}" for m in made["measured"]
    ]
    return "\n".join([*lines, *(f"left out: {what}: {why}" for what, why in made["left_out"].items())])
