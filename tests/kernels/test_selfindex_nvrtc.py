"""The CUDA C++ kernels of the self-indexed decode step: emulated on a CPU thread by thread, and run on a GPU."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from selfindex_cases import MUTATIONS, Scene, broken, errors, expected, make, run, within

import tamis.kernels
from tamis.kernels.reference import selfindex as ref
from tamis.kernels.selfindex import by_group, group_mean
from tamis.kernels.selfindex_arena import TALLY, Arena, Workspace, turned_forth

BF16 = torch.bfloat16
SOURCE = Path(tamis.kernels.__path__[0]) / "nvrtc" / "selfindex.cu"
BASE = Scene((((301, 0, 3), (77, 301, 1)), ((130, 7, 2),)), (5, 9), heads=(8, 2), dim=128, dtype=BF16, block=256)
MANY = (((33, 0, 1), (64, 1000, 2), (1, 70_000, 0), (40, 5, 0)),) * 2
SCENES = {
    "two parts": BASE,
    "short splits": replace(BASE, split=16),
    "8 heads share": replace(BASE, heads=(16, 2)),
    "5 heads share": replace(BASE, heads=(10, 2), split=48),
    "one head each": replace(BASE, heads=(2, 2)),
    "count 0": replace(BASE, count=0),
    "everything": replace(BASE, count=10_000, split=128),
    "splits with several parts": replace(BASE, sequences=MANY, open=(60, 1), split=32),
    "nothing but open tokens, and nothing at all": replace(BASE, sequences=((), ()), open=(4, 0)),
}
Library = Callable[[int], ctypes.CDLL]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The emulated kernels for a number of groups."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    made: dict[int, ctypes.CDLL] = {}

    def build(groups: int) -> ctypes.CDLL:
        if groups not in made:
            out = tmp_path_factory.mktemp("emulated") / f"{groups}.so"
            header = Path(__file__).with_name("emulated.hpp")
            command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", f"-DG={groups}",
                       f'-DKERNEL="{SOURCE}"', "-x", "c++", str(header), "-o", str(out)]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if "error: 'barrier' is not" in done.stderr or "unrecognized command-line option" in done.stderr:
                pytest.skip("g++ knows no C++20")
            assert done.returncode == 0, done.stderr[-2000:]
            made[groups] = ctypes.CDLL(str(out))
        return made[groups]

    return build


def call(function, grid: tuple[int, int], tensors: list[torch.Tensor], numbers: list[int]) -> None:
    pointers = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
    function(*grid, pointers, (ctypes.c_int * len(numbers))(*numbers))


def prepared(q: torch.Tensor, arena: Arena, scene: Scene) -> Workspace:
    """A workspace as the first launch leaves it."""
    work = Workspace.reserve(arena, scene.heads[0], scene.count, split=scene.split, dtype=q.dtype)
    for name in Workspace.__dataclass_fields__:
        tensor = getattr(work, name)
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -21846)
    work.tally.zero_()
    for b in range(len(q)):
        parts, _, turns = arena.held(b)
        for p, (part, turn) in enumerate(zip(parts, turns, strict=True)):
            x = q[b] if turn is None else turned_forth(q[b], turn[0], -turn[1])
            grouped, mean = by_group(x, scene.heads[1])[..., 0, :], group_mean(x, scene.heads[1])
            stored = part.tables.stored(grouped)
            work.turned[b, p] = stored.flatten(0, 1).to(q.dtype)
            work.spread[b, p] = (stored * part.tables.residual_scale.float()[:, None]).flatten(0, 1).to(q.dtype)
            work.bias[b, p] = part.tables.bias(grouped).flatten()
            lut = ref.lookup_tables(mean, part.tables)[:, 0]
            lut[:, 0] += part.tables.bias(mean)
            work.lut[b, p] = lut
            work.span[b, p] = torch.stack([lut.amin(-1).sum(-1), lut.amax(-1).sum(-1)], -1)
    return work


def scored(lib: ctypes.CDLL, q: torch.Tensor, arena: Arena, scene: Scene) -> tuple[Workspace, float]:
    """After the launch that scores, and records chosen by its keys; with the largest error of a key."""
    work, room, worst = prepared(q, arena, scene), arena.room, 0.0
    call(
        lib.run_score, (-(-room.slots // 512), room.requests * room.kv_heads),
        [arena.records.codes, arena.live, work.lut, work.span, arena.part_of, arena.slots, arena.n_parts, work.keys,
         work.tally], [room.kv_heads, room.parts, room.slots, work.tally.shape[1], room.block, 2],
    )  # fmt: skip
    for row in range(len(work.n_chosen)):
        b, h = divmod(row, room.kv_heads)
        keys = work.keys[row, : int(arena.slots[b])].int() & 0xFFFF
        live = (keys > 0).nonzero()[:, 0]
        assert torch.equal(torch.bincount(keys[live] >> 9, minlength=128)[1:], work.tally[row, 1:128].long())
        n = min(scene.count, len(live))
        work.chosen[row, :n] = keys.sort(descending=True, stable=True).indices[:n].sort().values.int()
        work.n_chosen[row] = n
        parts, _, turns = arena.held(b)
        if not parts:
            continue
        turned = [q[b] if t is None else turned_forth(q[b], t[0], -t[1]) for t in turns]
        right = torch.cat([ref.part_scores(x, p)[h, 0] for x, p in zip(turned, parts, strict=True)])
        at = arena.position(b, live)
        assert not right[at].isinf().any() and len(live) == int(right.isfinite().sum())
        low, high = work.span[b, : len(parts), h, 0].min(), work.span[b, : len(parts), h, 1].max()
        worst = max(worst, float(((keys[live] - 512) / 65023 - (right[at] - low) / (high - low)).abs().max()))
    assert work.tally.shape[1] > TALLY
    return work, worst


def attended(
    lib: ctypes.CDLL, q: torch.Tensor, arena: Arena, work: Workspace, scene: Scene
) -> tuple[torch.Tensor, torch.Tensor]:
    """The launch that attends, and its splits merged."""
    room, r, t = arena.room, arena.records, arena.tables
    bits = struct.unpack("i", struct.pack("f", scene.dim**-0.5 * 1.4426950408889634))[0]
    call(
        lib.run_attend, (work.part.shape[1], room.requests * room.kv_heads),
        [q, work.turned, work.spread, work.bias, r.codes, r.residuals, r.values, r.key_scales, r.value_scales,
         t.centroids, t.value_scale, t.value_mean, arena.part_of, work.chosen, work.n_chosen, arena.keys,
         arena.values, arena.n_exact, arena.open_end, work.part, work.part_top, work.part_den],
        [bits, room.kv_heads, room.parts, room.slots, work.chosen.shape[1], work.part.shape[1], work.wholes, work.split,
         room.exact, arena.keys.shape[2], q.stride(0), q.stride(1), q.shape[1] // room.kv_heads, room.block],
    )  # fmt: skip
    real = work.part_top > -1e12
    top = torch.where(real, work.part_top, -torch.inf).amax(1, keepdim=True)
    weight = torch.where(real, torch.exp2(work.part_top - top), 0.0)
    den = (weight * torch.where(real, work.part_den, 0.0)).sum(1)
    out = (weight[..., None] * torch.where(real[..., None], work.part, 0.0)).sum(1)
    out = torch.where(den[:, None] > 0, out / den[:, None], 0.0).view(q.shape)
    lse = torch.where(den > 0, (top[:, 0] + den.log2()) * 0.6931471805599453, -torch.inf)
    return out, lse.view(q.shape[:-1])


@pytest.mark.parametrize("name", SCENES)
def test_steps(name: str, library: Library) -> None:
    scene = SCENES[name]
    q, arena = make(scene)
    work, worst = scored(library(32), q, arena, scene)
    assert worst < 2e-5
    found = errors(attended(library(32), q, arena, work, scene), expected(q, arena, scene))
    assert within(found, BF16), found


def test_thousands_of_like_weights(library: Library) -> None:
    """Their rounding all goes one way, and values around zero do not hide what it adds up to."""
    scene = replace(BASE, sequences=(((2500, 0, 2),),), open=(3,), kind="equal", count=2400)
    q, arena = make(scene)
    arena.tables.value_mean.zero_()
    work, _ = scored(library(32), q, arena, scene)
    found = errors(attended(library(32), q, arena, work, scene), expected(q, arena, scene))
    assert within(found, BF16), found


@pytest.mark.parametrize("kind", MUTATIONS)
def test_a_broken_kernel_would_be_noticed(kind: str, library: Library) -> None:
    q, arena = make(BASE)
    right = expected(q, arena, BASE)
    broken(kind, arena)
    work, _ = scored(library(32), q, arena, BASE)
    assert not within(errors(attended(library(32), q, arena, work, BASE), right), BF16)


def test_scores_of_head_dim_64(library: Library) -> None:
    scene = replace(BASE, dim=64, dtype=torch.float32)
    q, arena = make(scene)
    assert scored(library(16), q, arena, scene)[1] < 2e-5


@pytest.mark.gpu
class TestOnAGpu:
    """At real sizes, compiled by PyTorch. All records are attended: which ones a bar would take depends on the order of
    sums in the last digit, and one token more or less is seen in a head (`bench decode` checks the choice)."""

    GPU = replace(BASE, sequences=(((8000, 0, 64), (700, 8000, 12)),) * 2, open=(96, 60), count=9000, heads=(32, 8),
                  block=512, split=128)  # fmt: skip

    @pytest.mark.parametrize("heads", [(32, 8), (40, 8), (8, 8), (64, 8)])
    def test_steps(self, heads: tuple[int, int]) -> None:
        scene = replace(self.GPU, heads=heads)
        q, arena = make(scene, device="cuda")
        found = errors(run(q, arena, scene, "nvrtc"), expected(q, arena, scene))
        assert within(found, BF16), found

    @pytest.mark.parametrize("kind", MUTATIONS)
    def test_a_broken_kernel_would_be_noticed(self, kind: str) -> None:
        q, arena = make(self.GPU, device="cuda")
        right = expected(q, arena, self.GPU)
        broken(kind, arena)
        assert not within(errors(run(q, arena, self.GPU, "nvrtc"), right), BF16)
