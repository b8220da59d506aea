"""Selectors for a GPU: on tensors without data, no operation mixes devices and none waits to read a value back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stage import HEADS, LAYOUTS, Stage

from tamis.select.flexprefill import FlexPrefill
from tamis.select.rules import PerHead, Share, Threshold
from tamis.select.scene import Scene
from tamis.select.variants import RowSampled, mean_correction
from tamis.select.vertical_slash import VerticalSlash
from tamis.select.xattention import XAttention

SELECTORS: dict[str, Any] = {
    "xattention": XAttention(),
    "flexprefill": FlexPrefill(),
    "vertical_slash": VerticalSlash(),
    "sampled": RowSampled(Share()),
    "max": RowSampled(Share(), reduce="max"),
    "ends": RowSampled(Share(), spread="ends"),
    "paired": RowSampled(Share(), paired=True),
    "local": RowSampled(Share(), local="both"),
    "threshold": RowSampled(Threshold()),
    "per head": RowSampled(PerHead(((0.5,) * HEADS,))),
}


@pytest.fixture
def stage() -> Stage:
    """On the device "meta". What a scene looks up once per prompt is looked up beforehand."""
    made = Stage(LAYOUTS["prefix, documents, question"], bits="none")
    real = made.scene
    made.scene = Scene(real.tiling, real.document.to("meta"), real.bits)
    made.scene.__dict__["document_tiles"] = real.document_tiles.to("meta")
    made.scene.__dict__["tiles_of"] = real.tiles_of
    made.q, made.k = made.q.to("meta"), made.k.to("meta")
    return made


@pytest.mark.parametrize("name", SELECTORS)
def test_on_one_device_without_waiting(name: str, stage: Stage) -> None:
    mask = SELECTORS[name].select(0, stage.q, stage.k, stage.scale, stage.scene)
    assert mask.device.type == "meta" and mask.dtype == torch.bool
    assert mask.shape == (HEADS, len(stage.scene), len(stage.scene))


@pytest.mark.parametrize("name", SELECTORS)
def test_a_chunk_on_one_device_without_waiting(name: str, stage: Stage) -> None:
    real = Stage(LAYOUTS["prefix, documents, question"], bits="none").scene.chunk(3, 8)
    view = stage.scene.chunk(3, 8)
    view.__dict__["document_tiles"] = real.document_tiles.to("meta")
    view.__dict__["tiles_of"] = real.tiles_of
    rows = slice(view.q_offset, view.tiling.n_tokens)
    mask = SELECTORS[name].select(0, stage.q[:, rows], stage.k[:, : rows.stop], stage.scale, view)
    assert mask.device.type == "meta" and mask.shape == (HEADS, 5, 8)


def test_mean_correction_on_one_device(stage: Stage) -> None:
    mask, mass = RowSampled(Share()).select_with_mass(0, stage.q, stage.k, stage.scale, stage.scene)
    assert mean_correction(stage.q, mass, mask, stage.k, stage.scene).device.type == "meta"


def test_waiting_and_mixing_are_seen(stage: Stage) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        int(stage.q.argmax())
    with pytest.raises(RuntimeError, match="device"):
        _ = stage.q[0] + torch.zeros(stage.q.shape[1], 1)
