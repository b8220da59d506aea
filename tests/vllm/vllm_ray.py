"""Ray as the starter of vLLM's workers on a CPU, which vLLM's CPU platform refuses: it names no device of Ray's.

This module is a platform plugin of vLLM that says "GPU", in every process, those that Ray starts included; Ray is told
that there are some. Nothing else of vLLM's or Ray's is changed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

METADATA = "Metadata-Version: 2.1\nName: vllm-ray\nVersion: 0\n"
ENTRY_POINTS = f"[vllm.platform_plugins]\nray_on_cpu = {Path(__file__).stem}:plugin\n"


@contextmanager
def environment(plugins: str, devices: int = 2) -> Iterator[dict[str, str]]:
    """Variables under which `--distributed-executor-backend ray` works on a CPU, and `plugins` are loaded, too."""
    # a short path, for Ray's sockets; what it leaves there goes with it
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        info = Path(folder, "vllm_ray-0.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(METADATA)
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
        shutil.copy(__file__, folder)
        yield {
            "PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH")))),
            "VLLM_PLUGINS": f"{plugins},ray_on_cpu",
            "VLLM_HOST_IP": "",  # Ray's own address: its older executor compares the two
            "RAY_OVERRIDE_RESOURCES": f'{{"GPU": {devices}}}',
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }


def plugin() -> str:
    """What vLLM calls to ask for the name of its platform."""
    return f"{__name__}.platform"


def platform() -> Any:
    """What vLLM calls as the platform's class; not imported above, where vLLM's platforms are being imported."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"
    return CpuPlatform()
