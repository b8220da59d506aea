"""Answers of one model under several ways of prefilling, question by question: scores, and differences to dense.

Every prompt is prefilled dense once; that gives the reference for KL and agreement, and the dense answer.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tamis.core.errors import ContextOverflow, InvalidInput
from tamis.engine.sampling import Sampling, TextStream
from tamis.eval.metrics import Interval, bootstrap, kl_divergence, top1_agrees
from tamis.eval.prefills import ADAPTED, DENSE, PrefillVariant
from tamis.eval.tasks import Item, Task, interleave

if TYPE_CHECKING:
    from tamis.engine.llm import LLM
    from tamis.engine.runner import Prefilled

FORMAT = 1
RESAMPLES = 4000
LEAST_FOR_CLAIM = 30  # questions below which a difference is no evidence either way
CLOSE = 0.01  # "within 1 % of dense"
MEASURED = ("kl", "kl_own", "agreement", "density", "recomputed")  # of a variant; its other metrics are scores
ROW_LEVEL = 0.6  # a row's p20 and p80 are the ends of the 60 % interval


@dataclass(frozen=True)
class Outcome:
    """One answer. kl is in nats of the first token, against dense; density a share; agreement 0 or 1.

    recomputed  share of the documents' stored tokens that were computed again, over layers; None where none is stored
    kl_own      with an adapter: kl against dense of the adapted model, which may itself be far from the stock one's
    """

    task: str
    id: str
    digest: str
    variant: str
    text: str
    scores: dict[str, float]
    kl: float
    agreement: float
    density: float
    prompt_tokens: int
    recomputed: float | None = None
    kl_own: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The item's scores and what was measured."""
        found = {**self.scores, "kl": self.kl, "agreement": self.agreement, "density": self.density}
        some = {"recomputed": self.recomputed, "kl_own": self.kl_own}
        return found | {name: value for name, value in some.items() if value is not None}


@dataclass(frozen=True)
class Cell:
    """One metric of one variant over the questions of a group, with dense's values on the same questions."""

    group: str
    variant: str
    metric: str
    values: tuple[float, ...]
    dense: tuple[float, ...]

    @cached_property
    def mean(self) -> Interval:
        """The mean with its 95 % interval."""
        return bootstrap(self.values, resamples=RESAMPLES)

    @cached_property
    def difference(self) -> Interval:
        """Mean of the paired differences to dense, with its 95 % interval."""
        return bootstrap([v - d for v, d in zip(self.values, self.dense, strict=True)], resamples=RESAMPLES)

    @cached_property
    def within_1pct(self) -> bool | None:
        """Whether the score is proved at least 99 % of dense's: the 95 % interval of v - 0.99 d begins at 0 or above.

        None with fewer than 30 questions, or if dense scores nothing: then there is nothing to compare.
        """
        if len(self.values) < LEAST_FOR_CLAIM or not any(self.dense):
            return None
        margins = [v - (1 - CLOSE) * d for v, d in zip(self.values, self.dense, strict=True)]
        return bootstrap(margins, resamples=RESAMPLES).low >= 0

    def row(self, *, difference: bool = False) -> tuple[float, float, float]:
        """(20 % quantile, value, 80 % quantile) of the mean, or of the mean difference to dense."""
        values = [v - d for v, d in zip(self.values, self.dense, strict=True)] if difference else self.values
        interval = bootstrap(values, level=ROW_LEVEL, resamples=RESAMPLES)
        return min(interval.low, interval.mean), interval.mean, max(interval.high, interval.mean)


