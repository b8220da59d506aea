"""`quest`: whole pages by an upper bound of their scores (Quest, arXiv 2406.10774).

A page keeps the least and greatest of its keys in each channel. sum_d max(q_d low_d, q_d high_d) bounds the score of
every key in it; the pages with the highest bounds are read whole. As published: pages of 16 tokens, the first two
layers read everything, three pages at least, the newest page always. Published for a KV head per query head; here query
heads that share one also share the choice, by their mean query, as `selfindex` does: else they would read a union.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tamis.eval.decoders.base import Growing, LayerPrompt, Size, as_tensor, best, counted, positions, shares_of
from tamis.eval.decoders.full import full_bytes
from tamis.kernels.selfindex import group_mean

PAGE = 16
DENSE_LAYERS = 2
LEAST_PAGES = 3


class Quest:
    """budgets: shares of the tokens that are read, in whole pages. `dense_layers` first layers read everything."""

    wants_module = False

    def __init__(
        self, budgets: Sequence[float], *, page: int = PAGE, dense_layers: int = DENSE_LAYERS, name: str = "quest"
    ) -> None:
        self.name, self.page, self.dense_layers = name, page, dense_layers
        self.budgets: tuple[float | None, ...] = shares_of(name, budgets)

    def shares(self, n_tokens: int, head_dim: int) -> tuple[float, ...]:
        """What each budget means as a share of the tokens."""
        return tuple(b for b in self.budgets if b is not None)

    def page_of(self, n_tokens: int, head_dim: int) -> int:
        """Tokens of a page."""
        return self.page

    def prefill(self, x: LayerPrompt) -> Growing:
        """See `Method`."""
        if x.layer < self.dense_layers:
            return Growing(x.keys, x.values, x.scale, batch=len(self.budgets))
        n, d = x.keys.shape[-2:]
        return Pages(x, self.shares(n, d), self.page_of(n, d))

    def sizes(self, n_tokens: int, head_dim: int, n_layers: int) -> list[Size]:
        """See `Method`."""
        full, page = full_bytes(head_dim), self.page_of(n_tokens, head_dim)
        sparse = max(0, n_layers - self.dense_layers) / n_layers
        found = []
        for share in self.shares(n_tokens, head_dim):
            pages = min(math.ceil(n_tokens / page), max(LEAST_PAGES, math.ceil(share * n_tokens / page)))
            read = full / page + full * min(1.0, pages * page / n_tokens)
            found.append(Size(full + sparse * full / page, sparse * read + (1 - sparse) * full))
        return found


class Pages(Growing):
    """One layer: bounds of the prompt's whole pages, made once, and of its own tokens' pages, made at each step."""

    def __init__(self, x: LayerPrompt, shares: Sequence[float], page: int) -> None:
        n = x.keys.shape[-2]
        super().__init__(x.keys, x.values, x.scale, batch=len(shares), whole=n - n % page)
        self.page, self.most, self.shares = page, max(shares), as_tensor(shares, x.keys.device)
        self.bounds = page_bounds(self.keys, page)

    def visible(self, q: torch.Tensor) -> torch.Tensor:
        """See `Growing`: a row's own page, and those before it with the highest bounds."""
        rows, n = q.shape[-2], self.n_tokens
        own = self.tail[0]
        tail = page_bounds(own[..., : own.shape[-2] - own.shape[-2] % self.page, :], self.page)
        mean = group_mean(q, own.shape[-3])
        scores = torch.cat([bound(mean, *pages) for pages in (self.bounds, tail)], -1)
        at = positions(rows, n, q.device)[:, None] // self.page  # [R, 1]: a row's own page
        before = torch.arange(scores.shape[-1], device=q.device) < at
        scores = scores.masked_fill(~before, -math.inf)
        pages = (counted(self.shares, rows, n) + self.page - 1) // self.page
        pages = pages.clamp(min=LEAST_PAGES) - 1  # without its own
        most = max(LEAST_PAGES, math.ceil(self.most * n / self.page))
        chosen = best(scores, pages, most).repeat_interleave(self.page, -1)
        chosen = torch.nn.functional.pad(chosen, (0, n - chosen.shape[-1]))
        return chosen | (torch.arange(n, device=q.device) // self.page == at)


def page_bounds(keys: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest of keys [.., T, D] in each page and channel, [.., T / page, D]; T a multiple of page."""
    pages = torch.unflatten(keys, -2, (-1, page)) if keys.shape[-2] else keys[..., None, :]
    return pages.amin(-2), pages.amax(-2)


def bound(q: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """[B, Hkv, R, P]: upper bounds for q [B, Hkv, R, D] of pages [Hkv, P, D] or [B, Hkv, P, D]."""
    form = "bhrd,hpd->bhrp" if low.dim() == 3 else "bhrd,bhpd->bhrp"
    return torch.einsum(form, q.clamp(min=0), high) + torch.einsum(form, q.clamp(max=0), low)
