"""The decode step of `kernels.triton.selfindex_decode` with scoring and attention in CUDA C++ (`selfindex.cu`).

What a token costs is instructions: here about half of Triton's for attention, since nothing of a record goes through
shared memory on its way to the matrix instructions. The source is compiled once a process by PyTorch's own compiler.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tamis.kernels.selfindex_arena import Arena, Workspace
from tamis.kernels.triton import selfindex_decode as by_triton
from tamis.kernels.triton.paged_prefill import LOG2E

SLOTS = 256  # of a program of scoring at once: its threads


@dataclass(frozen=True)
class NvrtcCut:
    """How the launches are cut: steps of 256 slots of a program of scoring, programs of attention on an SM (more leave
    fewer registers to each), and the rest."""

    iters: int = 8
    resident: int = 12
    rest: by_triton.StepCut = field(default_factory=by_triton.StepCut)


def cut_for(arena: Arena) -> NvrtcCut:
    """Enough programs of scoring for every SM."""
    room = arena.room
    iters = 16
    while iters > 1 and room.requests * room.kv_heads * room.slots < SLOTS * iters * 132 * 8:
        iters //= 2
    return NvrtcCut(iters, rest=by_triton.cut_for(arena))


@functools.cache
def compiled(name: str, groups: int, resident: int, device: int) -> Callable[..., None]:
    """A kernel of the source for the GPU of that number, which is the current one."""
    source = Path(__file__).with_name("selfindex.cu").read_text(encoding="utf-8")
    # the first line keeps older versions of PyTorch from putting the same in front of a preprocessor line
    head = f'extern "C" {{}}\n#define G {groups}\n#define RESIDENT {resident}\n'
    made: Callable[..., None] = torch.cuda._compile_kernel(head + source, name)
    return made


def launches(
    q: torch.Tensor,
    arena: Arena,
    work: Workspace,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    cut: NvrtcCut,
) -> dict[str, Callable[[], object]]:
    """The launches of a step by name, in order."""
    room, r, t = arena.room, arena.records, arena.tables
    h, n, p = room.kv_heads, room.slots, room.parts
    rows, group = room.requests * h, q.shape[1] // h
    most, splits = work.chosen.shape[1], work.part.shape[1]
    device = q.device.index or 0
    scores = compiled("score", arena.layout.groups, cut.resident, device)
    attends = compiled("attend", arena.layout.groups, cut.resident, device)
    # as bits: how a float is handed over differs between versions of PyTorch
    bits = struct.unpack("i", struct.pack("f", scale * LOG2E))[0]
    score_args: list[Any] = [
        r.codes, arena.live, work.lut, work.span, arena.part_of, arena.slots, arena.n_parts, work.keys, work.tally,
        h, p, n, work.tally.shape[1], room.block, cut.iters,
    ]  # fmt: skip
    attend_args: list[Any] = [
        q, work.turned, work.spread, work.bias, r.codes, r.residuals, r.values, r.key_scales, r.value_scales,
        t.centroids, t.value_scale, t.value_mean, arena.part_of, work.chosen, work.n_chosen, arena.keys, arena.values,
        arena.n_exact, arena.open_end, work.part, work.part_top, work.part_den, bits, h, p, n, most, splits,
        work.wholes, work.split, room.exact, arena.keys.shape[2], *q.stride()[:2], group, room.block,
    ]  # fmt: skip
    made = by_triton.launches(q, arena, work, out, lse, scale=scale, cut=cut.rest)
    made["score"] = partial(scores, (-(-n // (SLOTS * cut.iters)), rows, 1), (SLOTS, 1, 1), score_args)
    made["attend"] = partial(attends, (splits, rows, 1), (32, 1, 1), attend_args)
    return made


def selfindex_decode(
    q: torch.Tensor,
    arena: Arena,
    work: Workspace,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    cut: NvrtcCut | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.triton.selfindex_decode`; bfloat16, head_dim 128 with four scales, at most 8 query heads a KV head,
    blocks of whole 256 slots. `kernels.selfindex_dispatch` checks that."""
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    for launch in launches(q, arena, work, out, lse, scale=scale, cut=cut or cut_for(arena)).values():
        launch()
    return out, lse
