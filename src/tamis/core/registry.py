"""A name → lazy creator table whose miss is helpful.

Rooms that can be extended (selectors, kernels, retrievers) hold one `Registry`; adding a choice is adding a file
and one line that names it. The module behind a name is imported only when the name is asked for.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from typing import Any

from tamis.core.errors import UnknownName


class Registry:
    """Maps names to `"package.module:attribute"` strings, resolved on first use."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._targets: dict[str, str] = {}

    def add(self, name: str, target: str) -> None:
        """Register `target` ("module:attribute") under `name`; a second registration of one name is our own bug."""
        assert name not in self._targets, f"{self.noun} {name!r} is registered twice"
        self._targets[name] = target

    def get(self, name: str) -> Any:
        """The object behind `name`. Raises `UnknownName` with the nearest and all valid names."""
        if name not in self._targets:
            raise UnknownName(unknown(self.noun, name, list(self._targets)))
        module, _, attribute = self._targets[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets


def unknown(noun: str, name: str, choices: list[str]) -> str:
    """The sentence for a name that is not among `choices`, with the closest one suggested."""
    near = difflib.get_close_matches(name, choices, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {noun} {name!r}.{hint} Choices: {', '.join(sorted(choices))}."
