"""Prepared lists in chunks: together as dense as one chunk of them, and put in the place of what was chosen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tamis.attention.prefill import SparsePrefill
from tamis.bench.densities import Recorded, save
from tamis.bench.vllm_replay import Areas, lists_of_chunk, replay_densities
from tamis.core.errors import NothingFound
from tamis.kernels.lists import counted
from tamis.prompt.segments import Prompt
from tamis.select.every import AllTiles
from tamis.select.scene import Scene, window_of

TOKENS, HEADS = 2048, 8


def scene() -> Scene:
    parts = [("document", list(range(512))) for _ in range(4)]
    prompt = Prompt.of([*parts, ("question", [1])])
    return Scene.of(prompt, [None] * 4, 64, torch.device("cpu"))


@pytest.mark.parametrize("chunk", [TOKENS + 1, 512, 1024])
def test_chunks_together_have_the_density_asked_for(chunk: int) -> None:
    whole, draw = scene(), torch.Generator().manual_seed(0)
    density = torch.linspace(0.3, 0.9, HEADS)
    area = causal = 0
    for end in [*range(chunk, TOKENS + 1, chunk), TOKENS + 1]:
        start = (end - 1) // chunk * chunk if end > TOKENS else end - chunk
        if start == end:
            continue
        lists = lists_of_chunk(window_of(whole, end - start, end), Areas.of(whole).share(density), draw)
        area, causal = area + counted(lists.area), causal + lists.causal_area
    assert causal == HEADS * (TOKENS + 1) * (TOKENS + 2) // 2
    assert area / causal == pytest.approx(float(density.mean()), abs=0.02)


def test_the_selector_works_and_its_lists_make_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparsePrefill, "lists", SparsePrefill.lists)
    path = tmp_path / "densities.json"
    save([Recorded("m", "d", "all-of-it", TOKENS, 1, 0.0, 1.0, ((0.4, 0.4), (0.6, 0.6)))], path)
    assert json.loads(path.read_text())
    with pytest.raises(NothingFound):
        replay_densities(str(path), "another", 2)
    replay_densities(str(path), "all-of-it", 2)
    job = SparsePrefill(scene(), AllTiles())
    k = torch.randn(1, TOKENS + 1, 16)
    first = job.lists(0, torch.randn(2, TOKENS + 1, 16), k, 1.0)
    assert first.density == pytest.approx(0.4, abs=0.05)
    assert job.lists(1, torch.randn(2, TOKENS + 1, 16), k, 1.0).density == pytest.approx(0.6, abs=0.05)
    assert SparsePrefill(scene(), AllTiles()).lists(0, torch.randn(2, TOKENS + 1, 16), k, 1.0) is first
