"""Which tokens are kept whole beside their records, and how many records a step reads: rules, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.selfindex import by_group


@dataclass(frozen=True)
class Keep:
    """Tokens that are attended in full precision at every step.

    first   of the sequence: attention sinks, which codes miss
    chosen  of a prompt, by what its last `window` queries attended to most (as in SnapKV, arXiv 2404.14469)
    recent  the newest at least, generated or not
    """

    first: int = 4
    chosen: int = 60
    recent: int = 64
    window: int = 32

    def __post_init__(self) -> None:
        if min(self.first, self.chosen) < 0 or min(self.recent, self.window) < 1:
            raise InvalidInput(f"{self}: first and chosen are 0 or more tokens, recent and window 1 or more.")


@dataclass(frozen=True)
class Budget:
    """Records a step reads: `share` of all tokens of the sequence, at least `least`."""

    share: float = 0.075
    least: int = 96

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or self.least < 0:
            raise InvalidInput(f"{self}: share is 0 to 1, least 0 or more tokens.")

    def count(self, n_tokens: int) -> int:
        """Records for a sequence of n_tokens."""
        return max(self.least, math.ceil(self.share * n_tokens))


def exact_tokens(q: torch.Tensor | None, keys: torch.Tensor, keep: Keep, scale: float) -> torch.Tensor:
    """int64 [.., Hkv, F]: tokens of keys [.., Hkv, T, D] to keep whole, the first ones first; all distinct, F <= T.

    q [.., Hq, W, D]: the last queries, which come after all of the keys; None: the first tokens alone.
    """
    n = keys.shape[-2]
    first = min(keep.first, n)
    if q is None or not keep.chosen or not q.shape[-2]:
        return torch.arange(first, device=keys.device).expand(*keys.shape[:-2], first)
    grouped = by_group(q[..., -keep.window :, :].float(), keys.shape[-3])
    mass = (grouped @ keys.float()[..., None, :, :].transpose(-1, -2) * scale).softmax(-1).mean((-3, -2))
    mass = mass.nan_to_num(0.0)
    mass[..., :first] = math.inf
    return mass.sort(dim=-1, descending=True, stable=True).indices[..., : min(n, first + keep.chosen)]


def energy_of(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """float32 [.., Hkv, D]: mean square of the group-mean query of q [.., Hq, T, D]; it weighs a code's error."""
    return by_group(q.float(), kv_heads).mean(-3).square().mean(-2)
