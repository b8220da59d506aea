"""The arena of self-indexed sequences: what it holds is what was put in, at fixed places, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from selfindex_cases import (
    MUTATIONS,
    SCENES,
    TWO,
    Scene,
    angles_of,
    broken,
    errors,
    expected,
    make,
    part_of,
    run,
    within,
)

from tamis.cache.selfindex.sequence import joined_layers
from tamis.core.errors import InvalidInput, Unavailable, UnknownName
from tamis.kernels.reference import selfindex as ref
from tamis.kernels.selfindex import Layout, Part, Tables, dequantised
from tamis.kernels.selfindex_arena import Arena, ArenaRoom, Held, turned_forth
from tamis.kernels.selfindex_dispatch import (
    fit_sampled,
    reasons,
    selfindex_append,
    selfindex_compress,
    selfindex_decode,
)
from tamis.kernels.selfindex_workspace import Workspace

HALF = torch.float16
SCENE = Scene(TWO, (5, 9))


def test_a_step_is_the_references_over_the_parts_that_were_given() -> None:
    # not through `Arena.held`: the parts, their offsets and their exact tokens go to the reference as a cache has them
    draw = torch.Generator().manual_seed(0)
    parts, offsets = [part_of(SCENE, 201, 3, draw), part_of(SCENE, 77, 2, draw)], [0, 500]
    run_ = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    angles = angles_of(64)
    arena = Arena.of([Held(parts, offsets, run_)], Layout(64), angles, dtype=torch.float32, block=64)
    q = torch.randn(1, 6, 1, 64)
    queries = []
    for offset in offsets:
        cos, sin = angles(torch.tensor(offset))
        queries.append(turned_forth(q[0], cos, -sin))
    right = ref.attention([*queries, q[0]], parts, run_, Layout(64), count=40, scale=0.125)
    for kernel in ("reference", "cpu"):
        made = selfindex_decode(q, arena, count=40, scale=0.125, kernel=kernel)
        assert torch.allclose(made[0][0], right[0], atol=1e-5) and torch.allclose(made[1][0], right[1], atol=1e-5)


# of equal scores the path of a CPU takes any
@pytest.mark.parametrize("name", [n for n, scene in SCENES.items() if scene.kind == "normal"])
def test_the_path_of_a_cpu(name: str) -> None:
    scene = SCENES[name]
    q, arena = make(scene)
    found = errors(run(q, arena, scene, "cpu"), expected(q, arena, scene))
    assert within(found, torch.float32 if scene.dtype == torch.float32 else torch.bfloat16), found


@pytest.mark.parametrize("kind", MUTATIONS)
def test_a_broken_step_would_be_noticed(kind: str) -> None:
    q, arena = make(SCENE)
    right = expected(q, arena, SCENE)
    broken(kind, arena)
    assert not within(errors(run(q, arena, SCENE, "cpu"), right), torch.bfloat16)


def test_growing_gives_what_building_gives() -> None:
    draw = torch.Generator().manual_seed(1)
    first, last = part_of(SCENE, 100, 2, draw), part_of(SCENE, 150, 6, draw)
    short = Part(last.records.span(0, 61), last.tables, last.exact[:, :0], last.keys[:, :0], last.values[:, :0])
    # of what the part has more, so that the shorter one has none of them
    last = replace(last, exact=torch.stack([torch.randperm(89, generator=draw)[:6] + 61 for _ in range(2)]))
    run_ = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    angles = angles_of(64)
    grown = Arena.of([Held([first], [0], run_)], Layout(64), angles, dtype=torch.float32, block=64, spare=256)
    places = {name: t.data_ptr() for name, t in vars(grown).items() if isinstance(t, torch.Tensor)}
    grown.update(0, Held([first, short], [0, 100], run_), angles)
    grown.update(0, Held([first, last], [0, 100], run_), angles)
    built = Arena.of([Held([first, last], [0, 100], run_)], Layout(64), angles, dtype=torch.float32, block=64)
    q = torch.randn(1, 6, 1, 64)
    made, right = (selfindex_decode(q, a, count=50, scale=0.1, kernel="reference") for a in (grown, built))
    assert torch.equal(made[0], right[0])
    assert places == {name: t.data_ptr() for name, t in vars(grown).items() if isinstance(t, torch.Tensor)}
    grown.clear(0)
    assert float(selfindex_decode(q, grown, count=5, scale=0.1)[0].abs().max()) == 0


def test_sequences_that_are_alike_are_updated_at_once() -> None:
    draw, angles = torch.Generator().manual_seed(1), angles_of(64)
    first, last = ([part_of(SCENE, n, 2, draw) for _ in range(2)] for n in (100, 61))
    runs = [(torch.randn(2, 3, 64), torch.randn(2, 3, 64)) for _ in range(2)]
    room = ArenaRoom(4, 2, 256, parts=2, exact=8, open=8, rotary=64, block=64)
    one, all_ = (Arena(room, Layout(64), dtype=torch.float32, device="cpu") for _ in range(2))
    for i, b in enumerate((1, 3)):
        one.update(b, Held([first[i]], [0], runs[i]), angles)
        all_.update(b, Held([first[i]], [0], runs[i]), angles)
        one.update(b, Held([first[i], last[i]], [0, 100], runs[i]), angles)
    parts = [joined_layers([_led(p) for p in pair]) for pair in (first, last)]
    run_ = [torch.stack([r[i] for r in runs]) for i in range(2)]
    all_.update(slice(1, 4, 2), Held(parts, [0, 100], (run_[0], run_[1])), angles)
    for b in (1, 3):
        lower, view = all_.rows(2, 4), all_.rows(0, 2)
        mine = (view if b < 2 else lower).held(b % 2)
        for x, y in zip(mine[1], one.held(b)[1], strict=True):
            assert torch.equal(x, y)
        q = torch.randn(4, 6, 1, 64)
        made = [selfindex_decode(q, a, count=40, scale=0.1, kernel="reference")[0] for a in (one, all_)]
        assert torch.equal(made[0], made[1]) and float(made[0][0].abs().max()) == 0
        half = selfindex_decode(q[2:], lower, count=40, scale=0.1, kernel="reference")[0]
        assert torch.equal(half, made[0][2:])
    assert all_.part_tokens(3) == [100, 61] and all_.part_tokens(2) == []
    all_.clear(slice(1, 4, 2))
    assert float(selfindex_decode(q, all_, count=5, scale=0.1)[0].abs().max()) == 0
    assert [len(all_.held(b)[0]) for b in range(4)] == [0] * 4


def _led(part: Part) -> Part:
    """With a sequence's dim in front."""
    records, tables = (
        type(x)(*(getattr(x, f)[None] for f in x.__dataclass_fields__)) for x in (part.records, part.tables)
    )
    return Part(records, tables, part.exact[None], part.keys[None], part.values[None])