@dataclass(frozen=True)
class Answers:
    """All outcomes of a run. `skipped` names the questions that do not fit the model; `complete` is False if the
    deadline came first."""

    variants: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    skipped: tuple[str, ...]
    complete: bool

    @cached_property
    def cells(self) -> list[Cell]:
        """Every metric of every variant for each task, and for each kind of task that has several."""
        found: list[Cell] = []
        for group, members in by_group(self.outcomes).items():
            of = {(o.task, o.id, o.variant): o for o in members}
            ids = list(dict.fromkeys((o.task, o.id) for o in members))
            for metric in dict.fromkeys(m for o in members for m in o.metrics):
                for variant in self.variants:
                    asked = [i for i in ids if metric in of[(*i, variant)].metrics]
                    values = tuple(of[(*i, variant)].metrics[metric] for i in asked)
                    dense = tuple(of[(*i, DENSE)].metrics.get(metric, math.nan) for i in asked)
                    found += [Cell(group, variant, metric, values, dense)] if values else []
        return found

    def summary(self) -> dict[str, Any]:
        """group → variant → metric → mean, ci95, n, and for scores the paired difference to dense."""
        out: dict[str, Any] = {}
        for cell in self.cells:
            mean = cell.mean
            entry: dict[str, Any] = {"mean": mean.mean, "ci95": [mean.low, mean.high], "n": mean.n}
            if self.compared(cell):
                d = cell.difference
                entry |= {"difference": d.mean, "difference_ci95": [d.low, d.high], "within_1pct": cell.within_1pct}
            out.setdefault(cell.group, {}).setdefault(cell.variant, {})[cell.metric] = entry
        return out

    @staticmethod
    def compared(cell: Cell) -> bool:
        """Whether a difference to dense says something that the value does not."""
        return cell.variant != DENSE and cell.metric not in MEASURED

    def rows(self) -> Iterator[tuple[str, str, str, tuple[float, float, float], str]]:
        """(group, variant, metric, (p20, p50, p80), unit) for results/answers.csv.

        Metrics end in `_mean` or `_minus_dense_mean`: the value is the mean over the questions, p20 and p80 are the
        quantiles of its bootstrap distribution.
        """
        for cell in self.cells:
            unit = "nat" if cell.metric in ("kl", "kl_own") else "1"
            yield cell.group, cell.variant, f"{cell.metric}_mean", cell.row(), unit
            if self.compared(cell):
                yield cell.group, cell.variant, f"{cell.metric}_minus_dense_mean", cell.row(difference=True), unit


