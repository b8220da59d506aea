"""Kernels of a CUDA C++ source, compiled once a process by PyTorch's compiler, and their launch by the driver.

PyTorch's own launch knows neither clusters of programs nor a launch that may begin before the one in front of it has
ended; the driver's does. Nothing here waits for the device, and launches can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tamis.core.errors import TamisError
from tamis.kernels.driver import libcuda

CLUSTER, EARLY = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION and _PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: 4 bytes of padding, then a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@dataclass(frozen=True)
class Kernel:
    """A kernel on one device. `handle` is its CUfunction; `keep` holds what it lives in."""

    name: str
    handle: int
    keep: Any

    def __call__(
        self,
        grid: tuple[int, int],
        threads: int,
        args: Sequence[torch.Tensor | int],
        *,
        cluster: int = 1,
        early: bool = False,
    ) -> None:
        """Launch on the current stream; args are tensors and 32-bit ints.

        cluster  programs of a cluster, along the grid's first dim
        early    it may start before the launch in front of it has ended: it has to wait for that one itself
        Raises TamisError with the driver's reason.
        """
        values: list[Any] = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int(a) for a in args
        ]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        wanted = [(CLUSTER, (cluster, 1, 1))] * (cluster > 1) + [(EARLY, (1,))] * early
        attributes = (_Attribute * 2)(*[_Attribute(i, 0, (ctypes.c_uint * 16)(*v)) for i, v in wanted])
        stream = torch.cuda.current_stream().cuda_stream
        config = _Config((*grid, 1), (threads, 1, 1), 0, stream, attributes, len(wanted))
        driver = libcuda()
        error = driver.cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(self.handle), pointers, None)
        if error:
            why = ctypes.c_char_p()
            driver.cuGetErrorString(error, ctypes.byref(why))
            raise TamisError(
                f"the driver refuses to launch {self.name}, grid {grid}, {threads} threads, clusters of {cluster}: "
                f"{(why.value or b'unknown error').decode()}. Another kernel= does without it."
            )


@functools.cache
def compiled(name: str, files: tuple[Path, ...], constants: tuple[tuple[str, int], ...], device: int) -> Kernel:
    """Kernel `name` of the files joined, for the GPU of that number, which is the current one.

    `constants` are defined in front of the source.
    """
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    # the first line keeps older versions of PyTorch from putting the same in front of a preprocessor line
    head = 'extern "C" {}\n' + "".join(f"#define {key} {value}\n" for key, value in constants)
    made: Any = torch.cuda._compile_kernel(head + source, name)
    return Kernel(name, made.func.value, made)
