"""What a forecast learns from: the layer's attention on fine windows, and the divergence from it (arXiv 2606.04511).

Knows queries, keys and scores; not models, weights or optimisers.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import max_pool1d, pad

from tamis.kernels.blocks import BlockRule
from tamis.kernels.reference.blocks import (
    best_blocks,
    block_scores,
    forced_blocks,
    own_scores,
    pool_keys,
    visible,
)

FINE = (2, 1)  # window and stride of the teacher's keys
LEAST = 1e-8  # probabilities are at least so large before they are compared


def teacher_cells(
    q: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    rule: BlockRule,
    *,
    scale: float,
    fine: tuple[int, int] = FINE,
) -> torch.Tensor:
    """The teacher's distribution over the pooled keys' grid: q [Hq, Q, D], keys [Hkv, T, D] → float32 [Hkv, Q, C].

    Softmax of every head over fine windows, summed over the group; a cell has the largest value from one window before
    its first token on; rows sum to 1 over the cells that they see (to 0 where they see none).
    """
    window, stride = fine
    pooled = pool_keys(keys, window, stride).float()
    heads, count, _ = pooled.shape
    logits = torch.unflatten(q.float(), 0, (heads, -1)) @ pooled[:, None].transpose(-1, -2) * scale
    unseen = ~visible(positions, count, window, stride)
    fine_mass = logits.masked_fill(unseen, -math.inf).softmax(-1).nan_to_num(0.0).sum(1)  # [Hkv, Q, fine]
    ratio, before = rule.stride // stride, window // stride - 1
    cells = rule.n_pooled(keys.shape[1])
    if not cells:
        return fine_mass[..., :0]
    wide = pad(fine_mass, (before, max(0, cells * ratio - count)))
    made = max_pool1d(wide, ratio + before, ratio)[..., :cells]
    made = made * visible(positions, cells, rule.window, rule.stride)
    total: torch.Tensor = made.sum(-1, keepdim=True)
    return made / total.clamp(min=torch.finfo(torch.float32).tiny)


def own_cells(
    q: torch.Tensor, pooled: torch.Tensor, positions: torch.Tensor, rule: BlockRule, *, scale: float
) -> torch.Tensor:
    """As `teacher_cells`, of the layer's own scores of its pooled keys [Hkv, C, D]: what it selects by itself."""
    mass = own_scores(q, pooled, positions, rule, scale=scale).clamp(min=0)
    total: torch.Tensor = mass.sum(-1, keepdim=True)
    return mass / total.clamp(min=torch.finfo(torch.float32).tiny)


def divergence(
    teacher: torch.Tensor,
    student: torch.Tensor,
    positions: torch.Tensor,
    rule: BlockRule,
    n_tokens: int,
    *,
    apart: str = "chosen",
) -> torch.Tensor:
    """KL(teacher || student) of each row and KV head, in nats: [Hkv, Q].

    teacher   probabilities [Hkv, Q, C] by `teacher_cells` or `own_cells`
    student   logits [Hkv, Q, C], -inf where a row does not see; its gradient is what is learnt from
    apart     which cells are outcomes by themselves, all else being one: "chosen", those of the blocks that the teacher
              takes by score, as published; or "free", those of all blocks that are not forced
    """
    count = teacher.shape[-1]
    if not count:
        return student.sum(-1)
    with torch.no_grad():
        seen = visible(positions, count, rule.window, rule.stride)
        if apart == "free":
            forced = forced_blocks(positions, rule, rule.n_blocks(n_tokens)).repeat_interleave(rule.cells, -1)
            cell = torch.arange(count, device=teacher.device).expand(teacher.shape)
            used = (seen & ~forced[:, :count]).expand(teacher.shape)
        else:
            cell = _chosen_cells(teacher.masked_fill(~seen, -math.inf), positions, rule, n_tokens)
            used = (cell >= 0) & (cell < count)
            cell = cell.clamp(0, count - 1)
    # a row that sees nothing would make 0 / 0: its one outcome is "everything else"
    mass = torch.where(seen.any(-1)[:, None], student, torch.zeros_like(student)).softmax(-1)
    wanted = _outcomes(teacher, cell, used).log()
    found = _outcomes(mass, cell, used).log()
    real = torch.cat([used, torch.ones_like(used[..., :1])], -1)
    return (wanted.exp() * (wanted - found) * real).sum(-1)


def _chosen_cells(scores: torch.Tensor, positions: torch.Tensor, rule: BlockRule, n_tokens: int) -> torch.Tensor:
    """int64 [Hkv, Q, K]: the cells of the blocks taken by score, -1 for blocks that a row lacks."""
    best = best_blocks(block_scores(scores, rule, rule.n_blocks(n_tokens)), positions, rule)
    cell = best[..., None] * rule.cells + torch.arange(rule.cells, device=best.device)
    return cell.masked_fill((best < 0)[..., None], -1).flatten(-2)


def _outcomes(mass: torch.Tensor, cell: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """[.., K + 1]: the mass of K cells (those not used have next to none) and of all others; sums to 1."""
    picked = mass.gather(-1, cell) * used
    rest = 1 - picked.sum(-1, keepdim=True)
    real = torch.cat([used, torch.ones_like(used[..., :1])], -1)
    made = torch.where(real, torch.cat([picked, rest], -1).clamp(min=LEAST), 0.0)
    return (made / made.sum(-1, keepdim=True)).clamp(min=torch.finfo(torch.float32).tiny)
