"""A forecast under the QKV matrices: the same queries, keys and values, and a model that is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tamis.attention.fused import FusedForecast
from tamis.attention.layer_inputs import decoder_layers
from tamis.core.errors import InvalidInput
from tamis.forecast.heads import Forecast, ForecastInfo, first_weights
from tamis.kernels.blocks import BlockRule
from tamis.model.fingerprint import fingerprint
from tamis.model.rope import Rotary

TOKEN = torch.tensor([[7], [9]])
FAMILIES = ("llama", "qwen2", "qwen3")


def forecast_of(model: Any) -> Forecast:
    weight, bias = first_weights(decoder_layers(model), 2, 64, start="query")
    return Forecast(weight, bias, 2, ForecastInfo({}, "tiny", BlockRule()))


@pytest.fixture(params=FAMILIES)
def model(tiny_model: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    made = tiny_model(request.param, num_hidden_layers=3)
    with torch.no_grad():
        for layer in decoder_layers(made):
            for name in ("q_proj", "k_proj", "v_proj"):
                if (bias := getattr(layer.self_attn, name).bias) is not None:
                    bias.normal_()
    return made


def projected(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """What the three projections of every layer make of x."""
    made = []
    for layer in decoder_layers(model):
        made += [getattr(layer.self_attn, name)(x) for name in ("q_proj", "k_proj", "v_proj")]
    return made


def test_one_product_makes_all_three(model: Any) -> None:
    x = torch.randn(2, 1, 256)
    with torch.no_grad():
        wanted = projected(model, x)
        fused = FusedForecast(model, forecast_of(model))
        assert fused.n_fused == 2, "the last layer's input says nothing of another layer"
        assert all(torch.equal(a, b) for a, b in zip(projected(model, x), wanted, strict=True)), (
            "not running: as before"
        )
        with fused.running():
            found = projected(model, x)
        fused.close()
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_forecast_is_the_rows_product(model: Any) -> None:
    forecast, rotary = forecast_of(model), Rotary.of(model)
    x, at = torch.randn(2, 1, 256), torch.tensor([50])
    fused = FusedForecast(model, forecast)
    with torch.no_grad(), fused.running():
        projected(model, x)
        for layer in range(3):
            found = fused.query(layer, at)
            wanted = torch.cat([forecast.query(layer, x[b], at, rotary) for b in range(2)])
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    fused.close()


def test_of_a_prompt_on_a_model_that_scales_what_it_turns(tiny_model: Callable[..., Any]) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    model = tiny_model("llama", num_hidden_layers=3, rope_parameters=yarn)
    forecast, rotary = forecast_of(model), Rotary.of(model)
    x, at = torch.randn(1, 9, 256), torch.arange(40, 49)
    fused = FusedForecast(model, forecast)
    for n in (9, 1):
        with torch.no_grad(), fused.running():
            projected(model, x[:, :n])
            for layer in range(3):
                wanted = forecast.query(layer, x[0, :n], at[:n], rotary)
                torch.testing.assert_close(fused.query(layer, at[:n]), wanted, rtol=1e-4, atol=1e-4)
    fused.close()
    assert rotary.scaling > 1


def test_nothing_is_left_behind(model: Any) -> None:
    before = {name: t.clone() for name, t in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    was = fingerprint(model, None)
    fused = FusedForecast(model, forecast_of(model))
    assert list(model.state_dict()) == list(before) and fingerprint(model, None) == was, "nor while it is in"
    views = [p for p in parameters.values() if p.untyped_storage().nbytes() != p.nbytes]
    assert len(views) == 2 * 3 * (2 if model.config.model_type == "qwen2" else 1)
    with torch.no_grad(), fused.running():
        model(TOKEN, use_cache=False)
    fused.close()
    fused.close()
    after = model.state_dict()
    assert all(torch.equal(after[name], t) for name, t in before.items())
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    assert not any("forward" in vars(m) or m._forward_pre_hooks for m in model.modules())


def test_put_in_and_taken_out_in_inference_mode(model: Any) -> None:
    """The model can be trained afterwards."""
    with torch.inference_mode():
        fused = FusedForecast(model, forecast_of(model))
        fused.close()
    assert not any(p.is_inference() for p in model.parameters())
    model(TOKEN, use_cache=False).logits.sum().backward()
    assert all(p.grad is not None for p in model.model.layers[0].self_attn.parameters())
    model.zero_grad()


def test_what_is_written_meanwhile_stays(model: Any) -> None:
    fused = FusedForecast(model, forecast_of(model))
    weight = model.model.layers[1].self_attn.k_proj.weight
    with torch.no_grad():
        weight[3, 5] = 77.0
        x = torch.randn(1, 1, 256)
        with fused.running():
            found = projected(model, x)
        wanted = projected(model, x)
    torch.testing.assert_close(found[4], wanted[4], rtol=1e-5, atol=1e-4)
    fused.close()
    assert float(weight[3, 5].detach()) == 77.0


def test_projections_that_are_not_plain_are_left_alone(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama", num_hidden_layers=3)

    class Wrapped(torch.nn.Linear):
        pass

    first, second = (layer.self_attn for layer in decoder_layers(model)[:2])
    first.v_proj.__class__ = Wrapped
    shared = torch.empty(2, *second.q_proj.weight.shape)
    shared[0] = second.q_proj.weight.detach()
    second.q_proj.weight.data = shared[0]
    forecast, x, at = forecast_of(model), torch.randn(1, 1, 256), torch.tensor([3])
    fused = FusedForecast(model, forecast)
    assert fused.n_fused == 0
    with torch.no_grad():
        wanted = projected(model, x)
        with fused.running():
            found = projected(model, x)
            for layer in range(3):
                expected = forecast.query(layer, x[0], at, fused.rotary)
                torch.testing.assert_close(fused.query(layer, at), expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    fused.close()
    assert not first.q_proj._forward_pre_hooks and second.q_proj.weight.data_ptr() == shared.data_ptr()


def test_gradients_reach_the_parameters(model: Any) -> None:
    x = torch.randn(1, 1, 256)
    wanted = projected(model, x)
    sum(t.sum() for t in wanted).backward()  # type: ignore[union-attr]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    fused = FusedForecast(model, forecast_of(model))
    with fused.running():
        found = projected(model, x)
    sum(t.sum() for t in found).backward()  # type: ignore[union-attr]
    assert gradients and all(torch.equal(model.get_parameter(n).grad, g) for n, g in gradients.items())
    fused.close()


def test_a_model_that_was_moved_meanwhile(model: Any) -> None:
    fused, x = FusedForecast(model, forecast_of(model)), torch.randn(1, 1, 256, dtype=torch.float64)
    model.double()
    with torch.no_grad(), fused.running():
        assert all(t.dtype == torch.float64 for t in projected(model, x))
        assert bool(fused.query(1, torch.tensor([0])).isfinite().all())
    fused.close()
    assert all(p.dtype == torch.float64 for p in model.parameters())


def test_another_number_of_layers(tiny_model: Callable[..., Any]) -> None:
    model, forecast = tiny_model("llama"), forecast_of(tiny_model("llama", num_hidden_layers=3))
    with pytest.raises(InvalidInput, match="the forecast has 3 layers and LlamaForCausalLM has 2"):
        FusedForecast(model, forecast)
    assert replace(forecast, bias=None).n_layers == 3
    assert not any("forward" in vars(m) for m in model.modules())
