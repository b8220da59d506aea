"""Puts Tamis's attention into a transformers model, through transformers' own door, and takes it out again.

Everything but a planned prefill goes on to the stock implementation, so an installed model behaves like the stock
one until a job is set. Nothing is registered at import.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tamis.core.errors import InvalidInput, ModelUnsupported

NAME = "tamis"
MASK_ROWS = 256  # rows of a mask that are compared at once
_UNMASKED: ContextVar[tuple[int, int]] = ContextVar(
    "rows and keys of the pass that is made without a mask", default=(0, 0)
)


class Job(Protocol):
    """What one forward pass does instead of stock attention."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q [Hq, C, D], k and v [Hkv, T, D], rotated → out [Hq, C, D] and anything.

        C = T, except where the switch was given borders: then q's rows are the last C of the T tokens so far.
        """


class DecodeJob(Protocol):
    """What passes do whose keys lie in a cache of a form of Tamis's own. Its layers are known by their index."""

    def attend(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor | None:
        """q [B, Hq, n, D], rotated → out [B, Hq, n, D] from what the cache holds; None: attend as without this job, to
        the keys and values that the cache handed out."""

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Note the layer's queries [B, Hq, n, D], after its attention."""


@dataclass
class Switch:
    """Shared by all attention layers of one model: the job of the running forward pass, if there is one.

    `n_tokens` is the length the job was planned for, `borders` the tokens at which its chunks may begin and end (none:
    it takes the whole prompt alone). A pass of another shape is answered by the stock path and counted in `refused`
    with the reason, never by a guess. `decode` is asked first, where the cache has one, and sees all queries.
    """

    job: Job | None = None
    decode: DecodeJob | None = None
    n_tokens: int = 0
    borders: frozenset[int] = frozenset()
    refused: dict[str, int] = field(default_factory=dict)
    _looked_at: tuple[weakref.ref[torch.Tensor], bool] | None = None  # a chunk's mask, shared by its layers

    @contextmanager
    def running(self, job: Job, n_tokens: int, borders: Iterable[int] = ()) -> Iterator[None]:
        """Use `job` for the forward pass over exactly `n_tokens` new tokens that is made inside.

        With `borders` (token positions, 0 and `n_tokens` among them) there may be several passes, over consecutive
        chunks with the keys of the tokens before them in the cache.
        """
        if self.job is not None:
            raise InvalidInput("another prefill of this model is still running; Tamis prefills one prompt at a time.")
        self.job, self.n_tokens, self.borders = job, n_tokens, frozenset(borders)
        try:
            yield
        finally:
            self.job, self.borders, self._looked_at = None, frozenset(), None

    @contextmanager
    def decoding(self, job: DecodeJob) -> Iterator[None]:
        """Use `job` in the forward passes that are made inside, beside a prefill's job."""
        before, self.decode = self.decode, job
        try:
            yield
        finally:
            self.decode = before

    def takes(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None = None) -> bool:
        """Whether the job is for these tensors ([B, H, C, D], [B, H, T, D]).

        A whole prompt comes with a mask only where tokens are hidden, a chunk of it always.
        """
        n, end = query.shape[2], key.shape[2]
        decoding = n == 1 and end > 1 and (not self.borders or end > self.n_tokens)
        if self.job is None or decoding:
            return False
        reason = None
        if query.shape[0] != 1:
            reason = f"batch of {query.shape[0]}: a sparse prefill takes one prompt"
        elif n != end and not self.borders:
            reason = "chunked prefill: rows of a chunk are computed dense"
        elif end != self.n_tokens and (not self.borders or end > self.n_tokens):
            reason = f"{end} tokens where the plan has {self.n_tokens}"
        elif self.borders and not {end - n, end} <= self.borders:
            reason = "chunked prefill: a chunk that begins or ends inside a tile is computed dense"
        elif mask is None and 1 < n < end and _UNMASKED.get() != (n, end):
            reason = "chunked prefill: rows of a chunk in a cache with room for more are computed dense"
        elif mask is not None and not (n < end and self._plain(mask, n, end)):
            reason = "an attention mask hides tokens (padding): a sparse prefill attends to all before a row"
        if reason is not None:
            self.refused[reason] = self.refused.get(reason, 0) + 1
        return reason is None

    def _plain(self, mask: torch.Tensor, n: int, end: int) -> bool:
        """Whether a chunk's mask shows each row all tokens up to itself. Waits for the device, once a chunk."""
        if self._looked_at is None or self._looked_at[0]() is not mask:
            self._looked_at = weakref.ref(mask), is_causal(mask, n, end)
        return self._looked_at[1]


def is_causal(mask: torch.Tensor, n: int, end: int) -> bool:
    """Whether `mask` is bool [1, 1, n, end] and true where key j <= row i + end - n, and only there."""
    if mask.dtype != torch.bool or mask.shape != (1, 1, n, end):
        return False
    position = torch.arange(end, device=mask.device)
    same = torch.ones((), dtype=torch.bool, device=mask.device)
    for first in range(0, n, MASK_ROWS):
        last = min(first + MASK_ROWS, n)
        same &= (mask[0, 0, first:last] == (position <= position[end - n + first : end - n + last, None])).all()
    return bool(same)


def packed_pass(n_tokens: int) -> AbstractContextManager[None]:
    """For a pass over exactly `n_tokens` of several prompts whose job keeps them apart: no mask [T, T] is made for it.

    transformers sees the positions restart and would make one. Use it together with `Switch.running`.
    """
    return _without_mask(n_tokens, n_tokens)


def chunk_pass(begin: int, end: int) -> AbstractContextManager[None]:
    """For a pass over tokens [begin, end) of one prompt, the others before it, whose job takes all its layers: no mask
    [end - begin, end] is made for it, nor looked at. A layer that the job does not take raises RuntimeError.

    Use it together with `Switch.running`.
    """
    return _without_mask(end - begin, end)


@contextmanager
def _without_mask(rows: int, keys: int) -> Iterator[None]:
    token = _UNMASKED.set((rows, keys))
    try:
        yield
    finally:
        _UNMASKED.reset(token)


def mask_of_pass(batch_size: int, q_length: int, kv_length: int, **options: Any) -> torch.Tensor | None:
    """transformers' mask for SDPA, or None for the pass that `packed_pass` or `chunk_pass` announced."""
    from transformers.masking_utils import sdpa_mask

    announced = batch_size == 1 and (q_length, kv_length) == _UNMASKED.get()
    if announced and options.get("attention_mask") is None:
        return None
    mask: torch.Tensor | None = sdpa_mask(batch_size, q_length, kv_length, **options)
    return mask


def attention_layers(model: Any) -> list[Any]:
    """The modules that call the attention interface, in layer order. Raises ModelUnsupported if there are none."""
    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "q_proj") and hasattr(m, "scaling")]
    if not layers:
        raise ModelUnsupported(f"{type(model).__name__} has no attention layers that transformers' interface reaches.")
    return sorted(layers, key=lambda m: m.layer_idx)


