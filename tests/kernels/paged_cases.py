"""Prompts over pages for the tests of every paged kernel, and the truth: every key re-rotated into its absolute place.

The truth shares no code with what is tested: it takes the very numbers that the kernels are given, turns the keys as
complex float64 numbers from where they are kept to their absolute positions, and takes one dense masked softmax over
all of them. So what is left between the two is the kernels' own rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tamis.kernels.decode_plan import DecodePlan, Room
from tamis.kernels.paged import KeyTiles, PagedLists, Segment, paged_lists

Result = tuple[torch.Tensor, torch.Tensor]
Part = tuple[str, int, int]  # kind ("own", or the name of a document), keys, absolute position


@dataclass(frozen=True)
class Prompt:
    """One request: its parts, and the absolute positions of its query rows."""

    parts: tuple[Part, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """One input. `frequencies`: radians a position of each rotated pair, made from `theta` if None."""

    prompts: tuple[Prompt, ...]
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    rotary: int | None = None
    page: int = 32
    rows: int = 32
    dtype: torch.dtype = torch.float32
    theta: float = 10000.0
    frequencies: tuple[float, ...] | None = None
    holes: bool = False
    alibi: bool = False
    needle: bool = False

    @property
    def scale(self) -> float:
        """1 / sqrt(head dim)."""
        return float(self.dim**-0.5)


@dataclass
class Scene:
    """What the kernels get (q a request each, pools, tiles) and what the truth needs."""

    shape: Shape
    q: list[torch.Tensor]
    keys: torch.Tensor
    values: torch.Tensor
    tiles: list[KeyTiles]
    positions: list[torch.Tensor]
    expected: list[Result]

    def lists(self, i: int = 0, mask: torch.Tensor | None = None) -> PagedLists:
        """Lists of request i on the device of the pools."""
        return paged_lists(self.tiles[i], self.positions[i], rows=self.shape.rows, mask=mask).to(self.keys.device)

    def plan(self, kv_heads: int | None = None, programs: int = 8) -> DecodePlan:
        """A plan with room to spare for all requests."""
        tokens = len(self.positions[0])
        count = sum(len(t.table) for t in self.tiles)
        room = Room(len(self.tiles) + 1, count + 5, count + 9, 20, tokens, self.shape.page, _rotary(self.shape), True)
        slopes = self.tiles[0].slopes
        plan = DecodePlan.reserve(
            room, self.keys.device, slopes=None if slopes is None else slopes.to(self.keys.device)
        )
        plan = replace(plan, programs=programs)
        plan.write(self.tiles, torch.stack(self.positions), kv_heads=kv_heads or self.shape.heads[1])
        return plan

    def batch(self) -> torch.Tensor:
        """q [B, Hq, Tq, D] of all requests and one that is not there."""
        return torch.stack([*self.q, torch.zeros_like(self.q[0])])


def _rotary(shape: Shape) -> int:
    if shape.frequencies is not None:
        return 2 * len(shape.frequencies)
    return 0 if shape.alibi else shape.dim if shape.rotary is None else shape.rotary


def _frequencies(shape: Shape) -> torch.Tensor:
    if shape.frequencies is not None:
        return torch.tensor(shape.frequencies, dtype=torch.float64)
    dims = _rotary(shape)
    return shape.theta ** -(torch.arange(0, dims, 2, dtype=torch.float64) / max(dims, 1))


def turn(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """float64 x [.., T, D] turned to integer positions [T], as complex numbers."""
    n = len(frequencies)
    z = torch.complex(x[..., :n], x[..., n : 2 * n])
    z = z * torch.polar(torch.ones(()).double(), positions.double()[:, None] * frequencies)
    return torch.cat([z.real, z.imag, x[..., 2 * n :]], -1)


def make(shape: Shape, device: str = "cpu", seed: int = 0) -> Scene:
    """Pools full of NaN but for the keys of the segments, in scattered pages; documents of one name share pages."""
    draw = torch.Generator().manual_seed(seed)
    frequencies = _frequencies(shape)
    hq, hkv = shape.heads
    n_pages = 3 + sum(-(-n // shape.page) for p in shape.prompts for _, n, _ in p.parts)
    free = torch.randperm(n_pages, generator=draw).tolist()
    pools = [torch.full((n_pages, hkv, shape.page, shape.dim), float("nan"), dtype=torch.float64) for _ in range(2)]
    known: dict[str, tuple[tuple[int, ...], torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
    slopes = 2.0 ** -torch.arange(1, hq + 1).float() if shape.alibi else None

    def angles(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = offsets.double()[:, None] * frequencies
        return angle.cos().float(), angle.sin().float()

    def given(x: torch.Tensor) -> torch.Tensor:
        return x.to(shape.dtype).double()

    qs, tiles, positions, expected = [], [], [], []
    for prompt in shape.prompts:
        segments, all_k, all_v, where = [], [], [], []
        for kind, n, position in prompt.parts:
            local = position if kind == "own" or shape.alibi else 0
            if kind == "own" or kind not in known:
                pages = tuple(free.pop() for _ in range(-(-n // shape.page)))
                k, v = torch.randn((2, hkv, n, shape.dim), generator=draw, dtype=torch.float64)
                gone = (torch.rand(n, generator=draw) < 0.3) if shape.holes and kind != "own" else None
                if shape.needle:
                    k[:, torch.randint(0, n, (1,), generator=draw)] *= 8
                for i, page in enumerate(pages):
                    cut = slice(i * shape.page, min(n, (i + 1) * shape.page))
                    size = cut.stop - cut.start
                    pools[0][page, :, :size] = turn(k, torch.arange(local, local + n), frequencies)[:, cut]
                    pools[1][page, :, :size] = v[:, cut]
                    if gone is not None:
                        pools[0][page, :, :size][:, gone[cut]] = float("nan")
                        pools[1][page, :, :size][:, gone[cut]] = float("inf")
                known[kind] = (pages, k, v, gone)
            pages, k, v, gone = known[kind]
            k = turn(
                given(turn(k, torch.arange(local, local + n), frequencies)),
                torch.tensor([position - local]),
                frequencies,
            )
            segments.append(Segment(pages, n, position, None if local == position else 0, gone))
            kept = torch.ones(n, dtype=torch.bool) if gone is None else ~gone
            all_k.append(k[:, kept])
            all_v.append(given(v)[:, kept])
            where.append((position + torch.arange(n))[kept])
        p = torch.tensor(prompt.positions)
        q = given(turn(torch.randn((hq, len(p), shape.dim), generator=draw, dtype=torch.float64), p, frequencies))
        expected.append(truth(shape, (q, torch.cat(all_k, 1), torch.cat(all_v, 1)), p, torch.cat(where), slopes))
        qs.append(q.to(device, shape.dtype))
        positions.append(p)
        tiles.append(KeyTiles.of(segments, angles if len(frequencies) else None, page=shape.page, slopes=slopes))
    keys, values = (pool.to(device, shape.dtype) for pool in pools)
    return Scene(shape, qs, keys, values, tiles, positions, expected)


def truth(
    shape: Shape,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    p: torch.Tensor,
    at: torch.Tensor,
    slopes: torch.Tensor | None,
) -> Result:
    """Dense float64 attention of q [Hq, T, D] and k, v [Hkv, N, D], turned at their positions p [T] and at [N]."""
    q, k, v = qkv
    k, v = (t.repeat_interleave(shape.heads[0] // shape.heads[1], 0) for t in (k, v))
    scores = q @ k.mT * shape.scale
    away = at[None] - p[:, None]
    if slopes is not None:
        scores += slopes.double()[:, None, None] * away
    scores.masked_fill_(away > 0, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ v), scores.logsumexp(-1)


def worst(made: Result, expected: Result) -> dict[str, float]:
    """Largest absolute errors, and the worst row's relative L2 error. NaN stays NaN."""
    out, lse = made[0].double().cpu(), made[1].double().cpu()
    wrong = out - expected[0]
    same = (lse == expected[1]) | ((lse - expected[1]).abs() < torch.inf)
    gap = torch.where(lse == expected[1], 0.0, (lse - expected[1]).abs())
    return {
        "abs": float(wrong.abs().max()),
        "row": float((wrong.norm(dim=-1) / expected[0].norm(dim=-1).clamp(min=1e-9)).max()),
        "lse": float(gap.max()) if bool(same.all()) else float("nan"),
    }


