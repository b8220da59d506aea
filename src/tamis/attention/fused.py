"""A forecast's rows under a model's QKV matrices: one product makes queries, keys, values and forecasts.

Knows modules and weights; not what forecasts are for. Undoes itself: the model's parameters stay the same objects with
the same values, and have memory of their own again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import linear

from tamis.attention.layer_inputs import decoder_layers
from tamis.core.errors import InvalidInput
from tamis.forecast.heads import Forecast
from tamis.model.rope import Rotary

NAMES = ("q_proj", "k_proj", "v_proj")


class FusedForecast:
    """`forecast` in `model` until `close`. Within `running`, passes leave their forecasts for `query`; all other passes
    run the projections as they were.

    While it is in, the parameters of a layer's three projections are views of one matrix, so that nothing is held
    twice. A layer whose projections are no plain linear ones (adapters, quantised weights, parameters that share their
    memory) is left alone, and its forecasts are a product of their own. Raises InvalidInput for a forecast of another
    shape.
    """

    def __init__(self, model: Any, forecast: Forecast) -> None:
        layers = decoder_layers(model)
        if forecast.n_layers != len(layers):
            raise InvalidInput(
                f"the forecast has {forecast.n_layers} layers and {type(model).__name__} has {len(layers)}; "
                "`tamis train forecast` makes one for this model."
            )
        rotary, device = Rotary.of(model), next(model.parameters()).device
        # a step would wait for the frequencies to be brought, once for every layer
        self.forecast, self.rotary = forecast, replace(rotary, inv_freq=rotary.inv_freq.to(device))
        self.active = False
        self._made: dict[int, torch.Tensor] = {}
        self._undo: list[Callable[[], None]] = []
        self.n_fused = 0
        try:
            with torch.inference_mode(False):
                for number, layer in enumerate(layers):
                    self._put(number, layer.self_attn)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def running(self) -> Iterator[None]:
        """Passes inside forecast."""
        self.active = True
        try:
            yield
        finally:
            self.active = False
            self._made.clear()

    def query(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """What `layer`'s pooled keys will be asked by the running tokens at `positions` int64 [n], one of each sequence
        or all of a pass over one, once the projections of its source layer have run: [B * Hkv, n, D], rotated."""
        width = self.forecast.weight.shape[1]
        at = width if layer == 1 else 0  # layers 0 and 1 are both served by layer 0
        made = self._made[Forecast.source(layer)][..., at : at + width]
        f = torch.unflatten(made, -1, (self.forecast.n_kv_heads, -1)).transpose(1, 2).flatten(0, 1)
        return self.rotary.place(f, positions)

    def close(self) -> None:
        """Take it out of the model. Closing twice is harmless."""
        with torch.inference_mode(False):  # or the model could not be trained afterwards
            while self._undo:
                self._undo.pop()()

    def _put(self, number: int, attention: Any) -> None:
        weight, bias = self.forecast.rows(number)
        if not weight.shape[0]:
            return
        projections = [getattr(attention, name, None) for name in NAMES]
        like = next(attention.parameters())
        weight = weight.to(like.device, like.dtype)
        bias = None if bias is None else bias.to(like.device, like.dtype)
        if not _plain(projections):
            self._beside(number, projections[0], weight, bias)
            return
        fused = _Fused(projections, weight, bias)
        self._undo.append(fused.close)
        self.n_fused += 1

        fused.open(lambda: self.active, lambda f: self._keep(number, f))

    def _keep(self, number: int, f: torch.Tensor) -> None:
        self._made.pop(number - 2, None)  # nobody asks for it any more, and a prompt's is large
        self._made[number] = f

    def _beside(self, number: int, q_proj: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        def note(module: Any, args: tuple[Any, ...]) -> None:
            if self.active:
                self._keep(number, linear(args[0].to(weight.dtype), weight, bias))

        self._undo.append(q_proj.register_forward_pre_hook(note).remove)


class _Fused:
    """Three linear modules and rows beneath them as one matrix, of which the modules' parameters are views."""

    def __init__(self, projections: Sequence[Any], weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.projections = projections
        self.rows, self.bias_rows = weight, bias
        self.sizes = [p.weight.shape[0] for p in projections] + [weight.shape[0]]
        self.weight = torch.cat([*(p.weight.detach() for p in projections), weight])
        biases = [None if p.bias is None else p.bias.detach() for p in projections] + [bias]
        self.bias: torch.Tensor | None = None
        if any(b is not None for b in biases):
            none = [self.weight.new_zeros(n) for n in self.sizes]
            self.bias = torch.cat([z if b is None else b for b, z in zip(biases, none, strict=True)])
        self._views: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        for whole, name in ((self.weight, "weight"), (self.bias, "bias")):
            parts = () if whole is None else torch.split(whole, self.sizes)
            for projection, part in zip(projections, parts, strict=False):
                parameter = getattr(projection, name)
                if parameter is not None:
                    parameter.data = part
                    self._views.append((parameter, part))
        self._left: tuple[torch.Tensor, dict[int, torch.Tensor]] | None = None

    def open(self, active: Callable[[], bool], made: Callable[[torch.Tensor], None]) -> None:
        """Have the modules make the one product where it is `active`; the rows' part goes to `made`."""
        q, k, v = self.projections

        def forward_q(x: torch.Tensor) -> torch.Tensor:
            self._left = None
            if not active():
                return linear(x, q.weight, q.bias)
            if (torch.is_grad_enabled() and q.weight.requires_grad) or not self._whole():
                # gradients reach the modules' own parameters alone; and weights that were moved are not ours
                rows, bias = self.rows.to(x), None if self.bias_rows is None else self.bias_rows.to(x)
                made(linear(x, rows, bias).detach())
                return linear(x, q.weight, q.bias)
            queries, keys, values, f = torch.split(linear(x, self.weight, self.bias), self.sizes, -1)
            made(f)
            self._left = x, {1: keys, 2: values}
            return queries

        def forward(number: int, module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
            def run(x: torch.Tensor) -> torch.Tensor:
                if self._left is not None and self._left[0] is x and number in self._left[1]:
                    return self._left[1].pop(number)
                return linear(x, module.weight, module.bias)

            return run

        q.forward, k.forward, v.forward = forward_q, forward(1, k), forward(2, v)

    def close(self) -> None:
        """The modules as they were."""
        for projection in self.projections:
            projection.__dict__.pop("forward", None)
        for parameter, part in self._views:
            if parameter.data_ptr() == part.data_ptr():  # else it was moved, and has memory of its own
                parameter.data = part.clone()
        self._views, self._left = [], None

    def _whole(self) -> bool:
        return all(parameter.data_ptr() == part.data_ptr() for parameter, part in self._views)


def _plain(projections: Sequence[Any]) -> bool:
    """Whether these are linear modules as torch has them, alike, whose parameters are nobody else's memory."""
    if any(type(p) is not torch.nn.Linear or "forward" in vars(p) for p in projections):
        return False
    weights = [p.weight for p in projections]
    tensors = [t for p in projections for t in (p.weight, p.bias) if t is not None]
    own = all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)
    return own and len({(w.dtype, w.device, w.shape[1]) for w in weights}) == 1
