"""Energy of the GPU between two moments, from NVML's counter."""

from __future__ import annotations

from typing import Any

from tamis.core.log import logger

log = logger("bench")


class EnergyMeter:
    """Reads the total-energy counter of the first GPU; answers None where there is none, and logs why."""

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
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._nvml = pynvml
            self._read()
        except pynvml.NVMLError as e:
            log.info("no energy is measured: %s", e)
            self._nvml = None

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
