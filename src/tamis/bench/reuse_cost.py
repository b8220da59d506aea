"""What a GPU's work costs in seconds: a model of it, fitted to measured prefills. Knows token counts, not caches.

`Executor` is the seam between the simulator and the machine: `ModelledExecutor` computes seconds from a `CostModel`;
one that runs a model on a device can stand in its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from tamis.bench.results import read_rows
from tamis.bench.reuse_workload import Request
from tamis.core.errors import InvalidInput

SHAPE = "llama-3.1-8b"
ITEM_BYTES = 2
# Measured on one H200: device copy (bytes read + bytes written a second) and pinned host to device.
DEVICE_BYTES_S = 4.3e12
HOST_BYTES_S = 54.9e9


class Pass(NamedTuple):
    """One forward pass for one request: tokens computed, (query, key) pairs of causal attention, keys read."""

    tokens: int
    pairs: float
    keys: int

    @classmethod
    def of(cls, tokens: int, before: int = 0) -> Pass:
        """`tokens` new ones that see each other causally, and all of `before`."""
        return cls(tokens, tokens * before + tokens * (tokens + 1) / 2, before + tokens)


class Work(NamedTuple):
    """What stands between a request and its first token. documents: one pass for each that is computed alone, before
    the prompt's own pass; copied, loaded: tokens whose keys and values are copied in the device, or come from host."""

    prompt: Pass
    documents: tuple[Pass, ...] = ()
    copied: int = 0
    loaded: int = 0

    @property
    def new_tokens(self) -> int:
        """Tokens that pass through the model."""
        return self.prompt.tokens + sum(d.tokens for d in self.documents)


class Executor(Protocol):
    """Does the work, or says how long it takes."""

    @property
    def label(self) -> str: ...
    def prefill(self, requests: Sequence[Request], works: Sequence[Work]) -> float: ...
    def decode(self, context_tokens: int, n_requests: int, steps: int) -> float: ...
    def steps_within(self, context_tokens: int, n_requests: int, seconds: float, at_most: int) -> int: ...


@dataclass(frozen=True)
class CostModel:
    """Llama-3.1-8B in bf16 on one H200.

    token_s         the linear layers, seconds a token; a pass costs no less than reading the weights once
    pair_s          attention, seconds a (query, key) pair of all heads and layers; no less than reading the keys once
    token_bytes     keys and values of one token
    weight_bytes    what every pass and every decode step reads
    A decode step reads the weights and each request's keys and values. Launches, sampling and scheduling cost nothing.
    """

    token_s: float
    pair_s: float
    token_bytes: int
    weight_bytes: int
    source: str
    device_bytes_s: float = DEVICE_BYTES_S
    host_bytes_s: float = HOST_BYTES_S

    @classmethod
    def fitted(cls, path: Path | str = "results/ttft.csv") -> CostModel:
        """From the fastest dense prefill of each length that `tamis bench ttft` has recorded of SHAPE on a GPU.

        Each is the mean over the lengths, so that short prompts count like long ones. Raises InvalidInput if there is
        no such row.
        """
        measured = _dense_prefills(path)
        token_s = _slope([(float(n), other) for n, (_, other) in measured.items()])
        pair_s = _slope([(n * (n + 1) / 2, attention) for n, (attention, _) in measured.items()])
        token_bytes, weight_bytes = _shape_bytes()
        lengths = ", ".join(str(n) for n in sorted(measured))
        return cls(token_s, pair_s, token_bytes, weight_bytes, f"dense prefills of {lengths} tokens in {path}")

    @property
    def about(self) -> str:
        """The model in words and numbers, for reports."""
        return (
            f"{SHAPE} bf16 on one H200, modelled: {self.token_s * 1e6:.2f} us a token, {self.pair_s * 1e12:.1f} ps a "
            f"(query, key) pair, from {self.source}; a pass reads {self.weight_bytes / 1e9:.1f} GB of weights; copies "
            f"{self.device_bytes_s / 1e12:g} TB/s read + write, host to device {self.host_bytes_s / 1e9:g} GB/s; "
            "decode reads weights, keys and values at the copy's rate; launches and scheduling cost nothing"
        )

    def passes(self, passes: Sequence[Pass]) -> float:
        """Seconds of passes that run as one batch; 0 if there are none."""
        if not passes:
            return 0.0
        linear = max(sum(p.tokens for p in passes) * self.token_s, self.weight_bytes / self.device_bytes_s)
        return linear + sum(max(p.pairs * self.pair_s, p.keys * self.token_bytes / self.device_bytes_s) for p in passes)

    def document(self, n_tokens: int) -> float:
        """Seconds to compute a document alone: its worth to an eviction policy."""
        return self.passes([Pass.of(n_tokens)])


