"""16 bytes that tell whose keys and values lie on a shelf: the model's files, its dtype and Tamis's format.

Every process of a server must come to the same bytes without having the weights in memory, so files are looked at, not
tensors: the configuration whole, of every weight file its size, header and pieces spread over it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

FORMAT = 1  # of the keys and values: turned at a document's own positions, computed alone
PIECES, PIECE_BYTES, HEAD_BYTES = 16, 4096, 1 << 16


def of(vllm_config: Any) -> bytes:
    """Of a vLLM configuration: same bytes in every process and replica that serves the same model."""
    model = vllm_config.model_config
    digest = hashlib.blake2b(digest_size=16)
    config = model.hf_config.to_dict() if hasattr(model.hf_config, "to_dict") else {}
    for name in ("_name_or_path", "transformers_version", "_commit_hash"):
        config.pop(name, None)
    said = {
        "format": FORMAT,
        "config": config,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "load": str(vllm_config.load_config.load_format),
        "seed": model.seed if str(vllm_config.load_config.load_format).endswith("dummy") else None,
    }
    digest.update(json.dumps(said, sort_keys=True, default=str).encode())
    folder = Path(model.model)
    files = sorted(p for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".gguf", ".pt"))
    if not files:  # a name on the Hub: its snapshot has a commit of its own
        commit = getattr(model.hf_config, "_commit_hash", None)
        digest.update(f"{model.model}@{model.revision or commit}".encode())
    for path in files:
        digest.update(_file(path))
    return digest.digest()


def _file(path: Path) -> bytes:
    """Of a file's name, size and pieces."""
    digest = hashlib.blake2b(digest_size=16)
    size = os.path.getsize(path)
    digest.update(f"{path.name}:{size}".encode())
    with open(path, "rb") as file:
        digest.update(file.read(HEAD_BYTES))
        for i in range(PIECES):
            file.seek(max(0, (size - PIECE_BYTES) * (i + 1) // PIECES))
            digest.update(file.read(PIECE_BYTES))
    return digest.digest()
