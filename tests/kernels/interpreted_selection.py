"""Run the selection kernels under Triton's interpreter and print their errors as JSON, one line a case.

A program of its own, run with TRITON_INTERPRET=1: that must be set before Triton is first imported.
"""

from __future__ import annotations

import json
import sys

import torch
from interpreted import fix_interpreter
from selection_cases import Case, dense_lse, list_error, qk, scene_of, score_error, statistics_error

from tamis.kernels.reference.tile_statistics import tile_statistics as reference
from tamis.select.every import AllTiles, NoCrossTiles
from tamis.select.sampled import Sampled
from tamis.select.scene import Scene, Selector
from tamis.select.stored import Stored
from tamis.select.variants import GlobalThreshold

HALF = torch.float16
PAIRS = "many pairs"
CASES = {
    "odd documents": Case((40, 1, 16, 21)),
    "fp16, tile of 32, 8 rows": Case((70, 33), heads=(2, 1), tile=32, rows=8, dtype=HALF),
    "group of 3, head dim 24, 3 rows": Case((40, 20), heads=(3, 1), dim=24, rows=3),
    "no records": Case((33, 1), heads=(2, 2), records="none"),
    "some records, no prefix": Case((20, 33), outside=(0, 3), heads=(2, 1), records="some"),
    "nine documents of one tile": Case((9,) * 9, heads=(2, 1)),
    "chunk inside a document": Case((40, 1, 16, 21), window=(2, 4)),
    "last chunk": Case((40, 1, 16, 21), window=(5, 9), records="some"),
    "first chunk": Case((40, 1, 16, 21), heads=(2, 1), window=(0, 3)),
    PAIRS: Case((96, 80)),
}
MUTATIONS = (
    "scores of the wrong KV head",
    "lists of another layer",
    "statistics of the wrong KV head",
    "scores with another row offset",
    "power ignored",
    "partner ignored",
)


def selectors(name: str, case: Case) -> dict[str, Selector]:
    """The selectors that have kernels; the plainest two only once."""
    if name == PAIRS:  # a partner's mass counts as a share of what the tile itself sees: few lists show it
        return {"threshold, paired": GlobalThreshold(0.2, 0.0, 2, "sampled", paired=True)}
    most: dict[str, Selector] = {
        "sampled": Sampled(case.rows, 0.8),
        "sampled, all of it": Sampled(case.rows, 1.0),
        "threshold": GlobalThreshold(0.08, 0.3, case.rows),
        "threshold, power 0.5": GlobalThreshold(0.04, 0.1, case.rows, power=0.5),
        "threshold, power 1": GlobalThreshold(0.015, 0.1, case.rows, power=1),
        "threshold, local sampled": GlobalThreshold(0.05, 0.3, case.rows, "sampled"),
        "threshold, paired": GlobalThreshold(0.05, 0.3, 2, "sampled", paired=True),
        "stored": Stored(),
    }
    return most | ({"all": AllTiles(), "none": NoCrossTiles()} if name == next(iter(CASES)) else {})


RESULTS = [
    *((f"{name}: {what}") for name, case in CASES.items()
      for what in ("scores in float32", "scores in float16", *selectors(name, case), "statistics"))
]  # fmt: skip


def statistics(case: Case, scene: Scene, wrong: bool = False) -> dict[str, float]:
    """Errors of the statistics kernel, which is given the KV heads in the wrong order if `wrong`."""
    from tamis.kernels.statistics import tile_statistics

    q, k = qk(case, scene)
    lse = dense_lse(q, k, case.scale)
    cuts = {"scale": case.scale, "beta": 0.05, "q_offset": scene.q_offset}
    made = tile_statistics(q, k.flip(0) if wrong else k, lse, scene.queries, scene.tiling, **cuts)
    return statistics_error(made, reference(q, k, lse, scene.queries, scene.tiling, **cuts))


def main() -> None:
    """All cases, then the mutations of the first."""
    fix_interpreter()
    torch.set_num_threads(1)

    def say(name: str, what: str, found: dict[str, float]) -> None:
        sys.stdout.write(json.dumps({"case": f"{name}: {what}" if what else name, **found}) + "\n")

    for name, case in CASES.items():
        scene = scene_of(case)
        q, k = qk(case, scene)
        for dtype in (torch.float32, HALF):
            kind = str(dtype).removeprefix("torch.")
            say(name, f"scores in {kind}", {"mass": score_error(case, q, k, scene, dtype)})
        for kind, selector in selectors(name, case).items():
            say(name, kind, list_error(selector, case, q, k, scene))
        say(name, "statistics", statistics(case, scene))
    case = CASES["odd documents"]
    scene = scene_of(case)
    q, k = qk(case, scene)
    say(MUTATIONS[0], "", {"mass": score_error(case, q, k, scene, torch.float32, wrong="heads")})
    say(MUTATIONS[1], "", list_error(Stored(), case, q, k, scene, asked=0))
    say(MUTATIONS[2], "", statistics(case, scene, wrong=True))
    chunk = CASES["last chunk"]
    window = scene_of(chunk)
    say(MUTATIONS[3], "", {"mass": score_error(chunk, *qk(chunk, window), window, torch.float32, wrong="offset")})
    bent, flat = (GlobalThreshold(0.015, 0.1, case.rows, power=power) for power in (1.0, 0.0))
    say(MUTATIONS[4], "", list_error(bent, case, q, k, scene, given=flat))
    together, alone = GlobalThreshold(0.05, 0.3, 2, "sampled", paired=True), GlobalThreshold(0.05, 0.3, 1, "sampled")
    say(MUTATIONS[5], "", list_error(together, case, q, k, scene, given=alone))


if __name__ == "__main__":
    sys.exit(main())
