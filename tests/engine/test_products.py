"""Rows of products over packed weights: as torch's, the same bits whatever stands beside them, and gone afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tamis.engine import products
from tamis.engine.products import products_of


@pytest.fixture
def model(tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(products, "LEAST_WEIGHTS", 1)
    return tiny_model("qwen2")  # some of its layers have a bias


def test_rows_have_the_same_bits_in_any_company(model: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    for layer in (model.lm_head, model.model.layers[0].self_attn.q_proj, model.model.layers[0].mlp.down_proj):
        own = torch.randn(1, layer.in_features, generator=draw)
        plain = layer(own)
        with torch.inference_mode(), products_of(model).running():
            lone = layer(own)
            for rows in (2, 3, 4, 8, 33, 64):
                others = torch.randn(rows, layer.in_features, generator=draw)
                for place in {0, rows // 2, rows - 1}:
                    others[place] = own
                    assert torch.equal(layer(others)[place], lone[0]), (rows, place)
            assert torch.equal(layer(own[None]), lone[None]), "one row, more dims"
        torch.testing.assert_close(lone, plain, rtol=1e-4, atol=1e-4)


def test_a_changed_weight_is_packed_anew_and_nothing_stays_in_the_model(model: Any) -> None:
    layer, x = model.lm_head, torch.ones(4, model.lm_head.in_features)
    with torch.inference_mode(), products_of(model).running(), products_of(model).running():
        before = layer(x)
    assert "forward" not in layer.__dict__
    with torch.no_grad():
        layer.weight.mul_(2)
    with torch.inference_mode(), products_of(model).running():
        torch.testing.assert_close(layer(x), 2 * before)


def test_large_or_other_models_are_left_to_torch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MOST_BYTES", 1000)
    made = products.Products(model)
    assert not made.exact and "no second copy" in made.reason
    with made.running():
        assert "forward" not in model.lm_head.__dict__
    assert "float32" in products.Products(model.to(torch.bfloat16)).reason


def test_small_layers_are_left_alone(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    with products_of(model).running():
        assert not any("forward" in m.__dict__ for m in model.modules())
