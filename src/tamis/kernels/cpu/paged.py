"""Attention over pages on a CPU from PyTorch's batched matrix products, for prompts and for decode steps.

Same arguments and results as `kernels.reference.paged`, which stays the truth. Pages that lie side by side in the
pool are read in place, others are gathered a few at a time; the parts are merged as they come (online softmax).
"""

from __future__ import annotations

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.cpu.paged_rows import paged_decode_rows, takes
from tamis.kernels.decode_plan import DecodePlan
from tamis.kernels.paged import LENGTH, PAGE, POSITION, KeyTiles, PagedLists, check_pages, check_rows, turned_back

SCORE_BYTES = 4 << 20  # scores of one product: they are written and read again, so they must stay in a cache


def paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tiles: KeyTiles, lists: PagedLists, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.reference.paged.paged_attention`; float32, float16 or bfloat16 on a CPU."""
    check_pages(q, keys, values, tiles)
    check_rows(q, lists)
    _check_device(q)
    heads, kv_heads = q.shape[0], keys.shape[1]
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    starts, lengths = lists.q_start.tolist(), lists.q_len.tolist()
    for cell in range(lists.count.shape[0]):
        # all heads at once where they share the lists, else one
        own = slice(None) if lists.count.shape[0] == 1 else slice(cell, cell + 1)
        kv = slice(None) if lists.count.shape[0] == 1 else slice(cell * kv_heads // heads, cell * kv_heads // heads + 1)
        pool = _Pool(keys[:, kv], values[:, kv], tiles, scale, None if tiles.slopes is None else tiles.slopes[own])
        for i, (row, rows) in enumerate(zip(starts, lengths, strict=True)):
            near, n_runs = lists.run_count[cell, i].tolist()
            part = _Rows(pool, q[own, row : row + rows], lists.q_position[row : row + rows])
            first = 0
            for r, (end, document) in enumerate(lists.runs[cell, i, :n_runs].tolist()):
                part.visit(lists.entries[cell, i, first:end].long(), document, masked=r < near)
                first = end
            out[own, row : row + rows], lse[own, row : row + rows] = part.result()
    return out, lse


def paged_decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: DecodePlan, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.reference.paged.paged_decode`; float32, float16 or bfloat16 on a CPU."""
    _check_device(q)
    if takes(plan):
        return paged_decode_rows(q, keys, values, plan, scale=scale)
    check_pages(q, keys, values, plan.tiles)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32)
    pool = _Pool(keys, values, plan.tiles, scale, plan.tiles.slopes)
    documents = plan.tiles.table[:, 3].tolist()
    for b, (first, n) in enumerate(plan.ranges.tolist()):
        if not n:  # a place that no request has
            out[b], lse[b] = 0.0, -torch.inf
            continue
        part = _Rows(pool, q[b], plan.q_position[b])
        for _, start, rows, whole in plan.splits[first : first + n].tolist():
            index = torch.arange(start, start + rows)
            part.visit(index[:whole], documents[start], masked=False)
            part.visit(index[whole:], documents[start], masked=True)
        out[b], lse[b] = part.result()
    return out, lse


def _check_device(q: torch.Tensor) -> None:
    if q.device.type != "cpu":
        raise InvalidInput(f"the cpu kernel was given tensors on {q.device}; use kernel='auto' or move them.")


class _Pool:
    """One layer's pages of some KV heads [pages, H, page, D], and how to read them."""

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        tiles: KeyTiles,
        scale: float,
        slopes: torch.Tensor | None,
    ) -> None:
        self.keys, self.values, self.tiles, self.scale, self.slopes = keys, values, tiles, scale, slopes
        self.readable = tiles.readable()

    def pages(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [n, H, page, D] of both: views where the pages are neighbours and float32."""
        first, n = int(numbers[0]), len(numbers)
        if n == 1 or bool((numbers.diff() == 1).all()):
            return self.keys[first : first + n].float(), self.values[first : first + n].float()
        return self.keys[numbers].float(), self.values[numbers].float()


class _Rows:
    """Query rows [Hq, T, D] on their way through their pages: running maximum, sum and weighted values."""

    def __init__(self, pool: _Pool, q: torch.Tensor, position: torch.Tensor) -> None:
        heads, self.rows, dim = q.shape
        kv_heads = pool.keys.shape[1]
        self.pool, self.position, self.shape, self.dtype = pool, position, q.shape, q.dtype
        self.q = (q.float() * pool.scale).reshape(kv_heads, heads // kv_heads * self.rows, dim)
        self.top = torch.full(self.q.shape[:2], -torch.inf)
        self.sum = torch.zeros(self.q.shape[:2])
        self.acc = torch.zeros_like(self.q)

    def visit(self, visits: torch.Tensor, document: int, *, masked: bool) -> None:
        """Tiles of one document, in pieces whose scores stay in a cache."""
        if not len(visits):
            return
        q = turned_back(self.q, self.pool.tiles, document)
        step = max(1, SCORE_BYTES // (4 * self.q.shape[0] * self.q.shape[1] * self.pool.tiles.page))
        for piece in torch.split(visits, step):
            self._piece(q, piece, masked)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out [Hq, T, D] and log-sum-exp [Hq, T]."""
        out = self.acc / self.sum.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        lse = self.top.nan_to_num(neginf=0.0) + self.sum.log()
        return out.reshape(self.shape).to(self.dtype), lse.reshape(self.shape[:2])

    def _piece(self, q: torch.Tensor, visits: torch.Tensor, masked: bool) -> None:
        pool, n, kv_heads = self.pool, len(visits), self.q.shape[0]
        table, page = pool.tiles.table[visits], pool.tiles.page
        keys, values = pool.pages(table[:, PAGE].long())
        used = page
        if masked:
            used = int(table[:, LENGTH].max())
            readable = pool.readable[visits, :used]
            keys = keys[:, :, :used]
            # 0 times what lies in a slot that must not be read need not be 0
            values = values[:, :, :used].masked_fill(~readable[:, None, :, None], 0.0)
        scores = torch.matmul(q, keys.transpose(2, 3))  # [n, Hkv, G * T, used]
        if masked or pool.slopes is not None:
            where = table[:, POSITION, None] + torch.arange(used)
            away = where[:, None, None, None] - self.position[:, None]  # [n, 1, 1, T, used]
            cells = scores.view(n, kv_heads, -1, self.rows, used)
            if pool.slopes is not None:
                cells += pool.slopes.view(kv_heads, -1, 1, 1) * away
            if masked:
                cells.masked_fill_((away > 0) | ~readable[:, None, None, None], -torch.inf)
        top = torch.maximum(self.top, scores.amax((0, 3)))
        base = torch.where(top > -torch.inf, top, 0.0)  # a row that has seen nothing yet
        p = scores.sub_(base[:, :, None]).exp_()
        fade = (self.top - base).exp_()
        self.sum = self.sum * fade + p.sum((0, 3))
        self.acc = self.acc * fade[..., None] + torch.matmul(p, values).sum(0)
        self.top = top
