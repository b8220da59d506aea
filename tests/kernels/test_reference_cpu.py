"""The reference against plain masked softmax, and the CPU kernel against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.core.errors import InvalidInput
from tamis.kernels.cpu.block_sparse import block_sparse_attention as cpu
from tamis.kernels.cpu.dense import causal_attention
from tamis.kernels.lists import LENGTH_BITS, TileLists, Tiling, lists_from_mask, tile_areas
from tamis.kernels.reference.block_sparse import block_sparse_attention as reference
from tamis.kernels.reference.block_sparse import unpack

TILE = 32
SCALE = 0.125
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]
SEGMENTS = {
    "one token": (1,),
    "63": (63,),
    "111": (111,),
    "300": (300,),
    "odd segments": (1, 63, 111, 5, 96),
    "whole tiles": (64, 32, 96),
}
HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (4, 1)}


def tensors(
    heads: tuple[int, int], n_keys: int, *, rows: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = (heads[0], rows or n_keys, 64), (heads[1], n_keys, 64), (heads[1], n_keys, 64)
    q, k, v = (torch.randn(shape, generator=draw) for shape in shapes)
    return (q * 2).to(dtype), k.to(dtype), v.to(dtype)


def random_lists(heads: int, tiling: Tiling, *, share: float = 0.4, first: int = 0, seed: int = 1) -> TileLists:
    """Lists of a random choice of tiles for the query tiles from `first` on; the diagonal is always kept."""
    mask = random_mask(heads, tiling, share=share, seed=seed)[:, first:]
    offset = tiling.starts[first]
    queries = Tiling(tuple(s - offset for s in tiling.starts[first:]), tiling.tile)
    return lists_from_mask(mask, queries, tiling, offset)


def random_mask(heads: int, tiling: Tiling, *, share: float = 0.4, seed: int = 1) -> torch.Tensor:
    n = len(tiling)
    return (torch.rand(heads, n, n, generator=torch.Generator().manual_seed(seed)) < share) | torch.eye(n).bool()


def tile_numbers(tiling: Tiling) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(tiling)), torch.tensor(tiling.lengths))


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, tiling: Tiling, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked softmax in float64 over the whole score matrix; `first` is the first query tile."""
    of = tile_numbers(tiling)
    offset = tiling.starts[first]
    allowed = mask[:, of[offset:] - first][:, :, of] & torch.ones(len(of), len(of)).tril().bool()[offset:]
    group = q.shape[0] // k.shape[0]
    keys, values = (t.double().repeat_interleave(group, 0) for t in (k, v))
    scores = (q.double() @ keys.mT * SCALE).masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def errors(got: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Error over the root mean square, and the worst row's error over its norm."""
    difference, wanted = got.double() - wanted.double(), wanted.double()
    rms = difference.pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()
    row = difference.norm(dim=-1) / wanted.norm(dim=-1)
    return float(rms), float(row.max())


def assert_close(got: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    rms, row = errors(got[0], wanted[0])
    assert rms < 0.005 and row < 0.02, (rms, row)
    assert float((got[1].double() - wanted[1].double()).abs().max()) < 0.005


class TestTiling:
    def test_segments_are_cut_from_their_own_start(self) -> None:
        tiling = Tiling.of_segments([5, 0, 9, 4], 4)
        assert tiling.starts == (0, 4, 5, 9, 13, 14, 18)
        assert tiling.lengths == [4, 1, 4, 4, 1, 4] and len(tiling) == 6 and tiling.n_tokens == 18

    @pytest.mark.parametrize("tile", [0, 256])
    def test_a_tile_that_entries_cannot_hold_is_refused(self, tile: int) -> None:
        with pytest.raises(InvalidInput, match=f"tile is {tile} tokens; allowed are 1 to 255"):
            Tiling.of_segments([10], tile)

    def test_a_start_that_entries_cannot_hold_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="8388608 tokens"):
            Tiling.of_segments([1 << 23], 255)

    @given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(1, 5), st.data())
    @settings(max_examples=100, deadline=None)
    def test_areas_count_the_causal_elements(self, lengths: list[int], tile: int, data: st.DataObject) -> None:
        keys = Tiling.of_segments(lengths, tile)
        first = data.draw(st.integers(0, max(0, len(keys) - 1)))
        offset = keys.starts[first]
        queries = Tiling(tuple(s - offset for s in keys.starts[first:]), tile)
        areas = tile_areas(queries, keys, offset)
        assert areas.shape == (len(queries), len(keys))
        for i in range(len(queries)):
            for j in range(len(keys)):
                rows = range(queries.starts[i] + offset, queries.starts[i + 1] + offset)
                seen = sum(key <= row for row in rows for key in range(keys.starts[j], keys.starts[j + 1]))
                assert int(areas[i, j]) == seen, (i, j)

    @given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.lists(st.integers(1, 9), min_size=1, max_size=3))
    @settings(max_examples=100, deadline=None)
    def test_areas_of_unlike_cuts(self, rows: list[int], keys: list[int]) -> None:
        a, b = Tiling.of_segments(rows, 4), Tiling.of_segments(keys, 3)
        whole = torch.ones(a.n_tokens, b.n_tokens).tril(2)
        wanted = [
            [int(whole[a.starts[i] : a.starts[i + 1], b.starts[j] : b.starts[j + 1]].sum()) for j in range(len(b))]
            for i in range(len(a))
        ]
        assert tile_areas(a, b, 2).tolist() == wanted


