"""New tokens of a step into a self-indexed arena, their queries and these queries' energy: one plain Triton launch.

A program has all heads of a sequence, so that nobody reads the place of a token after it was moved on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tamis.kernels.selfindex_arena import Arena
from tamis.kernels.selfindex_notes import Notes


@triton.jit
def note_kernel(
    q, keys, values, kept_keys, kept_values, open_end, energy, queries, weight, there, W, E, M, q_batch, q_head,
    k_batch, k_head, v_batch, v_head,
    H: tl.constexpr, HP: tl.constexpr, GH: tl.constexpr, D: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    if tl.load(there + b) != 0:
        at = tl.load(open_end + b)
        o_h = tl.arange(0, HP)[:, None].to(tl.int64)
        o_d = tl.arange(0, D)[None, :]
        head = o_h < H
        # a token for which there is no room is counted and not kept
        real = head & (at < W)
        to = ((b * H + o_h) * W + at) * D + o_d
        tl.store(kept_keys + to, tl.load(keys + b * k_batch + o_h * k_head + o_d, mask=real, other=0.0), mask=real)
        tl.store(kept_values + to, tl.load(values + b * v_batch + o_h * v_head + o_d, mask=real, other=0.0), mask=real)
        # [HP, D]: query head i of every group
        place = (b * M + (at - E) % M) * (H * GH)
        total = tl.zeros([HP, D], tl.float32)
        for i in tl.static_range(GH):
            x = tl.load(q + b * q_batch + (o_h * GH + i) * q_head + o_d, mask=head, other=0.0)
            tl.store(queries + (place + o_h * GH + i) * D + o_d, x, mask=head)
            total += x.to(tl.float32)
        total = total / GH
        p_energy = energy + (b * H + o_h) * D + o_d
        old = tl.load(p_energy, mask=head, other=0.0)
        tl.store(p_energy, old + tl.load(weight + b) * (total * total - old), mask=head)
        tl.debug_barrier()
        tl.store(open_end + b, at + 1)


def note(arena: Arena, notes: Notes, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """See `tamis.kernels.selfindex_dispatch.selfindex_note`."""
    room, d = arena.room, arena.layout.head_dim
    note_kernel[(room.requests,)](
        q, keys, values, arena.keys, arena.values, arena.open_end, notes.energy, notes.queries, notes.weight,
        notes.there, arena.keys.shape[2], room.exact, notes.queries.shape[1], *q.stride()[:2], *keys.stride()[:2],
        *values.stride()[:2], room.kv_heads, triton.next_power_of_2(room.kv_heads), q.shape[1] // room.kv_heads, d,
        num_warps=4,
    )
