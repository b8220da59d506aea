"""The NVIDIA driver's library, for what PyTorch has no call for. Nothing of it is loaded before it is asked for."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from tamis.core.errors import Unavailable


@functools.cache
def libcuda() -> Any:
    """The library. Raises Unavailable where there is none."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as e:
        raise Unavailable(f"the NVIDIA driver's {name} is not there.") from e
