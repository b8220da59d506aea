"""Copies from pinned host memory by a GPU's copy engine, which takes none of its multiprocessors, and a GPU's own view
of such memory.

Knows addresses and sizes; not blocks or models. Nothing of CUDA is loaded before it is asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from tamis.core.errors import Unavailable
from tamis.kernels.driver import libcuda


def copy_pieces(pairs: Sequence[tuple[int, int]], nbytes: int) -> None:
    """Hand pieces of `nbytes` from host to device addresses (from, to) to the copy engine, on the current stream.

    One call of the driver a piece. Raises Unavailable without an NVIDIA driver, and where it refuses a copy.
    """
    call = libcuda().cuMemcpyHtoDAsync_v2
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    size = ctypes.c_size_t(nbytes)
    for source, target in pairs:
        code = call(ctypes.c_uint64(target), ctypes.c_void_p(source), size, stream)
        if code:
            raise Unavailable(f"the driver refused to copy {nbytes} bytes from pinned host memory (error {code}).")


def copy_tasks(host: torch.Tensor, slots: torch.Tensor, tasks: torch.Tensor, count: torch.Tensor) -> None:
    """What `kernels.triton.offload_move.copy_blocks` does, by the copy engine: host and slots [.., 2, block, D], tasks
    int32 [.., 2] and their count [1] on the device. Waits for the count, so no graph can hold it."""
    body = 3  # dims of a block
    nbytes = host[(0,) * (host.dim() - body)].numel() * host.element_size()
    todo = tasks[: int(count)].tolist()
    begin, end = host.data_ptr(), slots.data_ptr()
    copy_pieces([(begin + a * nbytes, end + b * nbytes) for a, b in todo], nbytes)


class _Memory:
    """Memory at an address, as the CUDA array interface describes it."""

    def __init__(self, host: torch.Tensor) -> None:
        words = host.numel() * host.element_size() // 4
        self.__cuda_array_interface__ = {
            "shape": (words,), "typestr": "<i4", "data": (host.data_ptr(), False), "version": 3,
        }  # fmt: skip
        self.kept = host


def device_view(host: torch.Tensor) -> torch.Tensor:
    """A pinned contiguous tensor as a flat int32 tensor of the GPU over the same memory: for what takes no host tensor.

    The view must not outlive the tensor. Raises Unavailable where the memory is not pinned.
    """
    if not host.is_pinned():
        raise Unavailable("the host memory is not pinned; make it with pin_memory=True.")
    return torch.as_tensor(_Memory(host), device="cuda")
