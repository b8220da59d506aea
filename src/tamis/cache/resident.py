"""Keys and values in blocks on the device, all of them: what blocks that come from the host are held against.

Knows blocks; not models or selection. The blocks are laid out as `cache.offload` has them, and read by the same sums.
"""

from __future__ import annotations

import torch

from tamis.cache.offload import attend_whole, in_blocks, with_tail


class ResidentBlocks:
    """One layer of one sequence, [Hkv, N, 2, block, D]; the last block grows. Sequences of one length may lie side by
    side as heads."""

    def __init__(
        self, n_heads: int, head_dim: int, capacity: int, *, block: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block, self.n_tokens = block, 0
        self.store = torch.empty((n_heads, -(-capacity // block), 2, block, head_dim), dtype=dtype, device=device)

    @property
    def memory(self) -> torch.Tensor:
        """All blocks, see `LayerBlocks.memory`."""
        return self.store

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.store.nbytes

    def reserve(self, capacity: int) -> None:
        """Have room for so many tokens, if there is less."""
        more = -(-capacity // self.block) - self.store.shape[1]
        if more > 0:
            room = self.store.new_empty((self.store.shape[0], more, *self.store.shape[2:]))
            self.store = torch.cat([self.store, room], 1)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put k, v [Hkv, n, D] behind what there is; `reserve` room before."""
        size = self.block
        first, blocks, rest = in_blocks(torch.stack([k, v], 1).to(self.store.dtype), self.n_tokens, size)
        self._append_in_block(first)
        if n_blocks := blocks.shape[1]:
            at = self.n_tokens // size
            self.store[:, at : at + n_blocks] = blocks
            self.n_tokens += n_blocks * size
        self._append_in_block(rest)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values [Hkv, T, D]."""
        return with_tail(*self._split())

    def attend(self, q: torch.Tensor, wanted: torch.Tensor, *, scale: float) -> torch.Tensor:
        """The newest token's attention to blocks `wanted` int64 [Hkv, W] before its own, and to that: q [Hq, D]."""
        head = torch.arange(wanted.shape[0], device=wanted.device)[:, None]
        return attend_whole(q, self.store[head, wanted], self._split()[1], scale=scale)

    def _split(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks before the growing one, and what that holds."""
        at = (self.n_tokens - 1) // self.block
        return self.store[:, :at], self.store[:, at, :, : self.n_tokens - at * self.block]

    def _append_in_block(self, both: torch.Tensor) -> None:
        if n := both.shape[2]:
            number, at = divmod(self.n_tokens, self.block)
            self.store[:, number, :, at : at + n] = both
            self.n_tokens += n
