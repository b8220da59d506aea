"""Which models' attention Tamis may replace: an allow-list of families, layer kinds and rotary geometries.

A model that is not on the list is refused by name with the reason; nothing is guessed.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

from tamis.core.errors import InvalidInput, ModelUnsupported

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
HEAD_DIMS = (64, 96, 128)
ROTARY_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's attention. All counts are per model, not per device."""

    family: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rotary: str
    context_tokens: int


def geometry(config: Any) -> Geometry:
    """Read a transformers config. Raises ModelUnsupported, naming what is not supported and what is."""
    family = config.model_type
    if family not in FAMILIES:
        raise ModelUnsupported(f"model family {family!r} is not supported. Supported: {', '.join(FAMILIES)}.")
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != ["full_attention"] or (window and not getattr(config, "layer_types", None)):
        raise ModelUnsupported(
            f"{family} with {', '.join(kinds)} layers and sliding window {window} is not supported; "
            "every layer must attend to the whole context."
        )
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if head_dim not in HEAD_DIMS:
        raise ModelUnsupported(f"head_dim {head_dim} is not supported. Supported: {', '.join(map(str, HEAD_DIMS))}.")
    rope = getattr(config, "rope_parameters", None) or {}
    rotary = str(rope.get("rope_type", "default"))
    if rotary not in ROTARY_TYPES:
        raise ModelUnsupported(f"rotary type {rotary!r} is not supported. Supported: {', '.join(ROTARY_TYPES)}.")
    return Geometry(
        family=family,
        n_layers=config.num_hidden_layers,
        n_heads=heads,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        rotary=rotary,
        context_tokens=config.max_position_embeddings,
    )


def with_yarn(config: Any, factor: float) -> Any:
    """A copy of a transformers config for `factor` times the positions, by YaRN (arXiv 2309.00071).

    Positions are squeezed for short prompts too, which costs a little quality: for prompts that do not fit otherwise.
    Raises InvalidInput unless factor is above 1, and ModelUnsupported for a model whose rotary embedding is not plain.
    """
    if not 1 < factor < math.inf:
        raise InvalidInput(f"the YaRN factor is {factor}; give a number above 1, such as 2 or 4, or leave it out.")
    known = geometry(config)
    if known.rotary != "default":
        raise ModelUnsupported(
            f"{known.family} with rotary type {known.rotary!r} cannot be stretched by YaRN, only plain rotary "
            "embeddings can. Leave the factor out: the model itself takes "
            f"{known.context_tokens} tokens."
        )
    made = copy.deepcopy(config)
    made.rope_parameters = {
        **(config.rope_parameters or {}),
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": known.context_tokens,
    }
    made.max_position_embeddings = int(known.context_tokens * factor)
    return made
