"""Block-sparse causal attention by flash-attn-4 (Dao et al., `flash_attn.cute`), on lists converted on the device.

Needs sm_90 and the extra `fa4`; the package is imported when the kernel first runs. Its blocks are numbered from the
start of the tensor, so tiles must be aligned, which `tamis.kernels.dispatch` checks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.lists import LENGTH_BITS, TILE, TileLists

NUMBER_SHIFT = LENGTH_BITS + TILE.bit_length() - 1  # an aligned entry without its length and in tiles, not tokens


class BlockLists(NamedTuple):
    """Key blocks that each (query head, query tile) visits, contiguous int32 tensors with a batch dimension of 1.

    mask_count [1, Hq, Nq], mask_index [1, Hq, Nq, 1]   blocks that need the element mask
    full_count [1, Hq, Nq], full_index [1, Hq, Nq, N]   blocks that are whole; the first `full_count` are read, N >= 1
    """

    mask_count: torch.Tensor
    mask_index: torch.Tensor
    full_count: torch.Tensor
    full_index: torch.Tensor


def block_lists(lists: TileLists, n_keys: int) -> BlockLists:
    """Aligned lists over `n_keys` keys as flash-attn-4 takes them. Nothing waits for the device.

    In aligned lists exactly the tile on the diagonal is masked: the tiles before it are whole, for only the last tile
    of all can be short.
    """
    most = -(-n_keys // TILE)
    rest = lists.entries[..., 1 : most + 1]
    if not rest.shape[-1]:
        rest = lists.entries  # its compiler wants something to point at, though nothing of it is read
    return BlockLists(
        lists.masked[None].contiguous(),
        (lists.entries[..., :1] >> NUMBER_SHIFT)[None].contiguous(),
        (lists.count - lists.masked)[None].contiguous(),
        (rest >> NUMBER_SHIFT)[None].contiguous(),
    )


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: TileLists,
    scale: float,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query row over the tiles listed for its head and tile, causal inside them.

    q [Hq, Tq, D], k and v [Hkv, Tk, D] in bf16 or fp16 on one Hopper GPU, D a multiple of 8 and at most 128, strides
    in steps of 16 bytes; `lists` aligned, of tiles of 128; the last tile may be short. `out` [Hq, Tq, D] is written if
    given. Returns out and the natural-log log-sum-exp [Hq, Tq] in float32. Raises InvalidInput for lists that are not
    of q's rows; the rest is checked by `tamis.kernels.dispatch` and taken as given here.
    """
    tiles = -(-q.shape[1] // TILE)
    if lists.count.shape[1] != tiles:
        raise InvalidInput(
            f"the lists are for {lists.count.shape[1]} query tiles and q has {q.shape[1]} rows, which are {tiles}."
        )
    n_keys = lists.q_offset + q.shape[1]  # no row sees a later key, and the mask wants the last row to see the last
    out = torch.empty_like(q) if out is None else out
    lse = attend(q, k[:, :n_keys], v[:, :n_keys], block_lists(lists, n_keys), scale, out=out)
    return out, lse


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: BlockLists, scale: float, *, out: torch.Tensor
) -> torch.Tensor:
    """`block_sparse_attention` on lists that are converted already; q's last row must see the last key. Returns the
    log-sum-exp."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_fwd

    from tamis.kernels.fa4.masks import causal

    q, k, v, into = (t.transpose(0, 1)[None] for t in (q, k, v, out))
    with torch.cuda.device(q.device):
        made = _flash_attn_fwd(
            q, k, v, softmax_scale=scale, causal=False, mask_mod=causal, pack_gqa=False, return_lse=True, out=into,
            block_sparse_tensors=BlockSparseTensorsTorch(*blocks, block_size=(TILE, TILE)),
        )  # fmt: skip
    lse: torch.Tensor = made[1]
    return lse[0]
