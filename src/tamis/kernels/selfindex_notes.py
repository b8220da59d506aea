"""What a step notes of a batch of sequences in one launch: each one's new token, its query, the energy of its queries.

An arena holds keys and values. Whoever compresses them later also asks what the queries were like: their running energy
says which channels count, and the newest of them say which tokens stay whole. Both are kept here, beside the arena.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tamis.kernels.selfindex import group_mean
from tamis.kernels.selfindex_arena import Arena


@dataclass(frozen=True)
class Notes:
    """Of B sequences of one layer, H KV heads of Hq / H query heads each, head dim D.

    energy   float32 [B, H, D]: running mean square of the group-mean query
    queries  [B, M, Hq, D] in q's dtype: the query of the open token i lies in place i modulo M
    weight   float32 [B]: what a new query counts in the energy, 0..1
    there    int32 [B]: 0 where no sequence is; such a row is passed over
    """

    energy: torch.Tensor
    queries: torch.Tensor
    weight: torch.Tensor
    there: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated; `weight` and `there` are shared by all layers."""
        return self.energy.nbytes + self.queries.nbytes


def note(arena: Arena, notes: Notes, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """The plain form of `selfindex_dispatch.selfindex_note`."""
    there, end, b = notes.there, arena.open_end, q.shape[0]
    for kept, new in ((arena.keys, keys), (arena.values, values)):
        kept.scatter_(2, end.view(b, 1, 1, 1).expand_as(new), new.to(kept.dtype))
    place = (end - arena.room.exact) % notes.queries.shape[1]
    rows = q.transpose(1, 2)  # [B, 1, Hq, D]
    notes.queries.scatter_(1, place.view(b, 1, 1, 1).expand_as(rows), rows)
    new = group_mean(q, arena.room.kv_heads)[..., 0, :].square()
    share = torch.where(there > 0, notes.weight, 0.0).view(b, 1, 1)
    # of a row of nobody nothing may come in, not even what is no number
    notes.energy.copy_(torch.where(share > 0, notes.energy + share * (new - notes.energy), notes.energy))
    end.add_(there)
