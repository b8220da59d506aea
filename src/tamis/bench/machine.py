"""What a number was measured on. Describes whatever is there and never fails for what is missing."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from tamis.core.errors import InvalidInput, Unavailable

if TYPE_CHECKING:
    import torch

_WAIT_S = 10.0  # a driver that does not answer must not hold up a bench
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_CPU_FILE = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """Hardware and versions; "" for what is not there.

    cpu     model name
    cores   logical cores that this process may use
    gpu     name of the GPU that is used by default
    driver  version of the NVIDIA driver
    commit  git commit of the Tamis that runs, with "-dirty" if its files were changed; "unknown" outside a checkout
    """

    cpu: str
    cores: int
    python: str
    torch: str
    transformers: str
    triton: str
    gpu: str
    driver: str
    commit: str

    @property
    def device(self) -> str:
        """What to write where one word for the hardware is wanted: the GPU, or the CPU where there is none."""
        return self.gpu or f"none ({self.cpu}, {self.cores} cores)"

    def to_dict(self) -> dict[str, str | int]:
        """Plain values, fit for JSON."""
        return asdict(self)


@functools.cache
def describe_machine() -> Machine:
    """The machine that this process runs on, looked at once."""
    listed = _run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    name, _, driver = listed[0].rpartition(", ") if listed else ("", "", "")
    return Machine(
        cpu=_cpu(),
        cores=_cores(),
        python=platform.python_version(),
        torch=_version("torch"),
        transformers=_version("transformers"),
        triton=_version("triton"),
        gpu=_torch_gpu() or name,
        driver=driver or _driver_from_kernel(),
        commit=_commit(Path(__file__)),
    )


def check_memory(n_bytes: int, device: torch.device, what: str) -> None:
    """Raises Unavailable for what is larger than the machine's memory: a CPU's process would be killed for it. A GPU
    says by itself that it has no more."""
    if device.type == "cuda":
        return
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if n_bytes > there:
        raise Unavailable(
            f"{what} take {n_bytes / 1e9:.0f} GB and this machine has {there / 1e9:.0f} GB. Give --shape tiny, or use "
            "a GPU."
        )


def device_of(name: str | None) -> torch.device:
    """The device to measure on: the GPU where there is one, or that which is named ("cpu", "cuda", "cuda:1").

    Raises InvalidInput for another name and Unavailable for a GPU that is not there.
    """
    import torch

    gpus = torch.cuda.device_count()
    if name is None:
        return torch.device("cuda" if gpus else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise InvalidInput(f"device is {name!r}; benchmarks run on cpu, cuda, or cuda:1 and so on.")
    if kind == "cuda" and int(number or 0) >= gpus:
        raise Unavailable(
            f"device is {name!r} and torch sees {gpus} NVIDIA GPUs; leave --device out, or name one that is there."
        )
    return torch.device(name)


def _run(*command: str) -> str:
    """What a command prints; "" if it is not installed, fails or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu() -> str:
    try:
        lines = _CPU_FILE.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if not models and sys.platform == "darwin":
        models = [_run("sysctl", "-n", "machdep.cpu.brand_string")]
    return (models[0] if models else "") or platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _torch_gpu() -> str:
    # torch knows which of several GPUs this process was given; nvidia-smi lists them all
    try:
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    except (ImportError, RuntimeError, AssertionError):
        return ""


def _driver_from_kernel() -> str:
    """The version in the kernel module's own words, for containers without nvidia-smi."""
    try:
        words = _DRIVER_FILE.read_text(errors="replace").split()
    except OSError:
        return ""
    return next((w for w in words if w[:1].isdigit() and w.count(".") >= 1), "")


def _commit(file: Path) -> str:
    here = ("git", "-C", str(file.parent))
    # an installed copy may lie inside somebody else's checkout, whose commit says nothing about it
    if not _run(*here, "ls-files", "--error-unmatch", file.name):
        return "unknown"
    return _run(*here, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or "unknown"


def why_of(error: BaseException) -> str:
    """What a report gives as the reason why something was left out: the first line of an error, its kind before it."""
    text = str(error).strip().split("\n")[0][:300].rstrip(".")
    return text if isinstance(error, Unavailable) else f"{type(error).__name__}: {text}"
