"""The mask is encoding alone; training lowers the divergence; a killed run goes on as if it had not been; the split."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.core.errors import Diverged, InvalidInput, ModelNotFound, StoreDamaged, StoreMismatch
from tamis.engine.template import Template
from tamis.model.adapter import FILE, with_adapter
from tamis.model.adapter_info import AdapterInfo, base_of, held_out
from tamis.model.source import LoadedModel
from tamis.train.block_adapter import TrainingData, train_block_adapter
from tamis.train.layouts import Example, Layouts, block_mask
from tamis.train.losses import HIDDEN, compare, student_logits, teacher_logits
from tamis.train.settings import TrainSettings
from tamis.train.state import FILE as STATE_FILE
from tiny_chat import tiny_tokenizer

pytest.importorskip("peft")

SETTINGS = TrainSettings(
    steps=6, tokens=1200, documents=(2, 4), accumulate=2, rank=4, alpha=8, lr=2e-3, save_every=2, answers="both"
)


def example(number: int) -> Example:
    docs = tuple((f"Station {i}", f"The crane {number * i} lifts stores from boat {i}. " * 4) for i in range(4))
    return Example(f"Where is crane {number}?", (f"boat {number}",), docs, (number % 4,))


DATA = TrainingData([example(i) for i in range(4)], [example(9)], ("tiny",), 0.25)


@pytest.fixture
def fresh(tiny_model: Callable[..., Any]) -> LoadedModel:
    """A tiny model that is sure of what it says: with the initial head all tokens are about as likely."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    return LoadedModel(model, tiny_tokenizer(), "tiny", "")


def layout_of(loaded: LoadedModel, number: int = 0) -> Any:
    layouts = Layouts(Template(loaded.tokenizer), DATA.examples, tokens=1200, documents=(2, 4))
    chosen, chance = layouts.draw(number)
    return layouts.make(chosen, chance, "boat 1")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_mask_is_encoding_alone(tiny_model: Callable[..., Any], family: str) -> None:
    """In place behind a prefix and other documents, a document's rows are those of the document from position 0."""
    model = tiny_model(family)
    ids = torch.randint(0, 512, (1, 300))
    spans = [(20, 110), (110, 260)]
    mask = block_mask(300, spans, ids.device)
    with torch.no_grad():
        placed = model.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
        full = model.model(ids, use_cache=False).last_hidden_state
        for begin, end in spans:
            alone = model.model(ids[:, begin:end], use_cache=False).last_hidden_state
            assert (placed[:, begin:end] - alone).abs().max() < 2e-4 * alone.abs().max()
            assert (full[:, begin:end] - alone).abs().max() > 1e-2 * alone.abs().max(), "else it would prove nothing"
    assert torch.equal(placed[:, :20], full[:, :20]) or torch.allclose(placed[:, :20], full[:, :20], atol=1e-4)


def test_rows_behind_the_documents_see_all() -> None:
    mask = block_mask(9, [(2, 4), (4, 7)], torch.device("cpu"))[0, 0]
    assert mask[8].all() and mask[7].tolist() == [True] * 8 + [False]
    assert mask[3].tolist() == [False] * 2 + [True] * 2 + [False] * 5
    assert mask[4].nonzero().flatten().tolist() == [4] and mask[1].tolist() == [True] * 2 + [False] * 7


def test_layouts_depend_on_seed_and_step_alone(fresh: LoadedModel) -> None:
    one, other = layout_of(fresh, 3), layout_of(fresh, 3)
    assert one == other and one != layout_of(fresh, 4)
    assert 2 <= len(one.prompt.documents) <= 4 and len(one.tokens) <= 1200
    layouts = Layouts(Template(fresh.tokenizer), DATA.examples, tokens=1200, documents=(2, 4))
    for epoch in range(2):
        assert sorted(layouts.draw(epoch * 4 + i)[0] for i in range(4)) == [0, 1, 2, 3]
    assert one.answer[-1] == fresh.tokenizer.eos_token_id and one.rows == one.question_rows + len(one.answer)


