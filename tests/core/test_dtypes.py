"""Names of element types against those who gave them."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save

from tamis.core.dtypes import IN_FILES, ITEM_BYTES, name_of


@pytest.mark.parametrize("name", IN_FILES)
def test_as_safetensors_writes_it(name: str) -> None:
    written = save({"x": torch.zeros(3, dtype=getattr(torch, name))})
    (length,) = struct.unpack("<Q", written[:8])
    assert json.loads(written[8 : 8 + length])["x"]["dtype"] == IN_FILES[name]


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_as_torch_has_it(name: str) -> None:
    dtype = getattr(torch, name)
    assert ITEM_BYTES[name] == dtype.itemsize and name_of(dtype) == name_of(name) == name and name in IN_FILES
