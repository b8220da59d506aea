"""Energy of the GPU between two moments, from NVML's counter."""

from __future__ import annotations

from typing import Any

import torch

from tamis.core.log import logger

log = logger("bench")


class EnergyMeter:
    """Reads the total-energy counter of the current GPU; answers None where there is none, and logs why."""

    def __init__(self, wanted: bool = True) -> None:
        self._nvml: Any = None
        self._begin = 0
        if not wanted:
            return
        try:
            import pynvml  # part of the CUDA builds' own dependencies; absent on a CPU
        except ImportError:
            log.info("no energy is measured: the package nvidia-ml-py is not installed")
            return
        try:
            pynvml.nvmlInit()
            self._handle = _handle(pynvml)
            self._nvml = pynvml
            self._read()
        except pynvml.NVMLError as e:
            log.info("no energy is measured: %s", e)
            self._nvml = None

    @property
    def works(self) -> bool:
        """Whether there is a counter."""
        return self._nvml is not None

    def start(self) -> None:
        """Count from now."""
        if self._nvml is not None:
            self._begin = self._read()

    def stop(self) -> float | None:
        """Joules since `start`, or None without a counter."""
        return None if self._nvml is None else (self._read() - self._begin) / 1e3

    def _read(self) -> int:
        millijoules: int = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        return millijoules


def _handle(nvml: Any) -> Any:
    """The GPU that PyTorch uses: NVML numbers all of the machine's, whatever CUDA_VISIBLE_DEVICES hides."""
    own = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(own), "uuid", None)
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError as e:
        log.info("energy is that of NVML's GPU %d: it does not know GPU-%s (%s)", own, uuid, e)
        return nvml.nvmlDeviceGetHandleByIndex(own)
