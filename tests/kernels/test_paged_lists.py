"""Key tiles, lists over pages, and decode plans: checked against rules counted out one key at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import make
from paged_shapes import DECODE, MIXED, PREFILL

from tamis.core.errors import InvalidInput
from tamis.kernels.decode_plan import MOST_PAGES, DecodePlan, Room
from tamis.kernels.paged import DOCUMENT, LENGTH, POSITION, KeyTiles, Segment, paged_lists, runs_of
from tamis.kernels.reference.paged import paged_attention


def angles(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One rotated pair of a radian a position."""
    return offsets.double()[:, None].cos().float(), offsets.double()[:, None].sin().float()


def tiles_of(*segments: Segment, page: int = 16) -> KeyTiles:
    return KeyTiles.of(segments, angles, page=page)


A, B, OWN = Segment((7, 3), 20, 40, 0), Segment((1,), 16, 60, 0), Segment((5,), 9, 76)


class TestKeyTiles:
    """Rows of the table."""

    def test_in_order_of_position(self):
        tiles = tiles_of(OWN, B, A)
        assert tiles.table.tolist() == [[7, 16, 40, 0], [3, 4, 56, 0], [1, 16, 60, 1], [5, 9, 76, -1]]
        assert tiles.cos is not None
        assert torch.equal(tiles.cos, angles(torch.tensor([40, 60]))[0])
        assert tiles.rotary_dims == 2

    def test_offset_zero_turns_nothing(self):
        tiles = tiles_of(Segment((2,), 4, 0, 0), Segment((3,), 4, 4))
        assert tiles.table[:, DOCUMENT].tolist() == [-1, -1]
        assert tiles.cos is None

    def test_pieces_of_a_document_share_a_rotation(self):
        # "A cached, B new, C cached": both pieces of the document are moved alike
        tiles = tiles_of(Segment((2,), 10, 100, 0), Segment((3,), 5, 110), Segment((4,), 8, 115, 15))
        assert tiles.table[:, DOCUMENT].tolist() == [0, -1, 0]

    def test_holes(self):
        gone = torch.zeros(20, dtype=torch.bool)
        gone[17] = True
        tiles = tiles_of(A._replace(holes=gone), OWN)
        assert tiles.readable().sum(-1).tolist() == [16, 3, 9]

    @pytest.mark.parametrize(
        ("segment", "words"),
        [
            (Segment((1,), 17, 0), "exactly 2 pages"),
            (Segment((), 0, 0), "1 or more keys"),
            (Segment((1,), 5, -1), "positions are 0"),
            (Segment((1,), 5, 1 << 30), "positions are 0"),
            (Segment((-1,), 5, 0), "pages 0 or more"),
            (Segment((1,), 5, 0, None, torch.zeros(4, dtype=torch.bool)), "one bool a key"),
        ],
    )
    def test_refused(self, segment, words):
        with pytest.raises(InvalidInput, match=words):
            tiles_of(segment)

    def test_moved_without_angles(self):
        with pytest.raises(InvalidInput, match="pass `angles`"):
            KeyTiles.of([A], page=16)


