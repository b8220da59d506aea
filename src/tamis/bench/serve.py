"""A running server under an open loop of requests: times as its clients see them, goodput, tokens, failures.

Knows workloads and outcomes of a load, no server and no model: whoever runs one gives its address. Requests are sent
when they arrive in the workload, whether or not earlier ones are done.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tamis.bench.results import Row
from tamis.bench.reuse_workload import Piece, Request, Workload, Zipf, mooncake, trace
from tamis.bench.serve_words import words
from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown

ALL = "all"
# Text of random words has no answer to be ruined, so block attention is accepted.
POLICIES: dict[str, dict[str, Any]] = {
    "dense": {"prefill": "dense"},
    "sift": {"prefill": "sift"},
    "reuse": {"prefill": "reuse", "accept_block_attention": True},
    "prefix": {"prefill": "prefix"},
    "selfindex": {"prefill": "dense", "kv": "selfindex", "decode": "selfindex"},
}
MIXED = ("dense", "sift", "reuse", "selfindex")  # in turn, under "all"
PERCENTILES = (50, 90, 99)
OTHER_WORDS = 1 << 40  # added to seeds of texts: beyond those of any workload
NO_END = "no text, and no finish_reason"
WAVE_S = 1e-3  # between the requests of a wave
Load = Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]]]  # `serve_load.run` somewhere else


@dataclass(frozen=True)
class Slo:
    """Seconds to the first token and, in the mean, between two; a request that keeps both counts as good."""

    ttft_s: float = 2.0
    itl_s: float = 0.1


@dataclass(frozen=True)
class Pace:
    """When requests arrive: Poisson at `rate` a second, or (None) as the workload recorded; the first `requests`.

    cut_tokens: of each piece of a prompt; output_tokens: of an answer, at most. None: as recorded.
    """

    requests: int = 32
    rate: float | None = None
    cut_tokens: int | None = None
    output_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate is not None and not self.rate > 0:
            raise InvalidInput(f"rate is {self.rate}; give more than 0 requests a second.")


def workload_of(source: str | None, *, speed: float = 1.0) -> Workload:
    """A trace's folder (RAGPulse, Mooncake), Mooncake's JSONL file, or (None) documents drawn by Zipf's law.

    Raises InvalidInput for what is neither.
    """
    if source is None:
        return Zipf(documents=20, document_tokens=512, per_prompt=4, question_tokens=32, output_tokens=32).workload()
    path = Path(source).expanduser()
    return mooncake(path, speed=speed) if path.is_file() else trace(path, speed=speed)


def requests_of(workload: Workload, pace: Pace) -> list[dict[str, Any]]:
    """What is sent: `at_s`, `path` and `body` of each, without model, policy or key."""
    chance, at, made = np.random.default_rng(pace.seed), 0.0, []
    chosen = _chosen(workload, pace)
    if pace.rate is None and len(chosen) > 1 and chosen[-1].arrival_s == chosen[0].arrival_s:
        raise InvalidInput(f"the {len(chosen)} requests of {workload.name} arrive all at once; give a rate.")
    for request in chosen:
        at = request.arrival_s if pace.rate is None else at + float(chance.exponential(1 / pace.rate))
        made.append({"at_s": at, "path": "/v1/chat/completions", "body": _body(request, pace)})
    return made


def waves_of(workload: Workload, pace: Pace, most: int) -> list[list[dict[str, Any]]]:
    """What is sent before anything is measured, wave by wave: 1, 2, 4, … and at last `most` requests at once.

    Each wave has the lengths of the workload from the longest to the shortest prompt, in words of its own, so that
    nothing that the load reads is stored before it begins. 0: none.
    """
    lengths = sorted(_chosen(workload, pace), key=lambda r: -sum(p.n_tokens for p in r.pieces))
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most] if most else []
    waves, seed = [], OTHER_WORDS
    for size in sizes:
        picked = [lengths[i * len(lengths) // size] for i in range(size)]
        bodies = []
        for request in picked:
            bodies.append(_body(request, pace, other=seed))
            seed += OTHER_WORDS
        waves.append(
            [{"at_s": i * WAVE_S, "path": "/v1/chat/completions", "body": body} for i, body in enumerate(bodies)]
        )
    return waves


def warm_up(
    name: str,
    waves: Sequence[Sequence[Mapping[str, Any]]],
    load: Load,
    model: str,
    *,
    key: str = "",
    limit_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Have a server build, record and lay out what a policy needs. How many requests were sent, of these answered, at
    most at once, and the seconds it took; no wave begins after `limit_s`. Raises InvalidInput, OSError."""
    begin, sent, done = clock(), 0, 0
    for wave in waves:
        if limit_s is not None and clock() - begin >= limit_s:
            break
        found = run_policy(name, wave, load, model, key=key)
        sent, done = sent + len(wave), done + len(found.done)
    return {"requests": sent, "done": done, "at_once": max(map(len, waves), default=0), "seconds": clock() - begin}