def share_of_bound(made: Result, scene: Scene, i: int) -> dict[str, float]:
    """What the log-sum-exps of request i are off, as a share of what rounding the turned query can do to them.

    That is u * scale * |q| * |k| for unit roundoff u and the longest document key (`kernels.reference.paged`).
    """
    tiles, shape = scene.tiles[i], scene.shape
    if tiles.cos is None:
        return {"share": 0.0, "share rms": 0.0}
    moved = tiles.readable() & (tiles.table[:, 3, None] >= 0)
    keys = scene.keys.cpu()[tiles.table[:, 0].long()].double().norm(dim=-1).transpose(1, 2)[moved].amax(0)
    q = scene.q[i].cpu().double().norm(dim=-1)
    unit = torch.finfo(shape.dtype).eps / 2
    bound = unit * shape.scale * q * keys.repeat_interleave(shape.heads[0] // shape.heads[1])[:, None]
    lse, expected = made[1].cpu().double(), scene.expected[i][1]
    gap = torch.where(lse == expected, 0.0, (lse - expected).abs() - LIMITS[torch.float32]["lse"]).clamp(min=0)
    return {"share": float((gap / bound).max()), "share rms": float((gap / bound).square().mean().sqrt())}


LIMITS = {
    torch.float32: {"abs": 1e-5, "row": 1e-4, "lse": 1e-5},
    torch.float16: {"abs": 0.005, "row": 0.003, "lse": 1e-3},
    torch.bfloat16: {"abs": 0.04, "row": 0.02, "lse": 0.01},
}


def within(found: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether every error is under the limit of this dtype (NaN is not)."""
    return all(found[name] < limit for name, limit in LIMITS[dtype].items())


def right(found: dict[str, float], shape: Shape) -> bool:
    """Whether a kernel that rounds the turned query did so and nothing worse.

    Against the reference that rounds, the limits hold whatever the scores; against the truth, as long as no key is
    much longer than the others, and the log-sum-exp keeps to the bound of the rounding in any case.
    """
    alike = within({name: found[f"rounded {name}"] for name in LIMITS[shape.dtype]}, shape.dtype)
    bounded = found["share"] <= 1 and found["share rms"] < 0.06
    return alike and bounded and (within(found, shape.dtype) or (shape.needle and shape.dtype.itemsize < 4))


def flipped(tiles: KeyTiles) -> KeyTiles:
    """Tiles whose rotation goes the wrong way."""
    assert tiles.sin is not None, "the scene has no documents"
    return replace(tiles, sin=-tiles.sin)


def ignored(tiles: KeyTiles) -> KeyTiles:
    """Tiles whose offsets are ignored."""
    assert tiles.cos is not None and tiles.sin is not None, "the scene has no documents"
    return replace(tiles, cos=torch.ones_like(tiles.cos), sin=torch.zeros_like(tiles.sin))
