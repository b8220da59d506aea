"""How many of the blocks that a layer wants were predicted; knows choices of blocks, not how they were made."""

from __future__ import annotations

import torch

from tamis.kernels.blocks import BlockRule
from tamis.kernels.reference.blocks import forced_blocks


def contested(positions: torch.Tensor, rule: BlockRule) -> torch.Tensor:
    """bool [Q]: rows that have more blocks to choose from than they may take; for the others any choice is right."""
    own = positions // rule.block
    return own + 1 > rule.top


def recall(chosen: torch.Tensor, wanted: torch.Tensor, positions: torch.Tensor, rule: BlockRule) -> torch.Tensor:
    """Share of the wanted blocks that were chosen, forced ones left out of both: bool [H, Q, N] twice → [H, Q].

    Give contested rows only: they alone have as many wanted blocks as the rule chooses.
    """
    free = wanted & ~forced_blocks(positions, rule, wanted.shape[-1])
    return (chosen & free).sum(-1) / free.sum(-1)
