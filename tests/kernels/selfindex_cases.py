"""Small batches of self-indexed sequences, what their decode step must give, and ways to break it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tamis.kernels.reference import selfindex as ref
from tamis.kernels.reference.selfindex import Fit
from tamis.kernels.selfindex import Layout, Part
from tamis.kernels.selfindex_arena import Arena, Held
from tamis.kernels.selfindex_dispatch import selfindex_decode
from tamis.kernels.selfindex_workspace import Workspace

HALF = torch.float16
MUTATIONS = ("bias dropped", "offsets ignored", "residuals' scales dropped", "value means dropped", "wrong KV head")


@dataclass(frozen=True)
class Scene:
    """Sequences as tuples of parts (tokens, offset, exact tokens), and open tokens of each; heads are query and KV."""

    sequences: tuple[tuple[tuple[int, int, int], ...], ...]
    open: tuple[int, ...]
    count: int = 40
    heads: tuple[int, int] = (6, 2)
    dim: int = 64
    scale_channels: int = 0
    dtype: torch.dtype = torch.float32
    split: int = 64
    kind: str = "normal"
    rotary: int = 0
    block: int = 64

    @property
    def layout(self) -> Layout:
        return Layout(self.dim, self.scale_channels or 32)


TWO = (((201, 0, 3), (77, 201, 0)), ((130, 7, 2),))
SCENES = {
    "two parts": Scene(TWO, (5, 9)),
    "splits with several parts": Scene(
        (((33, 0, 1), (64, 1000, 2), (1, 70_000, 0), (40, 5, 0)),) * 2, (3, 1), split=16
    ),
    "head dim 128, odd lengths": Scene((((157, 0, 4), (63, 157, 1)), ((31, 0, 0),)), (1, 33), dim=128, split=32),
    "half precision": Scene(TWO, (5, 9), dtype=HALF),
    "half precision, head dim 128": Scene((((111, 900, 2),),), (7,), dim=128, dtype=HALF),
    "one token": Scene((((1, 0, 0),),), (1,)),
    "its only token is whole": Scene((((1, 0, 1),),), (0,)),
    "nothing but open tokens, and nothing at all": Scene(((), ()), (4, 0)),
    "count 0": Scene(TWO, (5, 9), count=0),
    "count 1": Scene(TWO, (5, 9), count=1),
    "more than there are": Scene(TWO, (5, 9), count=10_000),
    "MQA": Scene(TWO, (2, 2), heads=(5, 1)),
    "one head each": Scene((((90, 3, 2),),), (2,), heads=(3, 3)),
    "a scale for 16 channels": Scene(TWO, (5, 9), scale_channels=16),
    "one scale": Scene(TWO, (5, 9), scale_channels=64, count=70),
    "part of a head is turned": Scene(TWO, (5, 9), rotary=32),
    "all keys alike": Scene((((150, 0, 0),),), (2,), kind="equal"),
    "ties": Scene((((160, 0, 0),),), (2,), kind="tied", count=33),
}


def angles_of(rotary: int):
    """The function of offsets for `Arena`."""
    frequencies = 1e4 ** -(torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)

    def angles(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = offsets.double()[..., None] * frequencies
        return angle.cos().float(), angle.sin().float()

    return angles


def part_of(scene: Scene, n: int, n_exact: int, draw: torch.Generator) -> Part:
    """A part of random tokens, its keys far from zero in a few channels."""
    size = (scene.heads[1], n, scene.dim)
    keys, values = (torch.randn(size, generator=draw) for _ in range(2))
    keys = keys * (torch.rand(scene.dim, generator=draw) * 2 + 0.2)
    keys = keys + 4 * torch.randn(scene.dim, generator=draw) * (torch.rand(scene.dim, generator=draw) < 0.2)
    values = values + torch.randn(scene.dim, generator=draw)
    if scene.kind == "equal":
        keys = keys[:, :1].expand(size).contiguous()
    elif scene.kind == "tied":
        keys = keys[:, : n // 8].repeat(1, 8, 1)
    keys, values = keys.to(scene.dtype), values.to(scene.dtype)
    exact = torch.stack([torch.randperm(n, generator=draw)[:n_exact] for _ in range(scene.heads[1])])
    tables = ref.fit_tables(keys, values, scene.layout, fit=Fit(steps=1))
    index = exact[..., None].expand(*exact.shape, scene.dim)
    records = ref.compress(keys, values, tables, scene.layout)
    return Part(records, tables, exact, keys.gather(1, index), values.gather(1, index))


def make(scene: Scene, seed: int = 0, device: str = "cpu") -> tuple[torch.Tensor, Arena]:
    """q [B, Hq, 1, D] and the arena."""
    draw = torch.Generator().manual_seed(seed)
    held = []
    for parts, n_open in zip(scene.sequences, scene.open, strict=True):
        made = [part_of(scene, n, f, draw) for n, _, f in parts]
        run = [torch.randn((scene.heads[1], n_open, scene.dim), generator=draw).to(scene.dtype) for _ in range(2)]
        held.append(Held(made, [o for _, o, _ in parts], (run[0], run[1])))
    arena = Arena.of(
        held, scene.layout, angles_of(scene.rotary or scene.dim), dtype=scene.dtype, device=device, block=scene.block
    )
    q = torch.randn((len(held), scene.heads[0], 1, scene.dim), generator=draw)
    return q.to(scene.dtype).to(device), arena


def broken(kind: str, arena: Arena) -> None:
    """The arena, in place, as a broken kernel would in effect have seen it."""
    if kind == "bias dropped":
        arena.tables.mean.zero_()
    elif kind == "offsets ignored":
        arena.cos.fill_(1)
        arena.sin.zero_()
    elif kind == "residuals' scales dropped":
        arena.records.key_scales.zero_()
    elif kind == "value means dropped":
        arena.tables.value_mean.zero_()
    else:
        assert kind == "wrong KV head", kind
        arena.records.codes.copy_(arena.records.codes.flip(1))


def expected(q: torch.Tensor, arena: Arena, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """What the reference gives."""
    return selfindex_decode(q, arena, count=scene.count, scale=scene.dim**-0.5, kernel="reference")


def run(q: torch.Tensor, arena: Arena, scene: Scene, kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A step; a Triton one on a workspace of garbage."""
    work = None
    if kernel in ("triton", "nvrtc"):
        work = Workspace.reserve(arena, scene.heads[0], scene.count, split=scene.split, dtype=q.dtype)
        for name in Workspace.__dataclass_fields__:
            tensor = getattr(work, name)
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(float("nan") if tensor.is_floating_point() else -21846)
    return selfindex_decode(q, arena, count=scene.count, scale=scene.dim**-0.5, kernel=kernel, work=work)


def errors(made: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Worst row's relative error, RMS over RMS, and the log-sum-exp's largest difference."""
    out, lse = made
    o, log = right[0].float(), right[1]
    wrong = (out.float() - o).norm(dim=-1)
    size = o.norm(dim=-1)
    row = torch.where((wrong == 0) & (size == 0), 0.0, wrong / size)
    same = (lse == log) | ((lse - log).abs() < torch.inf)
    away = torch.where(lse == log, 0.0, (lse - log).abs())
    return {
        "row": float(row.max()),
        "rms": float(wrong.norm() / size.norm()) if float(size.norm()) else float(wrong.norm()),
        "lse": float(away.max()) if bool(same.all()) else float("nan"),
    }


def within(found: dict[str, float], dtype: torch.dtype) -> bool:
    """The house's limits; float32 has to be as good as the order of sums allows."""
    row, rms = (1e-4, 1e-5) if dtype == torch.float32 else (0.02, 0.005)
    return found["row"] < row and found["rms"] < rms and found["lse"] < row
