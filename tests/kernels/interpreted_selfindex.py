"""Run the self-indexing Triton kernels under Triton's interpreter and print their errors as JSON, one line a case.

A program of its own, run with TRITON_INTERPRET=1: that must be set before Triton is first imported.
"""

from __future__ import annotations

import json
import sys

import torch
from interpreted import fix_interpreter
from selfindex_cases import MUTATIONS, SCENES, Scene, errors, expected, make, run

from tamis.kernels.reference import selfindex as ref
from tamis.kernels.selfindex import Layout, Records
from tamis.kernels.selfindex_arena import Arena, ArenaRoom
from tamis.kernels.selfindex_dispatch import selfindex_compress, selfindex_decode, selfindex_note
from tamis.kernels.selfindex_notes import Notes
from tamis.kernels.selfindex_workspace import Workspace


def say(name: str, **found: float) -> None:
    sys.stdout.write(json.dumps({"case": name, **found}) + "\n")


def selection(scene: Scene) -> dict[str, float]:
    """Slots that are not the `count` highest keys, of equal ones the earlier, in order; and keys of what is hidden."""
    q, arena = make(scene)
    work = Workspace.reserve(arena, scene.heads[0], scene.count, split=scene.split, dtype=q.dtype)
    selfindex_decode(q, arena, count=scene.count, scale=0.1, kernel="triton", work=work)
    wrong = hidden = 0
    for row in range(len(work.n_chosen)):
        b, h = divmod(row, scene.heads[1])
        used = int(arena.slots[b])
        keys = work.keys[row, :used].int() & 0xFFFF
        n = min(scene.count, int((keys > 0).sum()))
        best = keys.sort(descending=True, stable=True).indices[:n].sort().values
        wrong += int(work.n_chosen[row]) != n or not torch.equal(work.chosen[row, :n].long(), best)
        words = torch.arange(used) // 32
        live = (arena.live[b, h][words].long() >> (torch.arange(used) % 32)) & 1
        hidden += int(((keys > 0) != (live == 1)).sum())
    return {"wrong": wrong, "hidden": hidden}


def compress(dim: int, channels: int, dtype: torch.dtype) -> dict[str, float]:
    """Share of bytes of each plane that differ from the reference's."""
    draw = torch.Generator().manual_seed(1)
    layout = Layout(dim, channels)
    keys, values = (torch.randn((2, 2, 75, dim), generator=draw).to(dtype) for _ in range(2))
    keys[0, 0, 3, 5], keys[0, 0, 4, 6], values[0, 1, 2, 3] = torch.nan, torch.inf, -torch.inf
    tables = ref.fit_tables(keys, values, layout)
    made = selfindex_compress(keys, values, tables, layout, kernel="triton")
    right = ref.compress(keys, values, tables, layout)
    return {f: float((getattr(made, f) != getattr(right, f)).float().mean()) for f in Records.__dataclass_fields__}


def not_a_number() -> dict[str, float]:
    """A query that is no number spoils its own KV head and none else; the number of records stays exact."""
    scene = SCENES["two parts"]
    q, arena = make(scene)
    right = expected(q, arena, scene)
    q[0, 0, 0, 3] = torch.nan
    work = Workspace.reserve(arena, scene.heads[0], scene.count, split=scene.split, dtype=q.dtype)
    made = selfindex_decode(q, arena, count=scene.count, scale=scene.dim**-0.5, kernel="triton", work=work)
    spoilt = bool(made[0][0, 0].isnan().all())
    rest = errors((made[0][:, 3:], made[1][:, 3:]), (right[0][:, 3:], right[1][:, 3:]))
    return rest | {"spoilt": float(spoilt), "chosen": float((work.n_chosen == scene.count).all())}


def appended() -> dict[str, float]:
    """A token appended by the kernel against one appended by PyTorch."""
    from tamis.kernels.triton.selfindex_decode import append

    (_, a), (_, b) = make(SCENES["two parts"]), make(SCENES["two parts"])
    for arena in (a, b):
        arena.keys.zero_(), arena.values.zero_()
    k, v = torch.randn(2, 2, 1, 64), torch.randn(2, 1, 2, 64).transpose(1, 2)
    append(a, k, v)
    b.append(k, v)
    same = bool(a.keys.any()) and all(torch.equal(x, y) for x, y in ((a.keys, b.keys), (a.values, b.values)))
    return {"wrong": float(not same or not torch.equal(a.open_end, b.open_end))}


def noted() -> dict[str, float]:
    """Two steps noted by the kernel against two noted by PyTorch; the middle sequence is nobody's."""
    wrong = 0.0
    for heads, kv, places in ((6, 2, 1), (5, 1, 3)):
        arenas, notes = [], []
        for _ in range(2):
            room = ArenaRoom(3, kv, 64, parts=1, exact=2, open=8, block=64)
            arena = Arena(room, Layout(64), dtype=torch.float32, device="cpu")
            arena.keys.zero_(), arena.values.zero_()
            arena.open_end.copy_(torch.tensor([2, 3, 5]))
            energy, queries = torch.ones(3, kv, 64), torch.zeros(3, places, heads, 64)
            weight, there = torch.tensor([0.25, 0.5, 0.01]), torch.tensor([1, 0, 1], dtype=torch.int32)
            arenas.append(arena), notes.append(Notes(energy, queries, weight, there))
        for _ in range(2):
            q = torch.randn(heads, 3, 64).transpose(0, 1)[:, :, None]
            k, v = (torch.randn(kv, 3, 64).transpose(0, 1)[:, :, None] for _ in range(2))
            for arena, held, kernel in zip(arenas, notes, ("triton", "reference"), strict=True):
                selfindex_note(arena, held, q, k, v, kernel=kernel)
        for i in (0, 2):  # what lies in rows of nobody is nobody's
            for name in ("energy", "queries"):
                wrong = max(wrong, float((getattr(notes[0], name)[i] - getattr(notes[1], name)[i]).abs().max()))
            wrong += any(
                not torch.equal(getattr(arenas[0], n)[i], getattr(arenas[1], n)[i]) for n in ("keys", "values")
            )
        wrong += not torch.equal(arenas[0].open_end, torch.tensor([4, 3, 7]))
        wrong += not torch.equal(arenas[0].open_end, arenas[1].open_end)
        wrong += not torch.equal(notes[0].energy[1], torch.ones(kv, 64))
    return {"wrong": wrong}


def main() -> None:
    """All scenes, the mutations of the first, and what is not a step."""
    fix_interpreter()
    torch.set_num_threads(1)
    from selfindex_cases import broken

    for name, scene in SCENES.items():
        q, arena = make(scene)
        say(name, **errors(run(q, arena, scene, "triton"), expected(q, arena, scene)))
    for kind in MUTATIONS:
        scene = SCENES["two parts"]
        q, arena = make(scene)
        right = expected(q, arena, scene)
        broken(kind, arena)
        say(kind, **errors(run(q, arena, scene, "triton"), right))
    for name in ("two parts", "ties", "more than there are", "splits with several parts"):
        say(f"selection: {name}", **selection(SCENES[name]))
    for dim, channels, dtype in ((64, 32, torch.float32), (64, 64, torch.float16), (128, 32, torch.float32)):
        say(f"compress {dim}/{channels} {str(dtype).removeprefix('torch.')}", **compress(dim, channels, dtype))
    say("not a number", **not_a_number())
    say("append", **appended())
    say("note", **noted())


if __name__ == "__main__":
    sys.exit(main())
