"""Decode steps as CUDA graphs: what a step launches is recorded once for each number of rows, then replayed.

Knows launches, not requests. What is recorded reads and writes fixed tensors alone, so whoever calls puts what changes
into them first. Where recording fails the reason is kept, and steps go on as they were: nothing of a failed recording
was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from tamis.core.log import logger

log = logger("engine")
MOST_ROWS = 64  # of a recorded step; larger ones keep a GPU busy without
MOST_GRAPHS = 32  # each keeps its workspace; beyond, the one used longest ago goes
Forward = Callable[[], torch.Tensor]


@dataclass
class _Kept:
    """What steps of one kind have: how often they ran, and their graph with its result once it was recorded."""

    runs: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    out: torch.Tensor | None = None


class StepGraphs:
    """Runs steps by their graphs. `reason`: why none is used ("": they are); `replays`, `eager`: steps so far."""

    def __init__(self, model: Any, device: torch.device, *, use: bool = True) -> None:
        self.device, self.replays, self.eager = device, 0, 0
        self.reason = refusal(model, device) if use else "graphs are switched off"
        self._kept: dict[Hashable, _Kept] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def used(self) -> bool:
        """Whether steps are recorded at all."""
        return not self.reason

    def run(self, key: Hashable, rows: int, forward: Forward) -> torch.Tensor:
        """The result of `forward`, which must do the same launches on the same tensors whenever `key` is the same.

        The first step of a kind runs as it is, so that kernels are built and libraries set up; the second is recorded.
        A replay overwrites the result of the one before.
        """
        if self.reason or rows > MOST_ROWS:
            self.eager += 1
            return forward()
        kept = self._kept.pop(key, None) or _Kept()
        self._kept[key] = kept  # the one used last stands last
        kept.runs += 1
        if kept.graph is None and kept.runs > 1:
            self._record(kept, forward)
        if kept.graph is None or kept.out is None:
            self.eager += 1
            return forward()
        kept.graph.replay()
        self.replays += 1
        return kept.out

    def forget(self, key: Hashable) -> None:
        """The tensors of a kind of steps are gone."""
        self._kept.pop(key, None)

    def clear(self) -> None:
        """Let go of all graphs and their memory."""
        self._kept.clear()

    def _record(self, kept: _Kept, forward: Forward) -> None:
        while sum(k.graph is not None for k in self._kept.values()) >= MOST_GRAPHS:
            oldest = next(key for key, k in self._kept.items() if k.graph is not None)
            del self._kept[oldest]
        current = torch.cuda.current_stream(self.device)
        if self._stream is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        try:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # what libraries keep for a stream is not to lie in a graph's memory
                forward()
            # other threads may copy or allocate meanwhile: only this one's forbidden calls end the recording
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                out = forward()
        except Exception as e:
            self._failed(e, current)
            return
        current.wait_stream(stream)
        kept.graph, kept.out = graph, out

    def _failed(self, error: Exception, current: torch.cuda.Stream) -> None:
        line = str(error).partition("\n")[0]
        self.reason = f"a step could not be recorded ({type(error).__name__}: {line})"
        log.warning("decode goes on without CUDA graphs: %s", self.reason)
        self.clear()
        # a recording that broke off leaves its stream behind, and the random generators as if it went on
        torch.cuda.set_stream(current)
        torch.cuda.synchronize(self.device)
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros(1, device=self.device)
        torch.cuda.set_stream(current)


def refusal(model: Any, device: torch.device) -> str:
    """Why steps of a model are not even tried to be recorded; "" if they are."""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    config = model.config.get_text_config()
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return "which experts compute is read back from the GPU in every layer"
    parameters = getattr(config, "rope_parameters", None) or {}
    if (kind := parameters.get("rope_type", "default")) in ("dynamic", "longrope"):
        return f"{kind} rotary angles depend on positions that are read back from the GPU"
    return ""
