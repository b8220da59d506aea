"""What choosing blocks costs a prefill: one forecast vector a KV head against the softmax of every query head.

One layer on random numbers, all rows of a prompt in chunks. Both score the same pooled keys and take as many blocks by
the same kernels; the head-wise one estimates its normaliser from keys pooled four times as wide, as published.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from tamis.bench.decode_clock import timed
from tamis.bench.results import Row
from tamis.bench.shapes import Shape
from tamis.kernels.blocks import COARSE, BlockRule
from tamis.kernels.reference.blocks import pool_keys

CHUNK = {"cuda": 8192, "cpu": 256}  # rows that are scored at once: the reference holds all their scores


@dataclass(frozen=True)
class Selection:
    """Milliseconds of a layer, by provider ("forecast", "head-wise") and part ("select", "score")."""

    case: str
    times: dict[tuple[str, str], list[float]]

    def rows(self) -> list[Row]:
        """Rows of the results file: times and what the forecast saves."""
        made = [
            Row.of(self.case, provider, f"{part}_ms", times, unit="ms")
            for (provider, part), times in self.times.items()
        ]
        for part in ("select", "score"):
            pairs = zip(self.times["head-wise", part], self.times["forecast", part], strict=True)
            made.append(Row.of(self.case, "forecast", f"{part}_speedup", [a / b for a, b in pairs], unit="1"))
        return made


def measure(
    name: str, shape: Shape, tokens: int, rule: BlockRule, ops: ModuleType, device: torch.device, *, rounds: int
) -> Selection:
    """Time the selection of one layer for a prompt of so many tokens."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    draw = torch.Generator(device=device).manual_seed(0)

    def normal(heads: int) -> torch.Tensor:
        return torch.empty(heads, tokens, shape.head_dim, dtype=dtype, device=device).normal_(generator=draw)

    keys = normal(shape.kv_heads)
    pooled = pool_keys(keys, rule.window, rule.stride)
    wide = pool_keys(keys, COARSE * rule.window, COARSE * rule.stride)
    scale, n_blocks = shape.head_dim**-0.5, rule.n_blocks(tokens)
    chunk = CHUNK[device.type]
    firsts = range(0, tokens, chunk)

    def of(q: torch.Tensor, scaled: float | None, *, select: bool) -> Callable[[], None]:
        chunks = [q[:, first : first + chunk].contiguous() for first in firsts]

        def run() -> None:
            for first, part in zip(firsts, chunks, strict=True):
                values = ops.prefill_scores(part, pooled, first, rule, scale=scaled, wide=wide if scaled else None,
                                            n_blocks=n_blocks)  # fmt: skip
                if select:
                    ops.prefill_select(values, first, rule)

        return run

    f, q = keys, normal(shape.heads)
    runs = {
        (provider, part): of(x, scaled, select=part == "select")
        for provider, x, scaled in (("forecast", f, None), ("head-wise", q, scale))
        for part in ("select", "score")
    }
    found = timed({"/".join(key): run for key, run in runs.items()}, device, rounds, calls=0)
    times = {key: [s * 1e3 for s in found["/".join(key)]] for key in runs}
    return Selection(f"{name}/{tokens}/selection", times)