def run_policy(name: str, requests: Sequence[Mapping[str, Any]], load: Load, model: str, *, key: str = "") -> Outcomes:
    """Send all `requests` under one policy (or `ALL`: those of `MIXED` in turn). Raises InvalidInput, OSError."""
    if name != ALL and name not in POLICIES:
        raise InvalidInput(unknown("policy of a served load", name, [*POLICIES, ALL]))
    asked = [POLICIES[MIXED[i % len(MIXED)] if name == ALL else name] for i in range(len(requests))]
    sent = [
        {**r, "key": key, "body": r["body"] | {"model": model, "tamis": choices}}
        for r, choices in zip(requests, asked, strict=True)
    ]
    return Outcomes(name, load(sent))


@dataclass(frozen=True)
class Outcomes:
    """What became of the requests of one policy; see `serve_load.run`."""

    policy: str
    raw: Sequence[Mapping[str, Any]]

    @property
    def done(self) -> list[Mapping[str, Any]]:
        """Those that got their answer, which may be empty: a first token that ends it has no text."""
        return [one for one in self.raw if _answered(one)]

    @property
    def cut(self) -> int:
        """Requests that were ended because their time was over, the load's or the server's. None of them is `done`."""
        return sum(bool(one["cut"]) for one in self.raw)

    def values(self) -> dict[str, list[float]]:
        """Seconds of every answered request, `itl_s` of every two pieces of text that follow one another. An empty
        answer's first token is its end."""
        done = self.done
        return {
            "ttft_s": [_first_s(one) for one in done],
            "itl_s": [b - a for one in done for a, b in zip(one["pieces_s"], one["pieces_s"][1:], strict=False)],
            "e2e_s": [one["end_s"] for one in done],
        }

    def good(self, slo: Slo) -> int:
        """Requests that kept the SLO."""
        return sum(_first_s(one) <= slo.ttft_s and _mean_gap(one) <= slo.itl_s for one in self.done)

    def summary(self, requests: Sequence[Mapping[str, Any]], slo: Slo) -> dict[str, Any]:
        """All numbers. `span_s`: from the first request to the last end."""
        ends = [r["at_s"] + o["late_s"] + o["end_s"] for r, o in zip(requests, self.raw, strict=True)]
        span = max(1e-9, max(ends) - min(r["at_s"] for r in requests))
        usages = [one["usage"] for one in self.done if one["usage"]]
        prompt, new = (sum(u[name] for u in usages) for name in ("prompt_tokens", "completion_tokens"))
        cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
        reports = [one["tamis"][0]["report"] for one in self.done if one["tamis"]]
        return {
            "policy": self.policy,
            "requests": len(self.raw),
            "done": len(self.done),
            "empty": sum(not one["pieces_s"] for one in self.done),
            "cut_share": self.cut / len(self.raw),
            "failures": dict(Counter(one["error"] or NO_END for one in self.raw if not _answered(one))),
            "span_s": span,
            "late_s": max((one["late_s"] for one in self.raw), default=0.0),
            **{name: percentiles(values) for name, values in self.values().items()},
            "goodput_rps": self.good(slo) / span,
            "good_share": self.good(slo) / len(self.raw),
            "output_tokens_per_s": new / span,
            "prompt_tokens": prompt,
            "output_tokens": new,
            "cached_share": cached / prompt if prompt else 0.0,
            "used": dict(Counter(r["used"] for r in reports)),
            "reasons": dict(Counter(r["reason"] for r in reports if r["reason"])),
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """{"p50": ..} of `PERCENTILES`; empty without values."""
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES} if values else {}


