"""Training lowers the divergence, a killed run goes on as if it had not been, and the model stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.attention.hook import NAME
from tamis.core.errors import InvalidInput, NothingFound, StoreMismatch
from tamis.forecast.heads import FILE, Forecast
from tamis.forecast.texts import Texts
from tamis.kernels.blocks import BlockRule
from tamis.model.source import LoadedModel
from tamis.train.forecast import TrainedForecast, train_forecast
from tamis.train.settings import ForecastSettings
from tamis.train.state import FILE as STATE_FILE
from tiny_chat import tiny_tokenizer

RULE = BlockRule(top=5, first=1, local=1, block=16, window=8, stride=4, dense_tokens=0)
SETTINGS = ForecastSettings(steps=6, tokens=192, rows=96, rule=RULE, lr=5e-3, accumulate=2, save_every=2)
PIECES = [
    f"The crane of station {i} lifts boat {i * 7 % 11}, {'and the lamp is lit ' * (i % 5)}" * 5 for i in range(60)
]
TEXTS = Texts.split(PIECES, ["tiny"], 0.3)


@pytest.fixture
def fresh(tiny_model: Callable[..., Any]) -> LoadedModel:
    return LoadedModel(tiny_model("llama"), tiny_tokenizer(), "tiny", "")


@pytest.mark.parametrize("start", ["query", "uniform"])
def test_thirty_steps_lower_the_divergence(fresh: LoadedModel, tmp_path: Path, start: str) -> None:
    before = {name: p.clone() for name, p in fresh.model.named_parameters()}
    settings = replace(SETTINGS, steps=30, lr=2e-2, start=start)
    made = train_forecast(fresh, TEXTS, settings, tmp_path, checks=2)
    result = made.info.result
    assert result["after"]["kl"] < 0.85 * result["before"]["kl"], result  # of texts that it has not seen
    assert start == "query" or result["after"]["recall"] > 1.2 * result["before"]["recall"], result
    first, last = (sum(p.kl for p in part) for part in (made.history[:5], made.history[-5:]))
    assert last < first and made.info.steps == 30 and not made.out_of_time
    assert made.history[0].loss == pytest.approx(2 * made.history[0].kl), "a sum over two layers"
    after = dict(fresh.model.named_parameters())
    assert all(torch.equal(after[n], p) and after[n].grad is None for n, p in before.items())
    assert fresh.model.config._attn_implementation != NAME, "the model is as it was"
    names = {p.name for p in tmp_path.iterdir()}
    assert {FILE, "loss.csv", "loss.png"} <= names and STATE_FILE not in names and not [n for n in names if n[0] == "."]
    found = Forecast.load(tmp_path, fresh.model, fresh.tokenizer)
    assert found.info == made.info and found.parameters == made.parameters == 2 * 128 * 256


class Killed(Exception):
    """Stands for the end of a process."""


def test_a_killed_run_goes_on_as_if_it_had_not_been(
    fresh: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_forecast(fresh, TEXTS, SETTINGS, tmp_path / "whole", checks=1)

    def kill(done: int, total: int, what: str) -> None:
        if done == 5:
            monkeypatch.setattr("tamis.train.forecast.save_state", lambda *a: None)  # nothing runs after a kill
            raise Killed

    with pytest.raises(Killed):
        train_forecast(fresh, TEXTS, SETTINGS, tmp_path / "cut", checks=1, note=kill)
    assert fresh.model.config._attn_implementation != NAME and not (tmp_path / "cut" / FILE).exists()
    monkeypatch.undo()
    steps: list[int] = []
    again = train_forecast(
        fresh, TEXTS, SETTINGS, tmp_path / "cut", checks=1, note=lambda done, total, what: steps.append(done)
    )
    assert steps == [5, 6, 6], "from step 4, the last one saved"
    expected, found = (Forecast.read(tmp_path / name) for name in ("whole", "cut"))
    assert torch.equal(expected.weight, found.weight)
    assert [p.kl for p in again.history] == [p.kl for p in whole.history]
    assert again.info.result["before"] == whole.info.result["before"]
    finished = train_forecast(fresh, TEXTS, SETTINGS, tmp_path / "cut", checks=1)
    assert finished.info == again.info and not finished.history
    with pytest.raises(InvalidInput, match="another --out"):
        train_forecast(fresh, TEXTS, replace(SETTINGS, lr=1e-3), tmp_path / "cut", checks=1)


def test_another_run_in_the_folder_is_not_taken_over(fresh: LoadedModel, tmp_path: Path) -> None:
    def kill(done: int, total: int, what: str) -> None:
        if done == 1:
            raise Killed

    with pytest.raises(Killed):
        train_forecast(fresh, TEXTS, SETTINGS, tmp_path, note=kill)
    with pytest.raises(StoreMismatch, match="another --out"):
        train_forecast(fresh, TEXTS, replace(SETTINGS, seed=1), tmp_path)


def test_it_stops_in_time(fresh: LoadedModel, tmp_path: Path) -> None:
    made = train_forecast(fresh, TEXTS, replace(SETTINGS, steps=100_000), tmp_path, checks=1, minutes=0.12)
    assert made.out_of_time and 0 < made.info.steps < 100_000 and made.info.result["seconds"] < 8
    assert made.to_dict()["out_of_time"] is True and made.to_dict()["after"]["kl"] > 0


def trained(loaded: LoadedModel, folder: Path, **changes: Any) -> TrainedForecast:
    return train_forecast(loaded, TEXTS, replace(SETTINGS, steps=2, **changes), folder, checks=0)


def test_the_teachers_route_changes_what_deeper_layers_read(fresh: LoadedModel, tmp_path: Path) -> None:
    dense, routed = (trained(fresh, tmp_path / route, route=route).history[0] for route in ("dense", "teacher"))
    assert dense.loss != routed.loss and routed.loss == pytest.approx(dense.loss, rel=0.5)
    roomy = replace(RULE, dense_tokens=192)
    same = trained(fresh, tmp_path / "roomy", route="teacher", rule=roomy).history[0]
    assert same.loss == dense.loss, "short sequences are read in full"


def test_all_rows_are_the_mean_that_some_rows_estimate(fresh: LoadedModel, tmp_path: Path) -> None:
    every = trained(fresh, tmp_path / "every", rows=None).history[0]
    some = trained(fresh, tmp_path / "some", rows=96).history[0]
    assert every.loss != some.loss and some.loss == pytest.approx(every.loss, rel=0.3)


def test_other_teachers_and_outcomes_are_learnt(fresh: LoadedModel, tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=30, lr=2e-2, teacher="own", outcomes="free", start="uniform")
    result = train_forecast(fresh, TEXTS, settings, tmp_path, checks=2).info.result
    assert result["after"]["kl"] < 0.9 * result["before"]["kl"], result
    assert result["after"]["recall"] > 1.2 * result["before"]["recall"], result


def test_half_precision(fresh: LoadedModel, tmp_path: Path) -> None:
    fresh.model.to(torch.bfloat16)
    made = trained(fresh, tmp_path)
    assert Forecast.read(tmp_path).weight.dtype == torch.float32 and made.history[0].kl < 10


def test_what_cannot_be_trained_is_said(fresh: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(NothingFound, match="one sequence takes"):
        train_forecast(fresh, Texts.split(PIECES[:1], ["one"], 0.0), SETTINGS, tmp_path)
    with pytest.raises(InvalidInput, match="was made for 4096"):
        train_forecast(fresh, TEXTS, replace(SETTINGS, tokens=5000), tmp_path)
    for wrong, says in (
        ({"tokens": 48}, "nothing to learn"),
        ({"start": "zero"}, "Choices"),
        ({"route": "own"}, "Choices"),
        ({"teacher": "gold"}, "Choices"),
        ({"outcomes": "all"}, "Choices"),
        ({"steps": 0}, "steps is 0"),
        ({"lr": 0.0}, "more than 0"),
    ):
        with pytest.raises(InvalidInput, match=says):
            replace(SETTINGS, **wrong)  # type: ignore[arg-type]


def test_the_rate_is_constant_where_that_is_asked_for() -> None:
    assert {replace(SETTINGS, schedule="constant").rate(i / 10) for i in range(11)} == {SETTINGS.lr}
    assert SETTINGS.rate(1.0) == 0.0 < SETTINGS.rate(0.0) < SETTINGS.rate(0.5)


@pytest.mark.slow
def test_twenty_steps_on_a_real_model(smollm2: LoadedModel, tmp_path: Path) -> None:
    from pydoc_data.topics import topics

    texts = Texts.split(sorted(topics.values()), ["python"], 0.1)
    rule = BlockRule(top=5, first=1, local=1, dense_tokens=0)
    settings = ForecastSettings(steps=20, tokens=512, rows=128, rule=rule, lr=1e-3)
    made = train_forecast(smollm2, texts, settings, tmp_path, checks=2)
    result = made.info.result
    assert result["after"]["kl"] < 0.9 * result["before"]["kl"], result
    assert made.info.steps == 20 and made.parameters == 30 * 3 * 64 * 576
