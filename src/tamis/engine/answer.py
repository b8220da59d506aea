"""What a request gets back: the answer, the passages it rests on, and the report. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tamis.attention.report import DecodeReport, PrefillReport


@dataclass(frozen=True)
class Timing:
    """Seconds. `ttft_s` is all that passes between the question and the first token of the answer."""

    ttft_s: float
    retrieval_s: float
    index_s: float
    prompt_s: float
    prefill_s: float
    decode_s: float = 0.0


@dataclass(frozen=True)
class Source:
    """A passage that stood in the prompt. `support` 0..1: how much of the answer its words bear out."""

    number: int
    place: str
    title: str
    support: float


@dataclass(frozen=True)
class Report:
    """What was done for one request. `decode` is None where keys and values lie in pages."""

    prefill: PrefillReport
    timing: Timing
    new_tokens: int
    finish: str
    notes: tuple[str, ...] = ()
    decode: DecodeReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        t = self.timing
        parts = {"retrieval": t.retrieval_s, "index": t.index_s, "prompt": t.prompt_s, "prefill": t.prefill_s}
        split = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
        speed = f", {self.new_tokens / t.decode_s:.0f} tokens/s" if t.decode_s and self.new_tokens > 1 else ""
        lines = [f"TTFT {t.ttft_s:.2f} s ({split}); {self.new_tokens} new tokens{speed}", str(self.prefill)]
        if self.decode is not None and self.decode.kv != "auto":
            lines.append(str(self.decode))
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True)
class Answer:
    """The generated text and how it came about."""

    text: str
    report: Report
    sources: tuple[Source, ...] = ()
    tokens: tuple[int, ...] = ()
    first_logits: Any = field(default=None, compare=False, repr=False)

    def with_retrieval(self, retrieval_s: float, notes: Sequence[str] = ()) -> Answer:
        """The same answer after a retrieval that took `retrieval_s`, which counts towards the first token."""
        timing = self.report.timing
        timing = replace(timing, retrieval_s=retrieval_s, ttft_s=timing.ttft_s + retrieval_s)
        return replace(self, report=replace(self.report, timing=timing, notes=(*self.report.notes, *notes)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        prefill, timing = self.report.prefill, self.report.timing
        return {
            "answer": self.text,
            "ttft_s": timing.ttft_s,
            "density": prefill.density,
            "recall": prefill.recall,
            "sources": [asdict(s) for s in self.sources],
            "report": self.report.to_dict(),
        }


@dataclass(frozen=True)
class Comparison:
    """One prompt, prefilled dense and as asked. `kl` is KL(dense || asked) of the first token, in nats."""

    dense: Answer
    sift: Answer
    kl: float
    same_first_token: bool

    def with_retrieval(self, retrieval_s: float, notes: Sequence[str] = ()) -> Comparison:
        """Both answers after the retrieval that they share; the notes go with the second."""
        return replace(
            self,
            dense=self.dense.with_retrieval(retrieval_s),
            sift=self.sift.with_retrieval(retrieval_s, notes),
        )

    @property
    def speedup(self) -> float:
        """How many times sooner the first token came."""
        return self.dense.report.timing.ttft_s / self.sift.report.timing.ttft_s

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {
            "dense": self.dense.to_dict(),
            "sift": self.sift.to_dict(),
            "kl": self.kl,
            "same_first_token": self.same_first_token,
            "speedup": self.speedup,
        }
