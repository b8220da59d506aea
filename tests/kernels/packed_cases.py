"""Prompts that share a call, for the tests of every kernel: separate inputs, and the same packed."""

from __future__ import annotations

from dataclasses import replace

import torch
from attention_cases import Result, Shape, make

from tamis.kernels.lists import TileLists
from tamis.kernels.packed import concat_lists

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, TileLists]


def prompts(
    lengths: list[int], base: Shape, *, first_offset: int = 0, device: str = "cpu"
) -> tuple[list[Inputs], Inputs]:
    """One input for each length, the first behind `first_offset` earlier tokens, and all of them packed."""
    offsets = [first_offset, *[0] * (len(lengths) - 1)]
    parts = [
        make(replace(base, segments=(n + at,), offset=at), device, seed=i)
        for i, (n, at) in enumerate(zip(lengths, offsets, strict=True))
    ]
    q, k, v = (torch.cat([part[i] for part in parts], 1) for i in range(3))  # type: ignore[misc]
    return parts, (q, k, v, concat_lists([part[3] for part in parts], lengths))


def joined(results: list[Result]) -> Result:
    """What a packed call must give, from the results of separate ones."""
    return torch.cat([r[0] for r in results], 1), torch.cat([r[1] for r in results], 1)
