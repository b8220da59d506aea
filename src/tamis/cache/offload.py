"""Keys and values in host memory, with a pool of block slots per layer on the device: the offload path's reference.

Knows blocks, slots and order; not models or selection. A block is [2, block, D], keys before values, so that a copy
reads one piece of host memory. The last block of a sequence, which grows, never leaves the device: it is the tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tamis.cache.slots import Moves, SlotMap
from tamis.cache.streams import Queue
from tamis.core.errors import InvalidInput


@dataclass(frozen=True)
class PoolShape:
    """layers, KV heads, head_dim; tokens of a block; slots of a KV head and layer, the growing block's not counted."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    n_slots: int
    block: int = 64

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_kv_heads", "head_dim", "n_slots", "block"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; give 1 or more.")

    def block_bytes(self, item_bytes: int = 2) -> int:
        """Bytes of one KV head's keys and values of a block."""
        return 2 * self.block * self.head_dim * item_bytes

    def device_bytes(self, item_bytes: int = 2) -> int:
        """Bytes of all slots and growing blocks."""
        return self.n_layers * self.n_kv_heads * (self.n_slots + 1) * self.block_bytes(item_bytes)


class LayerBlocks:
    """One layer of one sequence: whole blocks on the host [Hkv, N, 2, block, D] (pinned beside a CUDA device), slots
    [Hkv, S, 2, block, D] and the growing block on the device. Sequences of one length may lie side by side as heads."""

    def __init__(
        self, shape: PoolShape, capacity: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        body = (2, shape.block, shape.head_dim)
        self.shape, self.device = shape, torch.device(device)
        self.map = SlotMap(shape.n_kv_heads, shape.n_slots, device)
        self.host = self._host_memory(-(-capacity // shape.block), dtype)
        self.slots = torch.empty((shape.n_kv_heads, shape.n_slots, *body), dtype=dtype, device=device)
        self.tail = torch.empty((shape.n_kv_heads, *body), dtype=dtype, device=device)
        self.n_tokens = 0
        self.streamed = 0  # blocks that `dense` brought, over all KV heads
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # of `copied` and `asked`

    @property
    def memory(self) -> torch.Tensor:
        """The whole blocks, wherever they lie: the host's."""
        return self.host

    @property
    def copied(self) -> int:
        """Blocks that went into slots, over all KV heads. Waits for the device."""
        return int(self.counts[0])

    @property
    def asked(self) -> int:
        """Blocks that were wanted, over all KV heads. Waits for the device."""
        return int(self.counts[1])

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.slots.nbytes + self.tail.nbytes

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put k, v [Hkv, n, D] behind what there is. A block goes to the host when it is full; it stays the tail until
        the next token comes."""
        size, n = self.shape.block, k.shape[1]
        capacity = self.host.shape[1] * size
        if self.n_tokens + n > capacity:
            raise InvalidInput(f"{self.n_tokens + n} tokens; the host memory was made for {capacity}.")
        first, blocks, rest = in_blocks(torch.stack([k, v], 1).to(self.tail.dtype), self.n_tokens, size)
        self._append_in_block(first)
        if n_blocks := blocks.shape[1]:
            at = self.n_tokens // size
            self.host[:, at : at + n_blocks] = blocks.to(self.host.device)
            self.tail.copy_(blocks[:, -1])
            self.n_tokens += n_blocks * size
        self._append_in_block(rest)

    def reserve(self, capacity: int, n_slots: int) -> None:
        """Have room for so many tokens, and so many slots, if there is less. Waits for the device where it grows."""
        n_blocks = -(-capacity // self.shape.block)
        if self.device.type == "cuda" and (n_blocks > self.host.shape[1] or n_slots > self.shape.n_slots):
            torch.cuda.synchronize(self.device)  # a copy may still read what is left behind
        if n_blocks > self.host.shape[1]:
            before, self.host = self.host, self._host_memory(n_blocks, self.host.dtype)
            self.host[:, : before.shape[1]] = before
        if n_slots > self.shape.n_slots:
            more = self.slots.new_empty((self.slots.shape[0], n_slots - self.shape.n_slots, *self.slots.shape[2:]))
            self.slots = torch.cat([self.slots, more], 1)
            self.shape = replace(self.shape, n_slots=n_slots)
            self.map.widen(n_slots)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values [Hkv, T, D] on the device: every block before the growing one is brought."""
        full = (self.n_tokens - self._in_tail) // self.shape.block
        blocks = self.host[:, :full].to(self.device)
        self.streamed += blocks.shape[0] * full
        return with_tail(blocks, self.tail[:, :, : self._in_tail])

    def place(self, wanted: torch.Tensor, *, forget: bool = False) -> Moves:
        """Slots for `wanted` int [Hkv, W], blocks on the host before the one of the token that will attend (-1: none).
        See `SlotMap.place`. A block that is not on the host is refused where that can be seen without waiting."""
        full = self.n_tokens // self.shape.block
        if not wanted.is_cuda and wanted.numel() and (most := int(wanted.max())) >= full:
            raise InvalidInput(f"block {most} is wanted; {full} are full and on the host. Leave out the tail.")
        moves = self.map.place(wanted, forget=forget)
        self.counts += torch.stack([moves.missing.sum(), (wanted >= 0).sum().to(self.device)])
        return moves

    def fetch(self, wanted: torch.Tensor, moves: Moves) -> None:
        """Copy the missing blocks into their slots."""
        head, place = moves.missing.nonzero(as_tuple=True)
        block = wanted.to(head.device, torch.int64)[head, place]
        self.slots[head, moves.slot[head, place]] = self.host[head.cpu(), block.cpu()].to(self.slots.device)

    def attend(self, q: torch.Tensor, moves: Moves, *, scale: float, every: bool = False) -> torch.Tensor:
        """One token's attention to placed blocks and the growing one: q [Hq, D] → [Hq, D].

        every: there is a block in every place of the wanted, so that nothing need be masked.
        """
        head = torch.arange(moves.slot.shape[0], device=moves.slot.device)[:, None]
        if every:
            tail = self.tail[:, :, : self._in_tail]
            return attend_whole(q, self.slots[head, moves.slot], tail, scale=scale)
        slot = moves.slot.clamp(min=0)
        return attend_parts(q, self.slots[head, slot], moves.slot >= 0, self.tail, self._in_tail, scale=scale)

    def attend_resident(self, q: torch.Tensor, wanted: torch.Tensor, *, scale: float) -> torch.Tensor:
        """The same from the host's blocks, in which all lie: what `attend` has to give, to the last bit."""
        number = wanted.to(torch.int64).clamp(min=0).cpu()
        head = torch.arange(number.shape[0])[:, None]
        blocks = self.host[head, number].to(q.device)
        return attend_parts(q, blocks, wanted.to(q.device) >= 0, self.tail, self._in_tail, scale=scale)

    @property
    def _in_tail(self) -> int:
        return (self.n_tokens - 1) % self.shape.block + 1 if self.n_tokens else 0

    def _append_in_block(self, both: torch.Tensor) -> None:
        """Tokens [Hkv, 2, n, D] that all belong to one block."""
        n, size = both.shape[2], self.shape.block
        if not n:
            return
        at = self.n_tokens % size
        self.tail[:, :, at : at + n] = both
        self.n_tokens += n
        if self.n_tokens % size == 0:
            self.host[:, self.n_tokens // size - 1] = self.tail.to(self.host.device)

    def _host_memory(self, n_blocks: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (self.shape.n_kv_heads, n_blocks, 2, self.shape.block, self.shape.head_dim)
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")


def in_blocks(both: torch.Tensor, n_tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values [Hkv, 2, n, D] behind n_tokens as what ends a block that was begun [Hkv, 2, n, D], whole blocks
    [Hkv, W, 2, size, D], and what begins one."""
    first = min(both.shape[2], -n_tokens % size)
    whole = (both.shape[2] - first) // size * size
    blocks = torch.unflatten(both[:, :, first : first + whole], 2, (whole // size, size)).transpose(1, 2)
    return both[:, :, :first], blocks, both[:, :, first + whole :]


def with_tail(blocks: torch.Tensor, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """blocks [Hkv, W, 2, block, D] and tail [Hkv, 2, n, D] behind them → keys and values [Hkv, W * block + n, D]."""
    k, v = (torch.cat([blocks[:, :, i].flatten(1, 2), tail[:, i]], 1) for i in (0, 1))
    return k, v


def attend_whole(q: torch.Tensor, blocks: torch.Tensor, tail: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Attention to all tokens of blocks [Hkv, W, 2, block, D] and of tail [Hkv, 2, n, D]: q [Hq, D] → [Hq, D]."""
    k, v = (t.to(q.dtype) for t in with_tail(blocks, tail))
    grouped = torch.unflatten(q, 0, (blocks.shape[0], -1))
    out = torch.nn.functional.scaled_dot_product_attention(grouped[None], k[None], v[None], scale=scale)
    return out[0].flatten(0, 1)


def attend_parts(
    q: torch.Tensor, blocks: torch.Tensor, used: torch.Tensor, tail: torch.Tensor, in_tail: int, *, scale: float
) -> torch.Tensor:
    """q [Hq, D], blocks [Hkv, W, 2, block, D] of which `used` [Hkv, W] count, the first `in_tail` tokens of tail
    [Hkv, 2, block, D] → [Hq, D]. Needs a token to attend to."""
    heads, size = blocks.shape[0], blocks.shape[3]
    k = torch.cat([blocks[:, :, 0].flatten(1, 2), tail[:, 0]], 1)
    v = torch.cat([blocks[:, :, 1].flatten(1, 2), tail[:, 1]], 1)
    last = torch.arange(size, device=q.device) < in_tail
    seen = torch.cat([used.repeat_interleave(size, -1), last.expand(heads, -1)], -1)
    # what is not used may be anything, NaN too
    k, v = (t.masked_fill(~seen[..., None], 0) for t in (k, v))
    logits = torch.einsum("hgd,htd->hgt", torch.unflatten(q, 0, (heads, -1)).float(), k.float()) * scale
    weights = logits.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return torch.einsum("hgt,htd->hgd", weights, v.float()).flatten(0, 1).to(q.dtype)


class Prefetcher:
    """Orders one step's work on two streams: what layer l + 1 wants is copied while layer l computes.

    Per layer: place on the compute stream, an event, the copy behind it on the copy stream, another event, which the
    layer's attention waits for. The first event also keeps a copy from overwriting what an earlier step still reads.
    """

    def __init__(self, layers: Sequence[LayerBlocks], compute: Queue, copy: Queue) -> None:
        self.layers, self.compute, self.copy = list(layers), compute, copy
        self._moves: dict[int, Moves] = {}
        self._arrived: dict[int, Any] = {}

    def want(self, layer: int, wanted: torch.Tensor, *, forget: bool = False) -> None:
        """Hand in what brings `wanted` [Hkv, W] of `layer` to the device."""

        def place() -> None:
            self._moves[layer] = self.layers[layer].place(wanted, forget=forget)

        self.compute.run(place)
        self.copy.wait(self.compute.record())
        self.copy.run(lambda: self.layers[layer].fetch(wanted, self._moves[layer]))
        self._arrived[layer] = self.copy.record()

    def attend(
        self, layer: int, q: torch.Tensor, out: list[torch.Tensor], *, scale: float, every: bool = False
    ) -> None:
        """Hand in the layer's attention, behind the copy; the result is appended to `out`. every: see `LayerBlocks`."""
        self.compute.wait(self._arrived.pop(layer))
        layers, moves = self.layers, self._moves
        self.compute.run(lambda: out.append(layers[layer].attend(q, moves[layer], scale=scale, every=every)))
