"""What ways of attending at decode time do to answers and to the next tokens of long texts, against exact attention.

Every prompt is prefilled once with exact attention but for its last token, which is the first decode step: so the first
token of an answer already depends on the method. All methods and budgets then go on side by side (`decode_session`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch

from tamis.core.errors import ContextOverflow, InvalidInput
from tamis.engine.sampling import TextStream
from tamis.eval.answers import MEASURED, Cell, Log, Outcome, by_group
from tamis.eval.decode_session import Session
from tamis.eval.decoders.base import Method
from tamis.eval.decoders.methods import FULL, labels
from tamis.eval.tasks import Item, Task, interleave

if TYPE_CHECKING:
    from tamis.engine.llm import LLM

KL_TOKENS = 8  # of full's own answer, given to every method
BLOCK = 16  # tokens of a text that are given in one pass, each of which attends for itself
PASS_ROWS = 256  # tokens of one pass over all methods, at most: their logits are held at once
FOUND = "found"


@dataclass(frozen=True)
class Text:
    """A text of which the first `n_prompt` tokens are prefilled and the others given one after the other."""

    task: str
    id: str
    tokens: tuple[int, ...]
    n_prompt: int

    def __post_init__(self) -> None:
        if not 0 < self.n_prompt < len(self.tokens) - 1:
            raise InvalidInput(
                f"{len(self.tokens)} tokens, {self.n_prompt} in the prompt; give two behind it at least."
            )

    @property
    def digest(self) -> str:
        """32 hex digits of the tokens and where the prompt ends."""
        return blake2b(repr((self.tokens, self.n_prompt)).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Decoded:
    """All outcomes of a run, whose variants are `full` and `method@budget`. Otherwise as `eval.answers.Answers`.

    In an outcome, kl (nats) and agreement are means over the first `KL_TOKENS` tokens of full's answer, or over all
    tokens of a text; density is the share of full's bytes that a step reads. Scores of texts are their perplexity and
    its ratio to full's.
    """

    variants: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    skipped: tuple[str, ...]
    complete: bool

    @cached_property
    def cells(self) -> list[Cell]:
        """Every metric of every variant for each task, and for the tasks of a kind and length together.

        `found` is the main score of needle and RULER items on those that full answers in full.
        """
        made: list[Cell] = []
        for group, members in by_group(self.outcomes).items():
            of = {(o.task, o.id, o.variant): o.metrics for o in members}
            ids = list(dict.fromkeys((o.task, o.id) for o in members))
            for metric in (*dict.fromkeys(m for o in members for m in o.metrics), FOUND):
                name = _main(group) if metric == FOUND else metric
                asked = [i for i in ids if name in of[(*i, FULL)] and (metric != FOUND or of[(*i, FULL)][name] == 1)]
                full = tuple(of[(*i, FULL)][name] for i in asked)
                made += [
                    Cell(group, variant, metric, tuple(of[(*i, variant)][name] for i in asked), full)
                    for variant in self.variants
                    if asked
                ]
        return made

    @staticmethod
    def compared(cell: Cell) -> bool:
        """Whether a difference to full says something that the value does not."""
        return cell.variant != FULL and cell.metric not in (*MEASURED, FOUND, "perplexity_ratio")

    def summary(self) -> dict[str, Any]:
        """group → variant → metric → mean, ci95, n, and for scores the paired difference to full."""
        out: dict[str, Any] = {}
        for cell in self.cells:
            mean = cell.mean
            entry: dict[str, Any] = {"mean": mean.mean, "ci95": [mean.low, mean.high], "n": mean.n}
            if self.compared(cell):
                d = cell.difference
                entry |= {"difference": d.mean, "difference_ci95": [d.low, d.high]}
            out.setdefault(cell.group, {}).setdefault(cell.variant, {})[cell.metric] = entry
        return out

    def rows(self) -> Iterator[tuple[str, int, str, str, tuple[float, float, float], str]]:
        """(group, questions, variant, metric, (p20, p50, p80), unit); metrics as `Answers.rows` names them."""
        for cell in self.cells:
            unit = "nat" if cell.metric == "kl" else "1"
            n = len(cell.values)
            yield cell.group, n, cell.variant, f"{cell.metric}_mean", cell.row(), unit
            if self.compared(cell):
                yield cell.group, n, cell.variant, f"{cell.metric}_minus_full_mean", cell.row(difference=True), unit


def eval_decode(
    llm: LLM,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    *,
    texts: Sequence[Text] = (),
    log: Log | None = None,
    deadline_s: float | None = None,
    answer_tokens: int | None = None,
    note: Callable[[int, int], None] = lambda done, total: None,
) -> Decoded:
    """Answer every item, and read every text, with `methods` (`decoders.methods.methods_of`: full comes first).

    Items and texts that do not fit the model's context are left out and named in the result. Greedy. The other
    arguments are those of `eval.answers.eval_answers`.
    """
    names = tuple(label for method in methods for label in labels(method))
    if names[:1] != (FULL,):
        raise InvalidInput(f"methods begin with {', '.join(names[:1]) or 'none'}; the first must be full.")
    log = log or Log(None, {})
    begin, longest, complete = time.monotonic(), 0.0, True
    outcomes: list[Outcome] = []
    skipped: list[str] = []
    total = sum(task.size for task in tasks) + len(texts)
    every: Iterator[Item | Text] = chain(interleave(tasks), texts)
    for i, work in enumerate(every):
        note(i, total)
        digest = f"{work.digest}:{answer_tokens}" if answer_tokens and isinstance(work, Item) else work.digest
        chosen = [m for m in methods if any(_find(log, work, digest, n) is None for n in labels(m))]
        started = time.monotonic()
        if chosen and deadline_s is not None and started - begin + longest > deadline_s:
            complete = False
            break
        try:
            if chosen:
                used = chosen if methods[0] in chosen else [methods[0], *chosen]
                for outcome in _measure(llm, work, digest, used, answer_tokens):
                    if _find(log, work, digest, outcome.variant) is None:
                        log.add(outcome)
        except ContextOverflow:
            skipped.append(f"{work.task}: {work.id}")
            continue
        outcomes += [found for n in names if (found := _find(log, work, digest, n))]
        longest = max(longest, time.monotonic() - started)
    note(total, total)
    return Decoded(names, tuple(outcomes), tuple(skipped), complete)


def kl_rows(logits: torch.Tensor) -> torch.Tensor:
    """float32 [rows, R]: KL(first row || each row) in nats of logits [rows, R, V]."""
    log_p = logits.float().log_softmax(-1)
    terms = log_p[:1].exp() * (log_p[:1] - log_p)
    return terms.sum(-1).clamp(min=0)


def _measure(
    llm: LLM, work: Item | Text, digest: str, methods: Sequence[Method], answer_tokens: int | None
) -> list[Outcome]:
    with llm.runner.lock:
        if isinstance(work, Text):
            return _read(llm, work, digest, methods)
        most = min(work.answer_tokens, answer_tokens or work.answer_tokens)
        return _answer(llm, work, digest, methods, most)


def _answer(llm: LLM, item: Item, digest: str, methods: Sequence[Method], most: int) -> list[Outcome]:
    tokens = item.prompt(llm.template).tokens
    llm.runner.check_fits(len(tokens))
    most = min(most, llm.runner.geometry.context_tokens - len(tokens))
    session = Session(llm.runner.model, llm.runner.switch, tokens[:-1], methods)
    answers = [_Answer(llm, item) for _ in range(session.rows)]
    ids = torch.full((session.rows, 1), tokens[-1], device=session.device)
    for _ in range(most):
        ids = session.step(ids)[:, -1].argmax(-1, keepdim=True)
        for answer, token in zip(answers, ids[:, 0].tolist(), strict=True):
            answer.push(token)
        if all(answer.done for answer in answers):
            break
    session.begin()
    given = torch.tensor([tokens[-1], *answers[0].tokens[: KL_TOKENS - 1]], device=session.device)
    given = given[: max(1, len(answers[0].tokens))]
    logits = session.step(given.expand(session.rows, -1))
    apart, same = kl_rows(logits).mean(-1).tolist(), _agreement(logits).mean(-1).tolist()
    texts = [answer.text for answer in answers]
    return [
        Outcome(item.task, item.id, digest, name, text, item.score(text), kl, agreement, density, len(tokens))
        for (name, density), text, kl, agreement in zip(
            _named(llm, methods, len(tokens)), texts, apart, same, strict=True
        )
    ]


def _read(llm: LLM, text: Text, digest: str, methods: Sequence[Method]) -> list[Outcome]:
    llm.runner.check_fits(len(text.tokens))
    session = Session(llm.runner.model, llm.runner.switch, text.tokens[: text.n_prompt], methods)
    tokens = torch.tensor(text.tokens, device=session.device)
    sums = torch.zeros((3, session.rows), dtype=torch.float64, device=session.device)
    block = max(1, min(BLOCK, PASS_ROWS // session.rows))
    end = len(text.tokens) - 1
    for begin in range(text.n_prompt, end, block):
        n = min(block, end - begin)
        logits = session.step(tokens[begin : begin + n].expand(session.rows, -1))
        wanted = tokens[begin + 1 : begin + n + 1].expand(session.rows, -1)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="none")
        parts = (loss.view(wanted.shape), kl_rows(logits), _agreement(logits))
        sums += torch.stack([p.double().sum(-1) for p in parts])
    losses, apart, same = (sums / (end - text.n_prompt)).tolist()
    return [
        Outcome(text.task, text.id, digest, name, "", _perplexity(loss, losses[0]), kl, agreement, density, end)
        for (name, density), loss, kl, agreement in zip(_named(llm, methods, end), losses, apart, same, strict=True)
    ]


def _perplexity(loss: float, full: float) -> dict[str, float]:
    return {"perplexity": math.exp(loss), "perplexity_ratio": math.exp(loss - full)}


def _agreement(logits: torch.Tensor) -> torch.Tensor:
    best = logits.argmax(-1)
    return (best == best[:1]).float()


def _named(llm: LLM, methods: Sequence[Method], n_tokens: int) -> Iterator[tuple[str, float]]:
    """Each label, and the share of full's bytes that its steps read."""
    shape = llm.runner.geometry
    whole = methods[0].sizes(n_tokens, shape.head_dim, shape.n_layers)[0].read
    for method in methods:
        for label, size in zip(labels(method), method.sizes(n_tokens, shape.head_dim, shape.n_layers), strict=True):
            yield label, size.read / whole


def _find(log: Log, work: Item | Text, digest: str, variant: str) -> Outcome | None:
    """A log looks at the task and the id, which texts have too."""
    return log.find(cast("Item", work), digest, variant)


def _main(group: str) -> str:
    """The score that says whether an item was found."""
    kind, _, rest = group.partition("/")
    return "match_part" if kind == "needle" or rest.startswith("qa_") else "match_all" if kind == "ruler" else ""


class _Answer:
    """One row's greedy tokens and text. Tokens behind the end are not taken."""

    def __init__(self, llm: LLM, item: Item) -> None:
        self._llm, self._stream, self._begun = llm, TextStream(llm.tokenizer, item.stop), False
        self.tokens: list[int] = []
        self.done = False

    def push(self, token: int) -> None:
        """Take the next token."""
        if self.done:
            return
        self.tokens.append(token)
        if token in self._llm.stop_tokens:
            self.done = True
            return
        self._begun = self._begun or bool(self._llm.tokenizer.decode([token]).strip())
        if self._begun:  # an empty line before the answer must not end it
            self._stream.push(token)
            self.done = self._stream.stopped

    @property
    def text(self) -> str:
        """All of it; ends the answer."""
        self._stream.finish()
        return self._stream.text