def rows_of(case: str, outcomes: Outcomes, summary: Mapping[str, Any]) -> list[Row]:
    """Of results/serve.csv: quantiles over requests (or gaps); tails and rates as one number each."""
    rows = []
    for name, values in outcomes.values().items():
        if values:
            rows.append(Row.of(case, outcomes.policy, name, values, unit="s"))
            tails = percentiles(values)
            rows += [Row.of(case, outcomes.policy, f"{name[:-2]}_p{p}_s", [tails[f"p{p}"]], unit="s") for p in (90, 99)]
    for name, unit in (
        ("goodput_rps", "1/s"), ("good_share", "1"), ("output_tokens_per_s", "1/s"), ("cached_share", "1"),
        ("cut_share", "1"),
    ):  # fmt: skip
        rows.append(Row.of(case, outcomes.policy, name, [summary[name]], unit=unit))
    failed = (summary["requests"] - summary["done"]) / summary["requests"]
    return [*rows, Row.of(case, outcomes.policy, "failed_share", [failed], unit="1")]


def case_of(model: str, workload: Workload, pace: Pace) -> str:
    """Such as "llama-3.1-8b/ragpulse-x20/first-64-cut-1024/poisson-4"."""
    cut = "" if pace.cut_tokens is None else f"-cut-{pace.cut_tokens}"
    output = "" if pace.output_tokens is None else f"-out-{pace.output_tokens}"
    pace_name = "recorded" if pace.rate is None else f"poisson-{pace.rate:g}"
    return f"{model}/{workload.name}/first-{pace.requests}{cut}{output}/{pace_name}"


def table(made: Mapping[str, Any]) -> str:
    """The summaries for people."""
    names = ("policy", "done", "ttft p50 / p99", "itl p50 / p99", "e2e p50", "good/s", "tok/s")
    head = "{:10} {:>9} {:>17} {:>17} {:>9} {:>7} {:>7}".format(*names)
    lines = [made["case"], head]
    for one in made["policies"]:

        def pair(name: str, one: Mapping[str, Any] = one) -> str:
            return f"{one[name]['p50']:.3f} / {one[name]['p99']:.3f}" if one[name] else "-"

        e2e = f"{one['e2e_s']['p50']:.2f}" if one["e2e_s"] else "-"
        lines.append(
            f"{one['policy']:10} {one['done']:>4}/{one['requests']:<4} {pair('ttft_s'):>17} {pair('itl_s'):>17} "
            f"{e2e:>9} {one['goodput_rps']:>7.2f} {one['output_tokens_per_s']:>7.1f}"
        )
        lines += [f"{'':10} {n} failed: {why}" for why, n in one["failures"].items()]
        if one["cut_share"]:
            lines.append(f"{'':10} {one['cut_share']:.0%} ran out of time; the times above are of the others alone")
    return "\n".join(lines)


def _answered(one: Mapping[str, Any]) -> bool:
    return not one["error"] and (bool(one["pieces_s"]) or one["finish_s"] is not None)


def _first_s(one: Mapping[str, Any]) -> float:
    """Of an answered request: seconds to its first text, or to its end if it has none."""
    first: float = one["pieces_s"][0] if one["pieces_s"] else one["finish_s"]
    return first


def _mean_gap(one: Mapping[str, Any]) -> float:
    """Between tokens: a piece of text may hold several."""
    pieces: list[float] = one["pieces_s"]
    if not pieces:
        return 0.0
    new = (one["usage"] or {}).get("completion_tokens", len(one["pieces_s"]))
    return (pieces[-1] - pieces[0]) / max(1, int(new) - 1)


def _chosen(workload: Workload, pace: Pace) -> list[Request]:
    return list(islice(workload.requests(pace.seed), pace.requests))


def _body(request: Request, pace: Pace, *, other: int = 0) -> dict[str, Any]:
    """other: added to the seeds of all texts."""

    def text(pieces: Sequence[Piece]) -> str:
        cut = (min(p.n_tokens, pace.cut_tokens or p.n_tokens) for p in pieces)
        return " ".join(words(p.first + other, n) for p, n in zip(pieces, cut, strict=True))

    messages = [{"role": "system", "content": text(request.prefix)}] if request.prefix else []
    messages.append({"role": "user", "content": text(request.own)})
    return {
        "messages": messages,
        "documents": [{"text": text([p])} for p in request.documents],
        "max_tokens": max(2, min(request.output_tokens, pace.output_tokens or request.output_tokens)),
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
