"""Tile statistics on whatever device the tensors are: a kernel on a GPU, else PyTorch. Imports no Triton by itself."""

from __future__ import annotations

import functools
from bisect import bisect_right

import torch

from tamis.kernels.lists import Tiling
from tamis.kernels.reference.tile_statistics import TileStatistics
from tamis.kernels.reference.tile_statistics import tile_statistics as reference
from tamis.kernels.selection import MAX_TILES, why_not


def tile_statistics(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    queries: Tiling,
    keys: Tiling,
    *,
    scale: float,
    q_offset: int = 0,
    beta: float | None = None,
) -> TileStatistics:
    """See `kernels.reference.tile_statistics`, whose arguments and results these are; scores of bf16 inputs are summed
    in float32 on either way."""
    if why_not(q, MAX_TILES, keys.tile) is not None or q.stride(2) != 1 or k.stride(2) != 1:
        return reference(q, k, lse, queries, keys, scale=scale, q_offset=q_offset, beta=beta)
    from tamis.kernels.triton.tile_statistics import tile_statistics as on_gpu

    made = on_gpu(
        q,
        k,
        lse.contiguous(),
        _cuts(queries, keys, q_offset, q.device),
        scale=scale,
        tile=max(keys.tile, queries.tile),
        q_offset=q_offset,
        beta=beta,
    )
    return TileStatistics(*made)


@functools.lru_cache(maxsize=256)  # the layers of a model ask for the same ones, and a copy to the device is waited for
def _cuts(queries: Tiling, keys: Tiling, q_offset: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    ends = [start + q_offset for start in queries.starts[1:]]
    first = [bisect_right(ends, start) for start in keys.starts[:-1]]
    whole = (queries.starts[:-1], queries.lengths, keys.starts[:-1], keys.lengths, first)
    return tuple(torch.tensor(t, dtype=torch.int32, device=device) for t in whole)
