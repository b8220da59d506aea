"""What the study keeps of each layer and head belongs to that layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tamis.engine.llm import LLM
from tamis.eval import research
from tamis.eval.questions import Passage, Question
from tamis.eval.research import Bench, VariantPass, calibrate_on, long_prompt
from tamis.eval.variants import Variant
from tamis.kernels.lists import tile_areas
from tamis.prompt.segments import Prompt
from tamis.select.calibrate import Curves
from tamis.select.rules import Share
from tamis.select.scene import Scene
from tamis.select.variants import RowSampled

HEADS = 4
PARTS = [("prefix", 5), ("document", 40), ("document", 24), ("question", 9)]
SCENE = Scene.of(Prompt.of([(kind, range(n)) for kind, n in PARTS]), [None, None], 16)


class Given:
    """A selector that chooses the masks it was made with, one for each layer."""

    needs_records = False

    def __init__(self, masks: Sequence[torch.Tensor]) -> None:
        self.masks = masks

    def select(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
        """See `Selector.select`."""
        return self.masks[layer]


def test_recall_and_densities_are_those_of_the_layer_and_the_head() -> None:
    draw = torch.Generator().manual_seed(0)
    n, tokens = len(SCENE), SCENE.tiling.n_tokens
    masks = [(torch.rand(HEADS, n, n, generator=draw) < share) & SCENE.causal | SCENE.always for share in (0.1, 0.7)]
    truth = [(torch.rand(HEADS, n, n, generator=draw) * SCENE.causal) for _ in masks]
    truth = [t / t.sum(-1, keepdim=True) for t in truth]
    job = VariantPass(SCENE, Variant("given", Given(masks)), truth)
    for layer in range(2):
        q, k, v = (torch.randn(h, tokens, 16, generator=draw) for h in (HEADS, 2, 2))
        job.attend(layer, q, k, v, 0.25)
    areas, rows = tile_areas(SCENE.tiling, SCENE.tiling).double(), torch.tensor(SCENE.tiling.lengths).double()
    for layer, mask in enumerate(masks):
        wanted = [float((areas * m).sum() / areas.sum()) for m in mask]
        assert job.heads[layer].tolist() == pytest.approx(wanted) and len(set(wanted)) > 1
        assert job.areas[layer] == pytest.approx(sum(wanted) / HEADS)
        kept = ((truth[layer] * mask).sum(-1).double() * rows).sum() / (rows.sum() * HEADS)
        assert float(job.kept[layer]) == pytest.approx(float(kept))


def test_calibration_is_given_the_layers_in_order(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = tuple(Passage(f"Station {i}", f"The crane {i} lifts stores. " * 30) for i in range(3))
    question = Question("q", "What lifts stores?", ("the crane",), docs, (1,))
    given: list[tuple[Any, Any]] = []
    real = Curves.add
    monkeypatch.setattr(Curves, "add", lambda self, s, e, t: (given.append((e, t)), real(self, s, e, t))[1])
    calibrate_on(llm, [question], 0.9)
    alone = Bench.of(llm, long_prompt(llm, [question], 0, None), RowSampled(Share())).dense
    ((estimates, truth),) = given
    assert len(truth) == llm.runner.geometry.n_layers and not torch.allclose(truth[0], truth[1])
    for found, wanted in ((estimates, alone.estimates), (truth, alone.truth)):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_log_s_question_that_is_not_asked_is_left_out(
    llm: LLM, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"case": "c", "question": "old", "variant": "none", **dict.fromkeys(research.METRICS, 0.0)}
    monkeypatch.setattr(research, "_read_log", lambda *_: [line])
    docs = (Passage("Station", "The crane lifts stores. " * 30),)
    question = Question("new", "What lifts stores?", ("the crane",), docs, (0,))
    found = research.research(llm, [question], [], research.Study("c", log=tmp_path / "log"))
    assert found == []
