"""Rotary geometry: the model's own frequencies, offsets that add up, and refusal of what cannot be moved."""

from __future__ import annotations

import pytest
import torch

from tamis.core.errors import InvalidInput, ModelUnsupported
from tamis.model.rope import Rotary, self_test

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def minimax():
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    config = MiniMaxM2Config(
        **SMALL, head_dim=64, rope_parameters=rope, num_local_experts=2, num_experts_per_tok=1, use_qk_norm=False
    )
    return MiniMaxM2ForCausalLM(config)


def partial(kind):
    import transformers as hf

    if kind == "stablelm":
        return hf.StableLmForCausalLM(hf.StableLmConfig(**SMALL, partial_rotary_factor=0.25))
    return hf.PhiForCausalLM(hf.PhiConfig(**SMALL, partial_rotary_factor=0.5))


@pytest.mark.parametrize("kind", KINDS)
def test_moved_keys_are_the_models_own(tiny_model, kind):
    model = tiny_model("llama", rope_parameters=KINDS[kind])
    assert self_test(model) <= 1e-5
    rotary = Rotary.of(model)
    assert (rotary.kind, rotary.dims, rotary.head_dim) == (kind, 64, 64)
    assert (rotary.scaling > 1) == (kind == "yarn")


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_says_what_its_model_does(tiny_model, kind):
    model = tiny_model("qwen3", rope_parameters=KINDS[kind])
    of_model, of_config = Rotary.of(model), Rotary.of(model.config)
    assert torch.equal(of_model.inv_freq, of_config.inv_freq)
    assert of_model.scaling == of_config.scaling


def test_partial_rotary():
    model = minimax()
    assert self_test(model) <= 1e-5
    rotary = Rotary.of(model)
    assert (rotary.dims, rotary.head_dim) == (32, 64)
    assert torch.equal(rotary.inv_freq, Rotary.of(model.config).inv_freq)
    x = torch.randn(2, 3, 64)
    assert torch.equal(rotary.rotate(x, 77)[..., 32:], x[..., 32:])


@pytest.mark.parametrize(("kind", "dims"), [("stablelm", 8), ("phi", 16)])
def test_partial_rotary_of_other_families(kind, dims):
    model = partial(kind)
    assert self_test(model) <= 1e-5
    assert Rotary.of(model).dims == dims == Rotary.of(model.config).dims


def test_rotation_agrees_with_the_models_function(tiny_model):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = tiny_model("llama")
    x, positions = torch.randn(1, 2, 40, 64), torch.arange(40)
    cos, sin = model.model.rotary_emb(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    assert torch.allclose(Rotary.of(model).rotate(x, positions), expected, atol=1e-5)


def test_offsets_add_up_far_away(tiny_model):
    rotary = Rotary.of(tiny_model("llama"))
    x = torch.randn(2, 5, 64)
    for offset in (1, 65_536, 1_000_000, 1 << 29):
        back = rotary.rotate(rotary.rotate(x, offset + torch.arange(5)), -offset)
        assert float((back - rotary.rotate(x, torch.arange(5))).abs().max()) < 1e-6


def test_angles_are_of_float64_products(tiny_model):
    rotary = Rotary.of(tiny_model("llama"))
    cos, sin = rotary.angles(torch.tensor([1_000_003]))
    exact = 1_000_003 * rotary.inv_freq
    assert cos.dtype == sin.dtype == torch.float32
    assert float((cos[0] - exact.cos()).abs().max()) < 1e-7
    assert float((sin[0] - exact.sin()).abs().max()) < 1e-7
    with pytest.raises(InvalidInput, match="whole positions"):
        rotary.angles(torch.tensor([1.0]))


def test_the_self_test_can_fail(tiny_model):
    model = tiny_model("llama")
    module = model.model.rotary_emb
    forward = module.forward
    module.forward = lambda x, position_ids: forward(x, position_ids + 1)
    with pytest.raises(ModelUnsupported):
        self_test(model)
    module.forward = lambda x, position_ids: forward(x, position_ids % 65_536)  # wraps, as 16-bit offsets would
    with pytest.raises(ModelUnsupported, match=r"at position 6553[56]"):
        self_test(model)


@pytest.mark.parametrize(
    ("family", "rope", "words"),
    [
        ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "'dynamic' may change"),
        ("llama", {"rope_type": "longrope", "rope_theta": 1e4}, "'longrope' may change"),
        ("cohere", {"rope_type": "default", "rope_theta": 1e4}, "'cohere' is not known"),
        ("qwen3", {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}, "differently"),
    ],
)
def test_refused_by_name(family, rope, words):
    from types import SimpleNamespace

    config = SimpleNamespace(model_type=family, rope_parameters=rope, head_dim=64)
    with pytest.raises(ModelUnsupported, match=words):
        Rotary.of(config)