def test_long_documents_are_cut_and_too_little_room_is_an_error(fresh: LoadedModel) -> None:
    template = Template(fresh.tokenizer)
    fixed = len(template.prompt(DATA.examples[0].question, []).tokens) + 20
    layouts = Layouts(template, DATA.examples, tokens=fixed + 150, documents=(3, 3))
    made = layouts.make(0, layouts.draw(0)[1], "boat 1")
    assert len(made.tokens) <= fixed + 150 and max(len(d.tokens) for d in made.prompt.documents) <= 55
    with pytest.raises(InvalidInput, match=r"give \d+ or more"):
        Layouts(template, DATA.examples, tokens=100).make(0, layouts.draw(0)[1], "boat 1")


def test_divergence_is_zero_where_student_and_teacher_are_one(fresh: LoadedModel) -> None:
    layout = layout_of(fresh)
    logits = torch.randn(layout.rows, 512)
    found = compare(logits, logits, layout)
    assert float(found.answer) == float(found.first) == 0.0 and found.agreement
    other = logits.clone()
    other[layout.question_rows] += torch.arange(512) * 0.01
    moved = compare(logits, other, layout)
    assert float(moved.first) > 0 and float(moved.rows[0]) == 0
    expected = torch.nn.functional.kl_div(
        other[layout.question_rows].log_softmax(-1), logits[layout.question_rows].softmax(-1), reduction="sum"
    )
    assert torch.allclose(moved.first, expected, rtol=1e-4)
    assert float(moved.loss(1.0, 0.0)) == pytest.approx(float(moved.answer)), "the question's rows are the same"


def test_thirty_steps_lower_the_divergence(fresh: LoadedModel, tmp_path: Path) -> None:
    asked = Example(
        "Where is crane 1?", ("boat 1",), example(1).documents[:2], (0, 1)
    )  # two orders, nothing else drawn
    one = TrainingData([asked], [asked], ("tiny",), 0.0)
    before = {name: p.clone() for name, p in fresh.model.named_parameters()}
    settings = replace(SETTINGS, steps=30, documents=(2, 2), lr=1e-2, answers="gold")
    made = train_block_adapter(fresh, one, settings, tmp_path / "a")
    result = made.info.result
    assert result["after"]["kl"] < 0.7 * result["before"]["kl"], result
    assert result["after"]["kl_answer"] < 0.7 * result["before"]["kl_answer"], result
    assert made.info.steps == 30 and len(made.history) == 30 and not made.out_of_time
    after = dict(fresh.model.named_parameters())
    assert list(after) == list(before) and all(torch.equal(after[n], p) for n, p in before.items())
    assert all(p.requires_grad for p in after.values()) and not hasattr(fresh.model, "peft_config")
    names = {p.name for p in (tmp_path / "a").iterdir()}
    assert {FILE, "adapter_model.safetensors", "adapter_config.json", "loss.csv"} <= names
    assert not names & {STATE_FILE, "teacher_answers.json"} and not [n for n in names if n.startswith(".")]


