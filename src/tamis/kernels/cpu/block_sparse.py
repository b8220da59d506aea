"""Block-sparse causal attention on a CPU at the speed of PyTorch's fused attention.

Same arguments and results as `kernels.reference.block_sparse`, which stays the truth. Two passes:

1. every query tile against its own keys (causal, all heads in one call);
2. every query tile against the other tiles listed for it: their keys are gathered, query tiles that read about
   equally many keys go through one fused call, and the parts are merged by their log-sum-exp.

Only listed keys are multiplied, so the time follows the density.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.lists import LENGTH_BITS, TileLists, check_shapes

GROUP_BYTES = 8 << 20  # gathered keys and values of one fused call: stays in a laptop's last-level cache
GROUP_WASTE = 1 / 8  # padding accepted to put query tiles with unequal lists into one call
ROW_STEP = 32  # PyTorch's CPU kernel walks queries in blocks of 32


def block_sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: TileLists, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.reference.block_sparse.block_sparse_attention`; float32, float16 or bfloat16 on a CPU.

    Query tiles must be cut like the key tiles, each listing its own first (`lists_from_mask` does); else InvalidInput.
    """
    if q.device.type != "cpu":
        raise InvalidInput(f"the cpu kernel was given tensors on {q.device}; use kernel='auto' or move them.")
    check_shapes(q, k, v, lists)
    own = (lists.q_start + lists.q_offset << LENGTH_BITS) | lists.q_len
    if not torch.equal(lists.entries[..., 0], own.expand(len(q), -1)):
        raise InvalidInput(
            "the cpu kernel was given query tiles that are cut unlike the key tiles or do not list their own keys "
            "first; start the chunk at a tile, or use kernel='reference'."
        )
    work = _Work(q, k, v, lists, scale)
    work.own_keys()
    for tiles in work.groups():
        work.other_keys(tiles)
    return work.out.view(q.shape), work.lse.view(q.shape[:2])


class _Work:
    """One call's tensors, heads folded into rows so that one index reaches any head's rows or keys."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: TileLists, scale: float) -> None:
        self.shape, self.scale, self.lists = q.shape, scale, lists
        self.kv_heads, self.n_keys = k.shape[0], k.shape[1]
        self.q, self.k, self.v = (t.reshape(-1, t.shape[-1]) for t in (q, k, v))
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(self.q.shape[0], dtype=torch.float32)

        heads, rows = q.shape[:2]
        tiles = lists.q_start.numel()
        head = torch.arange(heads)[:, None]
        self.row = (head * rows + lists.q_start).flatten()  # first row of (head, query tile)
        self.length = lists.q_len.long().repeat(heads)
        self.key_base = ((head // (heads // self.kv_heads)) * self.n_keys).expand(heads, tiles).flatten()
        entries = lists.entries.flatten(0, 1).long()
        start, size = entries >> LENGTH_BITS, entries & ((1 << LENGTH_BITS) - 1)
        own = (lists.q_start.long() + lists.q_offset).repeat(heads)
        self.other = (torch.arange(entries.shape[1]) < lists.count.flatten()[:, None]) & (start != own[:, None])
        self.start, self.size = start + self.key_base[:, None], size * self.other
        self.total = self.size.sum(-1)

    def own_keys(self) -> None:
        """Each query tile against the keys of its own rows, one call per tile length."""
        by_length: dict[int, list[int]] = defaultdict(list)
        for i, length in enumerate(self.lists.q_len.tolist()):
            by_length[length].append(i)
        heads, dim = self.shape[0], self.shape[2]
        for length, tiles in by_length.items():
            within = torch.arange(length)
            tile = (torch.arange(heads)[:, None] * self.lists.q_len.numel() + torch.tensor(tiles)).flatten()
            rows = (self.row[tile, None] + within).flatten()
            first = self.lists.q_start[tiles].long().repeat(heads) + self.lists.q_offset + self.key_base[tile]
            keys = (first[:, None] + within).flatten()
            q, k, v = (
                t.index_select(0, i).view(1, -1, length, dim)
                for t, i in ((self.q, rows), (self.k, keys), (self.v, keys))
            )
            out, lse = _attend(q, k, v, self.scale, causal=True)
            self.out[rows] = out.reshape(-1, dim)
            self.lse[rows] = lse.flatten()

    def groups(self) -> Iterator[torch.Tensor]:
        """(head, query tile) numbers that go through one fused call, every tile with other keys exactly once."""
        steps = (self.length + ROW_STEP - 1) // ROW_STEP
        order = (steps * (int(self.total.max()) + 1) + self.total).argsort(stable=True)
        steps_of, total_of = steps[order].tolist(), self.total[order].tolist()
        key_bytes = 2 * self.shape[2] * self.q.element_size()
        begin = 0
        for i in range(len(total_of) + 1):
            if i < len(total_of) and total_of[begin] and steps_of[i] == steps_of[begin]:
                fits = (i + 1 - begin) * total_of[i] * key_bytes <= GROUP_BYTES or i == begin
                if fits and total_of[i] - total_of[begin] <= GROUP_WASTE * total_of[i]:
                    continue
            if i > begin and total_of[begin]:
                yield order[begin:i]
            begin = i

    def other_keys(self, tiles: torch.Tensor) -> None:
        """The tiles' remaining keys in one call, folded into what `own_keys` found."""
        n, dim = len(tiles), self.shape[2]
        keys, blocked = self._token_index(tiles)
        within = torch.arange(int(self.length[tiles].max()))
        rows = self.row[tiles, None] + torch.minimum(within, self.length[tiles, None] - 1)
        q = self.q.index_select(0, rows.flatten()).view(1, n, -1, dim)
        k, v = (t.index_select(0, keys.flatten()).view(1, n, -1, dim) for t in (self.k, self.v))
        mask = blocked[None, :, None, :].expand(1, n, q.shape[2], -1) if blocked is not None else None
        out, lse = _attend(q, k, v, self.scale, causal=False, mask=mask)

        real = (within < self.length[tiles, None]).flatten()  # short tiles repeat their last row; drop the repeats
        self._merge(rows.flatten()[real], out.reshape(-1, dim)[real], lse.flatten()[real])

    def _token_index(self, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Key rows [n, N] listed for each tile, packed, and an additive mask of the padding (None if there is none)."""
        start, size, total = self.start[tiles], self.size[tiles], self.total[tiles]
        width = int(total.max())
        flat_size = size.flatten()
        before = flat_size.cumsum(0) - flat_size
        tokens = torch.arange(int(total.sum()))
        token_start = torch.repeat_interleave(start.flatten() - before, flat_size) + tokens
        if bool((total == width).all()):
            return token_start.view(len(tiles), width), None
        valid = torch.arange(width) < total[:, None]
        index = self.key_base[tiles, None].repeat(1, width)
        index[valid] = token_start
        return index, torch.where(valid, 0.0, float("-inf")).to(self.q.dtype)

    def _merge(self, rows: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
        lse = self.lse[rows]
        total = torch.logaddexp(lse, other_lse)
        share = (other_lse - total).exp()[:, None]
        self.out[rows] = torch.lerp(self.out[rows].float(), other.float(), share).to(self.out.dtype)
        self.lse[rows] = total


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fused attention [B, H, T, D] with its natural log-sum-exp [B, H, T]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale, attn_mask=mask
    )
    return out, lse.float()
