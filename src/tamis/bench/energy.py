"""Energy of the GPU between two moments, from NVML's counter."""

from __future__ import annotations

from typing import Any


class EnergyMeter:
    """Reads the total-energy counter of the first GPU; answers None where there is none."""

    def __init__(self, wanted: bool = True) -> None:
        self._handle: Any = None
        self._begin = 0
        if wanted:
            try:
                import pynvml  # part of the CUDA builds' own dependencies; absent on a CPU

                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
                self._nvml = pynvml
            except Exception as e:  # NVML's errors share no base with anything: no counter is no failure
                self._reason = str(e)

    def start(self) -> None:
        """Count from now."""
        if self._handle is not None:
            self._begin = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)

    def stop(self) -> float | None:
        """Joules since `start`, or None without a counter."""
        if self._handle is None:
            return None
        used: float = (self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) - self._begin) / 1e3
        return used
