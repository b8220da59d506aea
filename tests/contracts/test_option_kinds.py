"""Options of the wrong kind are refused with what came in and what is allowed, in every option class alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tamis.attention.policy import Policy
from tamis.attention.reuse_store import CacheSettings
from tamis.core.checks import check_fields
from tamis.core.errors import InvalidInput
from tamis.engine.sampling import Sampling
from tamis.index.spec import Thresholds
from tamis.kernels.blocks import BlockRule
from tamis.train.settings import ForecastSettings, TrainSettings

OPTIONS: tuple[Callable[..., Any], ...] = (
    Policy,
    CacheSettings,
    Sampling,
    Thresholds,
    TrainSettings,
    ForecastSettings,
    BlockRule,
)
WRONG = {
    "int": (1.5, 2.0, True, "1", [1], None),
    "float": (True, "0.5", float("nan"), float("inf"), [0.5], None),
    "bool": (0, 1, "yes", None),
    "str": (1, 1.5, True, None),
}


@dataclass(frozen=True)
class Options:
    n: int = 1
    most: int | None = None
    share: float = 0.5
    on: bool = False
    where: str | Path | None = None
    other: tuple[int, int] = (1, 2)

    def __post_init__(self) -> None:
        check_fields(self)


def test_what_is_allowed() -> None:
    Options(n=np.int64(3), most=7, share=1, on=True, where=Path("a"), other="left alone")  # type: ignore[arg-type]
    Options(share=np.float32(0.5), where="a")  # type: ignore[arg-type]


def test_numbers_become_pythons_own() -> None:
    made = Options(n=np.int64(3), most=np.int32(7), share=np.float32(0.5))  # type: ignore[arg-type]
    assert [type(v) for v in (made.n, made.most, made.share)] == [int, int, float]
    assert Options(on=np.bool_(True)).on is True  # type: ignore[arg-type]
    assert Policy(tile=np.int64(64)) == Policy(tile=64)  # type: ignore[arg-type]
    text = json.dumps(TrainSettings(steps=np.int64(3), lr=np.float64(0.5)).to_dict())  # type: ignore[arg-type]
    assert '"steps": 3' in text


def test_a_number_past_all_floats() -> None:
    with pytest.raises(InvalidInput, match="n is 1000"):
        Options(n=10**400)


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"n": 1.5}, "n is 1.5; allowed is a whole number."),
        ({"n": np.bool_(True)}, "allowed is a whole number."),
        ({"n": True}, "n is True; allowed is a whole number."),
        ({"most": "7"}, "most is '7'; allowed is a whole number or None."),
        ({"share": float("nan")}, "share is nan; allowed is a finite number."),
        ({"on": 1}, "on is 1; allowed is True or False."),
        ({"where": 3}, "where is 3; allowed is a text or a path or None."),
    ],
)
def test_the_sentence(choice: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(says)):
        Options(**choice)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda c: c.__name__)
def test_every_field_of_every_option_class(options: Any) -> None:
    checked = 0
    for field in fields(options):
        kinds = str(field.type).split(" | ")
        for wrong in WRONG.get(kinds[0], ()):
            if wrong is None and "None" in kinds:
                continue
            with pytest.raises(InvalidInput, match=field.name):
                options(**{field.name: wrong})
            checked += 1
    assert checked, f"no field of {options.__name__} is checked"


@pytest.mark.parametrize("stop", ["text", ["a", 3], ["a", ""], 5])
def test_stop_texts(stop: Any) -> None:
    with pytest.raises(InvalidInput, match="a list of texts"):
        Sampling(stop=stop)


def test_given_by_name_to_a_policy() -> None:
    with pytest.raises(InvalidInput, match=r"chunk_tokens is 1\.5; allowed is a whole number or None"):
        Policy.of(None, chunk_tokens=1.5)
