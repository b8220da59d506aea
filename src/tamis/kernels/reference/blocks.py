"""Block-sparse attention by pooled keys (InfLLM-v2, arXiv 2509.24663), in plain PyTorch.

Positions are int64 [Q]: where each query row stands; it sees tokens 0 .. its own. Scores are float32. T tokens make N
blocks and C pooled keys (`BlockRule`); a row sees the pooled keys whose whole window lies at or before it.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import max_pool1d, pad

from tamis.core.errors import InvalidInput
from tamis.kernels.blocks import COARSE, BlockRule


def pool_keys(keys: torch.Tensor, window: int, stride: int) -> torch.Tensor:
    """[Hkv, T, D] → means of whole windows [Hkv, C, D], in the keys' dtype; C is 0 where T < window.

    `window` is a whole multiple of `stride`.
    """
    heads, n, d = keys.shape
    if n < window:
        return keys.new_zeros((heads, 0, d))
    # means of strides first, then of the strides of a window: every key is read once
    pieces = torch.unflatten(keys[:, : n // stride * stride], 1, (-1, stride)).mean(2, dtype=torch.float32)
    return pieces.unfold(1, window // stride, 1).mean(-1).to(keys.dtype)


def visible(positions: torch.Tensor, count: int, window: int, stride: int) -> torch.Tensor:
    """bool [Q, count]: which of `count` windows end at or before each position."""
    ends = torch.arange(count, device=positions.device) * stride + window
    return ends <= positions[:, None] + 1


def own_scores(
    q: torch.Tensor,
    pooled: torch.Tensor,
    positions: torch.Tensor,
    rule: BlockRule,
    *,
    scale: float,
    coarse: torch.Tensor | None = None,
) -> torch.Tensor:
    """A layer's own scores of its pooled keys: softmax of every query head, summed over the group.

    q [Hq, Q, D] and pooled [Hkv, C, D], both rotated → [Hkv, Q, C], -inf where a row does not see. coarse [Hkv, C2, D]:
    keys pooled by windows and strides COARSE times as long, from which the softmax's normaliser is then estimated; rows
    that see none of them have the exact one.
    """
    heads, count, _ = pooled.shape
    group = torch.unflatten(q.float(), 0, (heads, -1))
    logits = group @ pooled.float()[:, None].transpose(-1, -2) * scale  # [Hkv, g, Q, C]
    seen = visible(positions, count, rule.window, rule.stride)
    logits = logits.masked_fill(~seen, -math.inf)
    normaliser = logits.logsumexp(-1, keepdim=True)
    if coarse is not None and coarse.shape[1]:
        far = visible(positions, coarse.shape[1], COARSE * rule.window, COARSE * rule.stride)
        rough = (group @ coarse.float()[:, None].transpose(-1, -2) * scale).masked_fill(~far, -math.inf)
        estimate = rough.logsumexp(-1, keepdim=True) + math.log(COARSE)
        normaliser = torch.where(far.any(-1)[:, None], estimate, normaliser)
    scores = (logits - normaliser).exp().sum(1)
    return scores.masked_fill(~seen, -math.inf)


def raw_scores(f: torch.Tensor, pooled: torch.Tensor, positions: torch.Tensor, rule: BlockRule) -> torch.Tensor:
    """Plain dot products of one vector a KV head: f [Hkv, Q, D], pooled [Hkv, C, D] → [Hkv, Q, C], -inf unseen."""
    seen = visible(positions, pooled.shape[1], rule.window, rule.stride)
    return (f.float() @ pooled.float().transpose(-1, -2)).masked_fill(~seen, -math.inf)


def summed(cells: torch.Tensor, positions: torch.Tensor, together: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of pooled keys [H, Q, C] → [H, G, C], summed over the rows that choose together, and where each lies.

    positions int64 [Q] rise; rows with the same position // together choose together. A row counts for what it sees:
    -inf stands where none of them does. Returns positions of the first rows int64 [G] beside the sums.
    """
    if together == 1:
        return cells, positions
    _, number, counts = torch.unique_consecutive(positions // together, return_inverse=True, return_counts=True)
    seen = cells > -math.inf
    sums = cells.new_zeros((cells.shape[0], len(counts), cells.shape[2]))
    some = torch.zeros_like(sums).index_add_(1, number, seen.to(cells.dtype)) > 0
    sums.index_add_(1, number, torch.where(seen, cells, 0))
    return sums.masked_fill(~some, -math.inf), positions[counts.cumsum(0) - counts]


def block_scores(cells: torch.Tensor, rule: BlockRule, n_blocks: int) -> torch.Tensor:
    """Scores of pooled keys [H, Q, C] → of blocks [H, Q, n_blocks]: the best pooled key that touches the block."""
    behind = n_blocks * rule.cells - cells.shape[-1]
    if behind < 0:
        raise InvalidInput(f"{cells.shape[-1]} pooled keys are more than {n_blocks} blocks hold; give all blocks.")
    cells = pad(cells, (rule.overlap, behind), value=-math.inf)
    return max_pool1d(cells, rule.cells + rule.overlap, rule.cells)


def forced_blocks(positions: torch.Tensor, rule: BlockRule, n_blocks: int) -> torch.Tensor:
    """bool [Q, n_blocks]: the first blocks, a row's own and the `local` ones before it."""
    block = torch.arange(n_blocks, device=positions.device)
    own = (positions // rule.block)[:, None]
    return (block <= own) & ((block < rule.first) | (block >= own - rule.local))


def best_blocks(scores: torch.Tensor, positions: torch.Tensor, rule: BlockRule) -> torch.Tensor:
    """The blocks taken by score alone, forced ones left out: int64 [H, Q, min(rule.chosen, N)], best first.

    Equal scores go to the earlier block; -1 stands where a row has no more blocks before it.
    """
    n_blocks = scores.shape[-1]
    block = torch.arange(n_blocks, device=scores.device)
    past = block <= (positions // rule.block)[:, None]
    free = past & ~forced_blocks(positions, rule, n_blocks)
    value, order = scores.masked_fill(~free, -math.inf).sort(dim=-1, descending=True, stable=True)
    return order.masked_fill(value == -math.inf, -1)[..., : rule.chosen]


def sticking(scores: torch.Tensor, free: torch.Tensor, recent: torch.Tensor, stick: float) -> torch.Tensor:
    """Scores [.., N] with those of `recent` blocks better by `stick` standard deviations of the `free` ones' scores.

    free and recent are bool [.., N]; free ones have finite scores. Rows without any stay as they are.
    """
    count = free.sum(-1, keepdim=True).clamp(min=1)
    mean = scores.masked_fill(~free, 0).sum(-1, keepdim=True) / count
    spread = ((scores - mean).masked_fill(~free, 0).square().sum(-1, keepdim=True) / count).sqrt()
    return torch.where(free & recent, scores + stick * spread, scores)


def select_blocks(scores: torch.Tensor, positions: torch.Tensor, rule: BlockRule) -> torch.Tensor:
    """bool [H, Q, N]: the blocks that each row of each KV head reads, forced ones and the best others."""
    n_blocks = scores.shape[-1]
    best = best_blocks(scores, positions, rule)
    chosen = torch.zeros((*scores.shape[:-1], n_blocks + 1), dtype=torch.bool, device=scores.device)
    chosen.scatter_(-1, best.masked_fill(best < 0, n_blocks), True)
    return chosen[..., :n_blocks] | forced_blocks(positions, rule, n_blocks)


def block_numbers(chosen: torch.Tensor, width: int) -> torch.Tensor:
    """bool [H, Q, N] → int32 [H, Q, width], ascending, -1 behind the last. Raises InvalidInput if a row has more."""
    most = int(chosen.sum(-1).max())
    if most > width:
        raise InvalidInput(f"a row has {most} blocks and {width} places were given; give {most} or more.")
    n_blocks = chosen.shape[-1]
    numbers = torch.where(chosen, torch.arange(n_blocks, device=chosen.device), n_blocks).sort(-1).values
    numbers = pad(numbers, (0, max(0, width - n_blocks)), value=n_blocks)[..., :width]
    return numbers.masked_fill(numbers == n_blocks, -1).int()


def attend_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chosen: torch.Tensor,
    positions: torch.Tensor,
    *,
    block: int,
    scale: float,
) -> torch.Tensor:
    """Attention to the tokens of chosen blocks: q [Hq, Q, D], k and v [Hkv, T, D], chosen [Hkv, Q, N] → [Hq, Q, D].

    A row never sees a token behind its position. Every row must have a token to see.
    """
    heads, n, _ = k.shape
    seen = chosen.repeat_interleave(block, -1)[..., :n] & (torch.arange(n, device=k.device) <= positions[:, None])
    mask = seen.repeat_interleave(q.shape[0] // heads, 0)
    out = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], mask[None], scale=scale, enable_gqa=True
    )
    return out[0]


def block_mass(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, rule: BlockRule, *, scale: float
) -> torch.Tensor:
    """Exact attention of each row to each block, a mean over the group's heads: float32 [Hkv, Q, N], rows sum to 1."""
    heads, n, _ = k.shape
    logits = torch.unflatten(q.float(), 0, (heads, -1)) @ k.float()[:, None].transpose(-1, -2) * scale
    late = torch.arange(n, device=k.device) > positions[:, None]
    mass = logits.masked_fill(late, -math.inf).softmax(-1).mean(1)
    return torch.unflatten(pad(mass, (0, -n % rule.block)), -1, (-1, rule.block)).sum(-1)
