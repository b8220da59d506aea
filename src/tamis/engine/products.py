"""Products with a model's weights on a CPU whose rows do not depend on each other, for decode steps.

The products that torch takes for one row, for two or three, and for more differ in the order of their sums, and those
over a few rows read the weights slower than they come from memory. oneDNN's products over weights in its own layout
do neither: each row has the same bits from two rows on, and few rows cost what the weights cost to read. One row is
computed as several. The layout is a second copy of the weights, made at the first step. Small layers stay torch's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

ROWS = 4  # computed at least; what the layout is made for
LEAST_WEIGHTS = 1 << 18  # of a layer: smaller ones gain nothing, and cost a wait for all threads
MOST_BYTES = 4 << 30  # of weights: beyond, a second copy is not taken without asking
_OF: weakref.WeakKeyDictionary[Any, Products] = weakref.WeakKeyDictionary()


class Products:
    """The large linear layers of one model. Inside `running` they compute by packed weights, outside as always.

    exact: whether a row's result does not depend on the number of rows; `reason`: why it does where it does.
    """

    def __init__(self, model: Any) -> None:
        self.reason = refusal(model)
        self._model = weakref.ref(model)
        self._packed: list[_Packed] | None = None
        self._inside = False

    @property
    def exact(self) -> bool:
        """See the class."""
        return not self.reason

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make passes inside; one thread at a time, as the model is for."""
        if self.reason or self._inside:
            yield
            return
        self._pack()
        packed, self._inside = self._packed or [], True
        for one in packed:
            one.layer.__dict__["forward"] = one.forward
        try:
            yield
        finally:
            self._inside = False
            for one in packed:
                del one.layer.__dict__["forward"]

    def _pack(self) -> None:
        """Anew, if a weight is another one or was changed in place."""
        model = self._model()
        if model is None or (self._packed is not None and all(one.current for one in self._packed)):
            return
        self._packed = None  # the old ones go before the new ones come
        with torch.inference_mode():
            self._packed = [_Packed(layer) for layer in _layers(model)]


def products_of(model: Any) -> Products:
    """Those of a model, whose packed weights all that run it share."""
    if model not in _OF:
        _OF[model] = Products(model)
    return _OF[model]


def refusal(model: Any) -> str:
    """Why a model's products are left to torch; "" if they are not."""
    parameters = list(model.parameters())
    if any(p.device.type != "cpu" or p.dtype != torch.float32 for p in parameters):
        return "weights that are not float32 on a CPU"
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not there or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "a torch without oneDNN"
    if (n := sum(layer.weight.nbytes for layer in _layers(model))) > MOST_BYTES:
        return f"{n / 2**30:.1f} GiB of weights, of which no second copy is made"
    return ""


def _layers(model: Any) -> list[nn.Linear]:
    linear = (m for m in model.modules() if type(m) is nn.Linear and "forward" not in m.__dict__)
    return [m for m in linear if m.weight.numel() >= LEAST_WEIGHTS]


class _Packed:
    """One layer, and its forward pass by packed weights."""

    __slots__ = ("bias", "forward", "layer", "packed", "version", "weight")

    def __init__(self, layer: nn.Linear) -> None:
        self.layer, self.weight, self.bias, self.version = layer, layer.weight, layer.bias, _version(layer.weight)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
        product, packed, bias = torch.ops.mkldnn._linear_pointwise, self.packed, layer.bias

        def forward(x: torch.Tensor) -> torch.Tensor:
            if x.shape[:-1].numel() > 1:
                made: torch.Tensor = product(x, packed, bias, "none", [], "")
                return made
            rows = x.reshape(1, -1).expand(ROWS, -1).contiguous()
            several: torch.Tensor = product(rows, packed, bias, "none", [], "")
            return several[:1].view(*x.shape[:-1], -1)

        self.forward: Callable[[torch.Tensor], torch.Tensor] = forward

    @property
    def current(self) -> bool:
        """Whether the layer's weights are those that were packed."""
        own = self.layer._parameters
        return own["weight"] is self.weight and own["bias"] is self.bias and _version(self.weight) == self.version


def _version(weight: torch.Tensor) -> int:
    return -1 if weight.is_inference() else weight._version
