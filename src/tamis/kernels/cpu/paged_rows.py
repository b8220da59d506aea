"""A decode step over pages on a CPU, one query row a request, in a handful of batched products for all of them.

What no layer changes (which pages, which slots are readable, by how much queries are turned) is worked out once a step
and kept with the plan. Every product is over one page of one KV head and pages are merged request by request, so that
a request's result has the same bits whoever else is in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tamis.kernels.decode_plan import DecodePlan
from tamis.kernels.paged import DOCUMENT, PAGE, POSITION

MASKED = -1e30  # a score, where -inf would make the differences of whole tiles NaN
FEW_PAGES = 8  # are copied together rather than read in place


def takes(plan: DecodePlan) -> bool:
    """Whether this path is for the plan: one row a request, and no bias by distance."""
    return plan.room.tokens == 1 and plan.tiles.slopes is None


def paged_decode_rows(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: DecodePlan, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.reference.paged.paged_decode`, with one row: q [B, Hq, 1, D]."""
    batch, heads, _, dim = q.shape
    kv_heads = keys.shape[1]
    step = _step(plan)
    rows = (q.float() * scale).view(batch, kv_heads, heads // kv_heads, dim).index_select(0, step.request)
    if step.cos is not None and step.sin is not None:
        half = step.cos.shape[-1]
        a, b = rows[..., :half], rows[..., half : 2 * half]
        turned = (a * step.cos + b * step.sin, b * step.cos - a * step.sin)
        rows = torch.cat([*turned, rows[..., 2 * half :]], -1)
    scores, reads = step.scores(rows, keys, values)
    n, of = len(step.request), step.request
    tops = scores.amax(-1).view(n, heads)
    top = torch.full((batch, heads), -torch.inf).scatter_reduce_(0, of[:, None].expand(n, heads), tops, "amax")
    p = scores.sub_(top.index_select(0, of).view(*scores.shape[:3], 1)).exp_()
    made = [torch.matmul(p[span], v) for span, v in reads]
    pages = made[0] if len(made) == 1 else torch.cat(made)
    sums = torch.zeros((batch, heads)).index_add_(0, of, p.sum(-1).view(n, heads))
    out = torch.zeros((batch, heads, dim)).index_add_(0, of, pages.view(n, heads, dim))
    out /= sums.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    lse = top + sums.log()
    return out[:, :, None].to(q.dtype), lse.masked_fill_(lse < MASKED / 10, -torch.inf)[..., None]


@dataclass(frozen=True)
class _Step:
    """What all layers of a step share, for the n pages that are read, those first that are read whole.

    pages, request int64 [n]; unreadable bool [n - whole, 1, 1, page]; cos, sin float32 [n, 1, 1, R / 2];
    first: the first of the whole pages where these are neighbours in the pool and many, else -1;
    position int32 [B, 1]: of the query rows that this was made for.
    """

    pages: torch.Tensor
    request: torch.Tensor
    whole: int
    unreadable: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    first: int
    position: torch.Tensor

    def scores(
        self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, list[tuple[slice, torch.Tensor]]]:
        """Scores [n, Hkv, G, page] of rows [n, Hkv, G, D], and the values of spans of them, float32."""
        begin = self.whole if self.first >= 0 else 0
        copied = self.pages[begin:]
        k, v = (t.index_select(0, copied).float() for t in (keys, values))
        if len(self.unreadable):  # what lies in slots that must not be read may be NaN, and 0 times that is
            v[self.whole - begin :].masked_fill_(self.unreadable.mT, 0.0)
        reads = [(slice(begin, None), v)]
        scores = torch.matmul(rows[begin:], k.mT)
        if begin:
            k, v = (t[self.first : self.first + begin].float() for t in (keys, values))
            reads.insert(0, (slice(0, begin), v))
            scores = torch.cat([torch.matmul(rows[:begin], k.mT), scores])
        if len(self.unreadable):
            scores[self.whole :].masked_fill_(self.unreadable, MASKED)
        return scores, reads


def _step(plan: DecodePlan) -> _Step:
    held = plan.scratch.get("cpu")
    if isinstance(held, _Step) and torch.equal(held.position, plan.q_position):
        return held
    made = plan.scratch["cpu"] = _made(plan)
    return made


def _made(plan: DecodePlan) -> _Step:
    tiles = plan.tiles
    splits = plan.splits[plan.splits[:, 2] > 0]
    splits = splits[splits[:, 1].argsort()].long()
    n = int(splits[:, 2].sum())
    request = torch.repeat_interleave(splits[:, 0], splits[:, 2])
    where = tiles.table[:n, POSITION, None] + torch.arange(tiles.page)
    readable = tiles.readable()[:n] & (where <= plan.q_position[request])
    whole = readable.all(-1)
    order = (~whole).long().argsort(stable=True)
    n_whole, request = int(whole.sum()), request[order]
    pages, document = tiles.table[order, PAGE].long(), tiles.table[order, DOCUMENT].long()
    cos = sin = None
    if tiles.cos is not None and tiles.sin is not None and bool((document >= 0).any()):
        # a page at its absolute position is turned by nothing
        still = (document < 0)[:, None]
        cos = torch.where(still, 1.0, tiles.cos[document.clamp(min=0)])[:, None, None]
        sin = torch.where(still, 0.0, tiles.sin[document.clamp(min=0)])[:, None, None]
    neighbours = n_whole > FEW_PAGES and bool((pages[:n_whole].diff() == 1).all())
    first = int(pages[0]) if neighbours else -1
    unreadable = ~readable[order[n_whole:]][:, None, None]
    return _Step(pages, request, n_whole, unreadable, cos, sin, first, plan.q_position.clone())
