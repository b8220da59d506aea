"""A prefill in chunks: which chunks a job takes, what it keeps of them, and how a prompt is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tamis.attention.hook import Switch, is_causal
from tamis.attention.planner import chunk_ranges
from tamis.attention.policy import Policy
from tamis.attention.prefill import SparsePrefill
from tamis.attention.report import PrefillReport
from tamis.core.errors import InvalidInput
from tamis.index.encode import Bits
from tamis.kernels.lists import Tiling
from tamis.prompt.segments import Prompt
from tamis.select import SELECTORS
from tamis.select.scene import Scene

TILE = 16
HEADS, KV_HEADS, DIM = 4, 2, 32
LAYOUT = [("prefix", 5), ("document", 60), ("document", 33), ("document", 49), ("question", 20)]
SAME = ("all", "none", "stored", "sampled", "threshold", "oracle", "xattention")
BORDERS: dict[str, Sequence[int]] = {
    "one tile": range(15),
    "three tiles": (0, 3, 6, 9, 12, 14),
    "uneven": (0, 1, 2, 7, 13, 14),
    "whole": (0, 14),
}


def scene_of(records: bool = True) -> Scene:
    prompt = Prompt.of([(kind, range(n)) for kind, n in LAYOUT])
    draw = torch.Generator().manual_seed(3)
    bits: list[Bits | None] = []
    for d in prompt.documents:
        p = -(-len(d.tokens) // TILE)
        la = (torch.rand(2, HEADS, p, p, generator=draw) < 0.4) | torch.eye(p, dtype=torch.bool)
        bits.append(Bits(la.tril(), torch.rand(2, HEADS, p, generator=draw) < 0.4) if records else None)
    return Scene.of(prompt, bits, TILE)


def run(job: SparsePrefill, borders: Sequence[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All chunks of two layers; the outputs of the second."""
    starts = job.scene.tiling.starts
    out = [torch.empty(0)]
    for first, last in pairwise(borders):
        a, b = starts[first], starts[last]
        for layer in (0, 1):
            made, _ = job.attend(layer, q[:, a:b], k[:, :b], v[:, :b], DIM**-0.5)
        out.append(made)
    return torch.cat(out[1:], 1)


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    n = sum(n for _, n in LAYOUT)
    return (
        3 * torch.randn(HEADS, n, DIM, generator=draw),
        torch.randn(KV_HEADS, n, DIM, generator=draw),
        torch.randn(KV_HEADS, n, DIM, generator=draw),
    )


