"""The cache of a pass that somebody else makes: given Tamis's form where it can be, or left alone with the reason."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tamis.attention.block_decode import BlockState
from tamis.attention.caching import AnyDecoding, Caching
from tamis.attention.decode import Trace
from tamis.attention.policy import Policy
from tamis.attention.report import DecodeReport
from tamis.cache.formats import cache_argument, form_of, new_cache
from tamis.core.errors import InvalidInput

OF_ONE_LENGTH = {"selfindex": "records", "blocks": "blocks"}  # forms, and what they are made of
MASK, CACHE = 1, 3  # places of the arguments in a causal model's forward


class Caches:
    """The caches that a model's passes came with, and what their passes did.

    An empty `DynamicCache`, which is what `generate` makes, gets the policy's form in place; so does a pass that would
    make one itself. A padded batch is left with full keys and values: a record or a block is of the same positions in
    all sequences, and padding would be taken for the tokens that open a text.
    """

    def __init__(self, model: Any, policy: Policy, caching: Caching | None = None) -> None:
        self._model, self._policy = model, policy
        self._caching = caching or Caching(model)
        self._name = cache_argument(model)
        self._states: weakref.WeakKeyDictionary[Any, BlockState] = weakref.WeakKeyDictionary()
        self._last: Trace | None = None

    @property
    def report(self) -> DecodeReport | None:
        """What the passes of the cache that was used last did; None where its form is the model's own."""
        return None if self._last is None else self._last.report(self._policy)

    def new_cache(self) -> Any:
        """An empty transformers cache of the policy's form."""
        return self._caching.new_cache(self._policy)

    def of_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AnyDecoding | None:
        """The running pass's cache, which is put into `kwargs` where the model would have made one; None without any.
        Where `args` reach as far as CACHE, the caller of this puts it there.

        Raises InvalidInput for a padded batch in a selfindex cache, or one in blocks, that the caller made.
        """
        if self._policy.kv_form == "auto":
            return None
        cache = argument(args, kwargs, CACHE, "cache", "past_key_values")
        if cache is None:
            if not self._caches(kwargs):
                return None
            cache = new_cache("auto", self._model.config)
            if len(args) <= CACHE:
                kwargs[self._name] = cache
        state = self._states.get(cache)
        if state is None:
            state = self._states[cache] = BlockState()
        trace = state.trace
        hidden = hides(argument(args, kwargs, MASK, "attention_mask"), rows(args, kwargs))
        form = self._policy.kv_form
        if (held := form_of(cache)) in OF_ONE_LENGTH:
            if hidden:
                raise InvalidInput(
                    f"an attention mask hides tokens of a {held} cache (padding); its sequences must have one length "
                    "and see all that is before them. Group prompts by length, or use kv='auto' and decode='dense'."
                )
        elif held != form and not trace.reason:
            padded = f"the batch is padded, and {OF_ONE_LENGTH.get(form)} are made of sequences of one length"
            refused = hidden and form in OF_ONE_LENGTH
            trace.reason = padded if refused else self._caching.take_over(cache, self._policy)
        self._last = trace
        return self._caching.decoding(cache, self._policy, state)

    def _caches(self, kwargs: dict[str, Any]) -> bool:
        """Whether the model would make a cache for a pass that comes without one."""
        asked = kwargs.get("use_cache")
        return bool(self._model.config.use_cache if asked is None else asked) and not self._model.training


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, *names: str) -> Any:
    """An argument of a model's forward, by its place or one of its names."""
    if len(args) > place:
        return args[place]
    return next((kwargs[name] for name in names if kwargs.get(name) is not None), None)


def rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """New tokens of each sequence in a pass."""
    given = argument(args, kwargs, 0, "input_ids")
    given = kwargs.get("inputs_embeds") if given is None else given
    return 0 if given is None else int(given.shape[1])


def hides(mask: Any, n_rows: int) -> bool:
    """Whether a mask may hide tokens. That of a step on a GPU is not waited for: it grows from one that was seen."""
    if not isinstance(mask, torch.Tensor):
        return mask is not None
    if mask.dim() != 2:
        return True
    return (n_rows > 1 or not mask.is_cuda) and not bool(mask.all())
