"""Names of cache blocks: documents are re-rooted, so that a block is found wherever its document stands.

vLLM names a block by its tokens and by the block before it, from the prompt's start on. Requests of Tamis get names of
their own: exact requests never read their blocks, nor they those of exact ones. Knows tokens and spans, not tensors;
how a name is made of a parent, tokens and extra keys is vLLM's and is given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tamis.integrations.vllm.request import PAD, Asked
from tamis.prompt.segments import Kind

FORMAT = 1  # of what a block of each mode holds
Make = Callable[[Any, Sequence[int], tuple[Any, ...]], Any]  # (parent or None, tokens, extra keys) → name


@dataclass(frozen=True)
class Root:
    """What all names of a request start from: everything but its tokens that changes what a block holds.

    own: of the request beside Tamis: adapter and cache salt.
    """

    fingerprint: str
    settings: str
    own: tuple[str, ...] = ()

    def of(self, mode: str, *more: str | int) -> tuple[str | int, ...]:
        """Extra keys of a block that begins a chain."""
        return ("tamis", mode, FORMAT, self.fingerprint, self.settings, *self.own, *more)


def block_names(
    asked: Asked, tokens: Sequence[int], known: Sequence[Any], *, block: int, root: Root, make: Make
) -> list[Any]:
    """Names of the full blocks of `tokens` (prompt and what was generated so far) that follow the `known` ones."""
    of_block = _reuse_block if asked.mode == "reuse" else _sift_block
    made: list[Any] = []
    for i in range(len(known), len(tokens) // block):
        before = made[-1] if made else (known[-1] if known else None)
        start, end = i * block, (i + 1) * block
        chain, extra = of_block(asked, tokens, (start, end), root)
        made.append(make(before if chain else None, _without_pads(asked, tokens, start, end), extra))
    return made


def _sift_block(asked: Asked, tokens: Sequence[int], at: tuple[int, int], root: Root) -> tuple[bool, tuple[Any, ...]]:
    """Chained from the prompt's start. Which tiles a document's rows read depends on its rows up to a tile's end and
    on where segments begin, so both are in the names."""
    start, end = at
    extra: list[Any] = []
    for span in asked.over(start, end):
        key = span.key if span.kind == Kind.DOCUMENT else ""
        extra += [span.kind, span.start - start, key, "bits" if key in asked.recorded else ""]
    if start == 0:
        extra += root.of("sift", asked.namespace, asked.selector)
    return start > 0, tuple(extra)


def _reuse_block(asked: Asked, tokens: Sequence[int], at: tuple[int, int], root: Root) -> tuple[bool, tuple[Any, ...]]:
    """A block inside a document (with the pads behind it) depends on that document alone; any other on everything."""
    start, end = at
    unit = asked.unit(start)
    if unit is not None and end <= unit.full:
        if start > unit.start:
            return True, ()
        return False, root.of("document", asked.namespace, unit.key)
    before = asked.unit(start - 1)
    if start and (before is None or before.full < start):
        return True, _layout(asked, start, end)
    everything = np.asarray(tokens[:start], dtype="<i8").tobytes()
    digest = hashlib.blake2b(everything + repr(asked.spans).encode(), digest_size=16).hexdigest()
    return False, root.of("reuse", asked.namespace, digest)


def _layout(asked: Asked, start: int, end: int) -> tuple[Any, ...]:
    return tuple(x for s in asked.over(start, end) for x in (s.kind, s.start - start))


def _without_pads(asked: Asked, tokens: Sequence[int], start: int, end: int) -> list[int]:
    """The block's tokens; pads are never read, so their ids do not count."""
    own = list(tokens[start:end])
    for span in asked.over(start, end):
        if span.kind == PAD:
            for i in range(max(span.start, start), min(span.end, end)):
                own[i - start] = 0
    return own
