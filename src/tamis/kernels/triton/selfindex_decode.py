"""A decode step over a self-indexed arena, in plain Triton: prepare, score, refine, compact, attend, combine.

Six launches of fixed shape that wait for nothing: a captured CUDA graph serves any lengths that fit the arena.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from tamis.kernels.selfindex_arena import Arena
from tamis.kernels.selfindex_workspace import CHUNK, Workspace
from tamis.kernels.triton import selfindex_attend as attending
from tamis.kernels.triton import selfindex_score as scoring
from tamis.kernels.triton import selfindex_select as selecting
from tamis.kernels.triton.paged_prefill import LOG2E

SCALE_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class StepCut:
    """How the launches are cut: a quarter of the slots of a step of scoring (32 a warp), steps of a program, warps;
    warps of choosing; records and whole tokens of a step of attention, warps, pipeline stages, registers a thread may
    have. With one warp nothing waits for another, and a token takes a third fewer instructions.
    How many records a split has is the workspace's."""

    score: int = 128
    iters: int = 4
    score_warps: int = 4
    select_warps: int = 8
    attend: int = 32
    whole: int = 32
    attend_warps: int = 1
    stages: int = 1
    registers: int | None = None


def cut_for(arena: Arena) -> StepCut:
    """Enough programs for every SM: a program of scoring takes fewer steps where there are few slots."""
    room = arena.room
    iters = 8
    while iters > 1 and room.requests * room.kv_heads * room.slots < 512 * iters * 132 * 8:
        iters //= 2
    return StepCut(score=min(128, room.block // 4), iters=iters)


def launches(
    q: torch.Tensor,
    arena: Arena,
    work: Workspace,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    cut: StepCut,
) -> dict[str, Callable[[], object]]:
    """The launches of a step by name, in order; each can be timed alone once all have run."""
    room, layout, t = arena.room, arena.layout, arena.tables
    b, heads, d = q.shape[0], q.shape[1], q.shape[-1]
    h, n, p, g = room.kv_heads, room.slots, room.parts, layout.groups
    rows, group, tally, per = b * h, heads // h, work.tally.shape[1], room.block
    chunks = -(-n // CHUNK)
    most, splits = work.chosen.shape[1], work.part.shape[1]
    words = {f: getattr(arena.records, f).view(torch.int32) for f in ("codes", "residuals", "values")}
    kinds = SCALE_WORDS[arena.records.key_scales.shape[-1]]
    key_scales, value_scales = (s.view(kinds) for s in (arena.records.key_scales, arena.records.value_scales))
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    steps = -(-n // (4 * cut.score * cut.iters))
    return {
        "prepare": partial(
            scoring.prepare_kernel[(rows, p)], q, t.order, t.mean, t.centroids, t.residual_scale, arena.cos, arena.sin,
            arena.n_parts, work.lut, work.span, work.turned, work.spread, work.bias, work.tally, h, p, tally,
            *q.stride()[:2], group, triton.next_power_of_2(group), d, g, room.rotary // 2,
            triton.next_power_of_2(tally), num_warps=4,
        ),
        "score": partial(
            scoring.score_kernel[(steps, rows)], words["codes"], arena.live, work.lut, work.span, arena.part_of,
            arena.slots, arena.n_parts, work.keys, work.tally, h, p, n, tally, g, cut.score, per, cut.iters,
            triton.next_power_of_2(p), num_warps=cut.score_warps,
        ),
        "refine": partial(
            selecting.refine_kernel[(chunks, rows)], work.keys, work.tally, arena.slots, work.count, h, n, tally, CHUNK,
            num_warps=cut.select_warps,
        ),
        "compact": partial(
            selecting.compact_kernel[(chunks, rows)], work.keys, work.tally, arena.slots, work.count, work.chosen,
            work.n_chosen, h, n, tally, most, CHUNK, triton.next_power_of_2(chunks), num_warps=cut.select_warps,
        ),
        "attend": partial(
            attending.attend_kernel[(splits, rows)], q, work.turned, work.spread, work.bias, words["codes"],
            words["residuals"], words["values"], key_scales, value_scales, t.centroids.view(torch.int64), t.value_scale,
            t.value_mean, arena.part_of, work.chosen, work.n_chosen, arena.keys, arena.values, arena.n_exact,
            arena.open_end, work.part, work.part_top, work.part_den, scale * LOG2E, h, p, n, most, splits, work.split,
            work.wholes, room.exact, arena.keys.shape[2], *q.stride()[:2], group, d, g,
            max(16, triton.next_power_of_2(group)), cut.attend, cut.whole, per,
            layout.head_dim // layout.scale_channels, precision, num_warps=cut.attend_warps, num_stages=cut.stages,
            maxnreg=cut.registers,
        ),
        "combine": partial(
            attending.combine_kernel[(b * heads,)], work.part, work.part_top, work.part_den, out, lse, heads, splits,
            *out.stride()[:2], d, 16, num_warps=2,
        ),
    }


def selfindex_decode(
    q: torch.Tensor,
    arena: Arena,
    work: Workspace,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    cut: StepCut | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tamis.kernels.selfindex_dispatch.selfindex_decode`, which checks arguments; here they are taken as given.

    `work.count` says how many records each sequence chooses.
    """
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    for launch in launches(q, arena, work, out, lse, scale=scale, cut=cut or cut_for(arena)).values():
        launch()
    return out, lse


@triton.jit
def append_kernel(
    keys, values, kept_keys, kept_values, open_end, W, k_batch, k_head, v_batch, v_head,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    # one program has all heads of a sequence: nobody reads the place after it was moved on
    at = tl.load(open_end + b)
    o_h = tl.arange(0, HP)[:, None].to(tl.int64)
    o_d = tl.arange(0, D)[None, :]
    real = (o_h < H) & (at < W)
    to = ((b * H + o_h) * W + at) * D + o_d
    tl.store(kept_keys + to, tl.load(keys + b * k_batch + o_h * k_head + o_d, mask=real, other=0.0), mask=real)
    tl.store(kept_values + to, tl.load(values + b * v_batch + o_h * v_head + o_d, mask=real, other=0.0), mask=real)
    tl.debug_barrier()
    tl.store(open_end + b, at + 1)


def append(arena: Arena, keys: torch.Tensor, values: torch.Tensor) -> None:
    """See `Arena.append`; a token for which there is no room is counted and not kept."""
    room, d = arena.room, arena.layout.head_dim
    append_kernel[(room.requests,)](
        keys, values, arena.keys, arena.values, arena.open_end, arena.keys.shape[2], *keys.stride()[:2],
        *values.stride()[:2], room.kv_heads, triton.next_power_of_2(room.kv_heads), d, num_warps=4,
    )
