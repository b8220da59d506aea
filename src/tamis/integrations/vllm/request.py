"""What a request to vLLM says of its documents: `kv_transfer_params["tamis"]`, checked against its token ids.

Plain Python: needs neither vLLM nor torch. Positions are counted twice: an index is a token's place in the prompt as
vLLM sees it, a position is what Tamis turns keys by, and pads have none. In mode "reuse" a document's positions start
at 0, so that its keys are the same wherever it stands.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as short
from typing import Any

from tamis.cache.keys import NAMESPACE_CHARACTERS, DocumentKey
from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown
from tamis.prompt.segments import ID_BYTES, Kind, document_id

VERSION = 1  # of the form of `kv_transfer_params["tamis"]`
MODES = ("sift", "reuse")
PAD = "pad"
KINDS = (*(kind.value for kind in Kind), PAD)
FIELDS = ("v", "mode", "segments", "selector", "namespace")
SELECTOR_CHARACTERS = 200
# a chat's prompt is written by the server, so segments do not fit it
_LAID_OUT = "Segments are of the token ids that /v1/completions gets as `prompt`; a chat request cannot have them."
DEPTH = 16


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of a prompt. `key` is a document's content address (32 hex digits), "" for anything else."""

    start: int
    end: int
    kind: str
    key: str = ""


@dataclass(frozen=True)
class Unit:
    """A document of a "reuse" request: tokens [start, end), with the pads behind it up to `full`, at `position`."""

    start: int
    end: int
    full: int
    position: int
    key: str


