"""Variants of selectors written in a line, such as `sampled:rows=4,mass=0.95` or `threshold:theta=0.01+mean`.

    name[:option=value,...][+mean]

`name` is a selector. `sampled`, `oracle`, `threshold` and `calibrated` are put together from `select.variants` and take
its options (rows, spread, reduce, paired, local, question) beside those of their rule: mass; theta, floor and power;
file. alpha, beta, gamma_ca and ca_rule are thresholds of the stored bits. `+mean` adds what skipped tiles give on
average.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown
from tamis.select import SELECTORS
from tamis.select.rules import PerHead, Rule, Share, Threshold
from tamis.select.scene import Selector
from tamis.select.variants import RowSampled

_BITS = {"alpha": "alpha", "beta": "beta", "gamma_ca": "gamma", "ca_rule": "ca_rule"}


@dataclass(frozen=True)
class Variant:
    """A selector with its settings. `bits` are the thresholds of stored bits that differ from the policy's."""

    spec: str
    selector: Selector
    bits: dict[str, Any] = field(default_factory=dict)
    corrected: bool = False


def parse_variant(spec: str) -> Variant:
    """Raises InvalidInput that names the selector, the option or the value that cannot be, and those that can."""
    spec = "".join(spec.split())
    text, plus, tail = spec.partition("+")
    if plus and tail != "mean":
        raise InvalidInput(f"variant {spec!r} ends in +{tail}; only +mean is known.")
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, is_pair, value = part.partition("=")
        if not is_pair or not key or key in options:
            raise InvalidInput(f"variant {spec!r}: {part!r} is not an option=value of its own.")
        options[key] = value_of(value)
    bits = {_BITS[key]: options.pop(key) for key in list(options) if key in _BITS}
    corrected = bool(plus)
    selector = _build(name, options)
    if corrected and not isinstance(selector, RowSampled):
        raise InvalidInput(f"variant {spec!r}: +mean needs estimated masses, which only {', '.join(_RULES)} have.")
    return Variant(spec, selector, bits, corrected)


def _load(file: str = "thresholds.json") -> PerHead:
    return PerHead.load(file)


_RULES: dict[str, Callable[..., Rule]] = {
    "sampled": Share, "oracle": Share, "threshold": Threshold, "calibrated": _load,
}  # fmt: skip
_FIXED: dict[str, dict[str, Any]] = {"oracle": {"rows": 0, "local": "sampled"}}
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"), "float": ((int, float), "a number"), "bool": ((bool,), "true or false"),
}  # fmt: skip


def _build(name: str, options: dict[str, Any]) -> Selector:
    if name not in SELECTORS and name not in _RULES:
        raise InvalidInput(unknown("selector", name, sorted({*SELECTORS, *_RULES})))
    make: Any = RowSampled if name in _RULES else SELECTORS.get(name)
    of_rule = inspect.signature(_RULES[name]).parameters if name in _RULES else {}
    allowed = {**inspect.signature(make).parameters, **of_rule}
    for no_option in ("rule", "args", "kwargs", *(["rows"] if name == "oracle" else [])):
        allowed.pop(no_option, None)
    for key, value in options.items():
        if key not in allowed:
            raise InvalidInput(unknown(f"option of {name}", key, [*allowed, *_BITS]))
        _check_kind(name, key, value, str(allowed[key].annotation))
    if name not in _RULES:
        made: Selector = make(**options)
        return made
    own = {key: options[key] for key in options if key in of_rule}
    rest = {key: options[key] for key in options if key not in of_rule}
    return RowSampled(_RULES[name](**own), **(_FIXED.get(name, {}) | rest))


def _check_kind(name: str, key: str, value: Any, annotation: str) -> None:
    """Raises InvalidInput for a value of another type than the parameter's: "no" would count as true."""
    kinds = annotation.split(" | ")
    wanted = _KINDS.get(kinds[0])
    if wanted is None or (value is None and "None" in kinds):
        return
    if not isinstance(value, wanted[0]) or (isinstance(value, bool) and kinds[0] != "bool"):
        raise InvalidInput(f"variant {name}: {key} is {str(value).lower()!r}; give {wanted[1]}.")


def value_of(text: str) -> Any:
    """An option's value as it is written: true, false, none, a number, or else a text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
