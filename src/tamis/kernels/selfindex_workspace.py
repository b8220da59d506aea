"""What a decode step over an arena scribbles on, shared by the layers of a model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from tamis.kernels.selfindex import CELLS

if TYPE_CHECKING:
    from tamis.kernels.selfindex_arena import Arena

CHUNK = 2048  # slots of a program that chooses
TALLY = 128 + 512  # counters of a row: of the two parts of a key
FULL = 1024  # programs of attention that fill a large GPU


@dataclass(frozen=True)
class Workspace:
    """What a step of one layer scribbles on. Rows are KV heads of all sequences; S splits, the last `wholes` of them
    for whole tokens.

    lut    float32 [B, P, H, G, 16]: what a code adds to a score; the bias is in group 0
    span   float32 [B, P, H, 2]: lowest and highest score that the part can have
    turned, spread  [B, P, Hq, D] of q's dtype: the query in stored order, and times the residuals' spread
    bias   float32 [B, P, Hq]
    keys   int16 [B H, N]: scores as 16-bit numbers, 0 where a record may not be chosen
    tally  int32 [B H, 640 + chunks]: how many keys have each high part; each low part beside the bar's; chunks' counts.
           The CUDA C++ kernels count a sample of the keys, and behind it the programs that are done
    chosen int32 [B H, most]: slots in order; n_chosen int32 [B H]
    count  int32 [B]: how many to choose
    part   float32 [B Hq, S, D]: a split's output times its denominator
    part_top, part_den  float32 [B Hq, S]: its largest score in powers of 2, its denominator
    """

    lut: torch.Tensor
    span: torch.Tensor
    turned: torch.Tensor
    spread: torch.Tensor
    bias: torch.Tensor
    keys: torch.Tensor
    tally: torch.Tensor
    chosen: torch.Tensor
    n_chosen: torch.Tensor
    count: torch.Tensor
    part: torch.Tensor
    part_top: torch.Tensor
    part_den: torch.Tensor
    split: int
    wholes: int

    @classmethod
    def reserve(
        cls,
        arena: Arena,
        heads: int,
        most: int,
        *,
        split: int | None = None,
        wholes: int = 4,
        dtype: torch.dtype | None = None,
    ) -> Workspace:
        """For steps of `heads` query heads that choose at most `most` records, `split` of them a program.

        None: 128, or 64 where that would not fill a GPU. The whole tokens are shared by `wholes` programs.
        """
        room, layout, device = arena.room, arena.layout, arena.device
        b, h, p = room.requests, room.kv_heads, room.parts
        most = max(1, min(most, room.slots))
        if split is None:
            split = 128
            while split > 64 and b * h * most < split * FULL:
                split //= 2
        splits = -(-most // split) + wholes
        dtype = arena.keys.dtype if dtype is None else dtype

        def empty(*size: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(size, dtype=kind, device=device)

        i32 = torch.int32
        return cls(
            lut=empty(b, p, h, layout.groups, CELLS),
            span=empty(b, p, h, 2),
            turned=empty(b, p, heads, layout.head_dim, kind=dtype),
            spread=empty(b, p, heads, layout.head_dim, kind=dtype),
            bias=empty(b, p, heads),
            keys=empty(b * h, room.slots, kind=torch.int16),
            tally=empty(b * h, TALLY + -(-room.slots // CHUNK), kind=i32),
            chosen=empty(b * h, most, kind=i32),
            n_chosen=empty(b * h, kind=i32),
            count=torch.zeros(b, dtype=i32, device=device),
            part=empty(b * heads, splits, layout.head_dim),
            part_top=empty(b * heads, splits),
            part_den=empty(b * heads, splits),
            split=split,
            wholes=wholes,
        )

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(t.nbytes for f in fields(self) if isinstance(t := getattr(self, f.name), torch.Tensor))
