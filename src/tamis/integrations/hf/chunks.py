"""A prompt that somebody else prefills in chunks: what is known of it when one of its chunks comes.

Only the tokens so far are known then. A document that has begun is taken to go on; if the prompt goes on otherwise, the
next chunk is planned from what stands there. A chunk of one token looks like a decode step; `generate` says which of
the two it makes, a caller that passes its own chunks does not.
"""

from __future__ import annotations

import functools
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tamis.attention.block_prefill import BlockPrefill
from tamis.attention.planner import Plan
from tamis.attention.prefill import SparsePrefill
from tamis.core.errors import InvalidInput
from tamis.prompt.segments import Kind, Prompt, Segment
from tamis.select.scene import window_of

NOT_FOUND = "documents do not stand in the prompt"
PREPARE = "prepare_inputs_for_generation"


@dataclass
class Begun:
    """The chunks of a prompt that are done, and the cache that holds them (not kept alive by this)."""

    cache: weakref.ref[Any]
    tokens: list[int]
    plan: Plan

    def goes_on(self, cache: Any) -> bool:
        """Whether `cache` holds exactly this prompt so far."""
        held = self.cache()
        return held is not None and held is cache and int(held.get_seq_length()) == len(self.tokens)

    @property
    def job(self) -> SparsePrefill | BlockPrefill | None:
        """The sparse prefill so far; None where the last chunk was dense."""
        job = self.plan.job
        ran = job is not None and bool(job.density if isinstance(job, BlockPrefill) else job.layers)
        return job if ran else None


class Foretold:
    """What `generate` says of a model's next pass when it makes the pass's arguments, until `close`."""

    def __init__(self, model: Any) -> None:
        self._model, self._prompt = model, False
        inner = getattr(model, PREPARE, None)
        self._before = model.__dict__.get(PREPARE)
        self._mine: Callable[..., Any] | None = None
        if inner is None:
            return

        @functools.wraps(inner)  # generate reads the signature
        def prepare(*args: Any, **kwargs: Any) -> Any:
            self._prompt = bool(kwargs.get("is_first_iteration"))
            return inner(*args, **kwargs)

        self._mine = model.__dict__[PREPARE] = prepare

    def prompt(self) -> bool:
        """Whether the pass that begins is of a prompt's tokens, however few. Said once; False where nobody said it."""
        told, self._prompt = self._prompt, False
        return told

    def close(self) -> None:
        """Leave the model as it was, unless somebody else has changed it since."""
        if self._mine is None or self._model.__dict__.get(PREPARE) is not self._mine:
            return
        if self._before is None:
            del self._model.__dict__[PREPARE]
        else:
            self._model.__dict__[PREPARE] = self._before


def whole_documents(prompt: Prompt, documents: Sequence[tuple[int, ...]], tile: int) -> Prompt:
    """`prompt`, at whose end one of the `documents` may have begun, with the rest of that document.

    It must have begun with a tile's tokens or more: a chunk that ends earlier ends inside a tile. Documents that stand
    in the prompt already are not looked for. Returns `prompt` itself where none has begun.
    """
    tail = prompt.segments[-1]
    if tail.kind is Kind.DOCUMENT:
        return prompt
    missing = Counter(documents) - Counter(d.tokens for d in prompt.documents)
    found = [(at, d) for d in missing if (at := _begins(tail.tokens, d, tile)) is not None]
    if not found:
        return prompt
    at, document = min(found, key=lambda pair: pair[0])
    kind = Kind.HISTORY if prompt.documents else Kind.PREFIX
    head = [Segment(kind, tail.tokens[:at])] if at else []
    return Prompt((*prompt.segments[:-1], *head, Segment(Kind.DOCUMENT, document)))


def cut(prompt: Prompt, n_tokens: int) -> Prompt:
    """The first `n_tokens` of a prompt."""
    placed = zip(prompt.segments, prompt.spans, strict=True)
    return Prompt.of([(s.kind, s.tokens[: max(0, n_tokens - begin)]) for s, (begin, _) in placed])


def fit(plan: Plan, begin: int, end: int, begun: Begun | None) -> bool:
    """Make `plan`, of a prompt of `end` tokens or more, the plan of its chunk [begin, end) after what has `begun`.

    False, and the plan is not to be used, where it is sparse and the chunk does not begin and end on borders of tiles.
    """
    if plan.job is None:
        plan.prompt = cut(plan.prompt, end)
        return True
    if isinstance(plan.job, SparsePrefill):
        try:
            window_of(plan.job.scene, end - begin, end)
        except InvalidInput:
            return False
        plan.job.scene = window_of(plan.job.scene, end, end)
    plan.prompt = cut(plan.prompt, end)
    plan.chunks = ((begin, end),)
    if begin:
        plan.chunks = (*begun.plan.chunks, *plan.chunks) if begun and begun.job else ((0, begin), *plan.chunks)
    if begun and begun.job:
        if isinstance(plan.job, BlockPrefill) and isinstance(begun.job, BlockPrefill):
            plan.job.go_on(begun.job)
        elif isinstance(plan.job, SparsePrefill) and isinstance(begun.job, SparsePrefill):
            plan.job.layers.update(begun.job.layers)
        plan.indexed += begun.plan.indexed
        plan.index_s += begun.plan.index_s
        plan.fallbacks += [why for why in begun.plan.fallbacks if not why.endswith(NOT_FOUND)]
    return True


def _begins(tokens: Sequence[int], document: Sequence[int], least: int) -> int | None:
    """Where in `tokens` a document begins that their end cuts off, after `least` of its tokens or more."""
    haystack, needle = array("i", tokens).tobytes(), array("i", document[:least]).tobytes()
    at = haystack.find(needle) if len(document) > least else -1
    while at >= 0:
        begin = at // 4
        rest = tuple(tokens[begin:])
        if at % 4 == 0 and len(rest) < len(document) and rest == tuple(document[: len(rest)]):
            return begin
        at = haystack.find(needle, at + 1)
    return None