class TestLists:
    def test_order_masks_and_counts_by_hand(self) -> None:
        # tiles of 4: [0,4) [4,6) | [6,10) [10,14) [14,15); the second and the last are short
        tiling = Tiling.of_segments([6, 9], 4)
        mask = torch.ones(1, 5, 5, dtype=torch.bool)
        mask[0, 3, 0] = False
        lists = lists_from_mask(mask, tiling, tiling)
        spans = [
            [unpack(e) for e in row[:n]]
            for row, n in zip(lists.entries[0].tolist(), lists.count[0].tolist(), strict=True)
        ]
        assert spans == [
            [(0, 4)],
            [(4, 6), (0, 4)],
            [(6, 10), (4, 6), (0, 4)],
            [(10, 14), (4, 6), (6, 10)],
            [(14, 15), (4, 6), (10, 14), (6, 10), (0, 4)],
        ]
        assert lists.masked.tolist() == [[1, 1, 2, 2, 2]]
        assert lists.q_start.tolist() == [0, 4, 6, 10, 14] and lists.q_len.tolist() == [4, 2, 4, 4, 1]
        assert lists.causal_area == 15 * 16 // 2 and lists.area == lists.causal_area - 16
        assert {t.dtype for t in (lists.q_start, lists.q_len, lists.entries, lists.count, lists.masked)} == {
            torch.int32
        }

    def test_tiles_above_the_diagonal_are_dropped(self) -> None:
        tiling = Tiling.of_segments([40], 8)
        lists = lists_from_mask(torch.ones(2, 5, 5, dtype=torch.bool), tiling, tiling)
        assert lists.count.tolist() == [[1, 2, 3, 4, 5]] * 2 and lists.density == 1.0

    @given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 9))
    @settings(max_examples=40, deadline=None)
    def test_lists_hold_exactly_the_chosen_tiles(self, lengths: list[int], seed: int) -> None:
        tiling = Tiling.of_segments(lengths, 16)
        mask = random_mask(2, tiling, seed=seed)
        lists = lists_from_mask(mask, tiling, tiling)
        area = 0
        for h in range(2):
            for i, row in enumerate(tiling.starts[:-1]):
                entries = [unpack(e) for e in lists.entries[h, i, : lists.count[h, i]].tolist()]
                chosen = [j for j in range(i + 1) if mask[h, i, j]]
                assert sorted(entries) == [(tiling.starts[j], tiling.starts[j + 1]) for j in chosen]
                assert entries[0][0] == row
                near = int(lists.masked[h, i])
                assert all(b - a == 16 and b <= row for a, b in entries[near:])
                assert all(b - a < 16 or a == row for a, b in entries[:near])
                area += sum(
                    (p + 1 - a) if p < b else b - a for a, b in entries for p in range(row, tiling.starts[i + 1])
                )
        assert lists.area == area

    @pytest.mark.parametrize("mask", [torch.ones(1, 2, 2), torch.ones(2, 2).bool(), torch.ones(1, 2, 3).bool()])
    def test_a_mask_of_another_kind_is_refused(self, mask: torch.Tensor) -> None:
        tiling = Tiling.of_segments([20], 16)
        with pytest.raises(InvalidInput, match=r"expected bool \[query heads, 2, 2\]"):
            lists_from_mask(mask, tiling, tiling)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_reference_is_masked_softmax(segments: tuple[int, ...], heads: tuple[int, int]) -> None:
    tiling = Tiling.of_segments(segments, TILE)
    q, k, v = tensors(heads, tiling.n_tokens)
    mask = random_mask(heads[0], tiling)
    got = reference(q, k, v, lists_from_mask(mask, tiling, tiling), SCALE)
    wanted = plain(q, k, v, mask, tiling)
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1].double(), wanted[1], rtol=1e-5, atol=1e-5)


