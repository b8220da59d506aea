"""The decode step of `kernels.triton.selfindex_decode` in CUDA C++ (`selfindex*.cu*`): prepare, score, choose, attend.

Four launches of fixed shape instead of six, each of which may begin while the one before it ends. What a token costs is
instructions and look-ups: here scoring does a look-up a lane and clock, nothing of a record goes through other threads
on its way to the matrix instructions, a cluster of programs chooses at one go, and the last program of a row merges.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.nvrtc.launch import Kernel, compiled
from tamis.kernels.selfindex_arena import PAIR, Arena
from tamis.kernels.selfindex_workspace import Workspace
from tamis.kernels.triton.paged_prefill import LOG2E

SLOTS, WARPS, MOST_SPLIT = 256, 4, 512  # slots of a step of scoring; warps of a program of attention; its most records
SHARED = Path(__file__).with_name("selfindex.cuh")
CHOOSE, ATTEND = (Path(__file__).with_name(f"selfindex_{name}.cu") for name in ("choose", "attend"))


@dataclass(frozen=True)
class NvrtcCut:
    """How the launches are cut.

    iters      steps of 256 slots of a program of scoring
    every      slots of which one is counted while scoring, for a guess where the bar lies; 0: none, 1: all
    cluster, choosers  programs that choose for a row together, and threads of each
    split      records of a program of attention, at least the workspace's and at most 512; None: by size
    stages     steps of 16 records of a warp whose bytes are on their way or worked on
    resident   programs of attention on an SM: more leave fewer registers to each
    early      launches that may begin before the one in front of them has ended: 0 none, 1 those behind the first,
               2 all (the one in front of the step must then be a kernel, no copy)
    """

    iters: int = 8
    every: int = 1
    cluster: int = 8
    choosers: int = 512
    split: int | None = None
    stages: int = 2
    resident: int = 3
    early: int = 1


def cut_for(arena: Arena) -> NvrtcCut:
    """Many programs of scoring for every SM, and about as many choosing ones as there are SMs: measured on 8 requests
    of 65,536 tokens (`tamis bench decode --tune`), for other sizes by the same counts."""
    room = arena.room
    rows = room.requests * room.kv_heads
    iters, cluster = 16, 8
    while iters > 2 and rows * room.slots < SLOTS * iters * 132 * 28:
        iters //= 2
    while cluster > 2 and rows * cluster > 160:
        cluster //= 2
    return NvrtcCut(iters, cluster=cluster, choosers=1024 if cluster == 2 else 512)


def split_of(cut: NvrtcCut, arena: Arena, work: Workspace) -> int:
    """Records of a program of attention: as many as leave two programs for every SM, at most `MOST_SPLIT`. Fewer
    records cost more in beginning programs and in merging what they made than idle SMs do.

    Raises InvalidInput for more than a program has room for.
    """
    chosen, split = arena.room.requests * arena.room.kv_heads * work.chosen.shape[1], max(work.split, 64)
    while split * 2 <= MOST_SPLIT and chosen >= split * 2 * 132 * 2:
        split *= 2
    split = split if cut.split is None else cut.split
    if not work.split <= split <= MOST_SPLIT:
        raise InvalidInput(
            f"{split} records for a program of a workspace with splits of {work.split}; give from that to {MOST_SPLIT}."
        )
    return split


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
    """The launches of a step by name, in order. Each is timed with those in front of it: `prepare` sets the counters
    that `choose` and the merge of `attend` go by."""
    room, r, t = arena.room, arena.records, arena.tables
    h, n, p, tally = room.kv_heads, room.slots, room.parts, work.tally.shape[1]
    rows, group, most = room.requests * h, q.shape[1] // h, work.chosen.shape[1]
    split = split_of(cut, arena, work)
    splits = -(-most // split) + work.wholes
    # as bits: an int is all that is handed over beside pointers
    bits = struct.unpack("i", struct.pack("f", scale * LOG2E))[0]

    def kernel(name: str) -> Kernel:
        return compiled(*source_of(name, group, cut), q.device.index or 0)

    return {
        "prepare": partial(
            kernel("prepare"), (rows, p), 128,
            [q, t.order, t.mean, t.centroids, t.residual_scale, arena.cos, arena.sin, arena.n_parts, work.lut,
             work.span, work.turned, work.spread, work.bias, work.tally, h, p, tally, room.rotary // 2,
             *q.stride()[:2]],
            early=cut.early > 1,
        ),
        "score": partial(
            kernel("score"), (-(-n // (SLOTS * cut.iters)), rows), 128,
            [r.codes, arena.live, work.lut, work.span, arena.part_of, arena.slots, arena.n_parts, work.keys, work.tally,
             h, p, n, tally, room.block, cut.iters],
            early=cut.early > 0,
        ),
        "choose": partial(
            kernel("choose"), (cut.cluster, rows), cut.choosers,
            [work.keys, work.tally, arena.slots, work.count, work.chosen, work.n_chosen, h, n, tally, most],
            cluster=cut.cluster, early=cut.early > 0,
        ),
        "attend": partial(
            kernel("attend"), (splits, rows), 32 * WARPS,
            [q, work.turned, work.spread, work.bias, r.codes, r.residuals, r.values, r.key_scales, r.value_scales,
             t.centroids, t.value_scale, t.value_mean, arena.part_of, work.chosen, work.n_chosen, arena.keys,
             arena.values, arena.n_exact, arena.open_end, work.part, work.part_top, work.part_den, work.tally, out, lse,
             bits, h, p, n, tally, most, splits, work.wholes, split, room.exact, arena.keys.shape[2],
             *q.stride()[:2], *out.stride()[:2], room.block],
            early=cut.early > 0,
        ),
    }  # fmt: skip


def source_of(name: str, group: int, cut: NvrtcCut) -> tuple[str, tuple[Path, ...], tuple[tuple[str, int], ...]]:
    """Name, files and constants of a kernel of a step in which `group` query heads share a KV head."""
    known = {"GROUP": group}
    if name == "attend":
        known |= {"WARPS": WARPS, "STAGES": cut.stages, "RESIDENT": cut.resident, "MOST_SPLIT": MOST_SPLIT}
    if name in ("score", "choose"):
        known |= {"EVERY": cut.every}
    if name == "choose":
        known |= {"CLUSTER": cut.cluster, "CHOOSERS": cut.choosers}
    return name, (SHARED, ATTEND if name == "attend" else CHOOSE), tuple(known.items())


def selfindex_decode(
    q: torch.Tensor,
    arena: Arena,
    work: Workspace,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    cut: NvrtcCut | None = None,
) -> PAIR:
    """See `kernels.triton.selfindex_decode`; bfloat16, head_dim 128 with four scales, at most 8 query heads a KV head,
    blocks of whole 256 slots. `kernels.selfindex_dispatch` checks that."""
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    for launch in launches(q, arena, work, out, lse, scale=scale, cut=cut or cut_for(arena)).values():
        launch()
    return out, lse
