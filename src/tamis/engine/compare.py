"""One prompt prefilled in two ways, dense and as asked for, so that they can be held against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tamis.attention.divergence import kl_divergence
from tamis.attention.policy import PAGED, Policy
from tamis.engine.answer import Comparison
from tamis.engine.sampling import Sampling

if TYPE_CHECKING:
    from tamis.engine.llm import LLM, Document


def compare(
    llm: LLM,
    question: str,
    documents: Sequence[Document],
    *,
    sampling: Sampling | None,
    measure_recall: bool,
    choices: dict[str, Any],
) -> Comparison:
    """Dense against the policy with `choices`, after a warm-up; bits and stored documents are made beforehand."""
    tokens = [llm.document_tokens(d) for d in documents]
    policy = Policy.of(llm.policy, **choices)
    if policy.needs_records:
        llm.index([t for t in tokens if t], **choices)
    if policy.prefill in PAGED:
        llm.prefill(llm.template.prompt(question, tokens[::-1]), **choices).close()
    warm = llm.template.prompt(question, [t for t in tokens if t][:2])
    for prefill in ("dense", policy.prefill):
        llm.prefill(warm, **choices | {"prefill": prefill, "min_tokens": 0}).close()
    dense = llm.generate(question, documents, sampling=sampling, **choices | {"prefill": "dense"})
    sift = llm.generate(question, documents, sampling=sampling, **choices)
    if measure_recall:  # in a pass of its own: measuring would spoil the timing
        prompt = llm.template.prompt(question, tokens[::-1])
        measured = llm.prefill(prompt, measure_recall=True, **choices).report.recall
        sift = replace(sift, report=replace(sift.report, prefill=replace(sift.report.prefill, recall=measured)))
    kl = kl_divergence(dense.first_logits, sift.first_logits)
    return Comparison(dense, sift, kl, bool(dense.first_logits.argmax() == sift.first_logits.argmax()))
