"""Which block of keys lies in which slot of a device pool, and what must be moved for the blocks wanted next.

Knows numbers of blocks and slots; not what lies in them. All of it is tensor arithmetic without a look at a value, so
that a device can do it within a graph; this is its reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tamis.core.errors import BrokenInvariant, PoolFull
from tamis.kernels.reference.offload import find_slots


@dataclass(frozen=True)
class Moves:
    """slot   int64 [H, W]: where each wanted block will lie, -1 where none was wanted
    missing  bool [H, W]: which of them must be copied there first
    """

    slot: torch.Tensor
    missing: torch.Tensor

    @property
    def hit_rate(self) -> float:
        """Share of the wanted blocks that lie in a slot already; 1 where none is wanted."""
        wanted = int((self.slot >= 0).sum())
        return 1 - int(self.missing.sum()) / wanted if wanted else 1.0


class SlotMap:
    """H KV heads with S slots each. A block keeps its slot as long as no wanted one needs it; the slot that was wanted
    longest ago goes first, empty ones before it."""

    def __init__(self, n_heads: int, n_slots: int, device: torch.device | str = "cpu") -> None:
        self.n_slots = n_slots
        self.held = torch.full((n_heads, n_slots), -1, dtype=torch.int64, device=device)
        self._used = torch.full((n_heads, n_slots), -1, dtype=torch.int64, device=device)
        self._step = 0

    def place(self, wanted: torch.Tensor, *, forget: bool = False) -> Moves:
        """Find slots for `wanted` int [H, W], block numbers, -1 for none, no block twice in a head.

        forget: take nothing for granted, so that every block is copied again. Raises PoolFull if W exceeds S.
        """
        width = wanted.shape[1]
        if width > self.n_slots:
            raise PoolFull(f"{width} blocks are wanted at once and a head has {self.n_slots} slots; give it {width}.")
        wanted = wanted.to(self.held.device, torch.int64)
        if forget:
            self.forget()
        asked = wanted >= 0
        slot, missing = find_slots(wanted, self.held, self._used)
        self._step += 1
        there = slot.masked_fill(~asked, self.n_slots)  # a column beside the pool takes what was not wanted
        self.held = _put(self.held, there, wanted)
        self._used = _put(self._used, there, torch.full_like(wanted, self._step))
        return Moves(slot, missing)

    def forget(self) -> None:
        """Empty all slots: what lies in them is known no more."""
        self.held.fill_(-1)
        self._used.fill_(-1)

    @property
    def state(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """held and when each was wanted last, both int64 [H, S], and the number of the last step."""
        return self.held, self._used, self._step

    @state.setter
    def state(self, now: tuple[torch.Tensor, torch.Tensor, int]) -> None:
        """Take over what another map knew."""
        held, used, self._step = now
        self.held, self._used = held.long(), used.long()

    def widen(self, n_slots: int) -> None:
        """Add empty slots behind those there are."""
        more = (self.held.shape[0], max(0, n_slots - self.n_slots))
        self.held, self._used = (torch.cat([t, t.new_full(more, -1)], -1) for t in (self.held, self._used))
        self.n_slots = self.held.shape[1]

    def check(self) -> None:
        """Raise BrokenInvariant if a block lies in two slots of a head."""
        for head, held in enumerate(self.held.tolist()):
            full = [b for b in held if b >= 0]
            if len(set(full)) != len(full):
                raise BrokenInvariant(f"head {head} holds a block in two slots: {sorted(full)}.")


def _put(table: torch.Tensor, there: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    wide = torch.cat([table, table[:, :1]], -1)
    return wide.scatter(-1, there, values)[:, :-1]
