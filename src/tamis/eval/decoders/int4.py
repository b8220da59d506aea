"""`int4`: every key is read, in 4 bits. transformers' quantised cache where its backend is installed, else our own.

`int4-kivi` is our own: keys by channel over 32 tokens, values by token over 32 channels, min-max with a scale and a
zero in 16 bits, the newest 128 tokens whole (KIVI, arXiv 2402.02750, at 4 bits). `int4-hqq` and `int4-quanto` are
transformers' `QuantizedLayer` with its own settings.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from tamis.core.errors import Unavailable
from tamis.eval.decoders.base import Growing, LayerPrompt, Method, Size, attention, causal
from tamis.eval.decoders.full import full_bytes

GROUP = 32
RESIDUAL = 128
LEVELS = 15
BACKENDS = ("hqq", "quanto")
GROUP_OF_BACKEND, RESIDUAL_OF_BACKEND = 64, 128  # transformers' defaults


def int4(name: str = "int4") -> Method:
    """`int4`: the first that there is of hqq, quanto and kivi. `int4-NAME`: that one. Raises Unavailable."""
    _, _, asked = name.partition("-")
    if asked == "kivi":
        return Kivi()
    there = available()
    if asked and asked not in there:
        raise Unavailable(f"{name} needs the package of the backend {asked!r}. Install it, or use int4-kivi.")
    chosen = asked or next(iter(there), None)
    return Transformers(chosen) if chosen else Kivi()


def available() -> list[str]:
    """Backends of transformers' quantised cache that are installed."""
    from transformers.utils import is_hqq_available, is_optimum_quanto_available

    there = {"hqq": is_hqq_available(), "quanto": is_optimum_quanto_available()}
    return [name for name in BACKENDS if there[name]]


class Kivi:
    """4-bit keys by channel and values by token."""

    name = "int4-kivi"
    budgets: tuple[float | None, ...] = (None,)
    wants_module = False

    def prefill(self, x: LayerPrompt) -> Growing:
        """See `Method`."""
        return Quantised(x)

    def sizes(self, n_tokens: int, head_dim: int, n_layers: int) -> list[Size]:
        """See `Method`."""
        return [_size(n_tokens, head_dim, GROUP, RESIDUAL)]


class Quantised(Growing):
    """One layer. A group of tokens is quantised once it is older than the residual, and then stays what it is."""

    def __init__(self, x: LayerPrompt) -> None:
        n = x.keys.shape[-2]
        super().__init__(x.keys, x.values, x.scale, batch=1, whole=_done(n))
        self.keys, self.values = by_channel(self.keys), by_token(self.values)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `LayerState`: what is old is quantised between steps."""
        done = _done(self.n_tokens) - self.shared
        if done > 0:
            keys, values = (t[0, :, :done] for t in self.tail)
            self.keys = torch.cat([self.keys, by_channel(keys)], -2)
            self.values = torch.cat([self.values, by_token(values)], -2)
            self.tail = tuple(t[..., done:, :] for t in self.tail)
        return super().attend(q, k, v)


def by_channel(keys: torch.Tensor) -> torch.Tensor:
    """keys [.., T, D] through 4 bits, each channel of 32 tokens by itself; T a multiple of 32."""
    return rounded(torch.unflatten(keys, -2, (-1, GROUP)), -2).flatten(-3, -2) if keys.shape[-2] else keys


def by_token(values: torch.Tensor) -> torch.Tensor:
    """values [.., T, D] through 4 bits, 32 channels of a token by themselves."""
    return rounded(torch.unflatten(values, -1, (-1, GROUP)), -1).flatten(-2)


def rounded(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x at the nearest of 16 even levels from its least to its greatest along `dim`, both ends kept in 16 bits."""
    low = x.amin(dim, keepdim=True)
    step = ((x.amax(dim, keepdim=True) - low) / LEVELS).half().float()
    low = low.half().float()
    return ((x - low) / step.clamp(min=torch.finfo(torch.float16).tiny)).round().clamp(0, LEVELS) * step + low


class Transformers:
    """transformers' quantised cache layer, one of `BACKENDS`."""

    budgets: tuple[float | None, ...] = (None,)
    wants_module = False

    def __init__(self, backend: str) -> None:
        self.name, self.backend = f"int4-{backend}", backend

    def prefill(self, x: LayerPrompt) -> Held:
        """See `Method`."""
        from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

        axis = 1 if self.backend == "hqq" else 0
        make = HQQQuantizedLayer if self.backend == "hqq" else QuantoQuantizedLayer
        return Held(make(nbits=4, axis_key=axis, axis_value=axis), x)

    def sizes(self, n_tokens: int, head_dim: int, n_layers: int) -> list[Size]:
        """See `Method`."""
        return [_size(n_tokens, head_dim, GROUP_OF_BACKEND, 0)]  # a prompt is quantised to its last token


class Held:
    """One layer of a transformers cache."""

    def __init__(self, layer: Any, x: LayerPrompt) -> None:
        self.layer, self.scale, self.dtype, self.batch = layer, x.scale, x.keys.dtype, 1
        layer.update(x.keys[None], x.values[None])

    def branch(self) -> Held:
        """See `LayerState`: the layer replaces its tensors, it does not write to them."""
        other = copy.copy(self)
        other.layer = copy.copy(self.layer)
        return other

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `LayerState`."""
        keys, values = (t.float() for t in self.layer.update(k.to(self.dtype), v.to(self.dtype)))
        return attention(q.float(), [(keys, values)], causal(q.shape[-2], keys.shape[-2], q.device), self.scale)


def _done(n_tokens: int) -> int:
    """Tokens that are quantised of a sequence of n_tokens."""
    return max(0, n_tokens - RESIDUAL) // GROUP * GROUP


def _size(n_tokens: int, head_dim: int, group: int, residual: int) -> Size:
    whole = min(n_tokens, residual) / n_tokens
    coded = 2 * head_dim * (0.5 + 4 / group)
    held = whole * full_bytes(head_dim) + (1 - whole) * coded
    return Size(held, held)
