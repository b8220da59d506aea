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
        options[key] = _value(value)
    bits = {_BITS[key]: options.pop(key) for key in list(options) if key in _BITS}
    corrected = bool(plus)
    selector = _build(name, options)
    if corrected and not isinstance(selector, RowSampled):
        raise InvalidInput(f"variant {spec!r}: +mean needs estimated masses, which only {', '.join(_OWN)} have.")
    return Variant(spec, selector, bits, corrected)


def _rule(make: Callable[..., Rule], *names: str, **fixed: Any) -> Callable[[dict[str, Any]], RowSampled]:
    def build(options: dict[str, Any]) -> RowSampled:
        own = {key: options.pop(key) for key in names if key in options}
        return RowSampled(make(**own), **(fixed | options))

    return build


def _load(file: str = "thresholds.json") -> PerHead:
    return PerHead.load(file)


_OWN: dict[str, Callable[[dict[str, Any]], RowSampled]] = {
    "sampled": _rule(Share, "mass"),
    "oracle": _rule(Share, "mass", rows=0, local="sampled"),
    "threshold": _rule(Threshold, "theta", "floor", "power"),
    "calibrated": _rule(_load, "file"),
}
_RULE_OPTIONS = {
    "sampled": ["mass"], "oracle": ["mass"], "threshold": ["theta", "floor", "power"], "calibrated": ["file"],
}  # fmt: skip


def _build(name: str, options: dict[str, Any]) -> Selector:
    if name not in SELECTORS and name not in _OWN:
        raise InvalidInput(unknown("selector", name, sorted({*SELECTORS, *_OWN})))
    make: Any = RowSampled if name in _OWN else SELECTORS.get(name)
    allowed = [p for p in inspect.signature(make).parameters if p not in ("rule", "args", "kwargs")]
    allowed += _RULE_OPTIONS.get(name, [])
    for key in options:
        if key not in allowed:
            raise InvalidInput(unknown(f"option of {name}", key, [*allowed, *_BITS]))
    try:
        made: Selector = _OWN[name](dict(options)) if name in _OWN else make(**options)
    except TypeError as e:
        raise InvalidInput(f"variant {name} with {options}: {e}.") from e
    return made


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
