"""What the dispatchers share: whether Triton runs here, and the choice of the best kernel that takes the tensors."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tamis.core.errors import Unavailable
from tamis.core.registry import Registry


def no_triton(x: torch.Tensor) -> str | None:
    """Why no Triton kernel takes a tensor of this kind here, or under its interpreter; None: it can."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    dtypes = [torch.float16, torch.float32] + [torch.bfloat16] * (not interpreted)
    if not _installed("triton"):
        return "Triton is not installed"
    if x.device.type != "cuda" and not interpreted:
        return f"the tensors are on {x.device}"
    if x.device.type == "cuda" and (sm := torch.cuda.get_device_capability(x.device)) < (8, 0):
        return f"the GPU is sm_{sm[0]}{sm[1]} and the kernel needs sm_80"
    if x.dtype not in dtypes:
        return f"the tensors are {x.dtype} and must be one of {', '.join(map(str, dtypes))}"
    return None


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def chosen(
    kernel: str, known: Registry, refuses: Mapping[str, Callable[..., str | None]], args: tuple[Any, ...], what: str
) -> str:
    """The kernel asked for, or under "auto" the first of `refuses` (best first) that does not refuse `args`.

    Raises UnknownName for one that does not exist, and Unavailable with the reasons where none can run.
    """
    if kernel != "auto" and kernel not in known:
        known.get(kernel)  # raises, with the nearest name
    refused: dict[str, str] = {}
    for name in refuses if kernel == "auto" else [kernel]:
        why = refuses[name](*args)
        if why is None:
            return name
        refused[name] = why
    told = "; ".join(f"{name}: {why}" for name, why in refused.items())
    raise Unavailable(f"no {what} takes these tensors ({told}). kernel='auto' picks one that can.")
