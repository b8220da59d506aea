"""Which CUDA graphs a step with rows of Tamis may replay: none that holds attention."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from tamis.integrations.vllm import compat, hooks, rows


class Mode(Enum):
    """As vLLM's: what is kept for batches of any kind and, before it, for decode steps."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    def mixed_mode(self) -> Mode:
        return Mode(self.value[1]) if isinstance(self.value, tuple) else self


def dispatched(mode: Mode | None, *, breakable: bool = False, **more: Any) -> dict[str, Any]:
    """What vLLM is asked for a decode step of three requests."""
    found: dict[str, Any] = {}

    def stock(manager: Any, n_requests: int, n_tokens: int, uniform: int | None, *args: Any, **kwargs: Any) -> None:
        found.update({"requests": n_requests, "tokens": n_tokens, "uniform": uniform} | kwargs)

    manager = None if mode is None else SimpleNamespace(cudagraph_mode=mode, use_breakable_cg=breakable)
    hook = next(h for h in hooks.WORKER_V2 if h.name == "dispatch_cg_and_sync_dp")
    hook.wrap(stock)(manager, 3, 3, 1, 1, 0, need_eager=False, **more)
    return found


@pytest.fixture
def tamis_step(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A step for which Tamis has no graph of its own."""
    step = SimpleNamespace(replays=lambda requests, tokens, loras: None)
    monkeypatch.setattr(rows, "running", step)
    return step


@pytest.mark.parametrize("mode", [Mode.PIECEWISE, Mode.FULL_AND_PIECEWISE])
def test_graphs_without_attention_are_replayed(tamis_step: SimpleNamespace, mode: Mode) -> None:
    assert dispatched(mode) == {"requests": 3, "tokens": 3, "uniform": None, "need_eager": False}
    assert dispatched(mode, uniform_decode=True)["uniform_decode"] is False


@pytest.mark.parametrize("mode", [None, Mode.NONE, Mode.FULL, Mode.FULL_DECODE_ONLY])
def test_graphs_with_attention_are_not(tamis_step: SimpleNamespace, mode: Mode | None) -> None:
    assert dispatched(mode)["need_eager"] is True


def test_a_graph_of_its_own_comes_first(tamis_step: SimpleNamespace) -> None:
    tamis_step.replays = lambda requests, tokens, loras: ("graph", requests, tokens, loras)
    hook = next(h for h in hooks.WORKER_V2 if h.name == "dispatch_cg_and_sync_dp")
    dispatch = hook.wrap(lambda *args, **kwargs: "stock")
    assert dispatch(None, 3, 3, 1, 1, 0, num_active_loras=2) == (("graph", 3, 3, 2), None)
    assert dispatch(None, 3, 5, None, 1, 0) == "stock", "not a token each"


def test_breakable_graphs_are_not(tamis_step: SimpleNamespace) -> None:
    assert dispatched(Mode.PIECEWISE, breakable=True)["need_eager"] is True


@pytest.mark.parametrize("mode", list(Mode))
def test_steps_without_tamis_are_stock(mode: Mode) -> None:
    asked = dispatched(mode, uniform_decode=True)
    assert asked == {"requests": 3, "tokens": 3, "uniform": 1, "need_eager": False, "uniform_decode": True}


@pytest.mark.parametrize(
    ("version", "whole"), [("0.26.0", True), ("0.26.1.post1", True), ("0.26.0+cu12.9", True), ("0.32.0", False)]
)
def test_whole_graphs_by_version(monkeypatch: pytest.MonkeyPatch, version: str, whole: bool) -> None:
    monkeypatch.setattr(compat, "version", lambda: version)
    looked: list[bool] = []
    manager = SimpleNamespace(use_breakable_cg=False, needs_capture=lambda: bool(looked.append(True)))
    assert compat.decode_managers(SimpleNamespace(cudagraph_manager=manager), 2) == []
    assert looked == [True] * whole, "what this version has is looked at"
