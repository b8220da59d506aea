"""Random models of real shapes: what is built, and that fusing and float8 change the time and not the result."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tamis.bench import shapes
from tamis.bench.fp8 import Fp8Linear, quantise, to_fp8
from tamis.bench.fuse import add_norm, fuse, rms_norm
from tamis.bench.shapes import SHAPES, Shape, choose_experts, experts_of, random_model
from tamis.core.errors import InvalidInput, Unavailable

TINY = {
    "llama": Shape("llama", 2, 64, 96, 4, 2, 16, 128, 10000.0),
    "qwen2": Shape("qwen2", 2, 64, 96, 4, 2, 16, 128, 10000.0),
    "qwen3": Shape("qwen3", 2, 64, 96, 4, 2, 16, 128, 10000.0),
    "qwen3_moe": Shape("qwen3_moe", 2, 64, 32, 4, 2, 16, 128, 10000.0, experts=8, routed=2),
    "minimax_m2": Shape("minimax_m2", 2, 64, 32, 4, 2, 16, 128, 10000.0, experts=8, routed=2, rotary=8),
}
FAMILIES = pytest.mark.parametrize("family", list(TINY))


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(family: str) -> Any:
        monkeypatch.setitem(shapes.SHAPES, family, TINY[family])
        torch.manual_seed(0)
        model = random_model(family, device="cpu", dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():  # norms of ones and biases of zeros would hide a mix-up
                if "norm" in name or "bias" in name:
                    weight.add_(0.3 * torch.randn_like(weight))
        return model

    return made


def logits(model: Any, tokens: int = 40) -> torch.Tensor:
    ids = torch.arange(tokens)[None] % 128
    with torch.inference_mode():
        out: torch.Tensor = model(ids, logits_to_keep=4).logits
    return out


@FAMILIES
def test_fused_layers_give_the_logits_of_stock_ones(build: Any, family: str) -> None:
    model = build(family)
    stock = logits(model)
    fuse(model)
    assert not torch.equal(stock, torch.zeros_like(stock))
    torch.testing.assert_close(logits(model), stock, rtol=1e-4, atol=1e-5)


@FAMILIES
def test_the_pieces_between_the_products_are_traced_whole(build: Any, family: str) -> None:
    model = build(family)
    stock = logits(model)
    torch.compiler.reset()
    fuse(model, functools.partial(torch.compile, backend="eager", fullgraph=True, dynamic=False))
    torch.testing.assert_close(logits(model), stock, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


def test_a_wrong_order_of_merged_rows_is_noticed(build: Any) -> None:
    model = build("llama")
    stock = logits(model)
    fuse(model)
    with torch.no_grad():
        weight = model.model.layers[0].self_attn.q_proj.weight
        weight[64:] = torch.cat([weight[96:], weight[64:96]])  # v before k
    assert (logits(model) - stock).abs().max() > 1e-3


def test_the_sum_and_its_norm() -> None:
    x, y, w = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total, normed = add_norm(x, y, w, 1e-6)
    torch.testing.assert_close(total, x + y)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x + y, (8,), w, 1e-6))
    assert rms_norm(x.bfloat16(), w.bfloat16(), 1e-6).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-3.1-8b", 8.03e9),
        ("qwen3-8b", 8.19e9),
        ("qwen2.5-14b", 14.77e9),
        ("qwen3-235b-a22b", 235.1e9),
        ("minimax-m2.5", 229e9),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name: str, published: float) -> None:
    s = SHAPES[name]
    attention = 2 * s.hidden * s.head_dim * (s.heads + s.kv_heads)
    of_one = attention + 3 * s.hidden * s.intermediate * max(1, s.experts) + s.hidden * s.experts
    assert s.layers * of_one + 2 * s.vocabulary * s.hidden == pytest.approx(published, rel=0.003)


def test_parameters_are_those_of_the_shape(build: Any) -> None:
    layer = build("minimax_m2").model.layers[0]
    experts, attn = layer.mlp.experts, layer.self_attn
    assert experts.gate_up_proj.shape == (8, 2 * 32, 64) and experts.down_proj.shape == (8, 64, 32)
    assert attn.q_norm.weight.shape == (64,) and attn.k_norm.weight.shape == (32,)


def test_tokens_go_to_different_experts(build: Any) -> None:
    gate = build("qwen3_moe").model.layers[0].mlp.gate
    chosen = gate(torch.randn(64, 64))[2]
    assert len(chosen.unique()) == 8


def test_the_first_product_of_experts_that_runs_is_taken(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_moe")
    assert choose_experts(model) == "grouped_mm" and len(experts_of(model)) == 2
    stock = type(model).set_experts_implementation

    def refuse(self: Any, name: str) -> None:
        if name == "grouped_mm":
            raise ValueError("not built in")
        stock(self, name)

    monkeypatch.setattr(type(model), "set_experts_implementation", refuse)
    assert choose_experts(model) == "eager; grouped_mm does not run here: not built in"


@pytest.mark.parametrize("layers", [0, 3])
def test_a_slice_is_no_larger_than_the_model(layers: int) -> None:
    with pytest.raises(InvalidInput, match="tiny has 2: give 1 to 2"):
        random_model("tiny", device="cpu", dtype=torch.float32, layers=layers)


def test_an_unknown_shape_is_named_with_its_neighbour() -> None:
    with pytest.raises(InvalidInput, match=r"Did you mean 'minimax-m2\.5'"):
        random_model("minimax-m25", device="cpu", dtype=torch.float32)


def test_quantised_rows_keep_their_own_scale() -> None:
    x = torch.randn(16, 256) * torch.logspace(-3, 3, 16)[:, None]
    made, scale = quantise(x)
    assert made.dtype == torch.float8_e4m3fn and scale.shape == (16, 1)
    error = (made.float() * scale - x).pow(2).mean(1).sqrt() / x.pow(2).mean(1).sqrt()
    assert error.max() < 0.04
    assert torch.equal(quantise(torch.zeros(2, 8))[0].float(), torch.zeros(2, 8))


def test_a_float8_linear_is_close_to_the_exact_one() -> None:
    linear = torch.nn.Linear(256, 192)
    with torch.no_grad():
        linear.weight.mul_(torch.logspace(-1, 1, 192)[:, None])  # rows that one scale for all would spoil
    x = torch.randn(2, 24, 256)
    made, exact = Fp8Linear(linear)(x), linear(x)
    assert made.shape == exact.shape and made.dtype == exact.dtype
    relative = (made - exact).pow(2).mean((0, 1)) / exact.pow(2).mean((0, 1))  # of every output row by itself
    assert relative.mean().sqrt() < 0.05


def test_merged_layers_are_quantised_once_and_experts_are_refused(build: Any) -> None:
    model = build("qwen2")
    stock = logits(model)
    fuse(model)
    to_fp8(model)
    layer = model.model.layers[0]
    replaced = [n for n, m in layer.named_modules() if isinstance(m, Fp8Linear)]
    assert replaced == ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.gate_up_proj"]
    error = (logits(model) - stock).pow(2).mean().sqrt() / stock.pow(2).mean().sqrt()
    assert 0 < error < 0.1
    with pytest.raises(InvalidInput, match="without experts"):
        to_fp8(build("qwen3_moe"))


@pytest.mark.gpu
def test_the_compiled_quantisation_equals_the_eager_one() -> None:
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    linear = torch.nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16)
    exact = linear(x).float()
    made = Fp8Linear(linear)(x).float()
    assert (made - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt() < 0.05


def test_a_model_that_does_not_fit_a_cpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 1000)
    with pytest.raises(Unavailable, match="8b's weights take 32 GB and this machine has 0 GB"):
        random_model("llama-3.1-8b", device="cpu", dtype=torch.float32)
