"""A whole decode step of a real shape with random weights whose blocks of keys and values come from host memory.

One step serves all providers: what chooses (the layer itself, a forecast, InfiniGen's guess), when the copy begins, and
whether there is one. All choosing is done in full; then the blocks of a replayed list are placed instead
(`bench.locality`), since what random weights choose means nothing. On a GPU three streams, ordered by events, go into
one graph: layers, choices made ahead, and copies. On a CPU the reference runs in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import linear

from tamis.bench.fuse import add_norm, rms_norm, swiglu
from tamis.bench.locality import STICK
from tamis.bench.machine import check_memory
from tamis.bench.shapes import Shape
from tamis.kernels.block_pool import NEVER, BlockPool
from tamis.kernels.blocks import BlockRule

EPS = 1e-5


@dataclass(frozen=True)
class Provider:
    """ahead     who chooses a layer's blocks while the layer before runs: "forecast", "infinigen", or "" for nobody:
              the layer itself when its query is there
    prefetch  copies begin as soon as the choice is there, beside the layer before; else when the layer needs them
    resident  all blocks lie on the device: nothing is copied
    stick     the rule sticks to what was read of late (`BlockRule.stick`)
    """

    name: str
    ahead: str = ""
    prefetch: bool = False
    resident: bool = False
    stick: bool = False

    @property
    def chooser(self) -> str:
        """The name of a recording of what chooses as this does (`bench.locality`)."""
        return ("forecast" if self.ahead == "forecast" else "own") + STICK * self.stick


PROVIDERS = {
    p.name: p
    for p in (
        Provider("sparse-resident", resident=True),
        Provider("sparse-offload"),
        Provider("infinigen", "infinigen", True),
        Provider("forecast-no-prefetch", "forecast"),
        Provider("forecast", "forecast", True),
        Provider("sparse-offload-stick", stick=True),
        Provider("forecast-stick", "forecast", True, stick=True),
    )
}


@dataclass(frozen=True)
class Pieces:
    """What lies between the products: `rotate` turns heads from the given one on, in place."""

    norm: Callable[..., torch.Tensor]
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    swiglu: Callable[..., torch.Tensor]
    rotate: Callable[..., torch.Tensor]

    @classmethod
    def on(cls, device: torch.device) -> Pieces:
        """One launch each on a GPU."""
        if device.type != "cuda":
            return cls(rms_norm, add_norm, swiglu, rotate)
        from tamis.kernels.triton import step_pieces as fast

        return cls(fast.rms_norm, fast.add_norm, fast.swiglu, fast.rotate)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, first: int) -> torch.Tensor:
    """Turn the heads from `first` on of x [B, heads, D] in place by cos and sin [D / 2]."""
    a, b = x[:, first:].float().chunk(2, -1)
    x[:, first:] = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    return x


class Weights:
    """Random weights of all layers. The first product gives v, q, k and the forecast of the next layer's query."""

    def __init__(self, shape: Shape, layers: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.layers, self.pieces = shape, layers, Pieces.on(device)
        d, inner = shape.head_dim, shape.heads * shape.head_dim

        self.check(shape, layers, device, dtype)

        def weight(rows: int, columns: int, n: int = layers) -> torch.Tensor:
            return torch.empty(n, rows, columns, dtype=dtype, device=device).normal_(std=0.02)

        self.first = weight((shape.heads + 3 * shape.kv_heads) * d, shape.hidden)
        self.o, self.current = weight(shape.hidden, inner), weight(shape.kv_heads * d, shape.hidden, 1)[0]
        self.up, self.down = weight(2 * shape.intermediate, shape.hidden), weight(shape.hidden, shape.intermediate)
        self.head = weight(shape.vocabulary, shape.hidden, 1)[0]
        self.scale = torch.ones(shape.hidden, dtype=dtype, device=device)
        angle = torch.arange(d // 2, device=device) * 0.1
        self.cos, self.sin = angle.cos(), angle.sin()

    @staticmethod
    def check(shape: Shape, layers: int, device: torch.device, dtype: torch.dtype) -> None:
        """Raises Unavailable where so many layers' weights do not fit a CPU's memory."""
        each = (2 * shape.heads + 3 * shape.kv_heads) * shape.head_dim + 3 * shape.intermediate
        n_bytes = (layers * each + shape.vocabulary) * shape.hidden * dtype.itemsize
        check_memory(n_bytes, device, f"{layers} layers' weights")

    def heads(self, y: torch.Tensor, layer: int, *, forecast: bool) -> tuple[torch.Tensor, ...]:
        """v [B, Hkv, D], q [B, Hq, D], k and, if asked for, the forecast [B, Hkv, D] of y [B, hidden], rotated."""
        s = self.shape
        counts = [s.kv_heads, s.heads, s.kv_heads] + [s.kv_heads] * forecast
        made = linear(y, self.first[layer, : sum(counts) * s.head_dim]).view(len(y), sum(counts), s.head_dim)
        return torch.split(self.pieces.rotate(made, self.cos, self.sin, s.kv_heads), counts, 1)

    def guess(self, y: torch.Tensor, layer: int) -> torch.Tensor:
        """The queries [B, Hq, D] that a layer's own projection makes of another layer's input."""
        s = self.shape
        rows = slice(s.kv_heads * s.head_dim, (s.kv_heads + s.heads) * s.head_dim)
        made = linear(y, self.first[layer, rows]).view(len(y), s.heads, s.head_dim)
        return self.pieces.rotate(made, self.cos, self.sin, 0)

    def now(self, y: torch.Tensor) -> torch.Tensor:
        """What stands for a forecast of the first layer [B, Hkv, D], which has no layer before it."""
        made = linear(y, self.current).view(len(y), self.shape.kv_heads, self.shape.head_dim)
        return self.pieces.rotate(made, self.cos, self.sin, 0)

    def behind(self, x: torch.Tensor, attended: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer behind its attention: residual sum and the next layer's input, both [B, hidden]."""
        p = self.pieces
        x, y = p.add_norm(x, linear(attended.reshape(len(x), -1), self.o[layer]), self.scale, EPS)
        return p.add_norm(x, linear(p.swiglu(linear(y, self.up[layer])), self.down[layer]), self.scale, EPS)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(t.nbytes for t in (self.first, self.o, self.up, self.down, self.head, self.current))


@dataclass
class Timeline:
    """Device times in ns, int64 [layers, 4]: a layer begins, its attention begins, its copy begins, its copy ends."""

    at: torch.Tensor
    stamp: Callable[[torch.Tensor, int], None]

    def mark(self, layer: int, what: int) -> None:
        """Note the time when the current stream comes here."""
        self.stamp(self.at.view(-1), layer * 4 + what)


@dataclass
class Step:
    """A step of one provider. wanted int32 [layers, R, W] and positions int32 [B] lie on the device and change from
    step to step; the step moves positions on. resident: slots of all blocks [layers][R, N, 2, block, D]."""

    weights: Weights
    pool: BlockPool
    ops: ModuleType
    provider: Provider
    wanted: torch.Tensor
    positions: torch.Tensor
    x: torch.Tensor
    resident: list[torch.Tensor] = field(default_factory=list)
    timeline: Timeline | None = None
    beside: bool = True  # choices made ahead have a stream of their own
    programs: int = 8
    warps: int = 8
    rule: BlockRule | None = None  # of choosing; None: the pool's

    def __post_init__(self) -> None:
        self._arrived: dict[int, Any] = {}
        self._read_beside: dict[int, Any] = {}
        room = self.pool.room
        self._chosen = torch.empty((room.rows, room.width), dtype=torch.int32, device=self.x.device)
        self._rule, self._last = self.rule or room.rule, None
        if self._rule.stick:
            size = (room.layers, room.rows, room.n_blocks)
            self._last = torch.full(size, NEVER, dtype=torch.int32, device=self.x.device)
        self._copying: Any = None
        self._choosing: Any = None
        if self.x.device.type == "cuda":
            # before a grid that fills the device, or the copies wait for its end
            self._copying = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            if self.beside and self.provider.ahead:
                self._choosing = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]

    def run(self) -> torch.Tensor:
        """Logits [B, vocabulary]."""
        w, provider, layers = self.weights, self.provider, self.pool.layers
        scale = w.shape.head_dim**-0.5
        self.pool.counts.zero_()
        x, y = self.x, w.pieces.norm(self.x, w.scale, EPS)
        for i, layer in enumerate(layers):
            self._mark(i, 0)
            v, q, k, *ahead = w.heads(y, i, forecast=provider.ahead == "forecast")
            self.ops.append(layer, k, v, self.positions)
            if i == 0 or i + 1 < len(layers) or not provider.ahead:  # else nothing is left to choose
                with self._on(self._choosing):
                    self._choices(i, y, q, ahead, scale)
            self._need(i)
            self._mark(i, 1)
            slots = self.resident[i] if provider.resident else layer.slots
            places = self.wanted[i] if provider.resident else layer.place
            x, y = w.behind(x, self.ops.attend(q, slots, places, layer.tail, self.positions, scale=scale), i)
        logits = linear(y, w.head)
        self.positions.add_(1)
        self._read_beside.clear()
        return logits

    def copies(self, *, fetch: bool) -> None:
        """What the step places and, if `fetch`, copies, one layer after the other and nothing else."""
        self.pool.counts.zero_()
        for i, layer in enumerate(self.pool.layers):
            self.ops.place(layer, self.wanted[i])
            if fetch:
                self.ops.fetch(layer, programs=self.programs, warps=self.warps)

    def _choices(self, i: int, y: torch.Tensor, q: torch.Tensor, ahead: list[torch.Tensor], scale: float) -> None:
        """What is chosen while layer i runs: by itself, or for the next one. y: its input; ahead: the forecast."""
        w, named = self.weights, self.provider.ahead
        if self._choosing is not None:  # their memory must not be given away before the other stream has read it
            self._read_beside[i + 1] = (y, q, ahead)
        if i == 0 or not named:
            first = named == "forecast"
            self._choose(i, w.now(y) if first else q, None if first else scale, lag=0)
        if named and i + 1 < len(self.pool.layers):
            guess = ahead[0] if ahead else w.guess(y, i + 1)
            self._choose(i + 1, guess, None if ahead else scale, lag=1)

    def _choose(self, i: int, q: torch.Tensor, scale: float | None, *, lag: int) -> None:
        """Score, select, and place; begin the copies where they are made ahead."""
        layer = self.pool.layers[i]
        values = self.ops.scores(q, layer, self.positions, scale=scale, lag=lag)
        last = None if self._last is None else self._last[i]
        self.ops.select(values, self.positions, self._rule, self._chosen, last)
        if self.provider.resident:
            if self._choosing is not None:
                self._arrived[i] = self._choosing.record_event()
            return
        self.ops.place(layer, self.wanted[i])
        if self.provider.prefetch:
            with self._on(self._copying):
                self._fetch(i)
                if self._copying is not None:
                    self._arrived[i] = self._copying.record_event()
        elif self._choosing is not None:
            self._arrived[i] = self._choosing.record_event()

    def _need(self, i: int) -> None:
        """The current stream goes on when layer i's blocks are there."""
        if i in self._arrived:
            torch.cuda.current_stream().wait_event(self._arrived.pop(i))
        self._read_beside.pop(i, None)
        if not self.provider.resident and not self.provider.prefetch:
            self._fetch(i)

    def _fetch(self, i: int) -> None:
        self._mark(i, 2)
        self.ops.fetch(self.pool.layers[i], programs=self.programs, warps=self.warps)
        self._mark(i, 3)

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Any:
        """On another stream, behind what was launched on this one so far; None: on this one."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def _mark(self, layer: int, what: int) -> None:
        if self.timeline is not None:
            self.timeline.mark(layer, what)
