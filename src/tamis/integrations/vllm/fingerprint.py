"""16 bytes that tell whose keys and values lie on a shelf: the model's files, its dtype and Tamis's format.

Every process of a server must come to the same bytes without having the weights in memory, so files are looked at, not
tensors: the configuration whole, of every weight file its size, header and pieces spread over it. In safetensors every
tensor gives a piece of its own, because models that were tuned in a few projections alone differ nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import IO, Any

FORMAT = 1  # of the keys and values: turned at a document's own positions, computed alone
PIECES, PIECE_BYTES, HEAD_BYTES = 16, 4096, 1 << 16
HEADER_BYTES = 100 << 20  # the most that safetensors allows


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
    found = [folder] if folder.is_file() else folder.glob("*")
    files = sorted(p for p in found if p.suffix in (".safetensors", ".bin", ".gguf", ".pt"))
    if not files:  # a name on the Hub: its snapshot has a commit of its own, while a revision may be a branch
        commit = getattr(model.hf_config, "_commit_hash", None)
        digest.update(f"{model.model}@{commit or model.revision}".encode())
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
        middles = _tensors(file) if path.suffix == ".safetensors" else []
        for at in [*((size - PIECE_BYTES) * (i + 1) // PIECES for i in range(PIECES)), *middles]:
            file.seek(max(0, at))
            digest.update(file.read(PIECE_BYTES))
    return digest.digest()


def _tensors(file: IO[bytes]) -> list[int]:
    """Where to read of each tensor in a safetensors file: its middle. Empty if it is none."""
    file.seek(0)
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(min(length, HEADER_BYTES)))
        spans = [t["data_offsets"] for name, t in header.items() if name != "__metadata__"]
        return sorted(8 + length + max(begin, (begin + end - PIECE_BYTES) // 2) for begin, end in spans)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        return []