def test_reference_of_a_chunk_is_masked_softmax() -> None:
    tiling = Tiling.of_segments((40, 111, 5, 80), TILE)
    q, k, v = tensors((4, 2), tiling.n_tokens)
    mask, at = random_mask(4, tiling), tiling.starts[3]
    got = reference(q[:, at:], k, v, random_lists(4, tiling, first=3), SCALE)
    wanted = plain(q[:, at:], k, v, mask[:, 3:], tiling, 3)
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize(
    ("q", "k", "says"),
    [
        ((4, 20, 64), (3, 20, 64), "4 query heads over 3 KV heads"),
        ((4, 20, 64), (2, 20, 32), r"expected q \[Hq, Tq, D\]"),
        ((2, 20, 64), (2, 20, 64), "lists are for 4 heads, q has 2"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(run: Attention, q: tuple[int, ...], k: tuple[int, ...], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        run(torch.ones(q), torch.ones(k), torch.ones(k), random_lists(4, Tiling.of_segments([20], TILE)), SCALE)


class TestCpuKernel:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
    @pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
    @pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
    def test_agrees_with_the_reference(
        self, segments: tuple[int, ...], heads: tuple[int, int], dtype: torch.dtype
    ) -> None:
        tiling = Tiling.of_segments(segments, TILE)
        q, k, v = tensors(heads, tiling.n_tokens, dtype=dtype)
        lists = random_lists(heads[0], tiling)
        got = cpu(q, k, v, lists, SCALE)
        assert got[0].dtype == dtype and got[1].dtype == torch.float32
        assert_close(got, reference(q.float(), k.float(), v.float(), lists, SCALE))

    @given(
        st.lists(st.integers(1, 70), min_size=1, max_size=4),
        st.sampled_from(list(HEADS.values())),
        st.floats(0, 1),
        st.integers(0, 99),
    )
    @settings(max_examples=40, deadline=None)
    def test_agrees_on_any_choice(self, lengths: list[int], heads: tuple[int, int], share: float, seed: int) -> None:
        tiling = Tiling.of_segments(lengths, 16)
        q, k, v = tensors(heads, tiling.n_tokens, seed=seed)
        lists = random_lists(heads[0], tiling, share=share, seed=seed)
        got, wanted = cpu(q, k, v, lists, SCALE), reference(q, k, v, lists, SCALE)
        torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("tile", [64, 128])
    def test_whole_tiles_of_the_shipped_sizes(self, tile: int) -> None:
        tiling = Tiling.of_segments((17, 300, 111, 263), tile)
        q, k, v = tensors((4, 2), tiling.n_tokens, dtype=torch.bfloat16)
        lists = random_lists(4, tiling)
        assert_close(cpu(q, k, v, lists, SCALE), reference(q.float(), k.float(), v.float(), lists, SCALE))

    def test_a_chunk_of_rows(self) -> None:
        tiling = Tiling.of_segments((40, 111, 5, 80), TILE)
        q, k, v = tensors((4, 2), tiling.n_tokens)
        for first in range(len(tiling)):
            at = tiling.starts[first]
            lists = random_lists(4, tiling, first=first)
            assert lists.q_offset == at
            assert_close(cpu(q[:, at:], k, v, lists, SCALE), reference(q[:, at:], k, v, lists, SCALE))

    def test_query_tiles_cut_unlike_the_keys_are_refused(self) -> None:
        """It computes each tile's own keys apart, so a chunk that starts within a key tile would come out wrong."""
        keys = Tiling.of_segments((70, 40), TILE)
        q, k, v = tensors((4, 2), keys.n_tokens)
        rows = Tiling.of_segments((keys.n_tokens - 20,), TILE)
        mask = torch.ones(4, len(rows), len(keys), dtype=torch.bool)
        lists = lists_from_mask(mask, rows, keys, 20)
        wanted = plain(q, k, v, torch.ones(4, len(keys), len(keys), dtype=torch.bool), keys)[0][:, 20:]
        assert errors(reference(q[:, 20:], k, v, lists, SCALE)[0], wanted)[0] < 1e-5
        with pytest.raises(InvalidInput, match="cut unlike the key tiles"):
            cpu(q[:, 20:], k, v, lists, SCALE)

    def test_a_tile_that_does_not_list_itself_is_refused(self) -> None:
        tiling = Tiling.of_segments((100,), TILE)
        q, k, v = tensors((4, 2), 100)
        mask = torch.ones(4, 4, 4, dtype=torch.bool)
        mask[1, 2, 2] = False
        with pytest.raises(InvalidInput, match="do not list their own keys first"):
            cpu(q, k, v, lists_from_mask(mask, tiling, tiling), SCALE)

    def test_strided_inputs(self) -> None:
        tiling = Tiling.of_segments((63, 111), TILE)
        q, k, v = tensors((4, 2), tiling.n_tokens)
        lists = random_lists(4, tiling)
        strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]  # [T, H, D] seen as [H, T, D]
        padded = [torch.cat([t, t], -1)[..., :64] for t in (q, k, v)]
        assert not any(t.is_contiguous() for t in (*strided, *padded))
        wanted = cpu(q, k, v, lists, SCALE)
        for inputs in (strided, padded):
            got = cpu(*inputs, lists, SCALE)
            assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
    def test_needles(self, dtype: torch.dtype) -> None:
        q, k, v, lists = needles(dtype)
        wanted = reference(q.float(), k.float(), v.float(), lists, SCALE)
        assert float(wanted[1].max()) > 100  # scores whose exponent no float could hold
        assert_close(cpu(q, k, v, lists, SCALE), wanted)

    def test_inputs_are_left_alone(self) -> None:
        tiling = Tiling.of_segments((63, 40), TILE)
        q, k, v = tensors((4, 2), tiling.n_tokens)
        before = [t.clone() for t in (q, k, v)]
        cpu(q, k, v, random_lists(4, tiling), SCALE)
        assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))

    def test_every_tile_listed_is_dense_attention(self) -> None:
        tiling = Tiling.of_segments((1, 63, 111, 300), TILE)
        q, k, v = tensors((6, 2), tiling.n_tokens)
        lists = random_lists(6, tiling, share=1.1)
        assert lists.density == 1.0
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=SCALE, enable_gqa=True
        )[0]
        out, lse = cpu(q, k, v, lists, SCALE)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
        dense, dense_lse = causal_attention(q, k, v, SCALE)
        torch.testing.assert_close(dense, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, dense_lse, rtol=1e-5, atol=1e-5)

    def test_a_sparse_choice_is_not_dense_attention(self) -> None:
        tiling = Tiling.of_segments((63, 300), TILE)
        q, k, v = tensors((4, 2), tiling.n_tokens)
        sparse, dense = (cpu(q, k, v, random_lists(4, tiling, share=s), SCALE)[0] for s in (0.3, 1.1))
        assert errors(sparse, dense)[0] > 0.1


