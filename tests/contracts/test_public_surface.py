"""Everything public says what it takes, what it gives and what it is for; unfinished work names what ends it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from source_tree import ROOT, Function, Source, functions, jitted, sources

MARKER = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?!\((?:#\d+|v?\d+\.\d+[\w.]*)\))")


def public(name: str) -> bool:
    """Whether no part of a dotted name is private; dunder methods do not count as public."""
    return not any(part.startswith("_") for part in name.split("."))


def bare(source: Source) -> Iterator[str]:
    """What lacks a docstring or an annotation in one file."""
    if not ast.get_docstring(source.tree) and source.text.strip():
        yield f"{source.name}: the module has no docstring"
    for cls in (n for n in source.tree.body if isinstance(n, ast.ClassDef) and public(n.name)):
        if not ast.get_docstring(cls):
            yield f"{source.name}:{cls.lineno} class {cls.name} has no docstring"
    for name, node, cls in functions(source.tree):
        place = f"{source.name}:{node.lineno} {name}"
        if jitted(node):
            continue
        if missing := unannotated(node, method=cls is not None):
            yield f"{place} lacks annotations of {', '.join(missing)}"
        if public(name) and not ast.get_docstring(node) and not declared(node, cls):
            yield f"{place} has no docstring"


def unannotated(node: Function, *, method: bool) -> list[str]:
    """Names of parameters without annotation, and "return"."""
    args = [*node.args.posonlyargs, *node.args.args]
    static = any(getattr(d, "id", "") == "staticmethod" for d in node.decorator_list)
    args = args[1:] if method and not static else args
    rest = [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
    names = [a.arg for a in (*args, *node.args.kwonlyargs, *rest) if a.annotation is None]
    return names if node.returns is not None else [*names, "return"]


def declared(node: Function, cls: ast.ClassDef | None) -> bool:
    """An overload, or a protocol's bare signature: the class or the implementation has the words."""
    protocol = cls is not None and any("Protocol" in ast.unparse(base) for base in cls.bases)
    only_dots = len(node.body) == 1 and ast.unparse(node.body[0]) == "..."
    return only_dots and (protocol or any("overload" in ast.unparse(d) for d in node.decorator_list))


def test_public_functions_are_annotated_and_described() -> None:
    wrong = [line for source in sources("src") for line in bare(source)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "def f() -> None: ...",
        'def f(a) -> None:\n    """Words."""',
        'def f():\n    """Words."""',
        'class C:\n    """Words."""\n    def m(self, a, *, b: int) -> None:\n        """Words."""',
        "class C:\n    x = 1",
        "def _f(a): ...",
    ],
)
def test_a_bare_one_is_seen(text: str) -> None:
    assert len(list(bare(Source("a.py", f'"""Module."""\n{text}\n')))) == 1


def test_unfinished_work_names_what_ends_it() -> None:
    texts = {s.name: s.text for s in sources("src", "tests", "scripts", "examples")}
    texts |= {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in (ROOT / "docs").rglob("*.md")}
    wrong = [
        f"{name}:{number} {line.strip()}"
        for name, text in texts.items()
        if name != "tests/contracts/test_public_surface.py"
        for number, line in enumerate(text.splitlines(), 1)
        if MARKER.search(line)
    ]
    assert not wrong, "name the version or issue, as in TODO(0.2) or TODO(#12):\n" + "\n".join(wrong)


@pytest.mark.parametrize(("line", "wrong"), [("# TODO: later", True), ("# TODO(#12): x", False), ("# FIXME", True)])
def test_marker_pattern(line: str, wrong: bool) -> None:
    assert bool(MARKER.search(line)) is wrong
