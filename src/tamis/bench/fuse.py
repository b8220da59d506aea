"""A decoder layer with as few passes over its activations as PyTorch allows: what any serving engine does as well.

One product for q, k and v and one for gate and up; head norms and rotation, residual sum and norm, and SwiGLU each
compiled to one kernel. Products, attention and experts are called as modules, so that they can be timed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tamis.bench.shapes import feed_forward


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] over its root mean square, times weight [n], in float32 in between."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_norm(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x + y and its norm."""
    total = x + y
    return total, rms_norm(total, weight, eps)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """x [..., 2 n], gate beside up → silu(gate) * up [..., n]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


Place = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def place_heads(head_dim: int, eps: float, rotate: Place) -> Place:
    """The function of q [B, T, Hq * D], k [B, T, Hkv * D], cos, sin and the weights of the norms of q and k (or None).

    It gives q [B, Hq, T, D] and k [B, Hkv, T, D], normed and rotated. A norm is over each head, or over all heads
    together, as wide as its weight is.
    """

    def heads(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = rms_norm(x.reshape(*x.shape[:-1], -1, weight.numel()), weight, eps).flatten(-2)
        return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)

    def place(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotate(heads(q, q_weight), heads(k, k_weight), cos, sin)

    return place


@dataclass(frozen=True)
class Pieces:
    """What lies between the products: `rms_norm`, `add_norm`, `place_heads` and `swiglu`, perhaps compiled."""

    norm: Callable[..., torch.Tensor]
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    place: Place
    swiglu: Callable[..., torch.Tensor]


def fuse(model: Any, compiler: Callable[[Any], Any] | None = None) -> None:
    """Rebuild the decoder layers of a transformers model of `shapes.random_model` in place, for prefill.

    compiler: what makes one kernel of a function, such as `torch.compile`; None leaves them to PyTorch's operators.
    """
    made = compiler or (lambda function: function)
    rotate = importlib.import_module(type(model).__module__).apply_rotary_pos_emb
    place = place_heads(model.config.head_dim, model.config.rms_norm_eps, rotate)
    pieces = Pieces(made(rms_norm), made(add_norm), made(place), made(swiglu))
    for layer in model.model.layers:
        attn, ffn = layer.self_attn, feed_forward(layer)
        attn.q_proj = _merged(attn.q_proj, attn.k_proj, attn.v_proj)  # under this name attention layers are found
        del attn.k_proj, attn.v_proj
        if hasattr(ffn, "gate_proj"):
            ffn.gate_up_proj = _merged(ffn.gate_proj, ffn.up_proj)
            del ffn.gate_proj, ffn.up_proj
            ffn.forward = functools.partial(_swiglu_mlp, ffn, pieces)
        elif hasattr(ffn, "experts"):
            ffn.experts._apply_gate = pieces.swiglu
        attn.forward = functools.partial(_attention, attn, pieces)
        layer.forward = functools.partial(_layer, layer, pieces)


def _merged(*parts: torch.nn.Linear) -> torch.nn.Linear:
    biased = parts[0].bias is not None
    rows = sum(p.out_features for p in parts)
    one = torch.nn.Linear(parts[0].in_features, rows, bias=biased, device="meta")
    one.weight = torch.nn.Parameter(torch.cat([p.weight.data for p in parts]), requires_grad=False)
    if biased:
        one.bias = torch.nn.Parameter(torch.cat([p.bias.data for p in parts]), requires_grad=False)
    return one


def _layer(
    layer: Any, pieces: Pieces, hidden_states: torch.Tensor, cache: Any = None, past_key_values: Any = None, **kept: Any
) -> torch.Tensor:
    """The forward of a decoder layer; transformers 5.24 renamed `past_key_values` to `cache`."""
    cache = past_key_values if cache is None else cache
    before, after = layer.input_layernorm, layer.post_attention_layernorm
    normed = pieces.norm(hidden_states, before.weight, before.variance_epsilon)
    attended = layer.self_attn(normed, cache=cache, **kept)
    total, normed = pieces.add_norm(hidden_states, attended, after.weight, after.variance_epsilon)
    out = feed_forward(layer)(normed)
    summed: torch.Tensor = total + (out[0] if isinstance(out, tuple) else out)
    return summed


def _attention(
    attn: Any,
    pieces: Pieces,
    hidden_states: torch.Tensor,
    *,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    cache: Any,
    **_: Any,
) -> torch.Tensor:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config, head_dim = attn.config, attn.head_dim
    n_q, n_kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    q, k, v = attn.q_proj(hidden_states).split([n_q, n_kv, n_kv], dim=-1)
    weights = (attn.q_norm.weight, attn.k_norm.weight) if hasattr(attn, "q_norm") else (None, None)
    q, k = pieces.place(q, k, *position_embeddings, *weights)
    v = v.view(*v.shape[:-1], -1, head_dim).transpose(1, 2)
    if cache is not None:
        k, v = cache.update(k, v, attn.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    out: torch.Tensor = attend(attn, q, k, v, attention_mask, dropout=0.0, scaling=attn.scaling)[0]
    projected: torch.Tensor = attn.o_proj(out.flatten(-2))
    return projected


def _swiglu_mlp(mlp: Any, pieces: Pieces, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = mlp.down_proj(pieces.swiglu(mlp.gate_up_proj(x)))
    return out
