"""Models of real shapes with random weights: for speed, which does not depend on what the weights say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown


@dataclass(frozen=True)
class Shape:
    """A published architecture. `layers` of the real model; a slice of them can be built."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rope_theta: float


SHAPES = {
    "llama-3.1-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 500000.0),
    "qwen3-8b": Shape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 1000000.0),
    "qwen2.5-14b": Shape("qwen2", 48, 5120, 13824, 40, 8, 128, 152064, 1000000.0),
    "tiny": Shape("llama", 2, 256, 512, 4, 2, 64, 512, 10000.0),
}


def random_model(
    name: str, *, device: str, dtype: torch.dtype, layers: int | None = None, context: int = 131072
) -> Any:
    """A transformers model of shape `name` with normal weights (0, 0.02), built on `device`, in eval mode.

    layers: build only so many. Raises InvalidInput for an unknown shape.
    """
    import transformers as hf

    if name not in SHAPES:
        raise InvalidInput(unknown("shape", name, list(SHAPES)))
    shape = SHAPES[name]
    kinds = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
    }
    config_class, model_class = kinds[shape.family]
    config = config_class(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers or shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = model_class(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def fuse(model: Any) -> None:
    """Compile what lies between the matrix products: norms, rotation, SwiGLU. Undone by `torch.compiler.reset`."""
    import importlib

    modeling: Any = importlib.import_module(type(model).__module__)
    if not hasattr(modeling.apply_rotary_pos_emb, "_torchdynamo_orig_callable"):
        modeling.apply_rotary_pos_emb = torch.compile(modeling.apply_rotary_pos_emb, dynamic=False)
    for layer in model.model.layers:
        for name in ("mlp", "input_layernorm", "post_attention_layernorm"):
            module = getattr(layer, name)
            module.forward = torch.compile(module.forward, dynamic=False)


class Fp8Linear(torch.nn.Module):
    """A linear layer whose product runs in float8 (e4m3): weights per output row, activations per token, on the fly."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight, scale = _to_fp8(linear.weight.data)
        self.weight: torch.Tensor
        self.scale: torch.Tensor
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.t().contiguous())
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out] in x's dtype."""
        flat = x.reshape(-1, x.shape[-1])
        quantised, scale = _to_fp8(flat)
        out = torch._scaled_mm(
            quantised, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=x.dtype, use_fast_accum=True
        )
        return (out if self.bias is None else out + self.bias).view(*x.shape[:-1], -1)


def _to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, n] as float8 and its float32 scale [rows, 1]."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448.0
    return (x / scale).to(torch.float8_e4m3fn), scale


def to_fp8(model: Any) -> None:
    """Replace every linear layer but the output head by `Fp8Linear`, in place."""
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(parent, name, Fp8Linear(child))
