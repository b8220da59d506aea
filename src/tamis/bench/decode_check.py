"""Whether the self-indexing kernels compute what the reference does, on the device and the inputs that are timed.

Each error has a limit; nothing is timed behind one that is passed.
"""

from __future__ import annotations

from typing import Any

import torch

from tamis.bench.decode_scene import Scene
from tamis.bench.decode_tune import module_of
from tamis.core.errors import TamisError
from tamis.kernels.reference import selfindex as reference
from tamis.kernels.selfindex import Part, Records, Tables
from tamis.kernels.selfindex_arena import turned_forth
from tamis.kernels.selfindex_dispatch import ON_A_GPU, fit_sampled, selfindex_compress, selfindex_decode
from tamis.kernels.selfindex_workspace import Workspace

LIMITS = {
    "compress, share of codes": 1e-3,
    "compress, share of bytes": 5e-3,
    "score, share of the span": 2e-4,
    "selection, wrong slots": 0.0,
    "selection, share not the reference's": 5e-3,
    "step, worst row": 0.02,
    "step, RMS": 0.005,
    "step, log-sum-exp": 0.01,
}
TOKENS = 4096  # of a slice that is compressed twice


def errors_of(scene: Scene, kernel: str, work: Workspace | None = None, cut: Any = None) -> dict[str, float]:
    """Errors by name; those of a step on a GPU also look into `work`, which must be given for it, as is its `cut`."""
    with torch.inference_mode():
        found = _compress(scene)
        if work is None or cut is None:
            out, lse = selfindex_decode(
                scene.q, scene.arena, count=scene.count, scale=scene.scale, work=work, kernel=kernel
            )
        else:
            work.count.fill_(scene.count)
            out, lse = module_of(kernel).selfindex_decode(scene.q, scene.arena, work, scale=scene.scale, cut=cut)
        rows = sorted({(0, 0), (scene.q.shape[0] - 1, scene.shape.kv_heads - 1)})
        for b, h in rows:
            made = _row(scene, b, h, out, lse, work if kernel in ON_A_GPU else None)
            found = {k: max(found.get(k, 0.0), made.get(k, 0.0), key=_worse) for k in {**found, **made}}
    return {name: found[name] for name in LIMITS if name in found}


def refused(found: dict[str, float]) -> str | None:
    """What passes its limit; None: nothing does."""
    bad = [f"{k} {v:.3g} (allowed {LIMITS[k]:g})" for k, v in found.items() if not v <= LIMITS[k]]
    return "it disagrees with the reference: " + ", ".join(bad) if bad else None


def check(scene: Scene, kernel: str, work: Workspace | None = None, cut: Any = None) -> dict[str, float]:
    """`errors_of`, or TamisError if one passes its limit."""
    found = errors_of(scene, kernel, work, cut)
    if why := refused(found):
        raise TamisError(f"{kernel}: {why}.")
    return found


def _worse(x: float) -> tuple[bool, float]:
    return x != x, x


def _compress(scene: Scene) -> dict[str, float]:
    k, v = (t[0, :2, :TOKENS].contiguous() for t in (scene.keys, scene.values))
    layout = scene.arena.layout
    tables = fit_sampled(k, v, layout)
    made, expected = selfindex_compress(k, v, tables, layout), reference.compress(k, v, tables, layout)
    wrong = {
        name: float((getattr(made, name) != getattr(expected, name)).float().mean())
        for name in Records.__dataclass_fields__
    }
    codes = wrong.pop("codes")
    return {"compress, share of codes": codes, "compress, share of bytes": max(wrong.values())}


def _row(
    scene: Scene, b: int, h: int, out: torch.Tensor, lse: torch.Tensor, work: Workspace | None
) -> dict[str, float]:
    """Errors of one KV head."""
    group = scene.shape.heads // scene.shape.kv_heads
    parts, whole, turns = scene.arena.held(b)
    parts = [_head(p, h) for p in parts]
    recent = whole[0][h : h + 1], whole[1][h : h + 1]
    q = scene.q[b, h * group : (h + 1) * group]
    queries = [q if t is None else turned_forth(q, t[0], -t[1]) for t in turns]
    scores = [reference.part_scores(x, p) for x, p in zip(queries, parts, strict=True)]
    best = reference.choose(scores, scene.count)
    joined = torch.cat(best, -1)[0, 0]
    found: dict[str, float] = {}
    if work is not None:
        chosen, found = _selection(scene, b, h, torch.cat(scores, -1)[0, 0], joined, work)
        best = [m[None, None] for m in torch.split(chosen, [p.records.n_tokens for p in parts])]
    expected, log = reference.attention(
        [*(x.float() for x in queries), q.float()], parts, recent, scene.arena.layout, count=scene.count,
        scale=scene.scale, chosen=best,
    )  # fmt: skip
    made = out[b, h * group : (h + 1) * group, 0].float()
    wrong, size = made - expected[:, 0], expected[:, 0].norm(dim=-1)
    return found | {
        "step, worst row": float((wrong.norm(dim=-1) / size).max()),
        "step, RMS": float(wrong.norm() / size.norm()),
        "step, log-sum-exp": float((lse[b, h * group : (h + 1) * group, 0] - log[:, 0]).abs().max()),
    }


def _selection(
    scene: Scene, b: int, h: int, scores: torch.Tensor, best: torch.Tensor, work: Workspace
) -> tuple[torch.Tensor, dict[str, float]]:
    """What the kernels chose, as bool over the joined parts, and the errors of keys and choice."""
    row, arena = b * scene.shape.kv_heads + h, scene.arena
    used = int(arena.slots[b])
    keys = work.keys[row, :used].int() & 0xFFFF
    n = int(work.n_chosen[row])
    slots = work.chosen[row, :n].long()
    live = int((keys > 0).sum())
    order = keys.sort(descending=True, stable=True).indices[: min(scene.count, live)].sort().values
    wrong = float(len(order) != n or not torch.equal(order, slots))
    low, high = (f(work.span[b, : int(arena.n_parts[b]), h, i]) for f, i in ((torch.min, 0), (torch.max, 1)))
    where = (keys > 0).nonzero()[:, 0]
    at = arena.position(b, where)
    share = (keys[where].float() - 512) / 65023 - (scores[at] - low) / (high - low)
    chosen = torch.zeros_like(best)
    chosen[arena.position(b, slots)] = True
    hidden = float(scores[at].isinf().sum())  # a token that is kept whole has a key
    return chosen, {
        "score, share of the span": float(share.abs().max()) if not hidden else float("nan"),
        "selection, wrong slots": wrong,
        "selection, share not the reference's": float((best & ~chosen).sum()) / max(1, int(best.sum())),
    }


def _head(part: Part, h: int) -> Part:
    """One KV head of a part, as a part."""
    one = slice(h, h + 1)
    records = Records(*(getattr(part.records, f)[one] for f in Records.__dataclass_fields__))
    tables = Tables(*(getattr(part.tables, f)[one] for f in Tables.__dataclass_fields__))
    return Part(records, tables, part.exact[one], part.keys[one], part.values[one])


def summary(found: dict[str, float]) -> str:
    """One line for a person."""
    return ", ".join(f"{k} {v:.2g}" for k, v in found.items())
