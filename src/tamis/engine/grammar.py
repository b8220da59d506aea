"""Answers that must be JSON, or JSON of a schema: which tokens may come next, through xgrammar, an optional package.

xgrammar leaves out parts of a schema that it does not know. Here they are refused, so that an answer is what was asked
for. Knows schemas and tokens, not requests. Answers are written on one line: a small model that may write white space
anywhere may write nothing else.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tamis.core.errors import InvalidInput, Unavailable

CACHE_BYTES = 64 << 20  # of compiled grammars
# what is larger could take the compiler minutes
MOST_DEPTH, MOST_SCHEMAS, MOST_CHARS, MOST_PATTERN, MOST_REPEATS, MOST_COUNT = 32, 256, 32_768, 200, 64, 4096
NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment"})
SHARED = frozenset({"$defs", "definitions"})
ALONE = ("$ref", "anyOf", "enum", "const")  # each says everything, so that nothing but a type may stand beside it
OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
FORMATS = ("uuid",)  # of others xgrammar also lets through what is none, such as February 31
COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
CHARACTER = r"[ -!#-\[\]-\ud7ff\ue000-\uffff]"  # that stands for itself in JSON
PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ")  # of xgrammar's own code, before its messages
# looks around and back, classes of characters, and characters that JSON writes in another way
UNKEPT = re.compile(r"\(\?|\\[1-9bBkpP0nrtfvxuc\\]|\"")


@dataclass(frozen=True)
class Grammar:
    """What an answer may be. `vocabulary`: rows of logits."""

    compiled: Any
    vocabulary: int

    def start(self) -> GrammarState:
        """At the beginning of an answer."""
        return GrammarState(self)


class GrammarState:
    """One answer on its way."""

    def __init__(self, grammar: Grammar) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, grammar.vocabulary)

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [vocabulary] with -inf for tokens that may not come next."""
        if self._matcher.is_terminated() or not self._matcher.fill_next_token_bitmask(self._bits):
            return logits
        shift = torch.arange(32, dtype=torch.int32)
        fits = (self._bits[0][:, None] >> shift & 1).bool().flatten()[: logits.shape[-1]]
        return logits.masked_fill(~fits.to(logits.device), -torch.inf)

    def accept(self, token: int) -> None:
        """It came next."""
        if not self._matcher.is_terminated():
            taken = self._matcher.accept_token(token)
            assert taken, f"token {token} was not among the allowed ones"


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the last ones. Safe to use from many threads."""

    def __init__(self, tokenizer: Any, vocabulary: int, stop_tokens: Iterable[int]) -> None:
        self._tokenizer, self._vocabulary, self._stop_tokens = tokenizer, vocabulary, sorted(stop_tokens)
        self._lock = threading.Lock()
        self._opened: Any = None

    def json_object(self) -> Grammar:
        """Any JSON object. Raises Unavailable without xgrammar."""
        return self._made({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """JSON of a schema; properties that it does not name are only written where it says additionalProperties.

        Raises InvalidInput for a schema that is none or cannot be kept to the letter, Unavailable without xgrammar.
        """
        check_schema(schema)
        return self._made(_lengths(schema))

    def _made(self, schema: Mapping[str, Any]) -> Grammar:
        compiler = self._compiler()
        try:
            compiled = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        except RuntimeError as e:
            raise InvalidInput(f"the schema cannot be used: {PLACE.sub('', str(e)).strip()}.") from e
        return Grammar(compiled, self._vocabulary)

    def _compiler(self) -> Any:
        with self._lock:
            if self._opened is None:
                try:
                    import xgrammar
                except ImportError as e:
                    raise Unavailable("JSON answers need xgrammar: pip install 'tamis[structured]'.") from e
                known = xgrammar.TokenizerInfo.from_huggingface(
                    self._tokenizer, vocab_size=self._vocabulary, stop_token_ids=self._stop_tokens or None
                )
                self._opened = xgrammar.GrammarCompiler(known, max_threads=1, cache_limit_bytes=CACHE_BYTES)
            return self._opened


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises InvalidInput for a JSON schema that uses more than what is kept to the letter, or is very large."""
    if len(json.dumps(schema)) > MOST_CHARS:
        raise InvalidInput(f"the schema has more than {MOST_CHARS} characters; give a smaller one.")
    for place, wrong in _wrong(schema, "schema", 0, schema):
        raise InvalidInput(f"{place}: {wrong}")
    if (n := _count(schema)) > MOST_SCHEMAS:
        raise InvalidInput(f"{n} schemas inside each other or beside; {MOST_SCHEMAS} may be. Give a smaller one.")


Wrong = Iterator[tuple[str, str]]