class TestLists:
    """Which tiles a query tile visits."""

    def test_masked_first_then_by_document(self):
        tiles = tiles_of(A, B, OWN)
        lists = paged_lists(tiles, torch.arange(80, 85), rows=16)
        assert lists.entries[0, 0].tolist() == [3, 1, 0, 2]
        assert (int(lists.count), int(lists.masked)) == (4, 2)
        assert lists.runs[0, 0].tolist() == [[1, -1], [2, 0], [3, 0], [4, 1]]
        assert lists.run_count[0, 0].tolist() == [2, 4]

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def test_every_visible_key_once(self, data):
        scene = make(PREFILL[data.draw(st.sampled_from(["mixed", "holes", "pages of 16", "rows inside a document"]))])
        tiles = scene.tiles[0]
        last = int(tiles.table[-1, POSITION]) + 3
        rows = sorted(data.draw(st.sets(st.integers(0, last), min_size=1, max_size=40)))
        lists = paged_lists(tiles, torch.tensor(rows), rows=16)
        for i in range(lists.q_start.numel()):
            own = rows[i * 16 : i * 16 + 16]
            assert int(lists.q_len[i]) == len(own)
            visits = lists.entries[0, i, : lists.count[0, i]].tolist()
            near = int(lists.masked[0, i])
            assert sorted(visits) == [t for t, row in enumerate(tiles.table.tolist()) if row[POSITION] <= own[-1]]
            for place, t in enumerate(visits):
                end = int(tiles.table[t, POSITION]) + tiles.page - 1
                whole = bool(tiles.readable()[t].all()) and end <= own[0]
                assert whole == (place >= near)
            documents = [int(tiles.table[t, DOCUMENT]) for t in visits]
            for part in (documents[:near], documents[near:]):
                assert part == sorted(part)
            first = 0
            for end, document in lists.runs[0, i, : lists.run_count[0, i, 1]].tolist():
                assert set(documents[first:end]) == {document}
                first = end
            assert first == len(visits)

    def test_runs_with_room_to_spare(self):
        scene = make(PREFILL["mixed"])
        lists, table = scene.lists(), scene.tiles[0].table
        runs, count = runs_of(lists.entries, lists.count, lists.masked, table, most=20)
        assert runs.shape[2] == 20
        assert torch.equal(count, lists.run_count)
        assert torch.equal(runs[:, :, : lists.runs.shape[2]], lists.runs)

    @pytest.mark.parametrize("positions", [[3, 3], [4, 2], [-1, 2], [1 << 30]])
    def test_positions_refused(self, positions):
        with pytest.raises(InvalidInput, match="increase strictly"):
            paged_lists(tiles_of(OWN), torch.tensor(positions))

    def test_masks_refused(self):
        with pytest.raises(InvalidInput, match="1 query tiles of 128 rows, 1 key tiles"):
            paged_lists(tiles_of(OWN), torch.tensor([90]), mask=torch.ones(1, 1, 2, dtype=torch.bool))
        with pytest.raises(InvalidInput, match="1 or more integers"):
            paged_lists(tiles_of(OWN), torch.tensor([9.0]))

    def test_no_tiles(self):
        lists = paged_lists(KeyTiles(torch.zeros((0, 4), dtype=torch.int32), 16), torch.tensor([90]))
        assert (int(lists.count), lists.run_count.tolist()) == (0, [[[0, 0]]])