class Killed(Exception):
    """Stands for the end of a process."""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_a_killed_run_goes_on_as_if_it_had_not_been(
    fresh: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_block_adapter(fresh, DATA, SETTINGS, tmp_path / "whole")

    def kill(done: int, total: int, what: str) -> None:
        if done == 5:
            monkeypatch.setattr("tamis.train.block_adapter.save_state", lambda *a: None)  # nothing runs after a kill
            raise Killed

    with pytest.raises(Killed):
        train_block_adapter(fresh, DATA, SETTINGS, tmp_path / "cut", note=kill)
    assert not hasattr(fresh.model, "peft_config") and not (tmp_path / "cut" / FILE).exists()
    monkeypatch.undo()
    steps: list[int] = []
    again = train_block_adapter(fresh, DATA, SETTINGS, tmp_path / "cut", note=lambda d, t, w: steps.append(d))
    assert steps == [5, 6, 6], "from step 4, the last one saved"
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert expected.keys() == found.keys() and all(torch.equal(found[n], t) for n, t in expected.items())
    assert [p.kl for p in again.history] == [p.kl for p in whole.history]
    assert again.info.result["before"] == whole.info.result["before"]
    finished = train_block_adapter(fresh, DATA, SETTINGS, tmp_path / "cut")
    assert finished.info == again.info and not finished.history


def test_half_precision_and_recomputed_activations(fresh: LoadedModel, tmp_path: Path) -> None:
    fresh.model.to(torch.bfloat16)
    made = train_block_adapter(fresh, DATA, replace(SETTINGS, steps=2, checkpointing=True, targets="all"), tmp_path)
    found = weights(tmp_path)
    assert {t.dtype for t in found.values()} == {torch.float32}, "the adapter learns in full precision"
    moved = {n for n, t in found.items() if "lora_B" in n and bool(t.abs().max() > 0)}
    assert len(moved) == 2 * 7 and all(p.kl < 10 for p in made.history)
    assert not fresh.model.is_gradient_checkpointing
    with pytest.raises(InvalidInput, match="bfloat16 or float32"):
        fresh.model.to(torch.float16)
        train_block_adapter(fresh, DATA, SETTINGS, tmp_path / "b")


def test_another_run_in_the_folder_is_not_taken_over(fresh: LoadedModel, tmp_path: Path) -> None:
    def kill(done: int, total: int, what: str) -> None:
        if done == 1:
            raise Killed

    with pytest.raises(Killed):
        train_block_adapter(fresh, DATA, SETTINGS, tmp_path, note=kill)
    with pytest.raises(StoreMismatch, match="another --out"):
        train_block_adapter(fresh, DATA, replace(SETTINGS, lr=1e-4), tmp_path)
    (tmp_path / STATE_FILE).write_bytes(b"\0" * 30)
    with pytest.raises(StoreDamaged, match="Remove it"):
        train_block_adapter(fresh, DATA, SETTINGS, tmp_path)


def test_it_stops_in_time(fresh: LoadedModel, tmp_path: Path) -> None:
    made = train_block_adapter(fresh, DATA, replace(SETTINGS, steps=100_000), tmp_path, minutes=0.12)
    assert made.out_of_time and 0 < made.info.steps < 100_000 and made.info.result["seconds"] < 8
    assert made.history[-1].lr < made.history[len(made.history) // 2].lr, "the rate falls with the time"
    assert AdapterInfo.read(tmp_path) == made.info


def test_merged_it_is_the_trained_student(fresh: LoadedModel, tmp_path: Path) -> None:
    made = train_block_adapter(fresh, DATA, replace(SETTINGS, answers="gold"), tmp_path)
    layout = Layouts(Template(fresh.tokenizer), DATA.checks, tokens=1200, documents=(2, 4))
    asked = layout.make(0, random.Random("check:0"), DATA.checks[0].answers[0])
    with torch.no_grad():
        truth = teacher_logits(fresh.model, asked, nullcontext())
        stock = compare(truth, student_logits(fresh.model, asked), asked)
        merged = with_adapter(fresh.model, fresh.tokenizer, tmp_path)
        tuned = compare(truth, student_logits(merged, asked), asked)
    assert float(stock.first) == pytest.approx(made.info.result["before"]["kl"], rel=1e-3)
    assert float(tuned.first) == pytest.approx(made.info.result["after"]["kl"], rel=1e-3)
    assert AdapterInfo.read(tmp_path) == made.info and float(stock.first) != float(tuned.first)
    with pytest.raises(StoreMismatch, match="weights"):  # merged, it is another model
        made.info.check(merged, fresh.tokenizer)


def test_an_adapter_of_another_model_is_refused(
    fresh: LoadedModel, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    info = AdapterInfo("block", base_of(fresh.model, fresh.tokenizer), "tiny", 3, ("a",), 0.25)
    info.write(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [FILE]
    found = AdapterInfo.read(tmp_path)
    found.check(fresh.model, fresh.tokenizer)
    with pytest.raises(StoreMismatch, match="weights_bfloat16 of this model differ"):
        found.check(tiny_model("llama", seed=2), fresh.tokenizer)
    with pytest.raises(StoreMismatch, match="architecture, "):
        found.check(tiny_model("qwen3"), fresh.tokenizer)
    found.check(fresh.model.to(torch.bfloat16), fresh.tokenizer)
    with pytest.raises(StoreMismatch):
        with_adapter(tiny_model("llama", seed=2), fresh.tokenizer, tmp_path)
    with pytest.raises(ModelNotFound, match="tamis train block-adapter"):
        AdapterInfo.read(tmp_path / "none")
    (tmp_path / FILE).write_text(json.dumps({"kind": "block", "base": {"weights": "1"}}))
    with pytest.raises(InvalidInput, match="format"):
        AdapterInfo.read(tmp_path)


def test_the_split_goes_by_the_words_of_a_question() -> None:
    asked = [f"Who built the station number {i}?" for i in range(2000)]
    kept = [held_out(q, 0.25) for q in asked]
    assert 0.2 < sum(kept) / len(kept) < 0.3
    assert [held_out(q.upper().replace("?", " ??"), 0.25) for q in asked] == kept
    assert all(held_out(q, 0.5) for q, k in zip(asked, kept, strict=True) if k), "a larger share keeps the same ones"
    assert not any(held_out(q, 0) for q in asked) and all(held_out(q, 1) for q in asked)
    info = AdapterInfo("block", {}, "tiny", 1, (), 0.25)
    assert [info.has_seen(q) for q in asked] == [not k for k in kept]
    with pytest.raises(InvalidInput, match="share"):
        held_out("x", 1.5)


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"lr": 0.0}, {"ce": -1.0}, {"targets": "none"}, {"answers": "mine"}, {"rank": 0}]
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        replace(SETTINGS, **wrong)


def test_the_rate_rises_and_falls() -> None:
    rates = [SETTINGS.rate(i / 100) for i in range(101)]
    top = rates.index(max(rates))
    assert 0 < rates[0] < rates[1] and 3 <= top <= 6 and rates[top:] == sorted(rates[top:], reverse=True)
    assert max(rates) <= SETTINGS.lr and rates[-1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hidden_keys_stay_finite_and_get_nothing(dtype: torch.dtype) -> None:
    """Fused kernels add the mask to scores times log2(e): the dtype's least would be -inf there, and NaN backwards."""
    hidden = torch.tensor(HIDDEN, dtype=dtype).float()
    assert torch.isfinite((hidden - 1000) * 1.4426950408889634)
    assert torch.exp(hidden + 1000) == 0
    least = torch.tensor(torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16).float()
    assert not torch.isfinite(least * 1.4426950408889634)  # what was added before


def test_a_step_without_a_finite_gradient_changes_nothing(
    fresh: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import tamis.train.block_adapter as module

    calls = iter(range(1000))

    def poisoned(teacher: torch.Tensor, student: torch.Tensor, layout: Any) -> Any:
        found = compare(teacher, student, layout)
        bad = torch.is_grad_enabled() and next(calls) == 2  # of the second step
        return replace(found, rows=found.rows * float("inf")) if bad else found

    monkeypatch.setattr(module, "compare", poisoned)
    made = train_block_adapter(fresh, DATA, SETTINGS, tmp_path)
    assert [p.skipped for p in made.history] == [False, True, False, False, False, False]
    assert all(bool(torch.isfinite(t).all()) for t in weights(tmp_path).values())
    assert made.info.result["after"]["kl"] < 10 and "step 2 had no finite gradient" in caplog.text


@pytest.mark.parametrize("steps", [6, 2])
def test_a_run_that_gives_no_numbers_any_more_is_given_up(
    fresh: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    import tamis.train.block_adapter as module

    def poisoned(teacher: torch.Tensor, student: torch.Tensor, layout: Any) -> Any:
        found = compare(teacher, student, layout)
        return replace(found, rows=found.rows * float("nan")) if torch.is_grad_enabled() else found

    monkeypatch.setattr(module, "compare", poisoned)
    last = min(steps, 5)
    with pytest.raises(Diverged, match=f"{last} steps in a row, up to step {last}"):
        train_block_adapter(fresh, DATA, replace(SETTINGS, steps=steps), tmp_path)
    assert not (tmp_path / FILE).exists(), "no adapter of nothing"
