"""A decode step over blocks in slots, in plain PyTorch: what the kernels of `kernels.triton.blocks` compute.

See `kernels.block_pool` for the tensors. positions [B] is where each sequence's token stands.
"""

from __future__ import annotations

import math

import torch

from tamis.kernels.block_pool import PoolLayer
from tamis.kernels.blocks import COARSE, BlockRule
from tamis.kernels.reference.blocks import (
    attend_blocks,
    block_numbers,
    block_scores,
    own_scores,
    raw_scores,
    select_blocks,
    sticking,
    summed,
)


def find_slots(wanted: torch.Tensor, held: torch.Tensor, used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots for wanted int [R, W] (-1: none, no block twice) → slot int64 [R, W], -1 where none, and missing bool.

    A block that is held keeps its slot; the others get those that were wanted longest ago, empty ones first, by held
    and used [R, S], of which nothing is changed.
    """
    asked = wanted >= 0
    same = (wanted[:, :, None] == held[:, None, :]) & asked[:, :, None]  # [R, W, S]
    missing = asked & ~same.any(-1)
    kept = same.any(1)
    # slots in the order in which they are given away; those of wanted blocks come last and are never reached
    order = used.masked_fill(kept, torch.iinfo(used.dtype).max).argsort(dim=-1, stable=True)
    turn = (missing.cumsum(-1) - 1).clamp(min=0)
    slot = torch.where(missing, order.gather(-1, turn), same.int().argmax(-1)).masked_fill(~asked, -1)
    return slot, missing


def append(pool: PoolLayer, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
    """Put the token's k, v [B, Hkv, D] behind what there is: into the growing block, the newest keys and, where a
    window ends, the pooled keys. A block that is full goes to the host; it stays the tail until the next token."""
    rule, n = pool.rule, pool.ring.shape[1]
    for row, (key, value) in enumerate(zip(k.flatten(0, 1), v.flatten(0, 1), strict=True)):
        p = int(positions[row // pool.kv_heads])
        pool.tail[row, 0, p % rule.block], pool.tail[row, 1, p % rule.block] = key, value
        pool.ring[row, p % n] = key
        for table, times in ((pool.pooled, 1), (pool.wide, COARSE)):
            window, stride = rule.window * times, rule.stride * times
            if table is not None and p + 1 >= window and (p + 1 - window) % stride == 0:
                last = (p - torch.arange(window, device=k.device)) % n
                table[row, (p + 1 - window) // stride] = pool.ring[row, last].float().mean(0).to(table.dtype)
        if (p + 1) % rule.block == 0:
            pool.host[int(pool.region[row]), p // rule.block] = pool.tail[row].to(pool.host.device)


def scores(
    q: torch.Tensor, pool: PoolLayer, positions: torch.Tensor, *, scale: float | None, lag: int = 0
) -> torch.Tensor:
    """Scores of blocks, float32 [R, N], -inf where no pooled key is seen.

    q [B, Hkv, D] with scale None: raw products. q [B, Hq, D]: softmax summed over the group, its normaliser from the
    wide keys where the pool has them. lag: tokens that the pool's keys lack, 1 for a layer the token has not reached.
    """
    rule, heads, n_blocks = pool.rule, pool.kv_heads, pool.host.shape[1]
    rows = []
    for b, position in enumerate(positions.tolist()):
        own, last = slice(b * heads, (b + 1) * heads), torch.tensor([position], device=q.device)
        keys = pool.pooled[own, : rule.n_pooled(position + 1 - lag)]
        if scale is None:
            cells = raw_scores(q[b][:, None], keys, last, rule)
        else:
            wide = None if pool.wide is None else pool.wide[own, : rule.n_pooled(position + 1 - lag, COARSE)]
            cells = own_scores(q[b][:, None], keys, last, rule, scale=scale, coarse=wide)
        rows.append(block_scores(cells, rule, n_blocks)[:, 0])
    return torch.cat(rows)


def select(
    values: torch.Tensor, positions: torch.Tensor, rule: BlockRule, out: torch.Tensor, last: torch.Tensor | None = None
) -> torch.Tensor:
    """Numbers of the blocks that each row reads beside its own: values [R, N] → int32 [R, W] in `out`, ascending, -1
    behind the last. positions [B], R / B rows of each.

    last: int32 [R, N], the position of the token that read each block last; noted anew. Without it no rule sticks.
    """
    per = values.shape[0] // len(positions)
    if last is not None and rule.stick:
        at = positions.repeat_interleave(per)[:, None]
        block, own = torch.arange(values.shape[1], device=values.device), at // rule.block
        free = (block >= rule.first) & (block < own - rule.local) & (values > -math.inf)
        values = sticking(values, free, last >= at - rule.recent, rule.stick)
    for b in range(len(positions)):
        rows, at = slice(b * per, (b + 1) * per), positions[b : b + 1].long()
        chosen = select_blocks(values[rows, None], at, rule)
        chosen[:, :, int(at) // rule.block :] = False
        out[rows] = block_numbers(chosen, out.shape[1])[:, 0]
        if last is not None and rule.stick:
            last[rows] = last[rows].masked_fill(chosen[:, 0], int(at))
    return out


def place(pool: PoolLayer, wanted: torch.Tensor) -> None:
    """Find slots for wanted int32 [R, W]: writes place, tasks and the slot map, and adds the copies to count."""
    slot, missing = find_slots(wanted, pool.held, pool.used)
    pool.stamp.add_(1)
    pool.place.copy_(slot)
    row, at = (wanted >= 0).nonzero(as_tuple=True)
    pool.held[row, slot[row, at]] = wanted[row, at]
    pool.used[row, slot[row, at]] = pool.stamp[row]
    row, at = missing.nonzero(as_tuple=True)
    source = pool.region[row] * pool.host.shape[1] + wanted[row, at]
    done = int(pool.count)
    target = row.int() * pool.held.shape[1] + slot[row, at].int()
    pool.tasks[done : done + len(row)] = torch.stack([source, target], -1)
    pool.count.add_(len(row))


def fetch(pool: PoolLayer, *, programs: int = 0, warps: int = 0) -> None:
    """Copy what `tasks` says into the slots. programs, warps: no matter here."""
    source, target = pool.tasks[: int(pool.count)].long().unbind(-1)
    blocks = pool.host.flatten(0, 1)[source.to(pool.host.device)]
    pool.slots.flatten(0, 1)[target] = blocks.to(pool.slots.device)


def attend(
    q: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    tail: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """A token's attention to placed blocks and the growing one, which holds it: q [B, Hq, D] → [B, Hq, D].

    slots [R, S, 2, block, D], places int32 [R, W] (-1: none), tail [R, 2, block, D].
    """
    rows, size = places.shape[0], slots.shape[3]
    row = torch.arange(rows, device=q.device)[:, None]
    both = slots[row, places.long().clamp(min=0)].transpose(1, 2).flatten(2, 3)  # [R, 2, W * block, D]
    both = torch.cat([both, tail], 2).float()
    last = torch.arange(size, device=q.device) <= (positions.repeat_interleave(rows // len(positions)) % size)[:, None]
    seen = torch.cat([(places >= 0).repeat_interleave(size, -1), last], -1)
    both = both.masked_fill(~seen[:, None, :, None], 0)  # what is not used may be anything, NaN too
    logits = torch.einsum("rgd,rtd->rgt", q.reshape(rows, -1, q.shape[-1]).float(), both[:, 0]) * scale
    weights = logits.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return torch.einsum("rgt,rtd->rgd", weights, both[:, 1]).reshape(q.shape).to(q.dtype)


def prefill_scores(
    q: torch.Tensor, pooled: torch.Tensor, first: int, rule: BlockRule, *, scale: float | None,
    wide: torch.Tensor | None = None, n_blocks: int,
) -> torch.Tensor:  # fmt: skip
    """Scores of blocks for rows of a prefill: q [Hkv, Q, D] (scale None) or [Hq, Q, D] at `first` and on, pooled
    [Hkv, C, D] → float32 [Hkv, G, n_blocks], G choices of the rows (`BlockRule.together`)."""
    positions = torch.arange(first, first + q.shape[1], device=q.device)
    if scale is None:
        cells = raw_scores(q, pooled, positions, rule)
    else:
        cells = own_scores(q, pooled, positions, rule, scale=scale, coarse=wide)
    return block_scores(summed(cells, positions, rule.together)[0], rule, n_blocks)


def prefill_select(values: torch.Tensor, first: int, rule: BlockRule) -> torch.Tensor:
    """Which blocks the rows of a prefill read, their own too: values [Hkv, G, N] of rows from `first` on → bool."""
    number = torch.arange(values.shape[1], device=values.device) + first // rule.together
    return select_blocks(values, number * rule.together, rule)  # all rows of a choice have one block of their own


def prefill_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, first: int, rule: BlockRule, *,
    scale: float, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of rows of a prefill to the tokens of their blocks, each up to itself: q [Hq, Q, D] at `first` and on,
    k and v [Hkv, T, D], chosen bool [Hkv, G, N] as `prefill_select` gives it → [Hq, Q, D], `out` if given."""
    positions = torch.arange(first, first + q.shape[1], device=q.device)
    number = positions // rule.together - first // rule.together
    made = attend_blocks(q, k, v, chosen[:, number], positions, block=rule.block, scale=scale)
    return made if out is None else out.copy_(made)
