from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tamis.core.errors import InvalidInput
from tamis.index.spec import DEFAULT_TILE, DocumentStats, Fingerprint, IndexSpec, Thresholds, n_pages
from tamis.kernels.lists import TILE, Tiling


def test_the_default_tile_is_the_kernels_and_the_same_lengths_are_allowed(make_spec: Callable[..., IndexSpec]) -> None:
    assert DEFAULT_TILE == TILE
    Tiling.of_segments([1], tile=255)
    make_spec(tile=255)
    for tile in (0, 256):
        with pytest.raises(InvalidInput):
            Tiling.of_segments([1], tile=tile)
        with pytest.raises(InvalidInput, match="1 to 255"):
            make_spec(tile=tile)


@pytest.mark.parametrize("change", [{"alpha": -0.1}, {"beta": 1.5}, {"gamma": float("nan")}, {"alpha": "x"}])
def test_thresholds_outside_0_to_1_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(change))):
        Thresholds(**change)  # type: ignore[arg-type]


def test_an_unknown_ca_rule_names_the_choices() -> None:
    with pytest.raises(InvalidInput, match=r"Did you mean 'share'\? Choices: any, share"):
        Thresholds(ca_rule="shares")  # type: ignore[arg-type]


def test_every_field_changes_the_digest_and_is_named(make_spec: Callable[..., IndexSpec]) -> None:
    base = make_spec()
    others = [make_spec(n_layers=9), make_spec(n_heads=9), make_spec(prefix="x"), make_spec(tile=9)]
    others += [
        make_spec(fingerprint=replace(base.fingerprint, **{name: "changed"}))
        for name in ("architecture", "weights", "tokenizer", "rotary", "dtype")
    ]
    others += [make_spec(thresholds=Thresholds(alpha=0.1)), make_spec(thresholds=Thresholds(ca_rule="share"))]
    assert len({s.digest for s in [base, *others]}) == len(others) + 1
    assert all(len(base.difference(s)) == 1 for s in others)
    assert base.difference(others[-2]) == ["alpha is 0.001 against 0.1"]
    assert base.fingerprint.difference(replace(base.fingerprint, weights="new")) == [
        "weights is 'wwwwwwww' against 'new'"
    ]
    assert len(base.digest) == len(base.fingerprint.digest) == 16


def test_whole_number_thresholds_digest_like_their_floats(make_spec: Callable[..., IndexSpec]) -> None:
    one, same = make_spec(thresholds=Thresholds(alpha=1)), make_spec(thresholds=Thresholds(alpha=1.0))
    assert one == same
    assert one.digest == same.digest


def test_a_spec_survives_its_dict_and_rejects_foreign_ones(make_spec: Callable[..., IndexSpec]) -> None:
    base = make_spec()
    assert IndexSpec.from_dict(base.as_dict()) == base
    for wrong in ({}, base.as_dict() | {"colour": 1}, base.as_dict() | {"tile": 0}, base.as_dict() | {"thresholds": 3}):
        with pytest.raises(InvalidInput, match="not the description of an index"):
            IndexSpec.from_dict(wrong)


def test_an_empty_fingerprint_field_is_refused() -> None:
    with pytest.raises(InvalidInput, match="weights"):
        Fingerprint("a", "", "c", "d", "e")


def test_pages() -> None:
    assert [n_pages(n, 128) for n in (1, 128, 129, 1024)] == [1, 1, 2, 8]
    with pytest.raises(InvalidInput):
        n_pages(0, 128)


def test_statistics_of_the_wrong_shape_are_refused() -> None:
    square, per_token = torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 20, dtype=torch.int32)
    rows = torch.zeros(20, dtype=torch.int32)
    DocumentStats(20, square, square, per_token, rows, tile=8)
    with pytest.raises(InvalidInput, match="tile_max is"):
        DocumentStats(20, square, square, per_token, rows, tile=16)
    with pytest.raises(InvalidInput, match="later_rows"):
        DocumentStats(20, square, square, per_token, rows[:1], tile=8)
