"""One check for all option classes: that a value is of the kind its field says. Python would let 1.5 tokens pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from numbers import Integral, Real
from os import PathLike
from typing import Any

from tamis.core.errors import InvalidInput


def check_fields(options: Any) -> None:
    """Raises InvalidInput for a field of the dataclass `options` whose value is not of the annotated kind.

    Kinds are int, float (a whole number counts, infinity and NaN do not), bool, str, Path and None, alone or joined by
    "|"; a field annotated with anything else is left alone. True and False are no numbers. Numbers of other types than
    Python's own, such as NumPy's, become int, float or bool. The class must be defined under `from __future__ import
    annotations`, so that annotations are text.
    """
    for field in fields(options):
        names = str(field.type).split(" | ")
        if not all(name in _KINDS for name in names):
            continue
        value = getattr(options, field.name)
        if not any(_KINDS[name][0](value) for name in names):
            allowed = " or ".join(_KINDS[name][1] for name in names)
            raise InvalidInput(f"{field.name} is {value!r}; allowed is {allowed}.")
        if not isinstance(value, int | float) and isinstance(value, Real):
            # reports and digests are JSON, which has no NumPy numbers
            object.__setattr__(options, field.name, int(value) if isinstance(value, Integral) else float(value))
        elif _truth(value) and not isinstance(value, bool):
            object.__setattr__(options, field.name, bool(value))


def _number(kind: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and not isinstance(value, bool) and _finite(value)


def _truth(value: Any) -> bool:
    """Whether it is True or False, also as a NumPy scalar."""
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number past the largest float: no number of tokens, bytes or seconds
        return False


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_number(Integral), "a whole number"),
    "float": (_number(Real), "a finite number"),
    "bool": (_truth, "True or False"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "Path": (lambda value: isinstance(value, PathLike), "a path"),
    "None": (lambda value: value is None, "None"),
}
