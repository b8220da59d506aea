"""The pages keep up with the code: rooms are on the map, generated parts fresh, links alive, code blocks parse."""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from source_tree import PACKAGE, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)[^)]*\)")


@pytest.fixture(scope="module")
def docs_script() -> ModuleType:
    """scripts/docs.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_script", ROOT / "scripts" / "docs.py")
    assert spec is not None and spec.loader is not None, "scripts/docs.py is there"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(text: str) -> Iterator[str]:
    """The Python code blocks of a page."""
    for found in FENCE.finditer(text):
        yield textwrap.dedent(found["code"])


def test_every_package_is_on_the_map_with_its_first_sentence(docs_script: ModuleType) -> None:
    chart = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    missing = []
    for init in sorted(PACKAGE.rglob("__init__.py")):
        name = init.parent.relative_to(PACKAGE).as_posix()
        row = f"| `{name}` | {docs_script.sentence(init)} |"
        if name != "." and row not in chart:
            missing.append(row)
    assert not missing, "run `make fix`; docs/map.md lacks:\n" + "\n".join(missing)


def test_every_room_says_what_it_is(docs_script: ModuleType) -> None:
    mute = [p.parent.name for p in PACKAGE.rglob("__init__.py") if not docs_script.sentence(p).endswith(".")]
    assert not mute, f"the docstring of these packages must start with a whole sentence: {mute}"


def test_generated_pages_are_fresh(docs_script: ModuleType) -> None:
    assert not docs_script.stale(), "run `make fix`"


def test_a_stale_map_is_seen(docs_script: ModuleType) -> None:
    chart = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    assert docs_script.map_page(chart.replace("| `core` |", "| `heart` |")) == docs_script.map_page(chart)
    assert docs_script.map_page(chart + "more\n").endswith("more\n"), "what is written by hand stays"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_python_blocks_parse(page: Path) -> None:
    for code in blocks(page.read_text(encoding="utf-8")):
        try:
            ast.parse(code)
        except SyntaxError as e:
            pytest.fail(f"{page.name}: {e}\n{code}")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    dead = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert not dead


def test_blocks_and_links_are_found() -> None:
    text = "1. x\n   ```python\n   a = (\n   ```\n[a](b.md#c) [d](https://e.f) ![g](h.png)\n"
    assert list(blocks(text)) == ["a = (\n"]
    assert LINK.findall(text) == ["b.md", "h.png"]