class TestSparsePrefill:
    @pytest.mark.parametrize("cut", BORDERS)
    @pytest.mark.parametrize("name", SAME)
    def test_equal_to_the_whole_prompt(self, name: str, cut: str, tensors: tuple[torch.Tensor, ...]) -> None:
        q, k, v = tensors
        whole, parts = (SparsePrefill(scene_of(), SELECTORS.get(name)(), "cpu", measure_recall=True) for _ in range(2))
        wanted, found = run(whole, BORDERS["whole"], q, k, v), run(parts, BORDERS[cut], q, k, v)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert parts.density == whole.density and parts.densities == whole.densities
        assert parts.recall == pytest.approx(whole.recall, abs=1e-6)
        for layer, trace in parts.layers.items():
            same = whole.layers[layer]
            assert (int(trace.area), trace.causal_area, trace.rows) == (int(same.area), same.causal_area, q.shape[1])
            assert trace.chunks == len(BORDERS[cut]) - 1
            assert trace.select_s > 0 and trace.attend_s > 0

    @pytest.mark.parametrize("name", ["flexprefill", "vertical_slash"])
    def test_the_others_run_too(self, name: str, tensors: tuple[torch.Tensor, ...]) -> None:
        job = SparsePrefill(scene_of(), SELECTORS.get(name)(), "cpu", measure_recall=True)
        assert bool(run(job, BORDERS["three tiles"], *tensors).isfinite().all())
        assert 0 < job.density <= 1 and job.recall is not None and 0 < job.recall <= 1 + 1e-5

    def test_a_forgotten_offset_is_seen(
        self, tensors: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import tamis.attention.prefill as module

        q, k, v = tensors
        wanted = run(SparsePrefill(scene_of(), SELECTORS.get("all")(), "reference"), BORDERS["whole"], q, k, v)
        right = module.lists_from_mask

        def wrong(mask: torch.Tensor, queries: Tiling, keys: Tiling, q_offset: int) -> Any:
            del q_offset
            return right(mask, queries, keys, 0)

        monkeypatch.setattr(module, "lists_from_mask", wrong)
        found = run(SparsePrefill(scene_of(), SELECTORS.get("all")(), "reference"), BORDERS["three tiles"], q, k, v)
        assert not torch.allclose(found, wanted, atol=1e-2)

    def test_a_prompt_anew_counts_anew(self, tensors: tuple[torch.Tensor, ...]) -> None:
        job = SparsePrefill(scene_of(), SELECTORS.get("none")(), "cpu")
        for _ in range(2):
            run(job, BORDERS["three tiles"], *tensors)
            assert job.layers[0].rows == tensors[0].shape[1]

    def test_rows_that_did_not_run_are_dense(self, tensors: tuple[torch.Tensor, ...]) -> None:
        q, k, v = tensors
        whole, part = (SparsePrefill(scene_of(), SELECTORS.get("none")(), "cpu", measure_recall=True) for _ in range(2))
        run(whole, BORDERS["whole"], q, k, v)
        run(part, (0, 3, 6), q, k, v)
        assert whole.density < part.density < 1
        assert whole.recall is not None and part.recall is not None and whole.recall < part.recall < 1

    def test_inside_a_tile(self, tensors: tuple[torch.Tensor, ...]) -> None:
        q, k, v = tensors
        job = SparsePrefill(scene_of(), SELECTORS.get("none")(), "cpu")
        with pytest.raises(InvalidInput, match=r"tokens \[5, 22\) of a prompt of 167; chunks must begin and end on b"):
            job.attend(0, q[:, 5:22], k[:, :22], v[:, :22], 0.2)


class Counting:
    """Counts its calls; attends to the row itself."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        self.calls.append((q.shape[1], k.shape[1]))
        return torch.zeros_like(q), None


def causal(n: int, end: int) -> torch.Tensor:
    return torch.ones(n, end, dtype=torch.bool).tril(end - n)[None, None]


class TestSwitch:
    def takes(self, n: int, end: int, mask: torch.Tensor | None, borders: Sequence[int] = (0, 4, 20, 600)) -> str:
        """The reason for refusal, "" where it takes the chunk."""
        switch = Switch()
        with switch.running(Counting(), 600, borders):
            taken = switch.takes(torch.zeros(1, 4, n, 2), torch.zeros(1, 2, end, 2), mask)
        assert taken is not bool(switch.refused)
        return next(iter(switch.refused), "")

    @pytest.mark.parametrize(("n", "end"), [(4, 4), (16, 20), (20, 20), (580, 600), (596, 600), (600, 600)])
    def test_takes(self, n: int, end: int) -> None:
        assert self.takes(n, end, None if n == end else causal(n, end)) == ""

    @pytest.mark.parametrize(("n", "end"), [(3, 3), (15, 20), (17, 20), (17, 21), (579, 600), (100, 200)])
    def test_a_border_inside_a_tile(self, n: int, end: int) -> None:
        assert "begins or ends inside a tile" in self.takes(n, end, None if n == end else causal(n, end))

    def test_a_chunk_of_one_token_is_no_decoding(self) -> None:
        assert self.takes(1, 1, None, (0, 1, 600)) == ""
        assert self.takes(1, 600, None, (0, 599, 600)) == ""
        switch = Switch()
        with switch.running(Counting(), 600, (0, 600)):
            assert not switch.takes(torch.zeros(1, 4, 1, 2), torch.zeros(1, 2, 601, 2))
        assert not switch.refused

    def test_no_borders_no_chunks(self) -> None:
        assert "rows of a chunk are computed dense" in self.takes(16, 20, causal(16, 20), ())
        assert "20 tokens where the plan has 600" in self.takes(20, 20, None, ())

    def test_masks_that_hide(self) -> None:
        for at in ((3, 0), (15, 19), (0, 5)):  # two tokens that a row should see, one that it should not
            mask = causal(16, 20).clone()
            mask[0, 0, at[0], at[1]] ^= True
            assert "mask hides" in self.takes(16, 20, mask)
        assert "mask hides" in self.takes(20, 20, causal(20, 20) & False)
        assert "room for more" in self.takes(16, 20, None)
        assert "24 tokens where the plan has" not in self.takes(4, 4, None)
        assert "700 tokens where the plan has 600" in self.takes(100, 700, causal(100, 700))
        assert "batch of 2" in self.batch()

    def batch(self) -> str:
        switch = Switch()
        with switch.running(Counting(), 600, (0, 4, 600)):
            switch.takes(torch.zeros(2, 4, 4, 2), torch.zeros(2, 2, 4, 2))
        return next(iter(switch.refused))

    @pytest.mark.parametrize(("n", "end"), [(1, 9), (300, 700), (256, 512), (513, 513)])
    def test_is_causal(self, n: int, end: int) -> None:
        mask = causal(n, end)
        assert is_causal(mask, n, end)
        assert not is_causal(mask.float(), n, end) and not is_causal(mask[:, :, :, 1:], n, end)
        mask[0, 0, n - 1, 0] = False
        assert not is_causal(mask, n, end)


class TestInAModel:
    """transformers' own chunks, cache and masks."""

    @pytest.mark.parametrize("name", ["all", "none", "sampled"])
    def test_logits(self, stock: Any, attach: Callable[[Any], Switch], name: str) -> None:
        ids = torch.randint(0, 512, (1, sum(n for _, n in LAYOUT)), generator=torch.Generator().manual_seed(5))
        switch = attach(stock)
        with torch.inference_mode():
            whole = SparsePrefill(scene_of(False), SELECTORS.get(name)(), "cpu")
            with switch.running(whole, ids.shape[1]):
                wanted = stock(ids).logits
            job, found, cache = SparsePrefill(scene_of(False), SELECTORS.get(name)(), "cpu"), [], None
            starts = job.scene.tiling.starts
            with switch.running(job, ids.shape[1], starts):
                for a, b in ((0, 3), (3, 4), (4, 14)):
                    made = stock(ids[:, starts[a] : starts[b]], cache=cache, use_cache=True)
                    found.append(made.logits)
                    cache = made.cache
        assert not switch.refused
        torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-4, atol=1e-4)
        assert job.density == whole.density and job.layers[0].chunks == 3

    def test_a_border_inside_a_tile_is_dense(self, llama: Any, attach: Callable[[Any], Switch]) -> None:
        ids = torch.randint(0, 512, (1, sum(n for _, n in LAYOUT)), generator=torch.Generator().manual_seed(5))
        with torch.inference_mode():
            wanted = llama(ids).logits[:, 30:]
            switch, job = attach(llama), SparsePrefill(scene_of(False), SELECTORS.get("none")(), "cpu")
            with switch.running(job, ids.shape[1], job.scene.tiling.starts):
                first = llama(ids[:, :30], use_cache=True)
                found = llama(ids[:, 30:], cache=first.cache).logits
        assert not job.layers
        assert list(switch.refused.items()) == [
            ("chunked prefill: a chunk that begins or ends inside a tile is computed dense", 4)
        ]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


