"""Hashes that tell whether stored bits or keys belong to this very model and tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tamis.core.dtypes import name_of
from tamis.core.errors import NothingFound

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
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return ModelFingerprint(
        architecture=architecture(model.config),
        weights=_weights(parameters, parameters.__getitem__),
        tokenizer=_tokenizer(tokenizer),
        rotary=rotary(model.config),
        dtype=name_of(next(model.parameters()).dtype),
    )


def architecture(config: Any) -> str:
    """Family and sizes of a transformers configuration, in one word."""
    names = ("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    return "/".join(str(getattr(config, name, None)) for name in names)


def rotary(config: Any) -> str:
    """The rotary parameters of a transformers configuration, as JSON."""
    return json.dumps(getattr(config, "rope_parameters", None) or {}, sort_keys=True, default=str)


def weights_of_files(folder: Path, dtype: torch.dtype, *, tied: bool) -> str:
    """`ModelFingerprint.weights` of a model as transformers loads it in `dtype` from the safetensors files of `folder`,
    without loading it: one pass over the files.

    tied: the output matrix is the embedding's (`tie_word_embeddings`), so a file's own is not a parameter.
    Raises NothingFound where there are no such files.
    """
    from safetensors import safe_open

    where: dict[str, Any] = {}
    with ExitStack() as opened:
        for path in sorted(folder.glob("*.safetensors")):
            file = opened.enter_context(safe_open(path, "pt"))
            where |= dict.fromkeys(file.keys(), file)
        if not where:
            raise NothingFound(
                f"{folder} holds no safetensors files, so its weights cannot be compared with an index's."
            )
        names = [n for n in where if not (tied and n == "lm_head.weight") and not n.endswith("rotary_emb.inv_freq")]
        return _weights(names, lambda name: where[name].get_tensor(name).to(dtype))


def tokens_hash(tokens: Sequence[int]) -> str:
    """A short hash of a token sequence."""
    return hashlib.blake2b(json.dumps(list(map(int, tokens))).encode(), digest_size=8).hexdigest()


def _weights(names: Iterable[str], tensor: Callable[[str], torch.Tensor]) -> str:
    """Hash of every parameter's name, shape, bit sum and evenly spaced bits.

    The sum is over the raw bits as integers, so that it is exact and the same on every device and thread count.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(names):
        p = tensor(name)
        flat = p.reshape(-1)
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