def _wrong(schema: Any, place: str, depth: int, root: Mapping[str, Any]) -> Wrong:
    """(place, what is wrong there)."""
    if depth > MOST_DEPTH:
        yield place, f"more than {MOST_DEPTH} schemas inside each other; give a flatter one."
        return
    if not isinstance(schema, Mapping):
        yield place, "a schema is an object."
        return
    names = set(schema) - NOTES - SHARED
    alone = [name for name in ALONE if name in schema]
    if alone:
        beside = sorted(names - {alone[0]} - ({"type"} if alone[0] in ("enum", "const") else set()))
        if beside:
            yield place, f"{', '.join(beside)} beside {alone[0]} cannot be kept; leave one of them out."
    else:
        yield from _wrong_type(schema, names, place)
    if isinstance(schema.get("$ref"), str) and not _leads(schema["$ref"], root):
        yield place, f"$ref {schema['$ref']!r} leads nowhere; it starts with #/$defs/ or #/definitions/, or is #."
    for name, below in _below(schema):
        yield from _wrong(below, f"{place}.{name}", depth + 1, root)


def _wrong_type(schema: Mapping[str, Any], names: set[str], place: str) -> Wrong:
    """Of a schema that says a type and what belongs to it."""
    given = schema.get("type")
    types: list[Any] = given if isinstance(given, list) else [given]
    if not types or not all(isinstance(t, str) and t in OF_TYPE for t in types):
        yield place, f"type is {given!r}; give one or several of {', '.join(OF_TYPE)}, or one of {', '.join(ALONE)}."
        return
    more = sorted(names - {"type"} - frozenset[str]().union(*(OF_TYPE[t] for t in types)))
    if more:
        yield place, f"{', '.join(more)} cannot be kept with type {given!r}; leave it out."
    if len(types) > 1 and names - {"type"}:
        yield place, "several types with further words; use anyOf of one type each."
    said = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(required, list) or not isinstance(said, Mapping) or not set(map(str, required)) <= set(said):
        yield place, "required names something that properties does not have."
    if not isinstance(schema.get("additionalProperties", False), bool | Mapping):
        yield place, "additionalProperties is true, false or a schema."
    for name in COUNTS:
        count = schema.get(name, 0)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_COUNT:
            yield place, f"{name} is {count!r}; give a whole number, 0 to {MOST_COUNT}."
    if "string" in types:
        yield from _wrong_string(schema, names, place)


def _wrong_string(schema: Mapping[str, Any], names: set[str], place: str) -> Wrong:
    lengths = {"minLength", "maxLength"} & names
    if bool(lengths) + ("pattern" in names) + ("format" in names) > 1:
        yield place, "pattern, format and lengths cannot be kept together; leave all but one out."
    if "format" in names and schema["format"] not in FORMATS:
        yield place, f"format is {schema['format']!r}; allowed are {', '.join(FORMATS)}."
    if "pattern" in names:
        pattern = schema["pattern"]
        fits = isinstance(pattern, str) and len(pattern) <= MOST_PATTERN and not UNKEPT.search(pattern)
        repeats = 1
        for bound in re.findall(r"\{\d*,?(\d+)", pattern) if fits else ():
            repeats *= max(1, int(bound))
        if not fits or repeats > MOST_REPEATS:
            yield (
                place,
                f"pattern takes up to {MOST_PATTERN} characters without (?, \\b and back references, and repeats that "
                f"multiply to {MOST_REPEATS} at most, and without characters that JSON escapes.",
            )


def _below(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas inside a schema."""
    for name in ("properties", *SHARED):
        if isinstance(schema.get(name), Mapping):
            yield from ((f"{name}.{key}", value) for key, value in schema[name].items())
    for name in ("anyOf", "prefixItems"):
        if isinstance(schema.get(name), list):
            yield from ((f"{name}.{i}", value) for i, value in enumerate(schema[name]))
    for name in ("items", "additionalProperties"):
        if name in schema and not isinstance(schema[name], bool):
            yield name, schema[name]


def _leads(reference: str, root: Mapping[str, Any]) -> bool:
    if reference == "#":
        return True
    words = reference.split("/")
    found = root.get(words[1]) if len(words) == 3 and words[0] == "#" and words[1] in SHARED else None
    return isinstance(found, Mapping) and words[2] in found


def _count(schema: Any) -> int:
    return 1 + sum(_count(below) for _, below in _below(schema))


def _lengths(schema: Any) -> Any:
    """The schema with the lengths of strings as patterns: xgrammar's own let control characters through."""
    if isinstance(schema, list):
        return [_lengths(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for name in {"anyOf", "prefixItems", "items", "additionalProperties"} & set(schema):
        made[name] = _lengths(schema[name])
    for name in {"properties", *SHARED} & set(schema):
        made[name] = {key: _lengths(value) for key, value in schema[name].items()}
    if schema.get("type") == "string" and {"minLength", "maxLength"} & set(schema):
        least, most = made.pop("minLength", 0), made.pop("maxLength", "")
        made["pattern"] = f"^{CHARACTER}{{{least},{most}}}$"
    return made
