"""Blocks of keys and values of a batch on two memories: all whole ones on the host, some in slots of the device.

Knows layout and room; not models, kernels or what is wanted. A row is a KV head of a sequence: sequence times KV heads,
plus head. A block is [2, block, D], keys before values, so that a copy reads one piece of host memory. What a decode
step changes lies in tensors and no number of it on the host, so that a captured graph can run the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.blocks import COARSE, BlockRule

TASK = 2  # numbers of a copy: block of the host, slot of the device
NEVER = -(1 << 30)


@dataclass(frozen=True)
class PoolRoom:
    """layers, sequences and KV heads; blocks a sequence may grow to; slots of a row; how blocks are chosen.

    regions  rows' worth of host memory of all layers; fewer than rows are shared by them, which only a benchmark may
             want (None: one for each row and layer)
    wide     also keep keys pooled COARSE times as wide, for `own` scores
    """

    layers: int
    requests: int
    kv_heads: int
    head_dim: int
    n_blocks: int
    slots: int
    rule: BlockRule
    regions: int | None = None
    wide: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "requests", "kv_heads", "head_dim", "n_blocks", "slots"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; give 1 or more.")
        if self.slots < self.width:
            raise InvalidInput(f"{self.slots} slots for {self.width} blocks that a token reads; give as many or more.")
        if self.regions is not None and not 1 <= self.regions <= self.layers * self.rows:
            raise InvalidInput(f"regions is {self.regions}; give 1 to {self.layers * self.rows}, or None.")

    @property
    def rows(self) -> int:
        """KV heads of all sequences."""
        return self.requests * self.kv_heads

    @property
    def width(self) -> int:
        """Blocks that a token reads beside its own, which grows and stays on the device."""
        return max(1, self.rule.top - 1)

    @property
    def n_pooled(self) -> int:
        """Pooled keys of a full sequence."""
        return max(1, self.rule.n_pooled(self.n_blocks * self.rule.block))

    def block_bytes(self, item_bytes: int = 2) -> int:
        """Bytes of one block of a row."""
        return 2 * self.rule.block * self.head_dim * item_bytes

    def host_bytes(self, item_bytes: int = 2) -> int:
        """Bytes of pinned host memory."""
        return (self.regions or self.layers * self.rows) * self.n_blocks * self.block_bytes(item_bytes)

    def device_bytes(self, item_bytes: int = 2) -> int:
        """Bytes of slots, growing blocks and pooled keys on the device, all layers."""
        pooled = self.n_pooled + (self.n_pooled // COARSE if self.wide else 0)
        row = (self.slots + 1) * self.block_bytes(item_bytes) + pooled * self.head_dim * item_bytes
        return self.layers * self.rows * row


@dataclass(frozen=True)
class PoolLayer:
    """One layer. R rows, S slots, W blocks wanted, N blocks, C pooled keys; int32 where nothing is said.

    host    [regions, N, 2, block, D] in pinned memory where there is a GPU; region [R] says which is whose
    slots   [R, S, 2, block, D];  tail [R, 2, block, D] the growing block;  ring [R, n, D] the newest keys
    pooled  [R, C, D];  wide the same of longer windows, or None
    held, used [R, S]  the block in a slot (-1: none) and when it was wanted last (-1: never), counted by stamp [R]
    place   [R, W] the slot of each wanted block, -1 for none;  order [R, S] room for what finds it
    tasks   [R * W, 2] copies to be made, `count` [1] of them in no order
    last    [R, N] position of the token that read a block last, NEVER if none; None where the rule does not stick
    """

    rule: BlockRule
    kv_heads: int
    host: torch.Tensor
    region: torch.Tensor
    slots: torch.Tensor
    tail: torch.Tensor
    ring: torch.Tensor
    pooled: torch.Tensor
    wide: torch.Tensor | None
    held: torch.Tensor
    used: torch.Tensor
    stamp: torch.Tensor
    place: torch.Tensor
    order: torch.Tensor
    tasks: torch.Tensor
    count: torch.Tensor
    last: torch.Tensor | None = None

    def forget(self) -> None:
        """Take nothing for granted: every block wanted next is copied again. What was read last stays known."""
        for t in (self.held, self.used):
            t.fill_(-1)


class BlockPool:
    """The memory of all layers, as views of one piece for each kind; `layers[i]` is a layer's.

    Nothing is put in but the empty slot maps: slots and host memory hold what they held. `counts` [layers] are the
    layers' numbers of copies, to be set to zero before a step.
    """

    def __init__(
        self, room: PoolRoom, *, dtype: torch.dtype, device: torch.device | str, host: torch.Tensor | None = None
    ) -> None:
        self.room, device = room, torch.device(device)
        rule, n, rows = room.rule, room.layers, room.rows
        body = (2, rule.block, room.head_dim)

        def numbers(*size: int) -> torch.Tensor:
            return torch.full((n, *size), -1, dtype=torch.int32, device=device)

        def memory(*size: int) -> torch.Tensor:
            return torch.empty((n, rows, *size), dtype=dtype, device=device)

        self.host = pinned(room, dtype, device) if host is None else host
        regions = torch.arange(n * rows, dtype=torch.int32, device=device) % (room.regions or n * rows)
        ring = rule.window * (COARSE if room.wide else 1)
        self.slots, self.tail = memory(room.slots, *body), memory(*body)
        self.ring, self.pooled = memory(ring, room.head_dim), memory(room.n_pooled, room.head_dim)
        self.wide = memory(max(1, room.n_pooled // COARSE), room.head_dim) if room.wide else None
        self.counts = torch.zeros(n, dtype=torch.int32, device=device)
        held, used, order = (numbers(rows, room.slots) for _ in range(3))
        place = numbers(rows, room.width)
        stamp, tasks = numbers(rows), numbers(rows * room.width, TASK)
        self.last = None if not rule.stick else numbers(rows, room.n_blocks).fill_(NEVER)
        self.layers = [
            PoolLayer(
                rule, room.kv_heads, self.host, regions.view(n, rows)[i], self.slots[i], self.tail[i], self.ring[i],
                self.pooled[i], None if self.wide is None else self.wide[i], held[i], used[i], stamp[i], place[i],
                order[i], tasks[i], self.counts[i : i + 1], None if self.last is None else self.last[i],
            )
            for i in range(n)
        ]  # fmt: skip

    def forget(self) -> None:
        """Empty all slot maps."""
        for layer in self.layers:
            layer.forget()
        self.counts.zero_()


def pinned(room: PoolRoom, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory [regions, N, 2, block, D] that a kernel on `device` can read through its own address (UVA)."""
    regions = room.regions or room.layers * room.rows
    size = (regions, room.n_blocks, 2, room.rule.block, room.head_dim)
    if device.type != "cuda":
        return torch.empty(size, dtype=dtype)
    return torch.empty(size, dtype=dtype, pin_memory=True)
