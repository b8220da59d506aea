"""Element types by torch's names, for rooms without torch and for files."""

from __future__ import annotations

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # what weights, keys and values may be
IN_FILES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "uint8": "U8"}  # in safetensors


def name_of(dtype: object) -> str:
    """The name, as in the tables, of a torch.dtype or of what is a name already."""
    return str(dtype).removeprefix("torch.")
