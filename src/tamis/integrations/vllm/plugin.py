"""The entry point that vLLM calls in each of its processes: puts Tamis in place, inert until it is configured.

vLLM logs an exception here and goes on without the plugin, so failures are kept, and the connector raises them when it
is made: a server configured for Tamis never starts without it.
"""

from __future__ import annotations

from tamis.core.errors import Unavailable
from tamis.core.log import logger

log = logger("vllm")
_state: dict[str, str] = {}


def register() -> None:
    """Register the backend and install the hooks; may be called any number of times."""
    if _state.get("done"):
        return
    try:
        _register()
        _state["done"] = "yes"
    except Exception as e:  # vLLM would swallow it; the connector raises it
        _state["failed"] = f"{type(e).__name__}: {e}"
        log.warning("Tamis is not in place in this process: %s", e)


def check_registered() -> None:
    """Raises Unavailable, with the reason, if this process runs without the plugin."""
    if _state.get("done"):
        return
    why = _state.get("failed") or (
        "vLLM did not load it: the entry point vllm.general_plugins 'tamis' is missing (reinstall Tamis), or "
        "VLLM_PLUGINS does not name it"
    )
    raise Unavailable(f"TamisConnector is configured and the plugin is not in place. {why}.")


def _register() -> None:
    from tamis.integrations.vllm import compat, hooks, weights

    compat.check_version()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for stock in compat.BACKENDS.values():
        register_backend(getattr(AttentionBackendEnum, stock.name), stock.ours)
    hooks.install((*hooks.CORE, *weights.HOOKS))
