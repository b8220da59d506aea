"""The share of the best tokens that codes find, layer by layer: `selfindex_study` as rows of a results file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tamis.core.errors import InvalidInput
from tamis.eval.selfindex_study import Protocol, Recorded, Row, record, spread_layers, study

if TYPE_CHECKING:
    from tamis.engine.llm import LLM

MEAN = "mean"


@dataclass(frozen=True)
class Found:
    """One scorer on one layer ("mean": all). bytes: read per token and KV head; overlap with the exact best tokens and
    attention mass kept are shares."""

    layer: str
    scorer: str
    bytes: float
    overlap: float
    mass: float


def overlap_study(llm: LLM, tokens: Sequence[int], *, share: float = 0.075) -> list[Found]:
    """Every scorer of the study, Quest at equal tokens and at equal bytes among them, on up to 7 layers of one prompt.

    Computed on the CPU. Raises InvalidInput for a prompt that is too short, or a share outside 0 to 1.
    """
    if not 0 < share < 1:
        raise InvalidInput(f"share is {share}; give a share of the tokens between 0 and 1.")
    llm.runner.check_fits(len(tokens))
    layers = spread_layers(llm.runner.geometry.n_layers)
    with llm.runner.lock:
        kept = record(llm.runner.model, llm.runner.switch, tokens, layers)
    of = {layer: study([_on_cpu(kept[layer])], Protocol(share=share)) for layer in layers}
    rows = {str(layer): [r for r in of[layer] if r.table == "find"] for layer in layers}
    found = [Found(layer, r.variant, r.bytes, r.overlap, r.mass) for layer, made in rows.items() for r in made]
    scorers = zip(*rows.values(), strict=True)
    return [_mean(each) for each in scorers] + found


def _on_cpu(x: Recorded) -> Recorded:
    q, keys, values = (t.float().cpu() for t in (x.q, x.keys, x.values))
    return Recorded(q, keys, values, x.scale)


def _mean(rows: Sequence[Row]) -> Found:
    return Found(
        MEAN, rows[0].variant, *(sum(getattr(r, n) for r in rows) / len(rows) for n in ("bytes", "overlap", "mass"))
    )
