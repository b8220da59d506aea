"""Keys and values in host memory, with a pool of block slots per layer on the device: the offload path's reference.

Knows blocks, slots and order; not models or selection. A block is [2, block, D], keys before values, so that a copy
reads one piece of host memory. The last block of a sequence, which grows, never leaves the device: it is the tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tamis.cache.slots import Moves, SlotMap
from tamis.cache.streams import Event, Stream
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
    """One layer of one sequence: whole blocks on the host [Hkv, N, 2, block, D], slots [Hkv, S, 2, block, D] and the
    growing block on the device."""

    def __init__(
        self, shape: PoolShape, capacity: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        body = (2, shape.block, shape.head_dim)
        self.shape = shape
        self.map = SlotMap(shape.n_kv_heads, shape.n_slots, device)
        self.host = torch.empty((shape.n_kv_heads, -(-capacity // shape.block), *body), dtype=dtype)
        self.slots = torch.empty((shape.n_kv_heads, shape.n_slots, *body), dtype=dtype, device=device)
        self.tail = torch.empty((shape.n_kv_heads, *body), dtype=dtype, device=device)
        self.n_tokens = 0
        self.copied = 0  # blocks from host to device, over all KV heads
        self.asked = 0

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put k, v [Hkv, n, D] behind what there is. A block goes to the host when it is full; it stays the tail until
        the next token comes."""
        size, capacity = self.shape.block, self.host.shape[1] * self.shape.block
        if self.n_tokens + k.shape[1] > capacity:
            raise InvalidInput(f"{self.n_tokens + k.shape[1]} tokens; the host memory was made for {capacity}.")
        both = torch.stack([k, v], 1).to(self.tail.dtype)  # [Hkv, 2, n, D]
        done = 0
        while done < k.shape[1]:
            at = self.n_tokens % size
            n = min(size - at, k.shape[1] - done)
            self.tail[:, :, at : at + n] = both[:, :, done : done + n]
            self.n_tokens += n
            done += n
            if self.n_tokens % size == 0:
                self.host[:, self.n_tokens // size - 1] = self.tail.to(self.host.device)

    def place(self, wanted: torch.Tensor, *, forget: bool = False) -> Moves:
        """Slots for `wanted` int [Hkv, W], blocks on the host before the one of the token that will attend (-1: none).
        See `SlotMap.place`."""
        most, full = int(wanted.max()), self.n_tokens // self.shape.block
        if most >= full:
            raise InvalidInput(f"block {most} is wanted; {full} are full and on the host. Leave out the tail.")
        moves = self.map.place(wanted, forget=forget)
        self.copied += int(moves.missing.sum())
        self.asked += int((wanted >= 0).sum())
        return moves

    def fetch(self, wanted: torch.Tensor, moves: Moves) -> None:
        """Copy the missing blocks into their slots."""
        head, place = moves.missing.nonzero(as_tuple=True)
        block = wanted.to(head.device, torch.int64)[head, place]
        self.slots[head, moves.slot[head, place]] = self.host[head.cpu(), block.cpu()].to(self.slots.device)

    def attend(self, q: torch.Tensor, moves: Moves, *, scale: float) -> torch.Tensor:
        """One token's attention to placed blocks and the growing one: q [Hq, D] → [Hq, D]."""
        slot = moves.slot.clamp(min=0)
        head = torch.arange(slot.shape[0], device=slot.device)[:, None]
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

    def __init__(self, layers: Sequence[LayerBlocks], compute: Stream, copy: Stream) -> None:
        self.layers, self.compute, self.copy = list(layers), compute, copy
        self._moves: dict[int, Moves] = {}
        self._arrived: dict[int, Event] = {}

    def want(self, layer: int, wanted: torch.Tensor, *, forget: bool = False) -> None:
        """Hand in what brings `wanted` [Hkv, W] of `layer` to the device."""

        def place() -> None:
            self._moves[layer] = self.layers[layer].place(wanted, forget=forget)

        self.compute.run(place)
        self.copy.wait(self.compute.record())
        self.copy.run(lambda: self.layers[layer].fetch(wanted, self._moves[layer]))
        self._arrived[layer] = self.copy.record()

    def attend(self, layer: int, q: torch.Tensor, out: list[torch.Tensor], *, scale: float) -> None:
        """Hand in the layer's attention, behind the copy; the result is appended to `out`."""
        self.compute.wait(self._arrived.pop(layer))
        self.compute.run(lambda: out.append(self.layers[layer].attend(q, self._moves[layer], scale=scale)))
