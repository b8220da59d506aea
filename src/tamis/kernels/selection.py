"""Tile selection on a GPU: what its two kernels are given, and whether they can run. Imports no Triton."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum
from importlib.util import find_spec

import torch

MAX_TILES = 4096  # a query tile's whole row of tiles is held in the registers of one block
TILES = (16, 32, 64, 128)
BAR_TILES = 64  # see `Bars`


class Choice(IntEnum):
    """By what rule a list is made."""

    ALL = 0
    NONE = 1
    STORED = 2
    SAMPLED = 3


@dataclass(frozen=True)
class Places:
    """Where the N key tiles of a prompt lie and whose they are. int32 tensors [N] on one device.

    entry     (token start << 8) | length
    owner     the number of the group that a tile belongs to (a document), or -1: seen by every row, and seeing all
    slot      the number of a query tile among those that have an owner; not read for other tiles
    tile      tokens of a whole tile
    first     the first query tile: 0, or the tiles before a chunk. The last key tile is the last query tile
    q_offset  the tokens before it: where row 0 of q lies
    pair      the number of the query tile that speaks for a tile beside itself (itself: none does), if tiles are paired
    """

    entry: torch.Tensor
    owner: torch.Tensor
    slot: torch.Tensor
    tile: int
    first: int = 0
    q_offset: int = 0
    pair: torch.Tensor | None = None


@dataclass(frozen=True)
class Bits:
    """One layer's stored bits, a byte each (bool or uint8), rows of one query head contiguous.

    la   [Hq, L]  per group its P x P local tiles, row after row, group after group
    ca   [Hq, N or more]  which tiles are offered to the rows of other groups
    row  int64 [N or more]  where tile i's row of `la` starts, less the number of its group's first tile
    """

    la: torch.Tensor
    ca: torch.Tensor
    row: torch.Tensor


@dataclass(frozen=True)
class Bars:
    """Which sampled tiles are kept: the heaviest that make up a share of each row, and all that reach a bar.

    share  of a row's mass; from 1 on every tile that holds any
    theta  the bar of a row that sees `BAR_TILES` tiles, for a whole tile (a short one's is lower in proportion); above
           1: no tile reaches it
    power  a row that sees n tiles has the bar theta * (BAR_TILES / n) ** power, at most 1
    """

    share: float = 1.0
    theta: float = 2.0
    power: float = 0.0


def why_not(q: torch.Tensor, n_tiles: int, tile: int) -> str | None:
    """Why tiles for these queries [Hq, T, D] are not selected by kernels on their device; None: they can be."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if q.device.type != "cuda" and not interpreted:
        return f"the tensors are on {q.device}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not interpreted and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the kernels need sm_80"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the tensors are {q.dtype} and must be bfloat16, float16 or float32"
    if tile not in TILES:
        return f"tiles are {tile} tokens and must be one of {', '.join(map(str, TILES))}"
    if n_tiles > MAX_TILES:
        return f"the prompt has {n_tiles} tiles and at most {MAX_TILES} fit"
    return None if q.shape[2] <= 256 else f"head dim is {q.shape[2]} and must be at most 256"
