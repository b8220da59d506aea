"""Quality of answers from stored documents: plain reuse, recomputed shares by two rules, copies, an adapter.

The variants are compared by `eval.answers` on the same prompts; this says which, on which questions, and sums up.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tamis.attention.blend import CHOOSERS
from tamis.attention.policy import Policy
from tamis.core.errors import InvalidInput
from tamis.eval.answers import Answers
from tamis.eval.prefills import ADAPTED, DENSE
from tamis.eval.questions import load_questions
from tamis.eval.tasks import Fill, Task, qa_task
from tamis.model.adapter_info import AdapterInfo

NO_CROSS = "none"  # the selector of SIFT with which no document sees another
COPIES = "reuse:reuse_copies=true"


def variants_of(shares: Sequence[float], *, adapter: bool = False, rules: Sequence[str] = ()) -> list[str]:
    """Names of the variants, dense first: every rule at every share. `rules`: all that there are.

    Raises InvalidInput for a share outside 0 to 1 and for an unknown rule.
    """
    blends = [f"blend:recompute={share:g},blend={rule}" for rule in rules or CHOOSERS for share in shares]
    for share, rule in ((share, rule) for share in shares for rule in rules or CHOOSERS):
        Policy.of(None, prefill="blend", recompute=share, blend=rule)
    tuned = [f"{ADAPTED}{DENSE}", f"{ADAPTED}reuse"] if adapter else []
    return [DENSE, "reuse", COPIES, *blends, NO_CROSS, *tuned]


def reuse_tasks(
    files: Sequence[Path], limit: int | None = None, fill: Fill | None = None, info: AdapterInfo | None = None
) -> tuple[list[Task], int]:
    """One task per question set, and how many questions were left out because the adapter of `info` may have seen
    them. Their passages are left out too.

    Raises what `load_questions` does, and InvalidInput where no question is left.
    """
    tasks: list[Task] = []
    asked, left_out = 0, 0
    for file in files:
        questions = load_questions(file)
        kept = [q for q in questions if info is None or not info.has_seen(q.question)]
        left_out += len(questions) - len(kept)
        asked += len(kept)
        tasks += [qa_task(file.stem, kept, limit, fill)] if kept else []
    if not asked:
        raise InvalidInput(
            f"the adapter may have seen all {left_out} questions: it was trained with a holdout of "
            f"{info.holdout if info else 0:g}. Give another question set, or train with a larger holdout."
        )
    return tasks, left_out


def curve(found: Answers, group: str) -> dict[str, list[dict[str, Any]]]:
    """For each rule of blend its points by recomputed share, asked for and done, with the KL and its 95 % interval."""
    of = {(c.variant, c.metric): c for c in found.cells if c.group == group}
    points: dict[str, list[dict[str, Any]]] = {}
    for variant in found.variants:
        kind, _, options = variant.partition(":")
        given = dict(part.split("=") for part in options.split(",") if part)
        if kind != "blend" or (variant, "kl") not in of:
            continue
        kl, done = of[variant, "kl"].mean, of.get((variant, "recomputed"))
        share = float(given.get("recompute", Policy.recompute))
        point = {"asked": share, "done": done.mean.mean if done else share}
        points.setdefault(given.get("blend", Policy.blend), []).append(
            point | {"kl": kl.mean, "kl_ci95": [kl.low, kl.high], "n": kl.n}
        )
    return {rule: sorted(row, key=lambda p: p["done"]) for rule, row in points.items()}
