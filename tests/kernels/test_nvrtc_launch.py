"""What the driver is handed for a launch: its structures byte for byte, on a machine without a driver."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tamis.core.errors import TamisError
from tamis.kernels.nvrtc import launch


class Driver:
    """Keeps what it is given."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.words, self.handle, self.args = error, b"", 0, [0, 0]
        self.attributes: list[tuple[int, list[int]]] = []

    def cuLaunchKernelEx(self, config: Any, handle: ctypes.c_void_p, args: Any, extra: None) -> int:
        self.words, self.handle = bytes(config._obj), handle.value or 0
        count = config._obj.count
        self.attributes = [(config._obj.attributes[i].id, list(config._obj.attributes[i].value)) for i in range(count)]
        self.args = [ctypes.c_void_p.from_address(args[0]).value or 0, ctypes.c_int.from_address(args[1]).value]
        return self.error

    def cuGetErrorString(self, error: int, text: Any) -> None:
        text._obj.value = b"too large"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(launch, "libcuda", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0xABC))
    return made


def test_a_launch(driver: Driver) -> None:
    x = torch.zeros(3)
    launch.Kernel("k", 77, None)((6, 5), 128, [x, -4])
    numbers = [int.from_bytes(driver.words[i : i + 4], "little") for i in range(0, 28, 4)]
    assert numbers == [6, 5, 1, 128, 1, 1, 0] and driver.words[32:40] == (0xABC).to_bytes(8, "little")
    assert len(driver.words) == 56 and driver.attributes == [] and driver.handle == 77
    assert driver.args == [x.data_ptr(), -4]


def test_clusters_and_early_starts(driver: Driver) -> None:
    launch.Kernel("k", 1, None)((8, 5), 64, [torch.zeros(1), 2], cluster=4, early=True)
    zeros = [0] * 13
    assert driver.attributes == [(4, [4, 1, 1, *zeros]), (6, [1, 0, 0, *zeros])]
    assert ctypes.sizeof(launch._Attribute) == 72 and launch._Attribute.value.offset == 8
    launch.Kernel("k", 1, None)((8, 5), 64, [torch.zeros(1), 2], early=True)
    assert [number for number, _ in driver.attributes] == [6]


def test_the_drivers_reason_is_told(driver: Driver) -> None:
    driver.error = 1
    with pytest.raises(TamisError, match=r"refuses to launch k, grid \(8, 5\), 64 threads, clusters of 16: too large"):
        launch.Kernel("k", 1, None)((8, 5), 64, [torch.zeros(1), 2], cluster=16)
