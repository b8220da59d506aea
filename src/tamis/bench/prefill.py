"""Time to first token of one long prompt of passages: dense against a sparse prefill, in turn, on one model.

Nothing is timed before the sparse path has been checked against stock transformers on this very model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from tamis.attention.divergence import kl_divergence
from tamis.bench.results import Row
from tamis.bench.text import passages
from tamis.core.errors import TamisError
from tamis.prompt.segments import Prompt

if TYPE_CHECKING:
    import torch

    from tamis.engine.llm import LLM

QUESTION = "What does the with statement do?"
GATE_TOKENS = 640
GATE_ERROR = 1e-4  # largest logit difference against stock transformers in float32
GATE_ERROR_HALF = 0.25  # the same in bfloat16 and float16, whose logits carry 8 to 11 bits


@dataclass(frozen=True)
class PrefillResult:
    """Medians over the repetitions, in seconds; shares 0..1; `kl` in nats of the first token."""

    model: str
    prompt_tokens: int
    documents: int
    selector: str
    kernel: str
    dense_ttft_s: tuple[float, ...]
    sift_ttft_s: tuple[float, ...]
    index_s: float
    select_s: float
    attend_s: float
    density: float
    recall: float | None
    kl: float
    same_first_token: bool
    gate_error: float

    @property
    def speedup(self) -> float:
        """Dense median over sparse median."""
        return median(self.dense_ttft_s) / median(self.sift_ttft_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "dense_ttft_s": median(self.dense_ttft_s),
            "sift_ttft_s": median(self.sift_ttft_s),
            "speedup": self.speedup,
        }

    def rows(self, dtype: str) -> list[Row]:
        """For results/prefill.csv."""
        case = f"{self.model}/{dtype}/{self.prompt_tokens}"
        ratios = [d / s for d, s in zip(self.dense_ttft_s, self.sift_ttft_s, strict=True)]
        rows = [
            Row.of(case, "dense", "ttft_s", self.dense_ttft_s, unit="s"),
            Row.of(case, self.selector, "ttft_s", self.sift_ttft_s, unit="s"),
            Row.of(case, self.selector, "speedup", ratios, unit="1"),
            Row.of(case, self.selector, "density", [self.density], unit="1"),
            Row.of(case, self.selector, "kl", [self.kl], unit="nat"),
        ]
        return rows if self.recall is None else [*rows, Row.of(case, self.selector, "recall", [self.recall], unit="1")]


def bench_prefill(
    llm: LLM, n_tokens: int, *, repeats: int = 3, docs: Sequence[str] = (), note: Callable[[str], None] = lambda _: None
) -> PrefillResult:
    """Prefill a prompt of `n_tokens` (cut to the model's context) dense and as `llm.policy` says, `repeats` times each.

    Documents are indexed before (that is the offline pass), and the attention mass kept is measured afterwards in a
    pass that is not timed. Raises TamisError if the sparse path with every tile listed does not equal the stock model.
    """
    gate = check_dense_equality(llm, _prompt(llm, GATE_TOKENS, docs))
    prompt = _prompt(llm, n_tokens, docs)
    policy = llm.policy
    note(f"indexing {len(prompt.documents)} documents")
    begin = time.perf_counter()
    llm.index([d.tokens for d in prompt.documents])
    index_s = time.perf_counter() - begin
    dense, sparse = [], []
    reference = sift = None
    for i in range(repeats + 1):
        note(f"run {i} of {repeats}" if i else "warm-up")
        begin = time.perf_counter()
        reference = llm.prefill(prompt, prefill="dense")
        between = time.perf_counter()
        sift = llm.prefill(prompt, prefill="sift", min_tokens=0)
        if i:  # the first round warms caches up
            dense.append(between - begin)
            sparse.append(time.perf_counter() - between)
    assert reference is not None and sift is not None, "repeats is at least 1"
    note("measuring recall")
    recall = llm.prefill(prompt, prefill="sift", min_tokens=0, measure_recall=True).report.recall
    return PrefillResult(
        model=llm.name,
        prompt_tokens=len(prompt.tokens),
        documents=len(prompt.documents),
        selector=policy.selector,
        kernel=sift.report.kernel,
        dense_ttft_s=tuple(dense),
        sift_ttft_s=tuple(sparse),
        index_s=index_s,
        select_s=sift.report.select_s or 0.0,
        attend_s=sift.report.attend_s or 0.0,
        density=sift.report.density,
        recall=recall,
        kl=kl_divergence(reference.logits, sift.logits),
        same_first_token=bool(reference.logits.argmax() == sift.logits.argmax()),
        gate_error=gate,
    )


def check_dense_equality(llm: LLM, prompt: Prompt) -> float:
    """Largest logit difference between stock attention and the sparse kernel with every tile listed."""
    dense = llm.prefill(prompt, prefill="dense").logits
    listed = llm.prefill(prompt, prefill="sift", selector="all", min_tokens=0).logits
    error = _error(dense, listed)
    allowed = GATE_ERROR if str(dense.dtype) == "torch.float32" else GATE_ERROR_HALF
    if not error <= allowed:
        raise TamisError(
            f"with every tile listed the logits differ from stock transformers by {error:.2g} (allowed {allowed:g}); "
            "nothing was timed. Please report this model."
        )
    return error


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max())


def _prompt(llm: LLM, n_tokens: int, docs: Sequence[str]) -> Prompt:
    """A prompt of exactly `n_tokens` (or what the context takes, or the text yields), its last passage cut to fit."""
    room = min(n_tokens, llm.runner.geometry.context_tokens - 1) - len(llm.template.prompt(QUESTION, []).tokens)
    chosen: list[tuple[int, ...]] = []
    for passage in passages(n_tokens, llm.template.count, docs):
        tokens = llm.template.document_tokens(passage.title, passage.text)[: max(0, room)]
        if tokens:
            chosen.append(tokens)
        room -= len(tokens)
        if room <= 0:
            break
    return llm.template.prompt(QUESTION, chosen)
