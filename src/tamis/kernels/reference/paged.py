"""Attention over pages in plain PyTorch: the truth that the kernels over pages are held to.

One (head, query tile, document) at a time: the query is turned back by the document's offset, attends to the
document's keys alone, and the parts are merged by their log-sum-exp. In float32, or float64 if q is.

The Triton kernels round the turned query to q's dtype once more, as their products take it. With unit roundoff u (2^-8
in bfloat16, 2^-11 in float16) that moves a score, and so the log-sum-exp, by at most u * scale * |q| * |k| (norms of
the two rows), and by 0.4 of that over sqrt(D) in the root mean square: the error follows the norms, not the score, and
where scores of 30 meet it the log-sum-exp is off by 0.04. `rounded=True` does the same rounding, so that a kernel can
be held to a tight limit whatever the scores are. Keys re-rotated into a bfloat16 copy are rounded once more, too, and
lose as much. Root mean square of scores of q and k that are bfloat16 already, against float64 (D 128, plain inputs,
and inputs with a few keys eight times as long): turned query 0.00166 and 0.00185, re-rotated copies 0.00166 and
0.00186. A product of the query in two bfloat16 parts would lose nothing and cost twice as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from tamis.kernels.decode_plan import DecodePlan
from tamis.kernels.paged import DOCUMENT, POSITION, KeyTiles, PagedLists, check_pages, check_rows, turned_back


class _Score(NamedTuple):
    """How a score is made: its factor, ALiBi's slope, and whether the turned query is rounded to q's dtype."""

    scale: float
    slope: float
    rounded: bool


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: KeyTiles,
    lists: PagedLists,
    *,
    scale: float,
    rounded: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query row over the listed key tiles, causal by absolute positions.

    q [Hq, Tq, D] turned at its absolute positions; keys and values [pages, Hkv, page, D] of one layer's pool, Hq a
    multiple of Hkv (query head h reads KV head h // (Hq / Hkv)). `scale` multiplies the scores; `rounded` rounds a
    query that was turned back to q's dtype before its product. Returns out [Hq, Tq, D] in q's dtype and the natural-log
    log-sum-exp [Hq, Tq] in float32; a row that sees no key has 0 and -inf.
    """
    check_pages(q, keys, values, tiles)
    check_rows(q, lists)
    group = q.shape[0] // keys.shape[1]
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for h in range(q.shape[0]):
        cell = h if lists.count.shape[0] > 1 else 0
        for i, (row, rows) in enumerate(zip(lists.q_start.tolist(), lists.q_len.tolist(), strict=True)):
            own = slice(row, row + rows)
            visits = lists.entries[cell, i, : int(lists.count[cell, i])].long()
            pools = keys[:, h // group], values[:, h // group]
            how = _Score(scale, _slope(tiles, h), rounded)
            made = _rows(q[h, own], lists.q_position[own], *pools, tiles, visits, how)
            out[h, own], lse[h, own] = made[0].to(q.dtype), made[1].float()
    return out, lse


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    rounded: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a batch: q [B, Hq, Tq, D], request b reads the splits of `plan` that are its own.

    Returns out [B, Hq, Tq, D] in q's dtype and the natural-log log-sum-exp [B, Hq, Tq] in float32.
    """
    check_pages(q, keys, values, plan.tiles)
    group = q.shape[1] // keys.shape[1]
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for b, (first, n) in enumerate(plan.ranges.tolist()):
        splits = plan.splits[first : first + n].tolist()
        visits = torch.cat([torch.zeros(0, dtype=torch.long), *(torch.arange(s[1], s[1] + s[2]) for s in splits)])
        for h in range(q.shape[1]):
            pools = keys[:, h // group], values[:, h // group]
            where = visits.to(q.device)
            how = _Score(scale, _slope(plan.tiles, h), rounded)
            made = _rows(q[b, h], plan.q_position[b], *pools, plan.tiles, where, how)
            out[b, h], lse[b, h] = made[0].to(q.dtype), made[1].float()
    return out, lse


def merge(parts: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One attention from several over disjoint keys: outs [.., T, D] and log-sum-exps [.., T], at least one of them."""
    made = list(parts)
    lses = torch.stack([lse for _, lse in made])
    total = lses.logsumexp(0)
    share = torch.where(total > -torch.inf, lses - total, -torch.inf).exp()
    return (share[..., None] * torch.stack([out for out, _ in made])).sum(0), total


def _slope(tiles: KeyTiles, head: int) -> float:
    return 0.0 if tiles.slopes is None else float(tiles.slopes[head])


def _rows(
    q: torch.Tensor,
    position: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: KeyTiles,
    visits: torch.Tensor,
    how: _Score,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows q [T, D] of one head over the tiles `visits`; keys and values [pages, page, D]."""
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    readable = tiles.readable()

    def parts() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield torch.zeros_like(wide), torch.full_like(wide[:, 0], -torch.inf)
        documents = tiles.table[visits, DOCUMENT]
        for document in sorted(set(documents.tolist())):
            own = visits[documents == document]
            kept = readable[own]  # only what is to be read is ever touched
            k, v = (t[tiles.table[own, 0].long()][kept].to(wide.dtype) for t in (keys, values))
            where = (tiles.table[own, POSITION, None] + torch.arange(tiles.page, device=q.device))[kept]
            away = where[None] - position[:, None]
            turned = turned_back(wide, tiles, document)
            if how.rounded:
                turned = turned.to(q.dtype).to(wide.dtype)
            scores = turned @ k.T * how.scale + how.slope * away
            scores = scores.masked_fill(away > 0, -torch.inf)
            lse = scores.logsumexp(-1)
            yield torch.where(lse > -torch.inf, scores.T - lse, -torch.inf).exp().T @ v, lse

    return merge(parts())
