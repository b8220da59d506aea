"""The study of the self-indexing form: its rows, its order, and that it records what the model computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tamis.attention.hook import install
from tamis.core.errors import InvalidInput
from tamis.eval.selfindex_study import Protocol, Recorded, document_study, lines, record, spread_layers, study
from tamis.model.rope import Rotary


@pytest.fixture(scope="module")
def recorded(tiny_model: Callable[..., Any]) -> dict[int, Recorded]:
    model = tiny_model("qwen2")
    switch, undo = install(model)
    try:
        return record(model, switch, torch.randint(0, 512, (700,)).tolist(), spread_layers(2))
    finally:
        undo()


def test_record(recorded: dict[int, Recorded]) -> None:
    assert sorted(recorded) == [0, 1] and spread_layers(28) == (0, 4, 9, 14, 18, 22, 27)
    layer = recorded[1]
    assert layer.q.shape == (4, 128, 64) and layer.keys.shape == layer.values.shape == (2, 700, 64)


def test_rows(recorded: dict[int, Recorded]) -> None:
    rows = study(list(recorded.values()))
    find = {r.variant: r for r in rows if r.table == "find"}
    exact, ours = find["exact"], find["refined, weighed, balanced (selfindex)"]
    assert exact.overlap == 1 and all(r.mass <= exact.mass + 1e-6 for r in find.values())
    assert ours.overlap > find["signs (the paper)"].overlap > find["quest, page 16"].overlap
    assert ours.bytes == find["signs (the paper)"].bytes < find["quest, page 16"].bytes
    lose = {r.variant: r for r in rows if r.table == "lose"}
    assert lose["scales of 32 channels"].bytes == 44
    assert lose["sign and magnitude, 32 channels, zero"].bytes == 56
    assert lose["scales of 32 channels"].error < lose["sign and magnitude, 32 channels, zero"].error
    assert all(math.isfinite(r.error) and r.error > 0 for r in lose.values())
    assert len(list(lines(rows))) == len(rows)


def test_documents(tiny_model: Callable[..., Any]) -> None:
    model, starts = tiny_model("llama"), [10, 260, 510, 660]
    switch, undo = install(model)
    segment = torch.bucketize(torch.arange(700), torch.tensor(starts), right=True)
    mask = torch.ones(700, 700).tril().bool() & ((segment[:, None] == segment) | (segment == 4)[:, None])
    try:
        kept = record(model, switch, torch.randint(0, 512, (700,)).tolist(), (0, 1), mask=mask)
    finally:
        undo()
    rows = {r.variant: r for r in document_study(list(kept.values()), starts, Rotary.of(model))}
    own = rows["own tables (selfindex)"]
    assert rows["exact"].overlap == 1 and own.overlap > rows["own tables, query not turned"].overlap + 0.1
    assert own.mass >= rows["own tables, first token not kept"].mass


def test_too_short() -> None:
    layer = Recorded(torch.randn(2, 8, 64), torch.randn(2, 100, 64), torch.randn(2, 100, 64), 0.125)
    with pytest.raises(InvalidInput, match="100 tokens and 8 recorded rows"):
        study([layer], Protocol())