def test_appending_lengthens_the_open_run() -> None:
    q, arena = make(SCENE)
    k, v = torch.randn(2, 2, 1, 64), torch.randn(2, 2, 1, 64)
    before = [arena.held(b)[1] for b in range(2)]
    selfindex_append(arena, k, v)
    for b in range(2):
        for i, new in enumerate((k, v)):
            assert torch.equal(arena.held(b)[1][i], torch.cat([before[b][i], new[b]], 1))
    assert not torch.equal(*(selfindex_decode(q, a, count=40, scale=0.125)[0] for a in (arena, make(SCENE)[1])))


def test_bytes_are_those_that_are_allocated() -> None:
    room = ArenaRoom(2, 3, 1024, parts=2, exact=16, open=48, rotary=64)
    arena = Arena(room, Layout(64), dtype=torch.bfloat16, device="cpu")
    whole = 2 * 3 * 64 * 64 * 2 * 2
    tables = 2 * 2 * 3 * Layout(64).table_bytes
    counts = 2 * (3 * 4 + 8) + 2 * 2 * 4 + 2 * 2 * 32 * 4 * 2  # and blocks' parts and angles
    assert arena.nbytes == 2 * 3 * 1024 * 44 + 2 * 3 * 128 + whole + tables + counts
    work = Workspace.reserve(arena, 6, 300, split=128)
    assert work.part.shape == (12, 3 + 4, 64) and work.chosen.shape == (6, 300)
    assert work.nbytes > work.keys.nbytes == 2 * 3 * 1024 * 2


def test_positions_of_slots() -> None:
    _, arena = make(SCENE)
    assert arena.position(0, torch.tensor([0, 200, 256, 332])).tolist() == [0, 200, 201, 277]


