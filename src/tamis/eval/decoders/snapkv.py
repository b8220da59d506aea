"""`snapkv`: what the prompt's last queries attend to is kept, the rest dropped for good (SnapKV, arXiv 2404.14469).

The last 32 queries vote: their attention to each earlier token, summed over the window, pooled over 7 neighbours,
averaged over the query heads of a KV head (the paper has one KV head a query head). Kept are the window itself and the
tokens with most votes, up to the budget; then all that is generated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tamis.core.errors import InvalidInput
from tamis.eval.decoders.base import Growing, LayerPrompt, Size, as_tensor, best, causal, product, shares_of
from tamis.eval.decoders.full import full_bytes
from tamis.kernels.selfindex import by_group

WINDOW = 32
KERNEL = 7
POOLINGS = ("avg", "max")


class SnapKV:
    """budgets: shares of the prompt's tokens that are kept, the window at least. pooling: "avg" or "max"."""

    wants_module = False

    def __init__(
        self, budgets: Sequence[float], *, window: int = WINDOW, kernel: int = KERNEL, pooling: str = "avg"
    ) -> None:
        if pooling not in POOLINGS or kernel % 2 != 1 or window < 1:
            raise InvalidInput(
                f"window {window}, kernel {kernel}, pooling {pooling!r}; give 1 or more, odd, avg or max."
            )
        self.name, self.window, self.kernel, self.pooling = "snapkv", window, kernel, pooling
        self.budgets: tuple[float | None, ...] = shares_of("snapkv", budgets)

    def prefill(self, x: LayerPrompt) -> Growing:
        """See `Method`."""
        n, shares = x.keys.shape[-2], [b for b in self.budgets if b is not None]
        window = min(self.window, x.q.shape[-2], n)
        counts = [max(0, math.ceil(b * n) - window) for b in shares]
        scores = self.votes(x, window).expand(len(shares), -1, 1, -1)
        limits = as_tensor(counts, x.keys.device).long()[:, None, None, None]
        kept = torch.nn.functional.pad(best(scores, limits, max(counts)), (0, window), value=True)
        return Kept(x, kept)

    def votes(self, x: LayerPrompt, window: int) -> torch.Tensor:
        """float32 [Hkv, 1, T - window]: pooled votes for the tokens before the window."""
        q, n = x.q[:, x.q.shape[-2] - window :].float(), x.keys.shape[-2]
        scores = product(by_group(q, x.keys.shape[0])[None], x.keys.float())[0] * x.scale  # [Hkv, g, window, T]
        scores = scores.masked_fill(~causal(window, n, q.device), -math.inf)
        votes = scores.softmax(-1)[..., : n - window].sum(-2)
        if not votes.shape[-1]:
            return votes.mean(1, keepdim=True)
        pool = torch.nn.functional.avg_pool1d if self.pooling == "avg" else torch.nn.functional.max_pool1d
        return pool(votes, self.kernel, stride=1, padding=self.kernel // 2).mean(1, keepdim=True)

    def sizes(self, n_tokens: int, head_dim: int, n_layers: int) -> list[Size]:
        """See `Method`."""
        kept = [min(n_tokens, max(self.window, math.ceil(b * n_tokens))) for b in self.budgets if b is not None]
        return [Size(*(full_bytes(head_dim) * k / n_tokens,) * 2) for k in kept]


class Kept(Growing):
    """One layer: kept bool [B, Hkv, 1, T] of the prompt, and everything behind it."""

    def __init__(self, x: LayerPrompt, kept: torch.Tensor) -> None:
        super().__init__(x.keys, x.values, x.scale, batch=kept.shape[0])
        self.kept = kept

    def visible(self, q: torch.Tensor) -> torch.Tensor:
        """See `Growing`."""
        return torch.nn.functional.pad(self.kept, (0, self.n_tokens - self.shared), value=True)
