"""Run the kernels of block decoding under Triton's interpreter and print their errors as JSON, one line a case.

A program of its own, run with TRITON_INTERPRET=1: that must be set before Triton is first imported.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from interpreted import fix_interpreter
from offload_cases import (
    SMALL,
    Case,
    attend_errors,
    difference,
    piece_errors,
    prefill_errors,
    selection_error,
    tied,
    walk,
)

from tamis.kernels.blocks import BlockRule
from tamis.kernels.reference import offload as reference

HALF = torch.float16
THIRDS = BlockRule(top=5, first=0, local=1, block=12, window=12, stride=4, dense_tokens=0)
# case, mode, whether all is forgotten, and what is wanted instead of what is selected
STEPS = {
    "own": (Case(), "own", False),
    "own, wide keys": (Case(tokens=(150, 20), wide=True), "own", False),
    "raw": (Case(), "raw", False),
    "a block ends": (Case(tokens=(158, 63), slots=7), "raw", False),
    "all copied again": (Case(slots=7), "own", True),
    "first tokens": (Case(tokens=(1, 17)), "raw", False),
    "fp16, group of 3": (Case(heads=6, dtype=HALF, slots=9), "own", False),
    "one KV head of 16 heads": (Case(heads=16, kv_heads=1, dim=32, tokens=(100,)), "own", False),
    "sticking": (Case(rule=replace(SMALL, stick=0.5, recent=2), tokens=(158, 190)), "raw", False),
    "blocks of 12": (Case(rule=THIRDS, tokens=(130, 40), slots=4), "raw", False),
}
WANTED = {
    "nothing missing": ([[1, 3, 5, -1, -1]] * 4, 0),
    "everything missing": ([[0, 1, 2, 3, 4], [5, 6, 7, 8, -1], [0, 1, 2, 3, 4]], 4),
    "the oldest goes": ([[0, 1, 2, -1, -1], [3, 4, -1, -1, -1], [5, 0, -1, -1, -1]], 1),
    "nothing wanted": ([[-1] * 5, [2, -1, -1, -1, -1], [-1] * 5], 0),
}
TIES = {
    "ties": (40, 3, (150, 90), SMALL),
    "all alike": (40, 1, (600, 90), SMALL),
    "none to choose": (40, 3, (5, 20), SMALL),
    "one value each": (130, 500, (1200, 2000), SMALL),
    "nothing by score": (40, 3, (300, 310), BlockRule(4, 1, 2, 16, 8, 4, 0)),
    "top of all": (9, 3, (120, 90), BlockRule(30, 1, 2, 16, 8, 4, 0)),
}
PREFILL = {
    "own": (150, 0, {}),
    "own, wide keys": (150, 90, {"wide": True}),
    "own, wide keys that the first rows do not see": (50, 29, {"wide": True}),
    "raw": (150, 61, {"own": False}),
    "a program's first key ends with the last row": (1032, 1026, {"own": False}),
    "raw, fp16": (100, 30, {"own": False, "dtype": HALF, "dim": 32}),
    "group of 3, fp16": (90, 60, {"heads": (6, 2), "dtype": HALF}),
    "a prompt shorter than a window": (6, 0, {"own": False}),
    "own, 4 together": (150, 0, {"wide": True, "together": 4}),
    "own, 8 together, cut by a border": (150, 61, {"together": 8}),
    "raw, 16 together": (150, 90, {"own": False, "together": 16}),
}
ATTEND = {
    "each token": (150, 0, {}),
    "each token, from the middle of a tile": (150, 61, {}),
    "2 together": (150, 61, {"together": 2}),
    "16 together": (150, 35, {"together": 16}),
    "group of 3": (100, 0, {"heads": (6, 2), "together": 4}),
    "one head, fp16": (100, 7, {"heads": (1, 1), "dtype": HALF}),
    "few choose: fp16, dim 32": (90, 60, {"heads": (8, 1), "dtype": HALF, "dim": 32, "together": 16}),
    "one row": (150, 149, {"together": 16}),
}
ATTEND_WRONG = ("a block more", "another choice", "later")
MUTATIONS = ("rows", "copies", "ties to the later", "heads", "first")


def wants(rows: list[list[int]], n_rows: int) -> list[torch.Tensor]:
    """Steps that want the same of every row."""
    return [torch.tensor(row, dtype=torch.int32).expand(n_rows, -1).clone() for row in rows]


def worst(case: Case, steps, n: int, **given) -> dict[str, float]:
    """The largest difference of some steps, and the copies of the last."""
    wrong = given.pop("wrong", "")
    total: dict[str, float] = {}
    for found, right in zip(walk(case, steps, n, wrong=wrong, **given), walk(case, reference, n, **given), strict=True):
        for name, value in difference(found, right).items():
            # NaN stays
            total[name] = value if name not in total or not value <= total[name] else total[name]
        copies = found["n_tasks"]
    return total | {"copies": copies}


def main() -> None:
    """All cases, then the mutations."""
    fix_interpreter()
    from tamis.kernels.triton import blocks as steps

    torch.set_num_threads(1)

    def say(name: str, found: dict[str, float]) -> None:
        sys.stdout.write(json.dumps({"case": name, **found}) + "\n")

    for name, (case, mode, forget) in STEPS.items():
        say(f"steps, {name}", worst(case, steps, 3, mode=mode, forget=forget))
    for name, (rows, _) in WANTED.items():
        case = Case(tokens=(150, 149))
        say(f"wanted, {name}", worst(case, steps, len(rows), wants=wants(rows, case.room.rows), mode="raw"))
    for name, (n, levels, positions, rule) in TIES.items():
        values = tied(6, n, levels)
        say(f"selection, {name}", {"wrong": selection_error(steps, values, torch.tensor(positions), rule)})
    for name, (tokens, first, given) in PREFILL.items():
        rule = replace(SMALL, together=given.pop("together", 1))
        say(f"prefill, {name}", prefill_errors(steps, tokens, first, rule, **given))
    for name, (tokens, first, given) in ATTEND.items():
        rule = replace(SMALL, together=given.pop("together", 1))
        say(f"attend, {name}", attend_errors(steps, tokens, first, rule, **given))
    for wrong in ATTEND_WRONG:
        say(wrong, attend_errors(steps, 150, 61, SMALL, wrong=wrong))
    say("pieces", piece_errors())
    for wrong in MUTATIONS[:2]:
        say(wrong, worst(Case(), steps, 2, wrong=wrong, mode="raw"))
    values = tied(6, 40, 3)
    bent = values + torch.arange(40) * 1e-4
    say(MUTATIONS[2], {"wrong": selection_error(steps, values, torch.tensor((300, 310)), SMALL, given=bent)})
    for wrong in MUTATIONS[3:]:
        say(wrong, prefill_errors(steps, 150, 61, SMALL, wrong=wrong))


if __name__ == "__main__":
    sys.exit(main())