@dataclass(frozen=True)
class Asked:
    """A checked request. The spans cover the prompt; tokens that are generated go on from the last one.

    recorded: keys of documents whose stored bits "sift" reads, see `records`.
    """

    mode: str
    spans: tuple[Span, ...]
    selector: str = ""
    namespace: str = ""
    recorded: tuple[str, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.spans[-1].end

    @cached_property
    def starts(self) -> list[int]:
        """Where each span begins."""
        return [span.start for span in self.spans]

    def number(self, index: int) -> int:
        """The span that a token lies in; generated ones lie in the last."""
        return bisect_right(self.starts, index) - 1

    def has_documents(self, start: int, end: int) -> bool:
        """Whether a token of [start, end) lies in a document."""
        return any(span.kind == Kind.DOCUMENT for span in self.over(start, end))

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """What is computed alone and can be shared: a leading prefix, and documents, in order. Mode "reuse" only.

        A prefix that begins the prompt sees itself alone, as documents do. What ends the prompt is always computed in
        place: generation goes on from it.
        """
        made, position = [], 0
        for i, span in enumerate(self.spans):
            if self.alone(i):
                behind = self.spans[i + 1]
                full = behind.end if behind.kind == PAD else span.end
                made.append(Unit(span.start, span.end, full, position, span.key))
            position += 0 if span.kind == PAD else span.end - span.start
        return tuple(made)

    @cached_property
    def unit_starts(self) -> list[int]:
        """Where each unit begins."""
        return [unit.start for unit in self.units]

    def unit(self, index: int) -> Unit | None:
        """The unit that begins last at or before a token; whether the token lies in it is its `full`'s to say."""
        number = bisect_right(self.unit_starts, index) - 1
        return self.units[number] if number >= 0 else None

    @cached_property
    def texts(self) -> list[int]:
        """The spans that are neither shared nor pads, by number."""
        return [i for i, span in enumerate(self.spans) if span.kind != PAD and not self.alone(i)]

    def over(self, start: int, end: int) -> list[Span]:
        """The spans with tokens in [start, end)."""
        found = self.spans[self.number(start) : bisect_left(self.starts, end)]
        return [span for span in found if start < span.end]

    def alone(self, number: int) -> bool:
        """Whether the tokens of a span see no other: it can be shared."""
        span = self.spans[number]
        leads = span.kind == Kind.PREFIX and number == 0
        return self.mode == "reuse" and (leads or span.kind == Kind.DOCUMENT) and number < len(self.spans) - 1

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The position of each span's first token, pads not counted; a span's tokens count on from it."""
        made, at = [], 0
        for span in self.spans:
            made.append(at)
            at += 0 if span.kind == PAD else span.end - span.start
        return tuple(made)

    def position(self, index: int) -> int:
        """The position of a token that is no pad, counted over the whole prompt."""
        number = self.number(index)
        return self.positions[number] + index - self.spans[number].start


def parse(params: Mapping[str, Any], tokens: Sequence[int], *, block_size: int | None = None) -> Asked:
    """The request in `params` (the value under "tamis") for a prompt of `tokens`. Raises InvalidInput.

    Segments must cover the tokens from 0 on without gap or overlap, keys must be those of the tokens. block_size: of
    the server; documents of a "reuse" request must begin on its borders.
    """
    if not isinstance(params, Mapping):
        raise InvalidInput(f"tamis is {type(params).__name__}; give an object with {', '.join(FIELDS)}.")
    for name in params:
        if name not in FIELDS:
            raise InvalidInput(unknown("field of tamis", _word(name), list(FIELDS)))
    if params.get("v") != VERSION:
        raise InvalidInput(
            f"tamis.v is {short(params.get('v'))}; this server understands {VERSION}. Update the older side."
        )
    mode = params.get("mode")
    if mode not in MODES:
        raise InvalidInput(unknown("tamis.mode", _word(mode), list(MODES)))
    texts = {name: "" if params.get(name) is None else params[name] for name in ("selector", "namespace")}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise InvalidInput(f"tamis.{name} is {short(value)}; give a text, or leave it out.")
    if len(texts["selector"]) > SELECTOR_CHARACTERS:
        raise InvalidInput(f"tamis.selector has {len(texts['selector'])} characters; {SELECTOR_CHARACTERS} are enough.")
    check_namespace(texts["namespace"])
    if mode == "reuse" and texts["selector"]:
        raise InvalidInput("tamis.selector belongs to mode 'sift'; leave it out, or ask for that mode.")
    asked = Asked(str(mode), _spans(params.get("segments"), tokens, str(mode)), texts["selector"], texts["namespace"])
    if mode == "reuse" and block_size is not None:
        _check_borders(asked, block_size)
    return asked


def check_namespace(name: str) -> None:
    """Raises InvalidInput for a namespace that no document can lie in; "" stands for the server's own."""
    if name:
        DocumentKey(name[: NAMESPACE_CHARACTERS + 1], bytes(ID_BYTES), bytes(ID_BYTES))


def check_depth(params: Mapping[str, Any]) -> None:
    """Raises InvalidInput for parameters nested so deep that pickling them for the workers would end the engine."""
    level: list[Any] = [params]
    for _ in range(DEPTH):
        inner = [x.values() if isinstance(x, Mapping) else x for x in level if isinstance(x, Mapping | list | tuple)]
        level = [x for own in inner for x in own]
        if not level:
            return
    raise InvalidInput(f"kv_transfer_params are nested more than {DEPTH} deep; tamis needs 4 levels.")


def _word(given: Any) -> str:
    """What came in, short and plain enough to be told: it may be of any kind, length and depth."""
    return ascii(given[:40])[1:-1] if isinstance(given, str) else short(given)


def _spans(segments: Any, tokens: Sequence[int], mode: str) -> tuple[Span, ...]:
    if not isinstance(segments, Sequence) or isinstance(segments, str) or not segments:
        raise InvalidInput("tamis.segments is missing; give [[start, end, kind, key or null], ...] from token 0 on.")
    spans: list[Span] = []
    at = 0
    for row in segments:
        if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != 4:
            raise InvalidInput(f"segment {short(row)}; give [start, end, kind, key or null].")
        start, end, kind, _ = row
        if kind not in KINDS:
            raise InvalidInput(unknown("kind of segment", _word(kind), list(KINDS)))
        if any(not isinstance(n, int) or isinstance(n, bool) for n in (start, end)) or start != at or end <= start:
            raise InvalidInput(
                f"segment [{short(start)}, {short(end)}) of kind {kind!r}; the next one starts at {at} and "
                "holds a token or more: segments follow each other without gap or overlap."
            )
        if kind == PAD and mode != "reuse":
            raise InvalidInput("segments of kind 'pad' belong to mode 'reuse'; leave them out.")
        spans.append(Span(start, end, kind, _key(row, tokens, leads=not spans)))
        at = end
    if at != len(tokens):
        raise InvalidInput(f"the segments end at token {at} and the prompt has {len(tokens)}; they must cover it.")
    if spans[-1].kind == PAD:
        raise InvalidInput("the prompt ends with pads; an answer goes on from its last segment: leave them out.")
    return tuple(spans)


def _key(row: Sequence[Any], tokens: Sequence[int], *, leads: bool) -> str:
    start, end, kind, key = row
    if kind != Kind.DOCUMENT and key is not None:
        raise InvalidInput(f"segment [{start}, {end}) is a {kind} and has a key; only documents have: give null.")
    if kind != Kind.DOCUMENT and not (kind == Kind.PREFIX and leads):
        return ""
    if end > len(tokens):
        raise InvalidInput(f"segment [{start}, {end}) lies outside the prompt of {len(tokens)} tokens. {_LAID_OUT}")
    own = document_id(tokens[start:end]).hex()
    if key is not None and key != own:
        raise InvalidInput(
            f"document [{start}, {end}) has the key {short(key)}, its tokens have {own!r}; give that, or null. "
            f"`tamis.prompt.segments.document_id` makes keys. {_LAID_OUT}"
        )
    return own


def _check_borders(asked: Asked, block: int) -> None:
    for number, span in enumerate(asked.spans):
        if span.kind == PAD and span.end % block:
            raise InvalidInput(
                f"pads [{span.start}, {span.end}) must end at a multiple of the server's block of {block}. "
                f"Lay the prompt out with block_size={block}."
            )
        if asked.alone(number) and span.start % block:
            raise InvalidInput(
                f"document [{span.start}, {span.end}) must begin at a multiple of the server's block of {block} tokens "
                "to be reused; put pads before it, as `tamis.integrations.vllm.client.request` does with "
                f"block_size={block}."
            )
