"""One decode step over self-indexed parts on a CPU: a byte of codes is one look-up, only chosen records are read.

Same results as `kernels.reference.selfindex`, which stays the truth and dequantises everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.selfindex import (
    CELLS,
    Layout,
    Part,
    Records,
    Tables,
    by_group,
    dequantised,
    group_mean,
    hide,
    merged,
)


def score(q: torch.Tensor, records: Records, tables: Tables) -> torch.Tensor:
    """float32 [.., Hkv, R, T], see the reference: two groups of a byte share one table of 256 sums."""
    order = tables.order.long()[..., None, :].expand(q.shape)
    stored = torch.unflatten(q.float().gather(-1, order), -1, (4, -1)).transpose(-1, -2)
    lut = torch.einsum("...gci,...rgi->...rgc", tables.centroids.float(), stored)
    low, high = lut.chunk(2, -2)
    pairs = (high[..., :, None] + low[..., None, :]).flatten(-3)  # [.., R, G/2 * 256]: entry 256 b + byte
    n_bytes = records.codes.shape[-1]
    index = records.codes.int() + torch.arange(n_bytes, dtype=torch.int32) * (CELLS * CELLS)
    flat = index.flatten(-2).long()[..., None, :].expand(*pairs.shape[:-1], index.shape[-2] * n_bytes)
    return torch.unflatten(pairs.gather(-1, flat), -1, (-1, n_bytes)).sum(-1) + tables.bias(q)[..., None]


def decode(
    queries: Sequence[torch.Tensor],
    parts: Sequence[Part],
    recent: tuple[torch.Tensor, torch.Tensor],
    layout: Layout,
    *,
    count: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.selfindex.attention` for one row: queries q [.., Hq, 1, D], one for each part and one for `recent`."""
    if len(queries) != len(parts) + 1 or queries[-1].shape[-2] != 1:
        raise InvalidInput(
            f"{len(queries)} queries of {queries[-1].shape[-2]} rows for {len(parts)} parts; "
            "give one row, for each part and for the recent tokens."
        )
    kv_heads = recent[0].shape[-3]
    grouped = [by_group(q.float(), kv_heads)[..., 0, :] for q in queries]  # [.., Hkv, g, D]
    keys, values = [recent[0].float()], [recent[1].float()]
    scores = [grouped[-1] @ keys[0].transpose(-1, -2)]
    coarse = [
        hide(score(group_mean(q, kv_heads), p.records, p.tables), p.exact)[..., 0, :]
        for q, p in zip(queries, parts, strict=False)
    ]
    best = _best(coarse, count)
    begin = 0
    for i, part in enumerate(parts):
        n = part.records.n_tokens
        mine = (best >= begin) & (best < begin + n)
        # every head reads as many records as the head with most of them here; the rest are masked
        most = int(mine.sum(-1).max()) if best.numel() else 0
        slot = mine.sort(dim=-1, descending=True, stable=True).indices[..., :most]
        real = mine.gather(-1, slot)
        k, v = dequantised(part.records.take((best.gather(-1, slot) - begin).clamp(0, n - 1)), part.tables, layout)
        s = (grouped[i] @ k.transpose(-1, -2)).masked_fill(~real[..., None, :], -math.inf)
        keys += [part.keys.float(), k]
        values += [part.values.float(), v]
        scores += [grouped[i] @ part.keys.float().transpose(-1, -2), s]
        begin += n
    out, lse = merged(torch.cat(scores, -1) * scale, torch.cat(values, -2))
    return out.flatten(-3, -2)[..., None, :].to(queries[-1].dtype), lse.flatten(-2)[..., None]


def _best(scores: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """int64 [.., Hkv, K]: positions of the `count` best in the joined parts; -1 where all that is left is at -inf."""
    if not scores:
        return torch.zeros(0, dtype=torch.long)
    joined = torch.cat(list(scores), -1)
    joined = torch.where(joined.isnan(), -math.inf, joined)
    found = joined.topk(min(count, joined.shape[-1]), -1)
    return torch.where(found.values > -math.inf, found.indices, -1)
