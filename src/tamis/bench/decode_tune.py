"""The best way to cut the launches of a decode step on this GPU, found one launch after the other."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from tamis.bench.decode_clock import timed
from tamis.bench.decode_scene import Scene
from tamis.bench.machine import why_of
from tamis.kernels.selfindex_arena import Workspace

ROUNDS, CALLS = 10, 10
SCORE = [(128, 4), (64, 2), (32, 1)]  # quarter of a step's slots, warps
ITERS = (1, 2, 4, 8, 16)
SELECT = (4, 8, 16)  # warps
# records of a step, whole tokens of a step, warps, registers
ATTEND: list[tuple[int, int, int, int | None]] = [
    (32, 32, 1, None), (32, 32, 1, 168), (16, 32, 1, 168), (64, 32, 1, None), (32, 32, 2, None), (32, 64, 4, 128),
    (32, 64, 4, None), (64, 64, 4, 168), (64, 64, 4, None), (64, 64, 4, 128), (64, 64, 8, 128), (128, 64, 8, 128),
]  # fmt: skip
RESIDENT = (8, 10, 12, 16)  # programs on an SM
SPLITS = (64, 128, 256, 512)


def module_of(kernel: str) -> Any:
    """The module of a kernel that runs on a GPU: "triton" or "nvrtc"."""
    return importlib.import_module(f"tamis.kernels.{kernel}.selfindex_decode")


def tuned(scene: Scene, kernel: str, note: Callable[[str], None]) -> dict[str, Any]:
    """{"work", "cut"}: a workspace of the best splits, and the best cut of a kernel's module.

    Times are of launches from a warm cache where one layer fits it, so tune on a case that does not.
    """
    module = module_of(kernel)
    heads, dtype = scene.shape.heads, scene.q.dtype
    works = {n: Workspace.reserve(scene.arena, heads, scene.count, split=n, dtype=dtype) for n in SPLITS}
    for work in works.values():
        work.count.fill_(scene.count)
    default, middle = module.cut_for(scene.arena), works[256]
    block = scene.arena.room.block
    best = functools.partial(_best, scene, module, note=note)
    if kernel == "nvrtc":
        selects = [(middle, replace(default, rest=replace(default.rest, select_warps=w))) for w in SELECT]
        cut = best("compact", selects)[1]
        cut = best("score", [(middle, replace(cut, iters=i)) for i in ITERS])[1]
        pairs = [(works[s], replace(cut, resident=r)) for r, s in itertools.product(RESIDENT, SPLITS)]
        work, cut = best("attend", pairs)
        return {"work": work, "cut": cut}
    scores = [
        (middle, replace(default, score=n, score_warps=w, iters=i))
        for (n, w), i in itertools.product(SCORE, ITERS)
        if block % (4 * n) == 0
    ]
    cut = best("score", scores)[1]
    cut = best("compact", [(middle, replace(cut, select_warps=w)) for w in SELECT])[1]
    attends = [
        (works[s], replace(cut, attend=n, whole=v, attend_warps=w, registers=r))
        for (n, v, w, r), s in itertools.product(ATTEND, SPLITS)
    ]
    work, cut = best("attend", attends)
    return {"work": work, "cut": cut}


def _best(
    scene: Scene, module: Any, name: str, tried: Iterable[tuple[Workspace, Any]], *, note: Callable[[str], None]
) -> tuple[Workspace, Any]:
    """The pair whose launch `name` is fastest; what cannot run is said and passed over."""
    found: list[tuple[float, tuple[Workspace, Any]]] = []
    for work, cut in tried:
        try:
            seconds = _seconds(scene, module, name, work, cut)
        except Exception as e:  # whatever a compiler or a launch raises
            note(f"tune {name} {cut} split {work.split}: {why_of(e)}")
            continue
        note(f"tune {name} {seconds * 1e6:8.2f} us  split {work.split}  {cut}")
        found.append((seconds, (work, cut)))
    best = min(found, key=lambda pair: pair[0])
    note(f"tune {name}: best {best[0] * 1e6:.2f} us with split {best[1][0].split}, {best[1][1]}")
    return best[1]


def _seconds(scene: Scene, module: Any, name: str, work: Workspace, cut: Any) -> float:
    out = torch.empty_like(scene.q)
    lse = torch.empty(scene.q.shape[:-1], device=scene.q.device)
    made = module.launches(scene.q, scene.arena, work, out, lse, scale=scene.scale, cut=cut)
    for launch in made.values():  # so that the launch finds what those before it leave
        launch()
    torch.cuda.synchronize()
    return median(timed({name: made[name]}, scene.q.device, ROUNDS, calls=CALLS)[name])
