"""Models of real shapes with random weights: for speed, which does not depend on what the weights say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tamis.bench.machine import check_memory
from tamis.core.errors import InvalidInput, Unavailable
from tamis.core.registry import unknown

PROBE_TOKENS = 64


@dataclass(frozen=True)
class Shape:
    """A published architecture. `layers` of the real model; a slice of them can be built.

    `intermediate` is the width of one expert where there are `experts`, `routed` of which serve a token. `rotary` are
    the rotated channels of a head, None for all.
    """

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rope_theta: float
    experts: int = 0
    routed: int = 0
    rotary: int | None = None


SHAPES = {
    "llama-3.1-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 500000.0),
    "qwen3-8b": Shape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 1000000.0),
    "qwen2.5-14b": Shape("qwen2", 48, 5120, 13824, 40, 8, 128, 152064, 1000000.0),
    "qwen3-235b-a22b": Shape("qwen3_moe", 94, 4096, 1536, 64, 4, 128, 151936, 1e6, experts=128, routed=8),
    "minimax-m2.5": Shape("minimax_m2", 62, 3072, 1536, 48, 8, 128, 200064, 5e6, experts=256, routed=8, rotary=64),
    # MiniCPM4.1's sizes on Llama's layers: their attention and products are the same, a few scalar factors are not
    "minicpm4.1-8b": Shape("llama", 32, 4096, 16384, 32, 2, 128, 73448, 10000.0),
    "tiny": Shape("llama", 2, 256, 512, 4, 2, 64, 512, 10000.0),
    "tiny-moe": Shape("qwen3_moe", 4, 128, 96, 4, 2, 64, 512, 10000.0, experts=8, routed=2),
}
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "minimax_m2": "MiniMaxM2"}


def shape_of(name: str) -> Shape:
    """Raises InvalidInput for an unknown name."""
    if name not in SHAPES:
        raise InvalidInput(unknown("shape", name, list(SHAPES)))
    return SHAPES[name]


def check_layers(name: str, layers: int | None) -> None:
    """Raises InvalidInput unless so many layers (None: all) can be built of shape `name`."""
    most = shape_of(name).layers
    if layers is not None and not 1 <= layers <= most:
        raise InvalidInput(f"layers is {layers}; {name} has {most}: give 1 to {most}.")


def random_model(
    name: str, *, device: str, dtype: torch.dtype, layers: int | None = None, context: int = 131072
) -> Any:
    """A transformers model of shape `name` with normal weights (0, 0.02), built on `device`, in eval mode.

    layers: build only so many. Raises InvalidInput for an unknown shape or more layers than it has, and Unavailable
    where the weights do not fit a CPU's memory.
    """
    import transformers as hf

    shape, config = shape_of(name), config_of(name, layers=layers, context=context)
    kind = getattr(hf, f"{CLASSES[shape.family]}ForCausalLM")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if torch.device(device).type == "cpu":
            with torch.device("meta"):
                n_bytes = sum(p.numel() * p.element_size() for p in kind(config).parameters())
            check_memory(n_bytes, torch.device(device), f"{name}'s weights")
        with torch.device(device):
            model = kind(config)
    finally:
        torch.set_default_dtype(before)
    rotated = 2 * model.model.rotary_emb.inv_freq.numel()
    assert rotated == (shape.rotary or shape.head_dim), f"transformers rotates {rotated} channels of a head of {name}"
    for layer in model.model.layers if shape.experts else ():
        # equal scores would send every token to the same experts
        torch.nn.init.normal_(feed_forward(layer).gate.weight, std=config.initializer_range)
    return model.eval()


def config_of(name: str, *, layers: int | None = None, context: int = 131072) -> Any:
    """The transformers configuration of that shape. Raises as `random_model`."""
    import transformers as hf

    shape = shape_of(name)
    check_layers(name, layers)
    stem = CLASSES[shape.family]
    if not hasattr(hf, f"{stem}ForCausalLM"):
        raise Unavailable(f"transformers {hf.__version__} has no {stem}; {name} needs a newer one.")
    settings = _settings(shape, layers or shape.layers, context)
    return getattr(hf, f"{stem}Config")(architectures=[f"{stem}ForCausalLM"], **settings)


def _settings(shape: Shape, layers: int, context: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rotary:
        rope["partial_rotary_factor"] = shape.rotary / shape.head_dim
    settings = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": context,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }
    if shape.experts:
        settings |= {"num_local_experts": shape.experts, "num_experts_per_tok": shape.routed}
    if shape.family == "qwen3_moe":
        del settings["num_local_experts"]
        settings |= {
            "num_experts": shape.experts,
            "moe_intermediate_size": shape.intermediate,
            "norm_topk_prob": True,
        }
    if shape.family == "minimax_m2":
        settings |= {"bos_token_id": None, "eos_token_id": None}  # the defaults lie outside a small vocabulary
    return settings


def feed_forward(layer: Any) -> Any:
    """A decoder layer's MLP or mixture of experts, whose name differs between transformers' versions."""
    return layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe


def experts_of(model: Any) -> list[Any]:
    """The modules that hold all experts of a layer, in layer order; empty for a dense model."""
    blocks = [feed_forward(layer) for layer in model.model.layers]
    return [block.experts for block in blocks if hasattr(block, "experts")]


def choose_experts(model: Any) -> str:
    """Take the fastest product of experts that runs here, tried on a few tokens. Returns what was taken, and why.

    Of what transformers offers, kernels from its hub are not tried (a bench downloads nothing), nor batched_mm, whose
    copies of the experts' weights grow with the tokens.
    """
    reasons = []
    block = feed_forward(model.model.layers[0])
    probe = torch.ones(1, PROBE_TOKENS, model.config.hidden_size, device=model.device, dtype=model.dtype)
    for name in ("grouped_mm", "eager"):
        try:
            model.set_experts_implementation(name)
            with torch.inference_mode():
                block(probe)
        except (RuntimeError, NotImplementedError, ValueError, AttributeError, ImportError) as e:
            reasons.append(f"{name} does not run here: {_line(e)}")
            continue
        return "; ".join([name, *reasons])
    raise Unavailable(f"no product of experts runs on {model.device}: {'; '.join(reasons)}.")


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