class TestRanges:
    def test_by_hand(self) -> None:
        tiling = Tiling.of_segments([5, 40, 3], 16)
        assert tiling.starts == (0, 5, 21, 37, 45, 48)
        assert chunk_ranges(tiling, None) == ((0, 48),)
        assert chunk_ranges(tiling, 1) == ((0, 5), (5, 21), (21, 37), (37, 45), (45, 48))
        assert chunk_ranges(tiling, 16) == ((0, 5), (5, 21), (21, 37), (37, 48))
        assert chunk_ranges(tiling, 20) == ((0, 5), (5, 21), (21, 37), (37, 48))
        assert chunk_ranges(tiling, 24) == ((0, 21), (21, 45), (45, 48))
        assert chunk_ranges(tiling, 48) == chunk_ranges(tiling, 9**9) == ((0, 48),)

    @given(st.lists(st.integers(0, 70), min_size=1, max_size=6), st.integers(1, 200))
    def test_any(self, lengths: list[int], chunk_tokens: int) -> None:
        tiling = Tiling.of_segments(lengths, 16)
        ranges = chunk_ranges(tiling, chunk_tokens)
        assert [a for a, _ in ranges] + [tiling.n_tokens] == [0, *(b for _, b in ranges)]
        for a, b in ranges:
            assert {a, b} <= set(tiling.starts)
            assert 0 < b - a <= max(16, chunk_tokens)

    @pytest.mark.parametrize("chunk_tokens", [0, -5])
    def test_what_is_not_allowed(self, chunk_tokens: int) -> None:
        with pytest.raises(InvalidInput, match=f"chunk_tokens is {chunk_tokens}; give 1 token or more, or None"):
            Policy(chunk_tokens=chunk_tokens)


def test_the_report_says_chunks() -> None:
    made = PrefillReport("sift", "sift", "sampled", "cpu", 500, 2, 450, density=0.5, chunks=3)
    assert "sift prefill of 500 tokens in 3 chunks (2 documents, cpu)" in str(made) and made.to_dict()["chunks"] == 3
    assert "chunk" not in str(PrefillReport("dense", "dense", "", "sdpa", 500, 2, 450))
