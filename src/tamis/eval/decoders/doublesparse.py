"""`doublesparse`: tokens by their scores in a few heavy channels (Double Sparsity, arXiv 2408.07092).

The channels that move scores most, an eighth of them (16 of 128), are kept once more beside the keys, in bfloat16: the
label cache, a sixteenth of keys and values. A step scores all tokens in those channels and reads the best in full.
Published with channels found offline on other text; here they are the prompt's own, mean |q| times mean |k|, which can
only favour the method. As published, the first two layers read everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tamis.eval.decoders.base import (
    SIDE_BYTES,
    Growing,
    LayerPrompt,
    Size,
    as_tensor,
    best,
    causal,
    counted,
    positions,
    shares_of,
)
from tamis.eval.decoders.full import full_bytes
from tamis.kernels.selfindex import by_group, group_mean

CHANNEL_SHARE = 8  # head_dim over heavy channels
DENSE_LAYERS = 2


class DoubleSparse:
    """budgets: shares of the tokens that are read. channels: heavy ones, None: an eighth."""

    wants_module = False

    def __init__(
        self, budgets: Sequence[float], *, channels: int | None = None, dense_layers: int = DENSE_LAYERS
    ) -> None:
        self.name, self.channels, self.dense_layers = "doublesparse", channels, dense_layers
        self.budgets: tuple[float | None, ...] = shares_of("doublesparse", budgets)

    def prefill(self, x: LayerPrompt) -> Growing:
        """See `Method`."""
        shares = [b for b in self.budgets if b is not None]
        if x.layer < self.dense_layers:
            return Growing(x.keys, x.values, x.scale, batch=len(shares))
        return Labels(x, shares, heavy_channels(x, self._channels(x.keys.shape[-1])))

    def sizes(self, n_tokens: int, head_dim: int, n_layers: int) -> list[Size]:
        """See `Method`."""
        full, labels = full_bytes(head_dim), float(SIDE_BYTES * self._channels(head_dim))
        sparse = max(0, n_layers - self.dense_layers) / n_layers
        read = [labels + full * math.ceil(b * n_tokens) / n_tokens for b in self.budgets if b is not None]
        return [Size(full + sparse * labels, sparse * r + (1 - sparse) * full) for r in read]

    def _channels(self, head_dim: int) -> int:
        return self.channels or head_dim // CHANNEL_SHARE


def heavy_channels(x: LayerPrompt, count: int) -> torch.Tensor:
    """int64 [Hkv, count]: channels in which |q_d k_d| is greatest on average."""
    queries = by_group(x.q.float(), x.keys.shape[0]).abs().mean((1, 2))
    return (queries * x.keys.float().abs().mean(1)).topk(count, -1).indices


class Labels(Growing):
    """One layer. heavy int64 [Hkv, r]."""

    def __init__(self, x: LayerPrompt, shares: Sequence[float], heavy: torch.Tensor) -> None:
        super().__init__(x.keys, x.values, x.scale, batch=len(shares))
        self.heavy, self.most, self.shares = heavy, max(shares), as_tensor(shares, x.keys.device)
        self.labels = self._labels(self.keys)

    def visible(self, q: torch.Tensor) -> torch.Tensor:
        """See `Growing`: a row itself, and the best by the heavy channels."""
        rows, n = q.shape[-2], self.n_tokens
        own = self._labels(self.tail[0])
        mean = self._labels(group_mean(q, own.shape[-3]))
        scores = torch.cat(
            [torch.einsum("bhrc,htc->bhrt", mean, self.labels), torch.einsum("bhrc,bhtc->bhrt", mean, own)], -1
        )
        scores = scores.masked_fill(~causal(rows, n, q.device), -math.inf)
        chosen = best(scores, counted(self.shares, rows, n), math.ceil(self.most * n))
        return chosen | (torch.arange(n, device=q.device) == positions(rows, n, q.device)[:, None])

    def _labels(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., Hkv, T, D] in the heavy channels, [.., Hkv, T, r]."""
        return x.gather(-1, self.heavy[:, None].expand(*x.shape[:-1], -1))