class TestPlans:
    """Splits of a decode step."""

    @pytest.mark.parametrize("name", DECODE)
    @pytest.mark.parametrize("programs", [1, 8, 1000])
    def test_every_tile_once_and_one_document_a_split(self, name, programs):
        scene = make(DECODE[name])
        plan = scene.plan(programs=programs)
        table = plan.tiles.table
        seen: list[int] = []
        for b, (first, n) in enumerate(plan.ranges.tolist()):
            rows: list[list[int]] = []
            for request, start, size, whole in plan.splits[first : first + n].tolist():
                assert request == b
                assert 1 <= size <= MOST_PAGES
                part = table[start : start + size]
                assert len(part[:, DOCUMENT].unique()) == 1
                full = plan.tiles.readable()[start : start + size].all(-1)
                full &= part[:, POSITION] + plan.room.page - 1 <= plan.q_position[b, 0]
                assert full.tolist() == [i < whole for i in range(size)]
                rows += part[:, :3].tolist()
                seen += range(start, start + size)
            if b < len(scene.tiles):
                assert sorted(rows) == sorted(scene.tiles[b].table[:, :3].tolist())
        assert sorted(seen) == list(range(len(seen)))
        assert int(plan.splits[:, 2].sum()) == len(seen)

    def test_tensors_stay_where_they_are(self):
        scene = make(DECODE["step"])
        plan = scene.plan()
        held = [t.data_ptr() for t in (plan.tiles.table, plan.splits, plan.ranges, plan.q_position, plan.growing)]
        plan.write(scene.tiles[:1], scene.positions[0][None], kv_heads=2)
        assert held == [
            t.data_ptr() for t in (plan.tiles.table, plan.splits, plan.ranges, plan.q_position, plan.growing)
        ]
        assert plan.ranges[1:].tolist() == [[0, 0]] * 3

    def test_advance(self):
        scene = make(DECODE["step"])
        plan = scene.plan()
        before = plan.tiles.table[plan.growing[:3]]
        for b, tiles in enumerate(scene.tiles):
            assert before[b, :3].tolist() == tiles.table[-1, :3].tolist()
        asked = plan.q_position.clone()
        plan.advance()
        after = plan.tiles.table[plan.growing[:3]]
        assert (after - before).tolist() == [[0, 1, 0, 0]] * 3
        assert torch.equal(plan.q_position, asked + 1)

    def test_no_room(self):
        scene = make(DECODE["step"])
        positions = torch.stack(scene.positions)
        for room, words in (
            (Room(2, 99, 99, 9, page=32, rotary_dims=64), "3 requests"),
            (Room(3, 4, 99, 9, page=32, rotary_dims=64), "tiles for a plan"),
            (Room(3, 99, 99, 1, page=32, rotary_dims=64), "documents for a plan"),
            (Room(3, 99, 4, 9, page=32, rotary_dims=64), "room for 4 splits"),
            (Room(3, 99, 99, 9, page=16, rotary_dims=64), "pages of 32"),
            (Room(3, 99, 99, 9, 2, page=32, rotary_dims=64), "expected \\(3, 2\\)"),
        ):
            plan = DecodePlan.reserve(room)
            with pytest.raises(InvalidInput, match=words):
                plan.write(scene.tiles, positions, kv_heads=2)
            assert int(plan.ranges.sum()) == 0
        with pytest.raises(InvalidInput, match="holes=True"):
            DecodePlan.reserve(Room(3, 99, 99, 9, page=32, rotary_dims=64)).write(
                make(DECODE["step, holes"]).tiles, positions, kv_heads=2
            )

    def test_fewer_splits_where_there_is_less_room(self):
        scene = make(DECODE["step"])
        plan = DecodePlan.reserve(Room(3, 99, 9, 9, page=32, rotary_dims=64))
        assert plan.write(scene.tiles, torch.stack(scene.positions), kv_heads=64) <= 9


def test_the_mixed_prompt_has_short_tiles_and_a_document_twice():
    tiles = make(PREFILL["mixed"]).tiles[0]
    assert {name for name, _, _ in MIXED.parts} == {"own", "a", "b", "c"}
    assert int((tiles.table[:, LENGTH] < tiles.page).sum()) >= 5


@pytest.mark.parametrize("starts", [[0, 5, 9], [0, 1, 2, 3], [0]])
def test_query_tiles_where_they_are_asked_for(starts: list[int]) -> None:
    draw = torch.Generator().manual_seed(3)
    q, keys, values = (torch.randn(s, generator=draw) for s in ((2, 13, 8), (3, 1, 16, 8), (3, 1, 16, 8)))
    tiles = tiles_of(Segment((0, 1), 20, 0, None), Segment((2,), 12, 20, None))
    where = torch.arange(5, 31, 2)
    wanted = paged_attention(q, keys, values, tiles, paged_lists(tiles, where), scale=0.3)
    lists = paged_lists(tiles, where, starts=torch.tensor(starts))
    assert lists.q_start.tolist() == starts and int(lists.q_len.sum()) == 13
    for a, b in zip(wanted, paged_attention(q, keys, values, tiles, lists, scale=0.3), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("starts", [[1, 5], [0, 5, 5], [0, 16], [0, 9, 5], [0, 9]])
def test_query_tiles_that_cannot_be(starts: list[int]) -> None:
    tiles = tiles_of(Segment((0, 1), 20, 0, None))
    with pytest.raises(InvalidInput, match="each has 1 to 8 rows"):
        paged_lists(tiles, torch.arange(16), rows=8, starts=torch.tensor(starts))
