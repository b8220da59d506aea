"""The CUDA C++ kernels of the self-indexed decode step: emulated on a CPU thread by thread, and run on a GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from selfindex_cases import MUTATIONS, Scene, broken, errors, expected, make, run, within

import tamis.kernels
from tamis.core.errors import InvalidInput
from tamis.kernels.reference import selfindex as ref
from tamis.kernels.selfindex import by_group, group_mean
from tamis.kernels.selfindex_arena import PAIR, Arena, turned_forth
from tamis.kernels.selfindex_dispatch import selfindex_append, selfindex_decode
from tamis.kernels.selfindex_workspace import Workspace

BF16 = torch.bfloat16
SOURCES = Path(tamis.kernels.__path__[0]) / "nvrtc"
FILES = {"SHARED": "selfindex.cuh", "CHOOSE": "selfindex_choose.cu", "ATTEND": "selfindex_attend.cu"}
CLUSTER, CHOOSERS, ITERS = 2, 64, 2
BASE = Scene((((301, 0, 3), (77, 301, 1)), ((130, 7, 2),)), (5, 9), heads=(8, 2), dim=128, dtype=BF16, block=256)
MANY = (((33, 0, 1), (64, 1000, 2), (1, 70_000, 0), (40, 5, 0)),) * 2
SCENES = {
    "two parts": BASE,
    "short splits": replace(BASE, split=16),
    "8 heads share": replace(BASE, heads=(16, 2)),
    "5 heads share": replace(BASE, heads=(10, 2), split=48),
    "one head each": replace(BASE, heads=(2, 2)),
    "count 0": replace(BASE, count=0),
    "count 1": replace(BASE, count=1),
    "everything": replace(BASE, count=10_000, split=128),
    "splits with several parts": replace(BASE, sequences=MANY, open=(60, 1), split=32),
    "part of a head is turned": replace(BASE, rotary=64),
    "its only token is whole": replace(BASE, sequences=(((1, 0, 1),), ((1, 0, 0),)), open=(0, 0)),
    "nothing but open tokens, and nothing at all": replace(BASE, sequences=((), ()), open=(4, 0)),
}
Library = Callable[..., ctypes.CDLL]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The emulated kernels for some query heads of a KV head and slots of which one is counted."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    made: dict[tuple[int, int], ctypes.CDLL] = {}

    def build(group: int, every: int = 8) -> ctypes.CDLL:
        if (group, every) not in made:
            out = tmp_path_factory.mktemp("emulated") / f"{group}-{every}.so"
            header = Path(__file__).with_name("emulated.hpp")
            constants = {"GROUP": group, "EVERY": every, "CLUSTER": CLUSTER, "CHOOSERS": CHOOSERS, "BINS": 256}
            constants |= {name: f'"{SOURCES / file}"' for name, file in FILES.items()}
            defined = [f"-D{k}={v}" for k, v in constants.items()]
            command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", *defined, "-x", "c++",
                       str(header), "-o", str(out)]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if "error: 'barrier' is not" in done.stderr or "unrecognized command-line option" in done.stderr:
                pytest.skip("g++ knows no C++20")
            assert done.returncode == 0, done.stderr[-2000:]
            made[group, every] = ctypes.CDLL(str(out))
        return made[group, every]

    return build


def call(function, grid: tuple[int, int], args: list[torch.Tensor | int]) -> None:
    words = [ctypes.c_void_p(a.data_ptr() if isinstance(a, torch.Tensor) else a & (1 << 64) - 1) for a in args]
    function(*grid, (ctypes.c_void_p * len(words))(*words))


@dataclass(frozen=True)
class Emulated:
    """A kernel as `kernels.nvrtc.launch.Kernel` is called."""

    lib: ctypes.CDLL
    name: str

    def __call__(
        self, grid: tuple[int, int], threads: int, args: list, *, cluster: int = 1, early: bool = False
    ) -> None:
        assert (threads, cluster) == ((CHOOSERS, CLUSTER) if self.name == "choose" else (128, 1))
        assert early == (self.name != "prepare")
        call(getattr(self.lib, f"run_{self.name}"), grid, args)


def reserved(q: torch.Tensor, arena: Arena, scene: Scene) -> Workspace:
    """A workspace of garbage that a step has left."""
    work = Workspace.reserve(arena, scene.heads[0], scene.count, split=scene.split, dtype=q.dtype)
    for name in Workspace.__dataclass_fields__:
        tensor = getattr(work, name)
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -21846)
    work.count.fill_(scene.count)
    return work


def launched(lib: ctypes.CDLL, q: torch.Tensor, arena: Arena, scene: Scene, work: Workspace, *names: str) -> PAIR:
    """Launches of those names of a step."""
    module = pytest.importorskip("tamis.kernels.nvrtc.selfindex_decode")
    cut = module.NvrtcCut(ITERS, cluster=CLUSTER, choosers=CHOOSERS, split=scene.split)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:-1], torch.nan)
    with mock.patch.object(module, "compiled", lambda name, *_: Emulated(lib, name)):
        made = module.launches(q, arena, work, out, lse, scale=scene.dim**-0.5, cut=cut)
    assert list(made) == ["prepare", "score", "choose", "attend"]
    for name in names:
        made[name]()
    return out, lse


def chosen(lib: ctypes.CDLL, q: torch.Tensor, arena: Arena, scene: Scene) -> Workspace:
    """After the launches that prepare, score and choose."""
    work = reserved(q, arena, scene)
    launched(lib, q, arena, scene, work, "prepare", "score", "choose")
    return work


def stepped(lib: ctypes.CDLL, q: torch.Tensor, arena: Arena, scene: Scene) -> tuple[Workspace, PAIR]:
    """All four launches."""
    work = reserved(q, arena, scene)
    return work, launched(lib, q, arena, scene, work, "prepare", "score", "choose", "attend")


def live_keys(work: Workspace, arena: Arena, row: int) -> torch.Tensor:
    return work.keys[row, : int(arena.slots[row // arena.room.kv_heads])].int() & 0xFFFF


def check_prepared(work: Workspace, q: torch.Tensor, arena: Arena, scene: Scene) -> None:
    """The table of a query and the rest that its launch leaves, for every part."""
    for b in range(len(q)):
        parts, _, turns = arena.held(b)
        for p, (part, turn) in enumerate(zip(parts, turns, strict=True)):
            x = q[b] if turn is None else turned_forth(q[b], turn[0], -turn[1])
            grouped, mean = by_group(x, scene.heads[1])[..., 0, :], group_mean(x, scene.heads[1])
            stored = part.tables.stored(grouped)
            assert torch.equal(work.turned[b, p].float(), stored.flatten(0, 1))
            spread = (stored * part.tables.residual_scale.float()[:, None]).flatten(0, 1).to(q.dtype)
            assert torch.equal(work.spread[b, p], spread)
            assert torch.allclose(work.bias[b, p], part.tables.bias(grouped).flatten(), rtol=1e-5, atol=1e-5)
            lut = ref.lookup_tables(mean, part.tables)[:, 0]
            lut[:, 0] += part.tables.bias(mean)
            assert torch.allclose(work.lut[b, p], lut, rtol=1e-5, atol=1e-5)
            span = torch.stack([lut.amin(-1).sum(-1), lut.amax(-1).sum(-1)], -1)
            assert torch.allclose(work.span[b, p], span, rtol=1e-5, atol=1e-4)


def check_scored(work: Workspace, q: torch.Tensor, arena: Arena, every: int) -> None:
    """Keys against scores of the reference, and what is counted of them."""
    room = arena.room
    for row in range(len(work.n_chosen)):
        b, h = divmod(row, room.kv_heads)
        keys = live_keys(work, arena, row)
        live = (keys > 0).nonzero()[:, 0]
        counted = live[live % every == 0] if every else live[:0]
        assert torch.equal(torch.bincount(keys[counted] >> 9, minlength=128)[1:], work.tally[row, 1:128].long())
        parts, _, turns = arena.held(b)
        if not parts:
            continue
        turned = [q[b] if t is None else turned_forth(q[b], t[0], -t[1]) for t in turns]
        right = torch.cat([ref.part_scores(x, p)[h, 0] for x, p in zip(turned, parts, strict=True)])
        at = arena.position(b, live)
        assert not right[at].isinf().any() and len(live) == int(right.isfinite().sum())
        low, high = work.span[b, : len(parts), h, 0].min(), work.span[b, : len(parts), h, 1].max()
        if len(live) and high > low:  # one token alone has no span
            assert ((keys[live] - 512) / 65023 - (right[at] - low) / (high - low)).abs().max() < 2e-5


def check_chosen(work: Workspace, arena: Arena, count: int) -> None:
    """The highest keys, of equal ones the earlier, in order."""
    for row in range(len(work.n_chosen)):
        keys = live_keys(work, arena, row)
        n = min(count, int((keys > 0).sum()))
        assert int(work.n_chosen[row]) == n
        best = keys.sort(descending=True, stable=True).indices[:n].sort().values
        assert torch.equal(work.chosen[row, :n].long(), best)


@pytest.mark.parametrize("name", SCENES)
def test_steps(name: str, library: Library) -> None:
    scene = SCENES[name]
    q, arena = make(scene)
    work, made = stepped(library(scene.heads[0] // scene.heads[1]), q, arena, scene)
    check_prepared(work, q, arena, scene)
    check_scored(work, q, arena, 8)
    check_chosen(work, arena, scene.count)
    found = errors(made, expected(q, arena, scene))
    assert within(found, BF16), found


@pytest.mark.parametrize("every", [0, 1, 8])
@pytest.mark.parametrize("count", [3, 300, 1900])
def test_choices_of_many(count: int, every: int, library: Library) -> None:
    """Several tiles of a program that chooses, whatever is known beforehand about where the bar lies."""
    scene = replace(BASE, sequences=(((1800, 0, 5), (333, 1800, 2)),), open=(1,), count=count, heads=(4, 1))
    q, arena = make(scene)
    work = chosen(library(4, every), q, arena, scene)
    check_scored(work, q, arena, every)
    check_chosen(work, arena, count)


def test_a_sample_unlike_the_rest(library: Library) -> None:
    """Counters that put the bar elsewhere, above it or below, do not change the choice: of so many that both ends of
    the interval are guessed, 1 where it begins with the lowest key of all."""
    scene = replace(BASE, sequences=(((1500, 0, 5),),), open=(1,), count=700, heads=(4, 1))
    q, arena = make(scene)
    lib = library(4)
    work = chosen(lib, q, arena, scene)
    for wrong in (1, 2, 120):
        work.tally[:, :128] = 0
        work.tally[:, wrong] = 2000
        work.chosen.fill_(-1)
        launched(lib, q, arena, scene, work, "choose")
        check_chosen(work, arena, 700)


@pytest.mark.parametrize("kind", ["equal", "tied"])
def test_ties(kind: str, library: Library) -> None:
    scene = replace(BASE, sequences=(((1200, 0, 3),),), open=(2,), count=517, heads=(4, 1), kind=kind)
    q, arena = make(scene)
    work, made = stepped(library(4), q, arena, scene)
    check_chosen(work, arena, 517)
    assert within(errors(made, expected(q, arena, scene)), BF16)


@pytest.mark.parametrize(("kind", "count"), [("equal", 517), ("tied", 517), ("tied", 10_000)])
def test_no_more_are_chosen_than_asked_for_and_have_room(kind: str, count: int, library: Library) -> None:
    scene = replace(BASE, sequences=(((1200, 0, 3),),), open=(2,), count=700, heads=(4, 1), kind=kind)
    q, arena = make(scene)
    work = reserved(q, arena, scene)
    before = work.chosen.clone()
    work.count.fill_(count)
    launched(library(4), q, arena, scene, work, "prepare", "score", "choose")
    check_chosen(work, arena, min(count, 700))
    assert torch.equal(work.chosen[:, count:], before[:, count:])


def test_the_order_in_which_programs_are_done_changes_nothing(library: Library) -> None:
    scene = replace(BASE, split=32, count=200)
    q, arena = make(scene)
    lib = library(4)
    _, forwards = stepped(lib, q, arena, scene)
    lib.go_backwards(1)
    try:
        _, backwards = stepped(lib, q, arena, scene)
    finally:
        lib.go_backwards(0)
    assert torch.equal(forwards[0], backwards[0]) and torch.equal(forwards[1], backwards[1])


def test_thousands_of_like_weights(library: Library) -> None:
    """Their rounding all goes one way, and values around zero do not hide what it adds up to."""
    scene = replace(BASE, sequences=(((2500, 0, 2),),), open=(3,), kind="equal", count=2400, split=512)
    q, arena = make(scene)
    arena.tables.value_mean.zero_()
    _, made = stepped(library(4), q, arena, scene)
    found = errors(made, expected(q, arena, scene))
    assert within(found, BF16), found


@pytest.mark.parametrize("kind", MUTATIONS)
def test_a_broken_kernel_would_be_noticed(kind: str, library: Library) -> None:
    q, arena = make(BASE)
    right = expected(q, arena, BASE)
    broken(kind, arena)
    assert not within(errors(stepped(library(4), q, arena, BASE)[1], right), BF16)


def test_what_is_no_number_stays_where_it_is(library: Library) -> None:
    """A query that is no number spoils its own KV head and none else; the number of records stays exact."""
    q, arena = make(BASE)
    right = expected(q, arena, BASE)
    q[0, 0, 0, 3] = torch.nan
    work, made = stepped(library(4), q, arena, BASE)
    assert made[0][0, 0].isnan().all() and (work.n_chosen == BASE.count).all()
    rest = errors((made[0][:, 4:], made[1][:, 4:]), (right[0][:, 4:], right[1][:, 4:]))
    assert within(rest, BF16), rest


class TestCompiled:
    """For sm_90, by a compiler that is there."""

    @pytest.mark.parametrize(("group", "resident"), [(4, 3), (4, 4), (8, 3), (1, 3)])
    def test_kernels(self, group: int, resident: int, tmp_path: Path) -> None:
        if shutil.which("nvcc") is None:
            pytest.skip("nvcc is not installed")
        from tamis.kernels.nvrtc.selfindex_decode import NvrtcCut, source_of

        cut = NvrtcCut(resident=resident)
        for name in ("choose", "attend") if group == 4 else ("attend",):
            _, files, constants = source_of(name, group, cut)
            source = tmp_path / f"{name}.cu"
            source.write_text("".join(f"#define {k} {v}\n" for k, v in constants) + "".join(
                f.read_text(encoding="utf-8") for f in files))  # fmt: skip
            command = ["nvcc", "-arch=sm_90", "-cubin", "-Xptxas", "-v", str(source), "-o", str(tmp_path / "x.cubin")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            spilled = [int(line.split(" bytes spill stores")[0].split()[-1]) for line in done.stderr.splitlines()
                       if "spill stores" in line]  # fmt: skip
            assert spilled and max(spilled) <= (64 if resident < 4 else 256), done.stderr


@functools.cache
def on_gpu(scene: Scene) -> tuple[torch.Tensor, Arena]:
    """For tests that leave the arena as it is."""
    return make(scene, device="cuda")


@pytest.mark.gpu
class TestOnAGpu:
    """At real sizes, compiled by PyTorch. All records are attended: which ones a bar would take depends on the order of
    sums in the last digit, and one token more or less is seen in a head (`bench decode` checks the choice)."""

    GPU = replace(BASE, sequences=(((8000, 0, 64), (700, 8000, 12)),) * 2, open=(96, 60), count=9000, heads=(32, 8),
                  block=512, split=128)  # fmt: skip
    LONG = replace(GPU, sequences=(((20_001, 0, 64), (1024, 20_001, 32)), ((33, 5, 1),)), open=(7, 1), count=3000)

    @pytest.mark.parametrize("heads", [(32, 8), (40, 8), (8, 8), (64, 8)])
    def test_steps(self, heads: tuple[int, int]) -> None:
        scene = replace(self.GPU, heads=heads)
        q, arena = on_gpu(scene)
        found = errors(run(q, arena, scene, "nvrtc"), expected(q, arena, scene))
        assert within(found, BF16), found

    @pytest.mark.parametrize("kind", MUTATIONS)
    def test_a_broken_kernel_would_be_noticed(self, kind: str) -> None:
        q, arena = make(BASE, device="cuda")
        right = expected(q, arena, BASE)
        broken(kind, arena)
        assert not within(errors(run(q, arena, BASE, "nvrtc"), right), BF16)

    @pytest.mark.parametrize(
        ("every", "cluster", "choosers", "early"), [(8, 8, 512, 1), (0, 4, 1024, 0), (1, 1, 1024, 2), (16, 2, 512, 2)]
    )
    def test_every_cut_chooses_exactly(self, every: int, cluster: int, choosers: int, early: int) -> None:
        """And leaves keys, prepared tables and counters as they should be, at odd lengths and several counts."""
        from tamis.kernels.nvrtc.selfindex_decode import NvrtcCut
        from tamis.kernels.nvrtc.selfindex_decode import selfindex_decode as step

        q, arena = on_gpu(self.LONG)
        work = reserved(q, arena, self.LONG)
        cut = NvrtcCut(every=every, cluster=cluster, choosers=choosers, early=early)
        for count in (3000, 1, 0, 2999):
            work.count.fill_(count)
            step(q, arena, work, scale=self.LONG.dim**-0.5, cut=cut)
            check_scored(work, q, arena, every)
            check_chosen(work, arena, count)

    @pytest.mark.parametrize(
        ("split", "stages", "resident", "early"), [(64, 2, 4, 2), (128, 3, 3, 1), (512, 4, 3, 0), (256, 3, 2, 2)]
    )
    def test_every_cut_attends_alike(self, split: int, stages: int, resident: int, early: int) -> None:
        from tamis.kernels.nvrtc.selfindex_decode import NvrtcCut
        from tamis.kernels.nvrtc.selfindex_decode import selfindex_decode as step

        scene = replace(self.GPU, split=64)
        q, arena = on_gpu(self.GPU)
        work, right = reserved(q, arena, scene), expected(q, arena, scene)
        cut = NvrtcCut(split=split, stages=stages, resident=resident, early=early)
        made = [step(q, arena, work, scale=scene.dim**-0.5, cut=cut) for _ in range(20)]
        assert within(errors(made[0], right), BF16), errors(made[0], right)
        assert all(torch.equal(out, made[0][0]) and torch.equal(lse, made[0][1]) for out, lse in made)

    def test_a_captured_graph_follows_tokens_and_counts(self) -> None:
        """A replay gives bit for bit what a step outside gives, and that is right where nothing is left out."""
        q, arena = make(self.GPU, device="cuda")
        work = Workspace.reserve(arena, 32, 9000)
        count = torch.tensor([10, 20], dtype=torch.int32, device="cuda")
        k, v = (torch.randn(2, 8, 1, 128, device="cuda", dtype=BF16) for _ in range(2))

        def step(n: int | torch.Tensor) -> PAIR:
            return selfindex_decode(q, arena, count=n, scale=128**-0.5, work=work, kernel="nvrtc")

        def grown() -> PAIR:
            selfindex_append(arena, k, v)
            return step(count)

        grown()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = [grown() for _ in range(3)][-1]  # launches of one step after the other
        for n in (10, 9000, 3, 777):
            count.fill_(n)
            k.normal_()
            graph.replay()
            check_chosen(work, arena, n)
            out, lse = (x.clone() for x in made)
            right = step(n)
            assert torch.equal(out, right[0]) and torch.equal(lse, right[1]), n
            if n == 9000:
                found = errors((out, lse), selfindex_decode(q, arena, count=n, scale=128**-0.5, kernel="reference"))
                assert within(found, BF16), found

    def test_what_is_refused(self) -> None:
        from tamis.kernels.nvrtc.selfindex_decode import NvrtcCut
        from tamis.kernels.nvrtc.selfindex_decode import selfindex_decode as step

        q, arena = on_gpu(self.GPU)
        work = Workspace.reserve(arena, 32, 900, split=128)
        with pytest.raises(InvalidInput, match="64 records for a program of a workspace with splits of 128"):
            step(q, arena, work, scale=1.0, cut=NvrtcCut(split=64))


def test_pytorch_has_the_compiler() -> None:
    """What the launch relies on of PyTorch, which does not call it public."""
    assert importlib.util.find_spec("torch.cuda._utils") is not None and hasattr(torch.cuda, "_compile_kernel")
