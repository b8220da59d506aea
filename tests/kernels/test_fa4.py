"""flash-attn-4 as a kernel: our lists in its terms on a CPU, what it refuses, and its results on a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from attention_cases import MUTATIONS, Shape, errors, make, mutate, truth, within

from tamis.core.errors import InvalidInput, Unavailable
from tamis.kernels import dispatch
from tamis.kernels.fa4.block_sparse import BlockLists, block_lists, block_sparse_attention
from tamis.kernels.lists import TILE, TileLists, Tiling, lists_from_mask

BF16, FP16 = torch.bfloat16, torch.float16
LENGTHS = {  # query rows, offset, keys
    "whole tiles": (1024, 0, 1024),
    "short last tile": (1000, 0, 1000),
    "last tile of one token": (513, 0, 513),
    "chunk": (512, 256, 768),
    "chunk before the end": (256, 256, 1000),
    "one tile": (100, 0, 100),
}


def random_lists(rows: int, offset: int, keys: int, heads: int = 3) -> tuple[TileLists, torch.Tensor]:
    """Lists of random tiles and the elements [Hq, rows, keys] that they let a query row see."""
    q_cut, k_cut = Tiling.of_segments([rows]), Tiling.of_segments([keys])
    own = torch.arange(len(q_cut))[:, None] + offset // TILE == torch.arange(len(k_cut))
    mask = (torch.rand(heads, *own.shape) < 0.4) | own
    sees = mask.repeat_interleave(TILE, 1)[:, :rows].repeat_interleave(TILE, 2)[..., :keys]
    causal = torch.arange(keys) <= torch.arange(rows)[:, None] + offset
    return lists_from_mask(mask, q_cut, k_cut, offset), sees & causal


def seen(blocks: BlockLists, rows: int, offset: int) -> torch.Tensor:
    """[Hq, rows, offset + rows]: what a kernel that walks the blocks lets every row see."""
    keys = offset + rows
    heads, tiles = blocks.mask_count.shape[1:]
    made = torch.zeros(heads, rows, keys, dtype=torch.bool)
    causal = torch.arange(keys) <= torch.arange(rows)[:, None] + offset
    for h in range(heads):
        for i in range(tiles):
            at = slice(i * TILE, (i + 1) * TILE)
            for b in blocks.mask_index[0, h, i, : blocks.mask_count[0, h, i]].tolist():
                made[h, at, b * TILE : (b + 1) * TILE] |= causal[at, b * TILE : (b + 1) * TILE]
            for b in blocks.full_index[0, h, i, : blocks.full_count[0, h, i]].tolist():
                made[h, at, b * TILE : (b + 1) * TILE] = True
    return made


class TestLists:
    """Conversion of lists, on the device they are on."""

    @pytest.mark.parametrize("name", LENGTHS)
    def test_the_same_elements_are_seen(self, name: str) -> None:
        rows, offset, keys = LENGTHS[name]
        lists, sees = random_lists(rows, offset, keys)
        assert lists.aligned
        blocks = block_lists(lists, offset + rows)
        assert torch.equal(seen(blocks, rows, offset), sees[..., : offset + rows])
        assert not sees[..., offset + rows :].any()

    @pytest.mark.parametrize("name", LENGTHS)
    def test_they_are_what_the_compiled_code_takes(self, name: str) -> None:
        rows, offset, keys = LENGTHS[name]
        blocks = block_lists(random_lists(rows, offset, keys)[0], offset + rows)
        tiles = -(-rows // TILE)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in blocks)
        assert blocks.mask_count.shape == blocks.full_count.shape == (1, 3, tiles)
        assert blocks.mask_index.shape == (1, 3, tiles, 1) and bool((blocks.mask_count == 1).all())
        assert 1 <= blocks.full_index.shape[3] <= -(-(offset + rows) // TILE)

    def test_room_behind_a_list_is_not_read(self) -> None:
        lists, sees = random_lists(1024, 0, 1024)
        room = torch.full((*lists.entries.shape[:2], 20), -1, dtype=torch.int32)
        room[..., : lists.entries.shape[2]] = lists.entries
        room[torch.arange(20) >= lists.count[..., None]] = -1
        blocks = block_lists(replace(lists, entries=room), 1024)
        assert blocks.full_index.shape[3] <= 8
        assert torch.equal(seen(blocks, 1024, 0), sees)

    @pytest.mark.parametrize("mistake", ["diagonal again as a whole block", "one block too few", "starts in tokens"])
    def test_a_wrong_conversion_would_be_noticed(self, mistake: str) -> None:
        lists, sees = random_lists(1024, 0, 1024)
        good = block_lists(lists, 1024)
        planted = {
            "diagonal again as a whole block": good._replace(full_index=(lists.entries >> 15)[None]),
            "one block too few": good._replace(full_count=(good.full_count - 1).clamp(min=0)),
            "starts in tokens": good._replace(full_index=good.full_index * TILE),
        }
        assert not torch.equal(seen(planted[mistake], 1024, 0), sees)

    @pytest.mark.parametrize(
        ("segments", "offset", "aligned"),
        [([1024], 0, True), ([256, 384, 100], 0, True), ([100, 256], 0, False), ([1024], 64, False)],
    )
    def test_alignment_is_known_from_the_cut(self, segments: list[int], offset: int, aligned: bool) -> None:
        keys = Tiling.of_segments(segments)
        queries = keys if not offset else Tiling.of_segments([1024 - offset])
        mask = torch.ones(1, len(queries), len(keys), dtype=torch.bool)
        assert lists_from_mask(mask, queries, keys, offset).aligned is aligned

    def test_lists_of_other_rows_are_refused(self) -> None:
        lists, _ = random_lists(1024, 0, 1024, heads=4)
        q = torch.zeros(4, 700, 64, dtype=BF16)
        with pytest.raises(InvalidInput, match=r"8 query tiles and q has 700 rows, which are 6"):
            block_sparse_attention(q, q, q, lists, 0.1)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if on a Hopper GPU with flash-attn-4, and Triton of a version for which no Gluon kernel is written."""
    monkeypatch.setattr(dispatch, "_capability", lambda: (9, 0))
    monkeypatch.setattr(dispatch, "_version", lambda package: "3.9.0")
    monkeypatch.setattr(dispatch, "_fa4_installed", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


class TestChoice:
    """When it is taken, and what is said when not."""

    def test_it_comes_after_our_own_kernels(self, hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
        assert list(dispatch.available())[-2:] == ["fa4", "reference"]
        assert dispatch.choose(torch.device("cuda"), BF16) == "triton"
        monkeypatch.setattr(dispatch, "_version", lambda package: None)
        assert dispatch.choose(torch.device("cuda"), BF16) == "fa4"

    def test_lists_that_are_not_aligned_fall_to_the_next(self, hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatch, "_version", lambda package: None)
        case = dispatch.Case(torch.device("cuda"), BF16, 128, TILE, aligned=False)
        assert dispatch._choose(case) == "reference"
        with pytest.raises(Unavailable, match="multiple of 128 tokens; pad documents"):
            dispatch._named("fa4", case)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"device": torch.device("cpu")}, "on cpu"),
            ({"dtype": torch.float32}, "bfloat16 or float16"),
            ({"head_dim": 192}, "up to 128"),
            ({"tile": 64}, "must be 128"),
            ({"steps_of_16": False}, "16 bytes"),
        ],
    )
    def test_what_it_does_not_take(self, hopper: None, change: dict[str, object], reason: str) -> None:
        case = dispatch.Case(torch.device("cuda"), BF16, 128, TILE)
        assert dispatch._named("fa4", case) == "fa4"
        with pytest.raises(Unavailable, match=reason):
            dispatch._named("fa4", replace(case, **change))

    @pytest.mark.parametrize(
        ("capability", "installed", "reason"),
        [
            (None, True, "no NVIDIA GPU"),
            ((8, 0), True, "sm_80"),
            ((10, 0), True, "sm_90 only"),
            ((9, 0), False, r"tamis\[fa4\]"),
        ],
    )
    def test_why_it_cannot_run(self, hopper, monkeypatch, capability, installed, reason) -> None:  # type: ignore[no-untyped-def]
        monkeypatch.setattr(dispatch, "_capability", lambda: capability)
        monkeypatch.setattr(dispatch, "_fa4_installed", lambda: installed)
        with pytest.raises(Unavailable, match=reason):
            dispatch._named("fa4", dispatch.Case(torch.device("cuda"), BF16, 128, TILE))

    def test_looking_for_it_imports_nothing(self, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
        look = dispatch._fa4_installed.__wrapped__
        package = tmp_path / "flash_attn"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
        assert look() is False
        (package / "cute").mkdir()
        (package / "cute" / "__init__.py").write_text("raise RuntimeError('imported')")
        monkeypatch.syspath_prepend(tmp_path)  # forgets what the finders remember of the folders
        assert look() is True and "flash_attn" not in sys.modules


SHAPES = {
    "many tiles": Shape((4096,), (32, 8), 128, BF16),
    "aligned documents, short last tile, needle": Shape((384, 640, 777), (8, 2), 128, BF16, needle=True),
    "d64, 14/2 heads": Shape((2048,), (14, 2), 64, BF16),
    "d64, fp16, token-major": Shape((1000,), (4, 1), 64, FP16, token_major=True),
    "d96": Shape((1024, 511), (6, 3), 96, BF16),
    "chunk of a prompt": Shape((1500,), (4, 2), 128, BF16, offset=512, needle=True),
    "own tiles only": Shape((1920, 77), (8, 2), 128, BF16, share=0.0),
    "one tile": Shape((77,), (4, 2), 128, BF16),
}


@pytest.mark.gpu
class TestGpu:
    """The kernel itself."""

    @pytest.fixture(autouse=True)
    def _runs_here(self) -> None:
        if (reason := dispatch.available()["fa4"]) is not None:
            pytest.skip(f"fa4: {reason}")

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_agrees_with_the_reference(self, shape: Shape) -> None:
        q, k, v, lists = make(shape, "cuda")
        made = dispatch.block_sparse_attention(q, k, v, lists, shape.scale, kernel="fa4")
        found = errors(made, truth(q, k, v, lists, shape.scale))
        assert within(found, shape.dtype), found

    @pytest.mark.parametrize("kind", MUTATIONS)
    def test_a_broken_kernel_would_be_noticed(self, kind: str) -> None:
        shape = SHAPES["aligned documents, short last tile, needle"]
        q, k, v, lists = make(shape, "cuda")
        made = dispatch.block_sparse_attention(*mutate(kind, q, k, v, lists), shape.scale, kernel="fa4")
        assert not within(errors(made, truth(q, k, v, lists, shape.scale)), BF16)

    def test_writes_into_out_and_nothing_else(self) -> None:
        shape = SHAPES["d64, 14/2 heads"]
        q, k, v, lists = make(shape, "cuda")
        room = torch.full((q.shape[1] + 9, q.shape[0], q.shape[2]), 7.0, dtype=BF16, device="cuda")
        out = room.transpose(0, 1)[:, : q.shape[1]]
        made = dispatch.block_sparse_attention(q, k, v, lists, shape.scale, kernel="fa4", out=out)
        assert made[0] is out
        assert within(errors(made, truth(q, k, v, lists, shape.scale)), BF16)
        assert bool((room[q.shape[1] :] == 7).all())
