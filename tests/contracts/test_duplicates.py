"""No long function exists twice."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

from source_tree import Function, Source, length, sources

LINES = 25


def twins(files: Iterable[Source]) -> list[list[str]]:
    """Places of functions whose bodies, docstrings left out, are the same syntax tree; LINES or more long."""
    places: dict[str, list[str]] = defaultdict(list)
    for source in files:
        for node in ast.walk(source.tree):
            if isinstance(node, Function) and length(node) >= LINES:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                places["\n".join(map(ast.dump, body))].append(f"{source.name}:{node.lineno} {node.name}")
    return [found for found in places.values() if len(found) > 1]


def test_no_long_function_exists_twice() -> None:
    found = twins(sources("src", "tests", "scripts"))
    assert not found, "make one of each of these groups:\n" + "\n".join(" = ".join(group) for group in found)


def test_a_copy_is_seen_under_another_name_and_docstring() -> None:
    body = "".join(f"    x{i} = {i}\n" for i in range(LINES))
    copies = [Source("a.py", f'def f():\n    """One."""\n{body}'), Source("b.py", f'def g():\n    """Two."""\n{body}')]
    assert twins(copies) == [["a.py:1 f", "b.py:1 g"]]
    changed = Source("b.py", f"def g():\n{body.replace('x3 = 3', 'x3 = 4')}")
    assert not twins([copies[0], changed])
