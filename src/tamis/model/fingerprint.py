"""Hashes that tell whether stored bits or keys belong to this very model and tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SAMPLES = 1024  # evenly spaced elements of each weight that are hashed beside the exact sum over all of them


@dataclass(frozen=True)
class ModelFingerprint:
    """One word or hash for each thing that changes attention scores."""

    architecture: str
    weights: str
    tokenizer: str
    rotary: str
    dtype: str


def fingerprint(model: Any, tokenizer: Any | None) -> ModelFingerprint:
    """The fingerprint of a loaded transformers model; one pass over its weights (0.1 s for 135 M parameters)."""
    config = model.config
    shape = {
        name: getattr(config, name, None)
        for name in ("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    }
    rotary = getattr(config, "rope_parameters", None) or {}
    return ModelFingerprint(
        architecture="/".join(str(v) for v in shape.values()),
        weights=_weights(model),
        tokenizer=_tokenizer(tokenizer),
        rotary=json.dumps(rotary, sort_keys=True, default=str),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
    )


def tokens_hash(tokens: Sequence[int]) -> str:
    """A short hash of a token sequence."""
    return hashlib.blake2b(json.dumps(list(map(int, tokens))).encode(), digest_size=8).hexdigest()


def _weights(model: Any) -> str:
    """Hash of every parameter's name, shape, bit sum and evenly spaced bits.

    The sum is over the raw bits as integers, so that it is exact and the same on every device and thread count.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, p in sorted(model.named_parameters()):
        flat = p.detach().reshape(-1)
        bits = flat.view({4: torch.int32, 2: torch.int16, 1: torch.int8}[flat.element_size()])
        step = max(1, bits.numel() // SAMPLES)
        digest.update(f"{name}{tuple(p.shape)}{int(bits.sum(dtype=torch.int64))}".encode())
        digest.update(bits[::step].cpu().numpy().tobytes())
    return digest.hexdigest()


def _tokenizer(tokenizer: Any | None) -> str:
    if tokenizer is None:
        return "none"
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()