class ModelledExecutor:
    """Says how long work takes by a cost model, and does none."""

    label = "modelled"

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def prefill(self, requests: Sequence[Request], works: Sequence[Work]) -> float:
        """Seconds: all missing documents as one batch, then all prompts as one, then copies and loads, not hidden."""
        cost = self.cost
        documents = [d for work in works for d in work.documents]
        copied = 2 * sum(work.copied for work in works) * cost.token_bytes / cost.device_bytes_s
        loaded = sum(work.loaded for work in works) * cost.token_bytes / cost.host_bytes_s
        return cost.passes(documents) + cost.passes([work.prompt for work in works]) + copied + loaded

    def decode(self, context_tokens: int, n_requests: int, steps: int) -> float:
        """Seconds of `steps` steps of a batch whose contexts sum to context_tokens and each grow by a token a step."""
        read = steps * context_tokens + n_requests * steps * (steps + 1) / 2
        return (steps * self.cost.weight_bytes + read * self.cost.token_bytes) / self.cost.device_bytes_s

    def steps_within(self, context_tokens: int, n_requests: int, seconds: float, at_most: int) -> int:
        """The fewest steps, 1 to at_most, that take `seconds` or more; at_most if none do."""
        low, high = 1, at_most
        while low < high:
            middle = (low + high) // 2
            if self.decode(context_tokens, n_requests, middle) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low


def _dense_prefills(path: Path | str) -> dict[int, tuple[float, float]]:
    """{tokens: (attention_s, other seconds)} of the fastest dense provider of each length; later rows replace."""
    if not Path(path).is_file():
        raise InvalidInput(f"{path} does not exist; give the ttft.csv that `tamis bench ttft` wrote on a GPU.")
    found: dict[int, dict[str, dict[str, float]]] = {}
    for row in read_rows(path):
        shape, dtype, length = [*row["case"].split("/"), "", ""][:3]
        if (shape, dtype) == (SHAPE, "bf16") and row["provider"].startswith("dense-") and length.isdigit():
            found.setdefault(int(length), {}).setdefault(row["provider"], {})[row["metric"]] = float(row["p50"])
    best: dict[int, tuple[float, float]] = {}
    for n_tokens, providers in found.items():
        whole = [m for m in providers.values() if {"ttft_s", "attention_s"} <= set(m)]
        if whole:
            fastest = min(whole, key=lambda m: m["ttft_s"])
            best[n_tokens] = fastest["attention_s"], fastest["ttft_s"] - fastest["attention_s"]
    if not best:
        raise InvalidInput(
            f"{path} has no dense prefill of {SHAPE} in bf16 with ttft_s and attention_s; run `tamis bench ttft` on a "
            "GPU, or give a file that has."
        )
    return best


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """The mean of y / x."""
    slope = sum(y / x for x, y in points) / len(points)
    assert math.isfinite(slope) and slope > 0, f"measured times are positive: {points}"
    return slope


def _shape_bytes() -> tuple[int, int]:
    """(keys and values of a token, weights that a step reads) of SHAPE in bf16."""
    from tamis.bench.shapes import shape_of

    s = shape_of(SHAPE)
    token = 2 * s.layers * s.kv_heads * s.head_dim
    layer = s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads) + 3 * s.hidden * s.intermediate
    return token * ITEM_BYTES, (s.layers * layer + s.vocabulary * s.hidden) * ITEM_BYTES