def needles(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TileLists]:
    """Rows of the last tiles whose whole mass lies on one key of one listed tile, far ahead of everything else."""
    tiling = Tiling.of_segments((63, 111, 70), TILE)
    q, k, v = tensors((4, 2), tiling.n_tokens, dtype=dtype)
    mask = random_mask(4, tiling)
    mask[:, -3:, 1] = True
    for row, key in ((200, 33), (243, 40), (190, 62)):
        q[:, row] = 8 * torch.ones(64)
        k[:, key] = 3 * torch.ones(64)
    return q, k, v, lists_from_mask(mask, tiling, tiling)


def _wrong_kv_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: TileLists) -> torch.Tensor:
    return cpu(q, k.flip(0), v.flip(0), lists, SCALE)[0]


def _last_entry_dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: TileLists) -> torch.Tensor:
    return cpu(q, k, v, replace(lists, count=(lists.count - 1).clamp(min=1)), SCALE)[0]


def _one_short_row_only(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: TileLists) -> torch.Tensor:
    count = lists.count.clone()
    count[0, -1] -= 1
    return cpu(q, k, v, replace(lists, count=count), SCALE)[0]


def _mask_off_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: TileLists) -> torch.Tensor:
    # the reference with its positions one too high lets every row see the key after its own
    k, v = (torch.cat([t, t[:, :1]], 1) for t in (k, v))
    return reference(q, k, v, replace(lists, q_offset=1), SCALE)[0]


def _lengths_ignored(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: TileLists) -> torch.Tensor:
    # every key tile but the own one starts a token late: an off-by-one in the gather
    own = (lists.q_start + lists.q_offset)[None, :, None] == lists.entries >> LENGTH_BITS
    shifted = lists.entries + torch.where(own, 0, 1 << LENGTH_BITS).int()
    return cpu(q, k, v, replace(lists, entries=shifted), SCALE)[0]


@pytest.mark.parametrize(
    "broken", [_wrong_kv_head, _last_entry_dropped, _one_short_row_only, _mask_off_by_one, _lengths_ignored]
)
@pytest.mark.parametrize("inputs", ["random", "needles"])
def test_a_broken_kernel_is_caught(broken: Callable[..., torch.Tensor], inputs: str) -> None:
    if inputs == "random":
        tiling = Tiling.of_segments((63, 111, 70), TILE)
        q, k, v = tensors((4, 2), tiling.n_tokens)
        lists = random_lists(4, tiling)
    else:
        q, k, v, lists = needles()
    rms, row = errors(broken(q, k, v, lists), reference(q, k, v, lists, SCALE)[0])
    assert rms > 0.005 and row > 0.02
