"""Run the paged Triton kernels under Triton's interpreter and print their errors as JSON, one line a case.

A program of its own, run with TRITON_INTERPRET=1: that must be set before Triton is first imported.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from interpreted import fix_interpreter
from paged_cases import Result, Scene, flipped, ignored, make, share_of_bound, worst
from paged_shapes import DECODE, PACKED, PREFILL

MUTATIONS = ("offsets ignored", "rotation flipped", "wrong KV head", "last entry dropped")


def broken(kind: str, scene: Scene) -> Scene:
    """The scene a broken kernel would in effect have seen."""
    if kind == "offsets ignored":
        return replace(scene, tiles=[ignored(t) for t in scene.tiles])
    if kind == "rotation flipped":
        return replace(scene, tiles=[flipped(t) for t in scene.tiles])
    if kind == "wrong KV head":
        return replace(scene, keys=scene.keys.flip(1), values=scene.values.flip(1))
    assert kind == "last entry dropped", kind
    return replace(scene, tiles=[replace(t, table=t.table[:-1]) for t in scene.tiles])


def prefill(scene: Scene, kernel: str = "triton") -> dict[str, float]:
    """Errors of the first request; for kernels of a GPU also against the reference that rounds as they do."""
    from tamis.kernels.paged_dispatch import paged_attention
    from tamis.kernels.reference import paged as reference

    args = scene.q[0], scene.keys, scene.values, scene.tiles[0].to(scene.keys.device), scene.lists()
    made = paged_attention(*args, scale=scene.shape.scale, kernel=kernel)
    found = worst(made, scene.expected[0])
    if kernel in ("triton", "gluon"):
        found |= against(made, reference.paged_attention(*args, scale=scene.shape.scale, rounded=True))
        found |= share_of_bound(made, scene, 0)
    return found


def decode(scene: Scene, kernel: str = "triton", programs: int = 8) -> dict[str, float]:
    """The worst errors of all requests, as for `prefill`; the place that no request has must give zeros."""
    from tamis.kernels.paged_dispatch import paged_decode
    from tamis.kernels.reference import paged as reference

    args = scene.batch(), scene.keys, scene.values, scene.plan(programs=programs)
    out, lse = paged_decode(*args, scale=scene.shape.scale, kernel=kernel)
    found = [worst((out[b], lse[b]), scene.expected[b]) for b in range(len(scene.q))]
    if kernel == "triton":
        rounded = reference.paged_decode(*args, scale=scene.shape.scale, rounded=True)
        for b, f in enumerate(found):
            f |= against((out[b], lse[b]), (rounded[0][b], rounded[1][b])) | share_of_bound((out[b], lse[b]), scene, b)
    unused = bool((out[-1] == 0).all()) and bool((lse[-1] == -torch.inf).all())
    found.append(dict.fromkeys(found[0], 0.0 if unused else float("nan")))
    return {name: max((f[name] for f in found), key=lambda x: (x != x, x)) for name in found[0]}


def packed(scene: Scene, kernel: str = "triton", *, moved: bool = True) -> dict[str, float]:
    """Errors of all requests in one call; `moved`: the runs name the joined documents, as they must."""
    from tamis.kernels.paged_dispatch import paged_attention
    from tamis.kernels.paged_packed import concat_paged

    own = [scene.lists(i) for i in range(len(scene.q))]
    device = scene.keys.device
    tiles, lists = concat_paged([(t.to(device), p) for t, p in zip(scene.tiles, own, strict=True)])
    if not moved:
        room = lists.runs.shape[2]
        runs = [torch.nn.functional.pad(p.runs, (0, 0, 0, room - p.runs.shape[2])) for p in own]
        lists = replace(lists, runs=torch.cat(runs, 1))
    q = torch.cat(scene.q, 1)
    made = paged_attention(q, scene.keys, scene.values, tiles, lists, scale=scene.shape.scale, kernel=kernel)
    return worst(made, (torch.cat([e[0] for e in scene.expected], 1), torch.cat([e[1] for e in scene.expected], 1)))


def against(made: Result, rounded: Result) -> dict[str, float]:
    """Errors against the reference that rounds."""
    errors = worst(made, (rounded[0].double().cpu(), rounded[1].double().cpu()))
    return {f"rounded {name}": value for name, value in errors.items()}


def by_parts() -> dict[str, float]:
    """Half a page a step, in both kernels."""
    from tamis.kernels.triton import paged_decode, paged_prefill

    scene = make(PREFILL["holes"])
    args, scale = (scene.q[0], scene.keys, scene.values), scene.shape.scale
    cut = paged_prefill.Cut(32, 16, 4, 1, False)
    made = paged_prefill.paged_attention(*args, scene.tiles[0], scene.lists(), scale=scale, cut=cut)
    first = worst(made, scene.expected[0])
    scene = make(DECODE["step, holes"])
    args, plan = (scene.batch(), scene.keys, scene.values), scene.plan()
    made = paged_decode.paged_decode(*args, plan, scale=scale, cut=paged_decode.Cut(16, 4, 1, False))
    found = [first, *(worst((made[0][b], made[1][b]), scene.expected[b]) for b in range(3))]
    return {name: max(f[name] for f in found) for name in first}


def strided() -> dict[str, float]:
    """Token-major queries and results, keys and values side by side in one pool, results written into `out`."""
    from tamis.kernels.paged_dispatch import paged_attention, paged_decode

    found = []
    for scene in (make(PREFILL["mixed"]), make(DECODE["three rows each"])):
        pool = torch.stack([scene.keys, scene.values], 3)  # [pages, Hkv, page, 2, D]
        keys, values = pool.unbind(3)
        if len(scene.q) == 1:
            q = scene.q[0].transpose(0, 1).contiguous().transpose(0, 1)
            out = torch.full((q.shape[1], q.shape[0] + 1, q.shape[2]), 7.0)
            view = out[:, :-1].transpose(0, 1)
            where = scene.tiles[0], scene.lists()
            made = paged_attention(q, keys, values, *where, scale=scene.shape.scale, kernel="triton", out=view)
            found.append(worst(made, scene.expected[0]))
            found.append(dict.fromkeys(found[0], 0.0 if bool((out[:, -1] == 7).all()) else float("nan")))
        else:
            q = scene.batch().transpose(1, 2).contiguous().transpose(1, 2)
            out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
            made = paged_decode(q, keys, values, scene.plan(), scale=scene.shape.scale, kernel="triton", out=out)
            found += [worst((out[b], made[1][b]), scene.expected[b]) for b in range(len(scene.q))]
    return {name: max(f[name] for f in found) for name in found[0]}


def each_head() -> dict[str, float]:
    """Lists of its own for every head, against the reference with the same lists."""
    from tamis.kernels.paged_dispatch import paged_attention

    scene = make(PREFILL["mixed"])
    mask = torch.rand((4, 2, len(scene.tiles[0].table)), generator=torch.Generator().manual_seed(0)) < 0.5
    args = scene.q[0], scene.keys, scene.values, scene.tiles[0], scene.lists(mask=mask)
    made, expected = (paged_attention(*args, scale=scene.shape.scale, kernel=k) for k in ("triton", "reference"))
    return worst(made, (expected[0].double(), expected[1].double()))


def main() -> None:
    """All cases, then the mutations."""
    fix_interpreter()
    torch.set_num_threads(1)
    rows = [(f"prefill {name}", prefill(make(shape))) for name, shape in PREFILL.items()]
    rows += [(f"decode {name}", decode(make(shape))) for name, shape in DECODE.items()]
    rows.append(("decode long splits", decode(make(DECODE["step"]), programs=1)))
    rows += [("half a page a step", by_parts()), ("strided", strided()), ("lists of each head", each_head())]
    rows += [("packed", packed(make(PACKED))), ("packed, holes", packed(make(replace(PACKED, holes=True))))]
    rows.append(("packed broken: documents not moved", packed(make(PACKED), moved=False)))
    for kind in MUTATIONS:
        rows.append((f"prefill broken: {kind}", prefill(broken(kind, make(PREFILL["mixed"])))))
        rows.append((f"decode broken: {kind}", decode(broken(kind, make(DECODE["step"])))))
    for name, found in rows:
        sys.stdout.write(json.dumps({"case": name, **found}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
