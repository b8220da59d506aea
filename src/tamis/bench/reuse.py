"""`tamis bench reuse`: one workload at several byte budgets, through every provider, as rows and as a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tamis.bench.results import Row
from tamis.bench.reuse_cost import CostModel, Executor, ModelledExecutor
from tamis.bench.reuse_pool import Pool, PoolOptions
from tamis.bench.reuse_providers import PROVIDERS, new_provider
from tamis.bench.reuse_simulator import MAX_RUNNING, Clock, Outcome, Progress, Simulator
from tamis.bench.reuse_workload import Workload
from tamis.core.checks import check_fields
from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown

GIB = 1 << 30
BLOCK = "block"
# Copies that fill the pool drive out the documents that they are made of: a good server would admit fewer requests.
TUNED = "block-tuned"
NAMES = (*PROVIDERS, TUNED)
UNITS = {"kb": 1 << 10, "mb": 1 << 20, "gb": GIB, "tb": 1 << 40}
UNLIMITED = "unlimited"
MODELLED = (
    "Hit rates, evictions and bytes are decisions of the real cache, policies and page allocator. Times are NOT "
    "measured: they come from a cost model."
)
NO_PROGRESS: Progress = lambda done, total: None  # noqa: E731


@dataclass(frozen=True)
class Plan:
    """What is replayed.

    budgets     such as "1GB" (2**30 bytes) or "unlimited"
    providers   of NAMES; "block-tuned" is "block" with the limit of running requests that gives most requests a
                second, or the shortest mean TTFT where arrivals are given
    host        bytes of a second tier, in host memory
    repeats     seeds seed, seed + 1, ... of a random workload
    costs       the CSV file that times are fitted to
    """

    workload: Workload
    budgets: Sequence[str] = (UNLIMITED,)
    providers: Sequence[str] = NAMES
    policy: str = "lru"
    ttl_s: float | None = None
    host: str | None = None
    seed: int = 0
    repeats: int = 1
    costs: str = "results/ttft.csv"

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.budgets or not self.providers:
            raise InvalidInput("no budget or no provider; give at least one of each.")
        for text in self.budgets:
            budget_bytes(text)
        for name in self.providers:
            if name not in NAMES:
                raise InvalidInput(unknown("provider", name, list(NAMES)))
        if self.repeats < 1:
            raise InvalidInput(f"repeats is {self.repeats}; allowed is 1 or more.")
        if self.ttl_s is not None and self.policy != "ttl":
            raise InvalidInput(f"ttl_s is for policy 'ttl'; the policy is {self.policy!r}.")


@dataclass(frozen=True)
class Replay:
    """One provider at one budget, over all seeds."""

    case: str
    provider: str
    outcomes: tuple[Outcome, ...]

    def metrics(self) -> dict[str, list[float]]:
        """One number a seed, by name."""
        return {
            "token_hit_rate": [o.hit_tokens / max(1, o.document_tokens) for o in self.outcomes],
            "prompt_hit_rate": [o.prompt_hit_tokens / o.prompt_tokens for o in self.outcomes],
            "ttft_mean_s": [float(np.mean(o.ttft_s)) for o in self.outcomes],
            "ttft_p90_s": [float(np.quantile(o.ttft_s, 0.9)) for o in self.outcomes],
            "ttft_p99_s": [float(np.quantile(o.ttft_s, 0.99)) for o in self.outcomes],
            "requests_per_s": [len(o.ttft_s) / o.seconds for o in self.outcomes],
            "tokens_per_s": [(o.prompt_tokens + o.output_tokens) / o.seconds for o in self.outcomes],
            "computed_share": [o.computed_tokens / o.prompt_tokens for o in self.outcomes],
            "evictions": [float(o.evictions) for o in self.outcomes],
            "peak_bytes": [float(o.peak_bytes) for o in self.outcomes],
            "peak_in_use_bytes": [float(o.peak_in_use_bytes) for o in self.outcomes],
            "most_running": [float(o.most_running) for o in self.outcomes],
            "fallbacks": [o.fallbacks / len(o.ttft_s) for o in self.outcomes],
        }

    def ttft_s(self) -> list[float]:
        """Of every request of every seed."""
        return [t for o in self.outcomes for t in o.ttft_s]


RATIOS = ("ttft_speedup", "throughput", "hit_rate")
UNITS_OF = {"ttft_mean_s": "s", "ttft_p90_s": "s", "ttft_p99_s": "s", "requests_per_s": "1/s", "tokens_per_s": "1/s",
            "peak_bytes": "B", "peak_in_use_bytes": "B"}  # fmt: skip


def budget_bytes(text: str) -> int | None:
    """ "10GB" in bytes (a GB is 2**30), None for "unlimited". Raises InvalidInput."""
    if text.lower() == UNLIMITED:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]b)", text.strip().lower())
    if match is None:
        raise InvalidInput(f"budget {text!r}; give a number with KB, MB, GB or TB (1 GB = 2**30), or 'unlimited'.")
    return int(float(match[1]) * UNITS[match[2]])


def bench_reuse(
    plan: Plan,
    *,
    note: Callable[[str], None] = lambda _: None,
    keep: Callable[[list[Row]], object] = lambda _: None,
    progress: Progress = NO_PROGRESS,
) -> dict[str, Any]:
    """Replay everything; `keep` is given the rows of each budget when it is done, so that little is lost if stopped.

    Returns {workload, about, cost_model, policy, measured: [{case, provider, metric: median over the seeds, ...}]}.
    """
    cost = CostModel.fitted(plan.costs)
    executor = ModelledExecutor(cost)
    made: list[dict[str, Any]] = []
    for text in plan.budgets:
        bench = _Bench(plan, text, cost, executor, progress)
        replays = []
        for provider in plan.providers:
            note(f"{plan.workload.name} at {text}: {provider}")
            replays.append(bench.replay(provider))
        ratios = ratios_of(replays)
        keep([row for r in replays for row in rows_of(r, ratios[r.provider], executor.label)])
        made += [summary(r, ratios[r.provider]) for r in replays]
    return {
        "workload": plan.workload.name,
        "about": plan.workload.about,
        "requests": plan.workload.n_requests,
        "policy": plan.policy,
        "seeds": list(_seeds(plan)),
        "times": MODELLED,
        "cost_model": asdict(cost) | {"about": cost.about},
        "measured": made,
    }


def ratios_of(replays: Sequence[Replay]) -> dict[str, dict[str, list[float]]]:
    """{provider: {ratio: one number a seed}} against Block-Attention's copies, plain and tuned; above 1 is better.

    Of mean times to first token, requests a second, and token hit rates. A ratio to zero is left out.
    """
    metrics = {replay.provider: replay.metrics() for replay in replays}
    made: dict[str, dict[str, list[float]]] = {name: {} for name in metrics}
    for base, suffix in ((BLOCK, "vs_block"), (TUNED, "vs_tuned")):
        if base not in metrics:
            continue
        for name, m in metrics.items():
            pairs = {
                f"ttft_speedup_{suffix}": (metrics[base]["ttft_mean_s"], m["ttft_mean_s"]),
                f"throughput_{suffix}": (m["requests_per_s"], metrics[base]["requests_per_s"]),
                f"hit_rate_{suffix}": (m["token_hit_rate"], metrics[base]["token_hit_rate"]),
            }
            made[name] |= {
                ratio: [a / b for a, b in zip(*sides, strict=True)] for ratio, sides in pairs.items() if all(sides[1])
            }
    return made


def rows_of(replay: Replay, ratios: dict[str, list[float]], label: str) -> list[Row]:
    """Rows of one replay: quantiles over the seeds, but of ttft_s over all requests. The provider says `label`."""
    name = f"{replay.provider}-{label}"
    rows = [Row.of(replay.case, name, "ttft_s", replay.ttft_s(), unit="s")]
    for metric, values in (replay.metrics() | ratios).items():
        rows.append(Row.of(replay.case, name, metric, values, unit=UNITS_OF.get(metric, "1")))
    return rows


def table(made: dict[str, Any]) -> str:
    """What `bench_reuse` returned, for people."""
    lines = [
        f"{made['workload']}: {made['requests']} requests, {made['about']}; policy {made['policy']}",
        made["times"],
        made["cost_model"]["about"],
        f"{'case':26} {'provider':11} {'hit':>6} {'TTFT p50':>9} {'p90':>9} {'p99':>9} {'mean':>9} {'req/s':>7} "
        f"{'runs':>5} {'evicted':>8} {'peak GB':>8} {'fell back':>9}  against block: TTFT, req/s, hits; and tuned",
    ]
    for m in made["measured"]:
        ratios = " ".join(
            f"{m[k]:6.2f}" if k in m else "     -"
            for k in (f"{what}_{base}" for base in ("vs_block", "vs_tuned") for what in RATIOS)
        )
        ttft = " ".join(f"{m[f'ttft_{what}_s']:9.4f}" for what in ("p50", "p90", "p99", "mean"))
        lines.append(
            f"{m['case']:26} {m['provider']:11} {m['token_hit_rate']:6.1%} {ttft} {m['requests_per_s']:7.3f} "
            f"{m['most_running']:5.0f} {m['evictions']:8.0f} {m['peak_bytes'] / GIB:8.2f} {m['fallbacks']:9.1%}  "
            + ratios
        )
    return "\n".join(lines)


def _seeds(plan: Plan) -> range:
    return range(plan.seed, plan.seed + (plan.repeats if plan.workload.random else 1))


class _Bench:
    """One plan at one budget, with what its replays share."""

    def __init__(self, plan: Plan, budget: str, cost: CostModel, executor: Executor, progress: Progress) -> None:
        host = budget_bytes(plan.host) if plan.host else 0
        if host is None:
            raise InvalidInput("host is 'unlimited'; give the host's memory a size, such as 64GB.")
        self._plan = plan
        self._options = PoolOptions(budget_bytes(budget), cost.token_bytes, plan.policy, host, plan.ttl_s)
        self._cost = cost
        self._executor = executor
        self._progress = progress
        name = plan.workload.name + (f"-{plan.policy}" if plan.policy != "lru" else "")
        self._case = f"{name}/{budget.lower()}" + (f"+host{plan.host.lower()}" if plan.host else "")

    def replay(self, provider: str) -> Replay:
        """All seeds."""
        if provider != TUNED:
            return self._replay(provider, provider, MAX_RUNNING)
        plain = self._replay(TUNED, BLOCK, MAX_RUNNING)
        most = int(max(plain.metrics()["most_running"]))
        limited = [self._replay(TUNED, BLOCK, n) for n in range(1, most)]
        if self._plan.workload.concurrency is None:  # whoever keeps up with the arrivals serves as many a second
            return min([plain, *limited], key=lambda r: float(np.median(r.metrics()["ttft_mean_s"])))
        return max([plain, *limited], key=lambda r: float(np.median(r.metrics()["requests_per_s"])))

    def _replay(self, name: str, provider: str, max_running: int) -> Replay:
        workload = self._plan.workload
        outcomes = []
        for seed in _seeds(self._plan):
            clock = Clock()
            pool = Pool(self._options, clock=clock, cost=self._cost.document)
            simulator = Simulator(
                new_provider(provider, pool), pool, self._executor, clock=clock, concurrency=workload.concurrency,
                max_running=max_running,
            )  # fmt: skip
            outcomes.append(simulator.run(workload.requests(seed), workload.n_requests, self._progress))
        return Replay(self._case, name, tuple(outcomes))


def summary(replay: Replay, ratios: dict[str, list[float]]) -> dict[str, Any]:
    """Medians over the seeds, fit for JSON."""
    numbers = {name: float(np.median(values)) for name, values in (replay.metrics() | ratios).items()}
    return {
        "case": replay.case,
        "provider": replay.provider,
        "ttft_p50_s": float(np.median(replay.ttft_s())),
    } | numbers
