"""Names of prefills, which variants and questions are compared, and what comes out for stored documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.core.errors import InvalidInput
from tamis.engine.llm import LLM
from tamis.eval.answers import eval_answers
from tamis.eval.prefills import PrefillVariant, variant_names
from tamis.eval.questions import load_questions
from tamis.eval.reuse import curve, reuse_tasks, variants_of
from tamis.eval.tasks import qa_task
from tamis.model.adapter_info import AdapterInfo
from tamis.model.source import LoadedModel
from tiny_chat import tiny_tokenizer


def test_names_of_prefills() -> None:
    parse = PrefillVariant.parse
    assert parse("dense").choices == {"prefill": "dense"}
    assert parse("sift").choices == {"prefill": "sift", "min_tokens": 0}
    assert parse("stored").choices == {"prefill": "sift", "selector": "stored", "min_tokens": 0}
    blend = parse("adapted/blend:recompute=0.1,blend=cacheblend")
    assert blend.adapted and blend.choices["recompute"] == 0.1 and blend.choices["blend"] == "cacheblend"
    assert parse("reuse:reuse_copies=true").choices["reuse_copies"] is True
    assert parse("sampled:chunk_tokens=256,rows=4").choices["chunk_tokens"] == 256
    listed = "dense, blend:recompute=0.1,blend=cacheblend,reuse,,sampled:rows=4"
    assert variant_names(listed) == ["dense", "blend:recompute=0.1,blend=cacheblend", "reuse", "sampled:rows=4"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("stord", "Did you mean 'stored'"),
        ("blend:recomputed=0.1", "Did you mean 'recompute'"),
        ("blend:recompute=2", "recompute is 2.0"),
        ("blend:recompute=much", "kind float"),
        ("blend:blend=cacheblnd", "Did you mean 'cacheblend'"),
        ("blend:recompute", "not an option=value"),
        ("blend:recompute=0.1,recompute=0.2", "of its own"),
        ("reuse:reuse_copies=maybe", "kind bool"),
        ("sampled:rows=x", "kind int"),
    ],
)
def test_a_wrong_name_is_explained(name: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        PrefillVariant.parse(name)


def test_variants_cover_both_rules_at_every_share() -> None:
    names = variants_of([0.1, 0.3], adapter=True)
    for name in names:
        PrefillVariant.parse(name)
    assert names[:3] == ["dense", "reuse", "reuse:reuse_copies=true"] and names[-2:] == [
        "adapted/dense",
        "adapted/reuse",
    ]
    for rule in ("attention", "bits_attention", "cacheblend"):
        assert [f"blend:recompute={s},blend={rule}" in names for s in (0.1, 0.3)] == [True, True]
    assert not [n for n in variants_of([0.1], rules=["cacheblend"]) if n.startswith(("adapted", "blend=attention"))]
    with pytest.raises(InvalidInput, match="recompute is 3"):
        variants_of([3])


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.jsonl"
    docs = [{"title": f"Station {i}", "text": f"The crane {i} lifts stores. " * 10} for i in range(3)]
    lines = [
        {"id": f"q{i}", "question": f"Where is crane {i}?", "answers": ["station"], "docs": docs} for i in range(12)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_questions_that_the_adapter_may_have_seen_are_left_out(questions: Path) -> None:
    info = AdapterInfo("block", {}, "tiny", 1, ("tiny",), 0.4)
    tasks, left_out = reuse_tasks([questions], info=info)
    kept = [q for q in load_questions(questions) if not info.has_seen(q.question)]
    assert 0 < left_out < 12 and [tasks[0].make(i).id for i in range(tasks[0].size)] == [q.id for q in kept]
    assert reuse_tasks([questions])[1] == 0
    with pytest.raises(InvalidInput, match="larger holdout"):
        reuse_tasks([questions], info=AdapterInfo("block", {}, "tiny", 1, ("tiny",), 0.0))


@pytest.fixture
def adapted(tiny_model: Callable[..., Any]) -> Iterator[LLM]:
    """Stands for the model with an adapter: its weights are a little different, and it is said to be tuned."""
    model = tiny_model("llama", max_position_embeddings=1500)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.05)
    with LLM(LoadedModel(model, tiny_tokenizer(), "tiny+a", "", block_tuned=True)) as llm:
        yield llm


def test_stored_documents_side_by_side(llm: LLM, adapted: LLM, questions: Path) -> None:
    tasks = [qa_task("tiny", load_questions(questions), 2)]
    names = variants_of([0.2, 1.0], adapter=True, rules=["cacheblend"])
    found = eval_answers(llm, tasks, names, answer_tokens=2, adapted=adapted)
    assert found.variants == tuple(names) and len(found.outcomes) == 2 * len(names)
    of = {(o.id, o.variant): o for o in found.outcomes}
    for i in ("q0", "q1"):
        plain, copied = of[i, "reuse"], of[i, "reuse:reuse_copies=true"]
        assert plain.recomputed == 0 and plain.kl > 0 and plain.kl_own is None
        assert copied.kl == pytest.approx(plain.kl, rel=1e-2, abs=1e-6), "copies are the same answers for more memory"
        some = of[i, "blend:recompute=0.2,blend=cacheblend"].recomputed
        assert some is not None and 0.2 <= some < 1
        everything = of[i, "blend:recompute=1,blend=cacheblend"]
        assert everything.recomputed == pytest.approx(1.0) and everything.kl < 1e-6
        dense, tuned = of[i, "adapted/dense"], of[i, "adapted/reuse"]
        assert dense.kl_own == 0.0 and dense.kl > 0 and dense.recomputed is None
        assert tuned.kl_own is not None and tuned.kl_own > 0 and tuned.kl_own != tuned.kl
    points = curve(found, "qa/tiny")["cacheblend"]
    assert [p["asked"] for p in points] == [0.2, 1.0] and points[0]["kl"] > points[1]["kl"] and points[0]["n"] == 2
    summary = found.summary()["qa/tiny"]
    assert "recomputed" not in summary["dense"] and "difference" not in summary["reuse"]["recomputed"]
    assert {unit for *_, metric, _, unit in found.rows() if metric.startswith("kl")} == {"nat"}
    assert json.dumps(summary)


def test_an_adapted_variant_needs_an_adapter(llm: LLM, questions: Path) -> None:
    with pytest.raises(InvalidInput, match="need an adapter"):
        eval_answers(llm, [qa_task("tiny", load_questions(questions))], ["adapted/reuse"])
