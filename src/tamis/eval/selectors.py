"""Every selector on the same questions: how much it computes, what it keeps, and what that does to the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tamis.attention.policy import Policy
from tamis.core.errors import ContextOverflow
from tamis.engine.sampling import Sampling, TextStream
from tamis.eval.metrics import bootstrap, exact_match, kl_divergence, token_f1, top1_agrees
from tamis.eval.questions import Question

if TYPE_CHECKING:
    from tamis.engine.llm import LLM
    from tamis.engine.runner import Prefilled
    from tamis.prompt.segments import Prompt

DEFAULT_SELECTORS = ("stored", "sampled", "oracle", "none")


@dataclass
class Scores:
    """One value per question. density, recall, agreement, f1, em are shares; kl is in nats, of the first token."""

    density: list[float] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    em: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Mean and 95 % bootstrap interval of each metric that has values."""
        out: dict[str, Any] = {}
        for name in ("density", "recall", "kl", "agreement", "f1", "em"):
            values = getattr(self, name)
            if values:
                interval = bootstrap(values)
                out[name] = interval.mean
                out[f"{name}_ci95"] = [interval.low, interval.high]
        return out


def eval_selectors(
    llm: LLM,
    questions: Sequence[Question],
    selectors: Sequence[str] = DEFAULT_SELECTORS,
    *,
    answer_tokens: int = 32,
    note: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Scores]:
    """Run each question dense and with each selector; "dense" comes first in the result.

    The prompt holds the question's passages in their given order. SIFT is on at any length. Recall is measured against
    the true attention of the very pass that skipped the rest. With `answer_tokens` 0 no answers are generated.
    Raises InvalidInput for a selector that does not exist, ContextOverflow with the question that does not fit.
    """
    selectors = list(dict.fromkeys(selectors))
    for name in selectors:
        Policy.of(llm.policy, selector=name)  # raises on a typo, before any work
    scores = {name: Scores() for name in ("dense", *selectors)}
    for i, question in enumerate(questions):
        note(i, len(questions))
        documents = [llm.template.document_tokens(d.title, d.text) for d in question.docs]
        prompt = llm.template.prompt(question.question, [d for d in documents if d])
        try:
            dense = llm.prefill(prompt, prefill="dense")
        except ContextOverflow as e:
            raise ContextOverflow(f"question {question.id!r}: {e}") from e
        reference = dense.logits
        _score(llm, scores["dense"], question, dense, answer_tokens)
        for name in selectors:
            _one(llm, scores[name], prompt, question, name, reference, answer_tokens)
    note(len(questions), len(questions))
    return scores


def _one(
    llm: LLM, scores: Scores, prompt: Prompt, question: Question, selector: str, reference: Any, answer_tokens: int
) -> None:
    made = llm.prefill(prompt, prefill="sift", selector=selector, min_tokens=0, measure_recall=True)
    scores.kl.append(kl_divergence(reference, made.logits))
    scores.agreement.append(float(top1_agrees(reference, made.logits)))
    if made.report.recall is not None:
        scores.recall.append(made.report.recall)
    _score(llm, scores, question, made, answer_tokens)


def _score(llm: LLM, scores: Scores, question: Question, made: Prefilled, answer_tokens: int) -> None:
    scores.density.append(made.report.density)
    if not answer_tokens:
        return
    text = TextStream(llm.tokenizer, ("\n\n",))
    for token in llm.runner.decode(made, Sampling(max_new_tokens=answer_tokens), llm.stop_tokens):
        text.push(token)
        if text.stopped:
            break
    text.finish()
    scores.f1.append(token_f1(text.text, question.answers))
    scores.em.append(exact_match(text.text, question.answers))
