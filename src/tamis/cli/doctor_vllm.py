"""What `tamis doctor` says of vLLM: whether Tamis can run inside the one that is installed."""

from __future__ import annotations

import importlib.metadata

GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")


def vllm_section() -> dict[str, str | None]:
    """installed, supported, and each entry point that vLLM has to find; None where vLLM is not installed."""
    from tamis.core.errors import Unavailable
    from tamis.integrations.vllm import compat

    found = compat.version()
    if found is None:
        return {"installed": None}
    try:
        compat.check_version(found)
        tried = any(found.startswith(f"{minor}.") for minor in compat.TRIED)
        supported = "yes, tried" if tried else "expected to work, not tried"
    except Unavailable as e:
        supported = f"no: {e}"
    told: dict[str, str | None] = {"installed": found, "supported": supported}
    for group in GROUPS:
        mine = [p.value for p in importlib.metadata.entry_points(group=group) if p.name == "tamis"]
        told[group] = mine[0] if mine else "missing: install Tamis again in this environment"
    return told
