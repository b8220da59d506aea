"""Pooled keys of one layer of a sequence that grows; knows keys, not what scores them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tamis.kernels.blocks import COARSE, BlockRule
from tamis.kernels.reference.blocks import pool_keys


@dataclass
class Pooled:
    """Means of whole windows of `n_tokens` keys: `pooled` [Hkv, C, D] as the rule has them, `wide` [Hkv, C2, D] of
    windows and strides COARSE times as long. `last` [Hkv, n, D] are the keys that later windows need."""

    rule: BlockRule
    n_tokens: int
    pooled: torch.Tensor
    wide: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, rule: BlockRule) -> Pooled:
        """Of keys [Hkv, T, D], rotated."""
        made = cls(rule, 0, keys[:, :0], keys[:, :0], keys[:, :0])
        made.append(keys)
        return made

    def append(self, keys: torch.Tensor) -> None:
        """Take further keys [Hkv, n, D]."""
        rule, known = self.rule, self.n_tokens - self.last.shape[1]
        every = torch.cat([self.last, keys], 1)
        self.n_tokens += keys.shape[1]
        for name, window, stride in (
            ("pooled", rule.window, rule.stride),
            ("wide", COARSE * rule.window, COARSE * rule.stride),
        ):
            done = getattr(self, name)
            fresh = pool_keys(every[:, done.shape[1] * stride - known :], window, stride)
            if fresh.shape[1]:  # most tokens complete no window, and all that is there would be copied
                setattr(self, name, torch.cat([done, fresh], 1))
        # the next window of either kind begins at or behind this token
        begin = min(self.pooled.shape[1] * rule.stride, self.wide.shape[1] * COARSE * rule.stride)
        self.last = every[:, begin - known :].clone()