def by_group(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of each task, and of each kind of task ("qa/a", "qa/b" → "qa") that has several."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.task, []).append(outcome)
    for kind in dict.fromkeys(task.partition("/")[0] for task in list(groups)):
        tasks = [t for t in groups if t.partition("/")[0] == kind]
        if len(tasks) > 1:
            groups[kind] = [o for t in tasks for o in groups[t]]
    return groups


@dataclass
class Log:
    """A JSON-lines file of outcomes, one line each, written as they come; a second run with it goes on.

    `settings` is what all outcomes in one file have in common; with other ones InvalidInput is raised.
    """

    path: Path | None
    settings: dict[str, Any]
    _known: dict[tuple[str, str, str, str], Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole, _, cut = (self.path.read_bytes() if self.path.exists() else b"").rpartition(b"\n")
        if cut:  # the process was killed within a line
            with self.path.open("r+b") as file:
                file.truncate(len(whole) + bool(whole))
        lines = whole.decode().split("\n") if whole else []
        head: dict[str, Any] | None
        try:
            head, *rest = [json.loads(line) for line in lines] or [None]
            outcomes = [Outcome(**values) for values in rest]
        except (ValueError, TypeError) as e:
            raise InvalidInput(f"{self.path} is not a log of answers ({e}). Give another file.") from e
        header = json.loads(json.dumps({"format": FORMAT, **self.settings}))
        if head is None:
            self._write(header)
        elif head != header:
            differ = sorted(k for k in {*head, *header} if head.get(k) != header.get(k))
            raise InvalidInput(
                f"{self.path} was written with another {', '.join(differ)}. Give another file, or remove it."
            )
        for outcome in outcomes:
            self._known[outcome.task, outcome.id, outcome.digest, outcome.variant] = outcome

    def find(self, item: Item, digest: str, variant: str) -> Outcome | None:
        """The outcome of an earlier run, if the item was the same."""
        return self._known.get((item.task, item.id, digest, variant))

    def add(self, outcome: Outcome) -> None:
        """Keep one more."""
        self._known[outcome.task, outcome.id, outcome.digest, outcome.variant] = outcome
        self._write(asdict(outcome))

    def _write(self, values: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("ab", buffering=0) as file:
                file.write((json.dumps(values) + "\n").encode())


def settings_of(llm: LLM) -> dict[str, Any]:
    """What outcomes of one log must have in common: the model's fingerprint, its dtype and device, and the policy."""
    device = next(llm.runner.model.parameters()).device.type
    return {
        "model": llm.name,
        "spec": llm.spec(llm.policy).digest.hex(),
        "dtype": llm.dtype,
        "device": device,
        "policy": asdict(llm.policy),
    }


def eval_answers(
    llm: LLM,
    tasks: Sequence[Task],
    variants: Sequence[str] = (DENSE, "sampled", "stored"),
    *,
    log: Log | None = None,
    deadline_s: float | None = None,
    answer_tokens: int | None = None,
    adapted: LLM | None = None,
    note: Callable[[int, int], None] = lambda done, total: None,
) -> Answers:
    """Answer every item of `tasks` with each variant (see `PrefillVariant`); dense always comes first.

    log             outcomes to take over, and where new ones go
    deadline_s      begin no item that would, going by the longest so far, end later than this
    answer_tokens   a limit below the items' own
    adapted         the same model with an adapter, for variants that begin with "adapted/"

    Items that do not fit the model's context are left out and named in the result. Greedy.
    Raises InvalidInput for a variant that does not exist.
    """
    names = tuple(dict.fromkeys([DENSE, *variants]))
    variants_of = {name: PrefillVariant.parse(name) for name in names}
    if adapted is None and any(v.adapted for v in variants_of.values()):
        raise InvalidInput(f"{', '.join(n for n in names if n.startswith(ADAPTED))} need an adapter; give one.")
    log = log or Log(None, {})
    begin, longest = time.monotonic(), 0.0
    outcomes: list[Outcome] = []
    skipped: list[str] = []
    total, complete = sum(task.size for task in tasks), True
    for i, item in enumerate(interleave(tasks)):
        note(i, total)
        digest = f"{item.digest}:{answer_tokens}" if answer_tokens else item.digest
        missing = [name for name in names if log.find(item, digest, name) is None]
        started = time.monotonic()
        if missing and deadline_s is not None and started - begin + longest > deadline_s:
            complete = False
            break
        try:
            for outcome in _measure(
                (llm, adapted), item, digest, [variants_of[name] for name in missing], answer_tokens
            ):
                log.add(outcome)
        except ContextOverflow:
            skipped.append(f"{item.task}: {item.id}")
            continue
        outcomes += [found for name in names if (found := log.find(item, digest, name))]
        longest = max(longest, time.monotonic() - started)
    note(total, total)
    return Answers(names, tuple(outcomes), tuple(skipped), complete)


def _measure(
    models: tuple[LLM, LLM | None],
    item: Item,
    digest: str,
    variants: Sequence[PrefillVariant],
    answer_tokens: int | None,
) -> Iterator[Outcome]:
    """The outcomes of the variants, dense first. models: the stock one and the adapted one."""
    if not variants:
        return
    stock, adapted = models
    prompt = item.prompt(stock.template)
    dense = PrefillVariant.parse(DENSE).choices
    made = stock.prefill(prompt, **dense)
    reference, own = made.logits, None
    if adapted is not None and any(v.adapted for v in variants):
        own = adapted.prefill(prompt, **dense).logits
    for variant in variants:
        llm = adapted if variant.adapted and adapted is not None else stock
        if variant.name != DENSE:
            made.close()
            del made  # frees its cache before the next one grows
            made = llm.prefill(prompt, **variant.choices)
        text = _answer(llm, item, made, min(item.answer_tokens, answer_tokens or item.answer_tokens))
        reuse = made.report.reuse
        yield Outcome(
            task=item.task,
            id=item.id,
            digest=digest,
            variant=variant.name,
            text=text,
            scores=item.score(text),
            kl=kl_divergence(reference, made.logits),
            agreement=float(top1_agrees(reference, made.logits)),
            density=made.report.density,
            prompt_tokens=made.n_tokens,
            recomputed=reuse.recomputed_share if reuse else None,
            kl_own=kl_divergence(own, made.logits) if variant.adapted and own is not None else None,
        )
    made.close()


def _answer(llm: LLM, item: Item, made: Prefilled, most: int) -> str:
    """The greedy continuation of a prefilled prompt, up to a stop text. Uses up its cache."""
    stream, begun = TextStream(llm.tokenizer, item.stop), False
    for token in llm.runner.decode(made, Sampling(max_new_tokens=most), llm.stop_tokens):
        begun = begun or bool(llm.tokenizer.decode([token]).strip())
        if not begun:  # an empty line before the answer must not end it
            continue
        stream.push(token)
        if stream.stopped:
            break
    stream.finish()
    return stream.text
