"""The steps of a decode over blocks in slots as the rooms above call them, and the choice of what runs them.

Nothing of Triton is imported before a Triton kernel is about to run. One asked for by name that cannot run raises
`Unavailable` with the reason; under "auto" the best one that takes the tensors is given.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import torch

from tamis.core.registry import Registry
from tamis.kernels.choice import chosen, no_triton

MOST_GROUP = 64  # query heads of a KV head: rows of a program's products
ENGINE_BYTES = 256 << 10  # of a block, from which on the copy engine keeps up: it takes 4.7 us for each, however small
BLOCK_STEPS = Registry("block kernel")


def block_steps(like: torch.Tensor, group: int = 1, *, kernel: str = "auto") -> ModuleType:
    """What runs tensors like this one, [.., head_dim], with `group` query heads of a KV head.

    It has `append`, `scores`, `select`, `place`, `fetch`, `attend`, `prefill_scores`, `prefill_select` and
    `prefill_attend`, as `kernels.reference.offload` describes them. Under Triton all of them can be captured into a
    graph, and none waits for the host. Raises `UnknownName` and `Unavailable` for a kernel that does not exist or
    cannot run here.
    """
    module: Callable[[], ModuleType] = BLOCK_STEPS.get(steps_name(like, group, kernel=kernel))
    return module()


def steps_name(like: torch.Tensor, group: int = 1, *, kernel: str = "auto") -> str:
    """The name of what `block_steps` gives for the same arguments. Raises as it does."""
    return chosen(kernel, BLOCK_STEPS, _REFUSES, (like, group), "block kernel")


def why_not(like: torch.Tensor, group: int = 1) -> str | None:
    """Why no kernel runs the steps of such tensors (see `block_steps`) but plain PyTorch does; None: one can."""
    return _triton_refuses(like, group)


def copied_by(block_bytes: int, *, captured: bool) -> str:
    """What moves missing blocks: "kernel", or "engine" for the copy engine.

    Inside a graph only the kernel can read on the device how many there are. Outside, the engine takes no
    multiprocessor, but needs blocks of ENGINE_BYTES to be as fast: on an H200 `tamis bench offload` saw 7 GB/s at 32 KB
    and 14 at 64 KB, where the kernel has 50.
    """
    return "engine" if not captured and block_bytes >= ENGINE_BYTES else "kernel"


def _triton_refuses(like: torch.Tensor, group: int) -> str | None:
    if why := no_triton(like):
        return why
    dim = like.shape[-1]
    if dim & (dim - 1) or not 16 <= dim <= 256:
        return f"head dim is {dim} and must be a power of 2 from 16 to 256"
    return None if group <= MOST_GROUP else f"{group} query heads share a KV head and must be at most {MOST_GROUP}"


def _reference_refuses(like: torch.Tensor, group: int) -> str | None:
    return None


def triton_steps() -> ModuleType:
    """The Triton kernels."""
    return importlib.import_module("tamis.kernels.triton.blocks")


def reference_steps() -> ModuleType:
    """Plain PyTorch."""
    return importlib.import_module("tamis.kernels.reference.offload")


# best first
_REFUSES: dict[str, Callable[[torch.Tensor, int], str | None]] = {
    "triton": _triton_refuses,
    "reference": _reference_refuses,
}
BLOCK_STEPS.add("triton", "tamis.kernels.blocks_dispatch:triton_steps")
BLOCK_STEPS.add("reference", "tamis.kernels.blocks_dispatch:reference_steps")
