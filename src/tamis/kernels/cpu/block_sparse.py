"""Block-sparse causal attention on a CPU from PyTorch's batched matrix products.

Same arguments and results as `kernels.reference.block_sparse`, which stays the truth. The keys listed for a query tile
are gathered side by side, its own keys last; query tiles that read about equally many keys go through one batched
product. Only listed keys are multiplied, so the time follows the density.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.lists import LENGTH_BITS, TileLists, check_shapes

SCORE_BYTES = 4 << 20  # scores of one batched product: they are written and read again, so they must stay in a cache
GROUP_WASTE = 1 / 4  # padding accepted to put query tiles with unequal lists into one product
ROW_STEP = 32  # query tiles whose lengths agree up to this share a product


def block_sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: TileLists, scale: float, *, need_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.reference.block_sparse.block_sparse_attention`; float32, float16 or bfloat16 on a CPU.

    Every query tile must begin where a key tile begins and list that tile first, as `lists_from_mask` makes them where
    queries and keys are cut alike; other lists raise InvalidInput. With `need_lse` off the log-sum-exp is not computed
    and comes back as NaN.
    """
    check_shapes(q, k, v, lists)
    if q.device.type != "cpu":
        raise InvalidInput(f"the cpu kernel was given tensors on {q.device}; use kernel='auto' or move them.")
    own = (lists.q_start + lists.q_offset << LENGTH_BITS) | lists.q_len
    if not torch.equal(lists.entries[..., 0], own.expand(len(q), -1)):
        raise InvalidInput(
            "the cpu kernel was given query tiles that are cut unlike the key tiles or do not list their own keys "
            "first; start the chunk at a tile, or use kernel='reference'."
        )
    work = _Work(q, k, v, lists, scale, need_lse)
    for tiles in work.groups():
        work.attend(tiles)
    return work.out.view(q.shape), work.lse.view(q.shape[:2])


class _Work:
    """One call's tensors, heads folded into rows so that one index reaches any head's rows or keys."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: TileLists, scale: float, need_lse: bool
    ) -> None:
        self.dim, self.scale, self.need_lse = q.shape[2], scale, need_lse
        self.q, self.k, self.v = (t.reshape(-1, t.shape[-1]) for t in (q, k, v))
        self.out = torch.empty_like(self.q)
        self.lse = torch.full(self.q.shape[:1], float("nan"), dtype=torch.float32)

        heads, rows = q.shape[:2]
        head = torch.arange(heads)[:, None]
        self.row = (head * rows + lists.q_start).flatten()  # first row of (head, query tile)
        self.length = lists.q_len.long().repeat(heads)
        key_base = ((head // (heads // k.shape[0])) * k.shape[1]).expand(heads, lists.q_start.numel()).flatten()
        entries = lists.entries.flatten(0, 1).long()
        start, size = entries >> LENGTH_BITS, entries & ((1 << LENGTH_BITS) - 1)
        own = (lists.q_start.long() + lists.q_offset).repeat(heads)
        listed = torch.arange(1, entries.shape[1]) < lists.count.flatten()[:, None]
        self.start, self.size = start[:, 1:] + key_base[:, None], size[:, 1:] * listed
        self.own = own + key_base  # first of the tile's own keys
        self.total = self.size.sum(-1)  # keys besides its own

    def groups(self) -> Iterator[torch.Tensor]:
        """(head, query tile) numbers that go through one product, every tile exactly once."""
        steps = (self.length + ROW_STEP - 1) // ROW_STEP
        order = (steps * (int(self.total.max()) + 1) + self.total).argsort(stable=True)
        steps_of, keys_of = steps[order].tolist(), (self.total + self.length)[order].tolist()
        begin = 0
        for i in range(1, len(keys_of) + 1):
            if i < len(keys_of) and steps_of[i] == steps_of[begin]:
                area = (i + 1 - begin) * keys_of[i] * steps_of[i] * ROW_STEP
                near = keys_of[i] - keys_of[begin] <= max(GROUP_WASTE * keys_of[i], ROW_STEP)
                if area * 4 <= SCORE_BYTES and near:
                    continue
            yield order[begin:i]
            begin = i

    def attend(self, tiles: torch.Tensor) -> None:
        """All keys of these tiles in one batched product."""
        n, rows = len(tiles), int(self.length[tiles].max())
        within = torch.arange(rows)
        real = within < self.length[tiles, None]  # short tiles repeat their last row; the repeats are dropped
        row = self.row[tiles, None] + torch.minimum(within, self.length[tiles, None] - 1)
        other, fewest = self._others(tiles)
        own = self.own[tiles, None] + torch.minimum(within, self.length[tiles, None] - 1)
        keys = torch.cat([other, own], 1).flatten()
        # half precision is widened after the gather: products of it would round the scores to 8 or 11 bits
        q = self.q.index_select(0, row.flatten()).view(n, rows, self.dim).float()
        k, v = (t.index_select(0, keys).view(n, -1, self.dim).float() for t in (self.k, self.v))

        scores = torch.baddbmm(q.new_zeros(1), q, k.transpose(1, 2), alpha=self.scale, beta=0)
        width = other.shape[1]
        if fewest < width:
            padding = torch.arange(fewest, width) >= self.total[tiles, None]
            scores[:, :, fewest:width].masked_fill_(padding[:, None], float("-inf"))
        scores[:, :, width:].masked_fill_(within > within[:, None], float("-inf"))
        kept = row[real]
        self.out[kept] = torch.bmm(scores.softmax(-1), v)[real].to(self.out.dtype)
        if self.need_lse:
            self.lse[kept] = scores.logsumexp(-1)[real]

    def _others(self, tiles: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Key rows [n, N] listed besides each tile's own, packed to the left, and the shortest list's length."""
        size, total = self.size[tiles], self.total[tiles]
        width, fewest = int(total.max()), int(total.min())
        flat_size = size.flatten()
        first = self.start[tiles].flatten() - (flat_size.cumsum(0) - flat_size)
        tokens = torch.repeat_interleave(first, flat_size) + torch.arange(int(total.sum()))
        if fewest == width:
            return tokens.view(len(tiles), width), fewest
        index = self.own[tiles, None].repeat(1, width)
        index[torch.arange(width) < total[:, None]] = tokens
        return index, fewest