def install(model: Any) -> tuple[Switch, Callable[[], None]]:
    """Route `model`'s attention through Tamis. Returns the switch and the function that undoes all of it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_of_pass)
    layers = attention_layers(model)
    before = model.config._attn_implementation
    if before == NAME:
        raise InvalidInput("this model is attached to Tamis already; detach it first.")
    switch = Switch()
    for layer in layers:
        layer.tamis_switch = switch
    model.set_attn_implementation(NAME)

    def uninstall() -> None:
        model.set_attn_implementation(before)
        for layer in layers:
            del layer.tamis_switch

    return switch, uninstall


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query [B, Hq, T, D], key and value [B, Hkv, T', D] → [B, T, Hq, D]."""
    switch: Switch = module.tamis_switch
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    decode = switch.decode
    found = None if decode is None else decode.attend(module.layer_idx, query, scale)
    if found is not None:
        out = found.transpose(1, 2)
    elif switch.takes(query, key, attention_mask):
        assert switch.job is not None, "takes() checked it"
        out, _ = switch.job.attend(module.layer_idx, query[0], key[0], value[0], scale)
        out = out.transpose(0, 1)[None]
    else:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        rows, keys = query.shape[2], key.shape[2]
        if attention_mask is None and rows < keys and (rows, keys) == _UNMASKED.get():
            raise RuntimeError(f"a chunk of {rows} tokens of {keys} has no mask and no job: {switch.refused}")
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale, **kwargs)
    if decode is not None:
        decode.observe(module.layer_idx, query)
    return out, None
