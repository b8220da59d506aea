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
from tamis.bench.decode_scene import Scene, copied, copies_of
from tamis.bench.machine import why_of
from tamis.core.errors import TamisError
from tamis.kernels.selfindex_arena import Arena
from tamis.kernels.selfindex_workspace import Workspace

ROUNDS, CALLS = 10, 10
SCORE = [(128, 4), (64, 2), (32, 1)]  # quarter of a step's slots, warps
ITERS = (1, 2, 4, 8, 16)
SELECT = (4, 8, 16)  # warps
# records of a step, whole tokens of a step, warps, registers
ATTEND: list[tuple[int, int, int, int | None]] = [
    (32, 32, 1, None), (32, 32, 1, 168), (16, 32, 1, 168), (64, 32, 1, None), (32, 32, 2, None), (32, 64, 4, 128),
    (32, 64, 4, None), (64, 64, 4, 168), (64, 64, 4, None), (64, 64, 4, 128), (64, 64, 8, 128), (128, 64, 8, 128),
]  # fmt: skip
SPLITS = (64, 128, 256, 512)
# of the CUDA C++ kernels: slots of which one is counted; programs of a row that choose, threads of each; steps of
# records on their way and programs on an SM; launches that may begin early
EVERY, STAGES = (8, 16, 1, 0), [(3, 3), (2, 3), (4, 3), (3, 4), (2, 4), (3, 2)]
CHOOSERS = [(8, 512), (8, 1024), (4, 512), (4, 1024), (2, 1024), (1, 1024)]
EARLY = (0, 1, 2)

Tried = tuple[Workspace, Any]


def module_of(kernel: str) -> Any:
    """The module of a kernel that runs on a GPU: "triton" or "nvrtc"."""
    return importlib.import_module(f"tamis.kernels.{kernel}.selfindex_decode")


def tuned(scene: Scene, kernel: str, note: Callable[[str], None]) -> dict[str, Any]:
    """{"work", "cut"}: a workspace of the best splits, and the best cut of a kernel's module.

    A launch is timed with all before it, over so many arenas that none of them stays in the device's own cache.
    """
    module, heads, dtype = module_of(kernel), scene.shape.heads, scene.q.dtype
    splits = SPLITS if kernel == "triton" else SPLITS[:1]
    works = {n: Workspace.reserve(scene.arena, heads, scene.count, split=n, dtype=dtype) for n in splits}
    for work in works.values():
        work.count.fill_(scene.count)
    others = copies_of(scene.arena.nbytes, scene.q.device) - 1
    arenas = [scene.arena, *(copied(scene.arena) for _ in range(others))]
    best = functools.partial(_best, scene, arenas, module, note=note)
    default = module.cut_for(scene.arena)
    if kernel == "triton":
        work, cut = _tuned_triton(default, works, best, scene.arena.room.block)
    else:
        work, cut = _tuned_nvrtc(default, works[64], best)
    return {"work": work, "cut": cut}


def _tuned_triton(default: Any, works: dict[int, Workspace], best: Callable[..., Tried], block: int) -> Tried:
    middle = works[256]
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
    return best("attend", attends)


def _tuned_nvrtc(default: Any, work: Workspace, best: Callable[..., Tried]) -> Tried:
    cut = best("score", [(work, replace(default, iters=i)) for i in ITERS])[1]
    cut = best("choose", [(work, replace(cut, every=n)) for n in EVERY])[1]
    cut = best("choose", [(work, replace(cut, cluster=c, choosers=t)) for c, t in CHOOSERS])[1]
    attends = [(work, replace(cut, split=s, stages=n, resident=r)) for (n, r), s in itertools.product(STAGES, SPLITS)]
    cut = best("attend", attends)[1]
    return best("attend", [(work, replace(cut, early=n)) for n in EARLY])


def _best(
    scene: Scene, arenas: list[Arena], module: Any, name: str, tried: Iterable[Tried], *, note: Callable[[str], None]
) -> Tried:
    """The pair with which a step is fastest up to launch `name`; what cannot run is said and passed over."""
    found: list[tuple[float, Tried]] = []
    for work, cut in tried:
        try:
            seconds = _seconds(scene, arenas, module, name, work, cut)
        except Exception as e:  # whatever a compiler or a launch raises
            note(f"tune {name} {cut} split {work.split}: {why_of(e)}")
            continue
        note(f"tune up to {name} {seconds * 1e6:8.2f} us  split {work.split}  {cut}")
        found.append((seconds, (work, cut)))
    if not found:
        raise TamisError(f"no cut of {name} could be timed; the reasons are noted.")
    best = min(found, key=lambda pair: pair[0])
    note(f"tune up to {name}: best {best[0] * 1e6:.2f} us with split {best[1][0].split}, {best[1][1]}")
    return best[1]


def _seconds(scene: Scene, arenas: list[Arena], module: Any, name: str, work: Workspace, cut: Any) -> float:
    """Of a layer's step up to launch `name`."""
    out = torch.empty_like(scene.q)
    lse = torch.empty(scene.q.shape[:-1], device=scene.q.device)
    made = [module.launches(scene.q, a, work, out, lse, scale=scene.scale, cut=cut) for a in arenas]
    names = list(made[0])

    def run() -> None:
        for one in made:
            for launch in names[: names.index(name) + 1]:
                one[launch]()

    for launch in made[0].values():  # so that the launches find what those behind them leave
        launch()
    return median(timed({name: run}, scene.q.device, ROUNDS, calls=CALLS)[name]) / len(arenas)
