"""The package's source as syntax trees, read once, and the walks that several contracts need."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tamis"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the repository's root, its text and tree."""

    name: str
    text: str

    @property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return _parse(self.text)

    @property
    def kernel(self) -> bool:
        """Whether it holds device code, which has a budget of its own."""
        return self.name.startswith(("src/tamis/kernels/triton/", "src/tamis/kernels/gluon/"))


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """All Python files below the given folders of the repository."""
    paths = sorted(p for f in folders for p in (ROOT / f).rglob("*.py"))
    return tuple(Source(p.relative_to(ROOT).as_posix(), p.read_text(encoding="utf-8")) for p in paths)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function, ast.ClassDef | None]]:
    """(dotted name, node, class it is a method of) of functions and methods, not of those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node, tree if isinstance(tree, ast.ClassDef) else None
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from functions(node, prefix)


def jitted(function: Function) -> bool:
    """Whether the function is compiled for a device (`triton.jit`, `gluon.jit`)."""
    return bool(decorators(function) & {"jit", "autotune", "heuristics"})


def decorators(function: Function) -> set[str]:
    """Last names of a function's decorators: `command` for `@app.command("x")`."""
    called = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return {d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "") for d in called}


def length(node: Function | ast.ClassDef) -> int:
    """Lines of a definition, its decorators left out."""
    assert node.end_lineno is not None, "ast.parse gives every node its end"
    return node.end_lineno - node.lineno + 1
