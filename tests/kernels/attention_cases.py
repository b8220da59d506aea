"""Inputs and checks shared by the tests of every block-sparse attention kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tamis.kernels.lists import TileLists, Tiling, lists_from_mask
from tamis.kernels.reference.block_sparse import block_sparse_attention as reference

Result = tuple[torch.Tensor, torch.Tensor]
ODD = (1, 63, 111, 300, 1000)


@dataclass(frozen=True)
class Shape:
    """One input: segment lengths, heads, and how the tensors are stored. Query rows start at token `offset`."""

    segments: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    dtype: torch.dtype = torch.float32
    tile: int = 128
    offset: int = 0
    needle: bool = False
    token_major: bool = False
    share: float = 0.4

    @property
    def scale(self) -> float:
        """1 / sqrt(head dim)."""
        return float(self.dim**-0.5)


def make(
    shape: Shape, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TileLists]:
    """q, k, v as views into larger NaN-filled storage, and random lists that keep what each query tile overlaps."""
    draw = torch.Generator().manual_seed(seed)
    keys = Tiling.of_segments(shape.segments, shape.tile)
    queries, left = keys, shape.offset
    if left:
        lengths = []
        for n in shape.segments:
            cut = min(n, left)
            left -= cut
            lengths.append(n - cut)
        queries = Tiling.of_segments(lengths, shape.tile)
    q0 = torch.tensor(queries.starts) + shape.offset
    k0 = torch.tensor(keys.starts)
    own = (k0[None, :-1] < q0[1:, None]) & (k0[None, 1:] > q0[:-1, None])
    mask = (torch.rand((shape.heads[0], *own.shape), generator=draw) < shape.share) | own
    lists = lists_from_mask(mask.to(device), queries, keys, shape.offset)

    def stored(heads: int, tokens: int) -> torch.Tensor:
        values = torch.randn((heads, tokens, shape.dim), generator=draw)
        size = (tokens + 7, heads, shape.dim) if shape.token_major else (heads, tokens + 7, shape.dim)
        room = torch.full(size, float("nan"), dtype=shape.dtype, device=device)
        view = (room.transpose(0, 1) if shape.token_major else room)[:, :tokens]
        return view.copy_(values)

    n = keys.n_tokens
    q, k, v = (stored(h, t) for h, t in ((shape.heads[0], n - shape.offset), (shape.heads[1], n), (shape.heads[1], n)))
    if shape.needle:
        plant(q, k, shape.offset, draw)
    return q, k, v, lists


def plant(q: torch.Tensor, k: torch.Tensor, offset: int, draw: torch.Generator) -> None:
    """Point a third of the keys at one query each, so that single keys carry whole rows."""
    q.mul_(0.3)
    group = q.shape[0] // k.shape[0]
    for h in range(k.shape[0]):
        at = torch.randint(0, k.shape[1], (k.shape[1] // 3,), generator=draw).to(q.device)
        k[h, at] = q[h * group, (at - offset).clamp(min=0)] * 12


def truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: TileLists, scale: float) -> Result:
    """The reference on inputs widened to float32."""
    return reference(q.float(), k.float(), v.float(), lists, scale)


def errors(result: Result, expected: Result) -> dict[str, float]:
    """Worst row's relative L2 error, RMS error over RMS, and the largest log-sum-exp error. NaN stays NaN."""
    wrong = result[0].float() - expected[0]
    return {
        "row": float((wrong.norm(dim=-1) / expected[0].norm(dim=-1)).max()),
        "rms": float((wrong.square().mean() / expected[0].square().mean()).sqrt()),
        "lse": float((result[1] - expected[1]).abs().max()),
    }


LIMITS = {
    torch.bfloat16: {"row": 0.02, "rms": 0.005, "lse": 1e-3},
    torch.float16: {"row": 0.003, "rms": 0.0007, "lse": 1e-3},
    torch.float32: {"row": 1e-4, "rms": 1e-5, "lse": 1e-4},
}


def within(found: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether every error is under the limit of this dtype (NaN is not)."""
    return all(found[name] < limit for name, limit in LIMITS[dtype].items())


def mutate(kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: TileLists):  # type: ignore[no-untyped-def]
    """The arguments a broken kernel would in effect have used."""
    if kind == "wrong KV head":
        return q, k.flip(0), v.flip(0), lists
    if kind == "last entry dropped":
        return q, k, v, replace(lists, count=(lists.count - 1).clamp(min=1))
    assert kind == "keys shifted by one", kind
    return q, k.roll(1, 1), v, lists


MUTATIONS = ("wrong KV head", "last entry dropped", "keys shifted by one")
