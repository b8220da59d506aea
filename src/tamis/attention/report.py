"""What a prefill did: how much was computed, what was not possible, and why. Data, and its plain words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PrefillReport:
    """One prompt's prefill. Shares are 0..1, times in seconds.

    asked, used   "dense" or "sift"; where they differ, `reason` says why
    selector      "" for a dense prefill
    kernel        what computed the attention
    density       share of the causal attention area computed, over all layers and heads
    recall        share of the true attention mass kept; None unless it was measured
    layers        density of each layer
    indexed       documents whose bits were made for this prompt, because the store lacked them
    fallbacks     what was computed dense, and why
    chunks        passes over consecutive parts of the prompt
    """

    asked: str
    used: str
    selector: str
    kernel: str
    prompt_tokens: int
    documents: int
    document_tokens: int
    density: float = 1.0
    recall: float | None = None
    reason: str = ""
    layers: tuple[float, ...] = ()
    indexed: int = 0
    select_s: float | None = None
    attend_s: float | None = None
    fallbacks: tuple[str, ...] = ()
    chunks: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        chunks = f" in {self.chunks} chunks" if self.chunks > 1 else ""
        what = f"{self.used} prefill of {self.prompt_tokens} tokens{chunks} ({self.documents} documents, {self.kernel})"
        if self.used != self.asked:
            return f"{what}; {self.asked} was asked for: {self.reason}"
        if self.used == "dense":
            return what
        kept = f", recall {self.recall:.3f}" if self.recall is not None else ""
        lines = [f"{what}: {self.selector}, density {self.density:.3f}{kept}", *self.fallbacks]
        return "\n".join(lines)
