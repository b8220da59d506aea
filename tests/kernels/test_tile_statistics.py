"""Tile statistics and paged keys against the whole score matrix."""

from __future__ import annotations

import pytest
import torch
from test_reference_cpu import HEADS, SCALE, SEGMENTS, TILE, tensors, tile_numbers

from tamis.kernels.cpu.dense import causal_attention
from tamis.kernels.lists import Tiling
from tamis.kernels.reference.tile_statistics import PagedKeys, tile_statistics


class TestTileStatistics:
    @pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
    @pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
    def test_against_the_whole_matrix(self, segments: tuple[int, ...], heads: tuple[int, int]) -> None:
        tiling, beta = Tiling.of_segments(segments, TILE), 0.02
        q, k, v = tensors(heads, tiling.n_tokens)
        _, lse = causal_attention(q, k, v, SCALE)
        got = tile_statistics(q, k, lse, tiling, tiling, scale=SCALE, beta=beta)
        p = probabilities(q, k)
        of = tile_numbers(tiling)
        for i in range(len(tiling)):
            for j in range(len(tiling)):
                part = p[:, of == i][:, :, of == j]
                torch.testing.assert_close(got.peak[:, i, j], part.amax((1, 2)), rtol=1e-4, atol=1e-6)
                torch.testing.assert_close(got.mass[:, i, j], part.sum(2).mean(1), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(got.mass.sum(-1), torch.ones(heads[0], len(tiling)))
        high = (p > beta) & (of[:, None] != of[None, :])
        close = ((p - beta).abs() < 1e-6).any(1)  # rounding may decide these either way
        assert got.later_high is not None
        assert torch.equal(got.later_high[~close], high.sum(1, dtype=torch.int32)[~close])

    def test_own_tile_does_not_count_as_later(self) -> None:
        tiling = Tiling.of_segments((TILE,), TILE)
        q, k, v = tensors((2, 2), TILE)
        got = tile_statistics(q, k, causal_attention(q, k, v, SCALE)[1], tiling, tiling, scale=SCALE, beta=0.0)
        assert got.later_high is not None and not got.later_high.any()

    def test_rows_of_a_chunk(self) -> None:
        keys = Tiling.of_segments((40, 111, 80), TILE)
        q, k, v = tensors((4, 2), keys.n_tokens)
        _, lse = causal_attention(q, k, v, SCALE)
        whole = tile_statistics(q, k, lse, keys, keys, scale=SCALE)
        at = keys.starts[3]
        rows = Tiling(tuple(s - at for s in keys.starts[3:]), TILE)
        got = tile_statistics(q[:, at:], k, lse[:, at:], rows, keys, scale=SCALE, q_offset=at)
        torch.testing.assert_close(got.mass, whole.mass[:, 3:])
        torch.testing.assert_close(got.peak, whole.peak[:, 3:])
        assert got.later_high is None


class TestPagedKeys:
    tiling = Tiling.of_segments((5, 40, 33), TILE)

    def test_scores_are_those_of_the_matrix_and_no_others(self) -> None:
        q, k, _ = tensors((4, 2), self.tiling.n_tokens)
        paged = PagedKeys(k, self.tiling)
        position = torch.tensor([3, 4, 20, 44, 60])
        got = paged.scores(q[2:4, position], 1, position, SCALE)
        assert got.shape == (2, 5, 4, TILE)
        wanted = torch.full_like(got, float("-inf"))
        for r, p in enumerate(position.tolist()):
            for key in range(p + 1):
                tile = max(i for i, s in enumerate(self.tiling.starts[:-1]) if s <= key)
                wanted[:, r, tile, key - self.tiling.starts[tile]] = q[2:4, p] @ k[1, key] * SCALE
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)

    def test_tile_of_every_position(self) -> None:
        paged = PagedKeys(torch.zeros(1, self.tiling.n_tokens, 64), self.tiling)
        assert torch.equal(paged.tile_of(torch.arange(self.tiling.n_tokens)), tile_numbers(self.tiling))

    def test_unpaged_puts_every_key_back(self) -> None:
        n = self.tiling.n_tokens
        paged = PagedKeys(torch.zeros(1, n, 64), self.tiling)
        tokens = torch.arange(1, n + 1)
        pages = torch.where(paged.index >= 0, tokens[paged.index.clamp(min=0)], -7)
        assert torch.equal(paged.unpaged(pages[None], n)[0], tokens)
        some = paged.unpaged(pages[None, :2], n)[0]
        assert torch.equal(some[: self.tiling.starts[2]], tokens[: self.tiling.starts[2]])
        assert not some[self.tiling.starts[2] :].any()


def probabilities(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = q.double() @ k.double().repeat_interleave(q.shape[0] // k.shape[0], 0).mT * SCALE
    above = torch.ones(scores.shape[-2:]).triu(1).bool()
    return scores.masked_fill(above, float("-inf")).softmax(-1).float()