def test_what_does_not_fit() -> None:
    draw = torch.Generator().manual_seed(0)
    part = part_of(SCENE, 70, 2, draw)
    arena = Arena(ArenaRoom(1, 2, 128, parts=2, exact=2, open=4, block=64), Layout(64), dtype=HALF, device="cpu")
    with pytest.raises(InvalidInput, match="no angles"):
        arena.add_part(0, part, 9)
    arena.add_part(0, part)
    with pytest.raises(InvalidInput, match="reserve a larger one"):
        arena.add_part(0, part)
    assert arena.n_parts.tolist() == [1] and arena.slots.tolist() == [70]
    with pytest.raises(InvalidInput, match="settle more often"):
        arena.set_open(0, torch.zeros(2, 5, 64), torch.zeros(2, 5, 64))
    with pytest.raises(InvalidInput, match="clear it first"):
        arena.update(0, Held([], []))
    with pytest.raises(InvalidInput, match="multiple of block"):
        Arena(ArenaRoom(1, 2, 100, block=64), Layout(64), dtype=HALF, device="cpu")
    with pytest.raises(InvalidInput, match="no sequence with tokens"):
        Arena.of([], Layout(64))


class TestDispatch:
    """Choice and refusal."""

    def test_auto_on_a_cpu(self) -> None:
        q, arena = make(SCENE)
        assert next(n for n, why in reasons(q, arena).items() if why is None) == "cpu"
        out = torch.empty_like(q)
        assert selfindex_decode(q, arena, count=torch.tensor([3, 40]), scale=0.1, out=out)[0] is out

    def test_asked_for_and_missing(self) -> None:
        q, arena = make(SCENE)
        k = torch.randn(2, 9, 64)
        tables = ref.fit_tables(k, k, Layout(64))
        if not torch.cuda.is_available():
            with pytest.raises(Unavailable, match="tensors are on cpu"):
                selfindex_decode(q, arena, count=1, scale=0.1, kernel="triton")
            with pytest.raises(Unavailable, match="tensors are on cpu"):
                selfindex_compress(k, k, tables, Layout(64), kernel="triton")
        with pytest.raises(UnknownName, match="reference"):
            selfindex_decode(q, arena, count=1, scale=0.1, kernel="referense")
        with pytest.raises(UnknownName, match="reference"):
            selfindex_compress(k, k, tables, Layout(64), kernel="referense")

    def test_what_no_kernel_may_be_given(self) -> None:
        q, arena = make(SCENE)
        for wrong, words in (
            (q[:1], "expected \\[2, query heads, 1, 64\\]"),
            (q[:, :5], "must be a multiple"),
            (q.transpose(-1, -2).contiguous().transpose(-1, -2).expand(-1, -1, 2, -1), "one row"),
        ):
            with pytest.raises(InvalidInput, match=words):
                selfindex_decode(wrong, arena, count=1, scale=0.1)
        with pytest.raises(InvalidInput, match="must be positive"):
            selfindex_decode(q, arena, count=1, scale=0.0)
        with pytest.raises(InvalidInput, match="must be like q"):
            selfindex_decode(q, arena, count=1, scale=1.0, out=q[:, :2])
        with pytest.raises(InvalidInput, match="give one for each"):
            k = torch.randn(2, 9, 64)
            selfindex_compress(k, k, ref.fit_tables(k[0], k[0], Layout(64)), Layout(64))


def test_a_sample_gives_tables_as_good() -> None:
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn((2, 3000, 64), generator=draw) * 2 + 1 for _ in range(2))
    layout = Layout(64)

    def error(tables: Tables) -> float:
        records = selfindex_compress(keys, values, tables, layout)
        made = torch.stack(dequantised(records, tables, layout))
        return float((made - torch.stack([keys, values])).square().mean())

    left_out = torch.zeros(2, 3000, dtype=torch.bool)
    left_out[:, 0] = True
    sampled = fit_sampled(keys, values, layout, left_out=left_out, tokens=1000)
    assert error(sampled) < 1.02 * error(ref.fit_tables(keys, values, layout, left_out=left_out))
    whole = fit_sampled(keys, values, layout, tokens=3000)
    assert torch.equal(whole.centroids, ref.fit_tables(keys, values, layout).centroids)
