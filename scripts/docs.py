"""Write the generated parts of docs/ anew: the table of rooms in map.md, and reference/env.md.

With --check nothing is written; exit status 1 and a list of the pages that are not fresh.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "tamis"
BEGIN, END = "<!-- rooms: written by scripts/docs.py -->", "<!-- end of rooms -->"


def sentence(init: Path) -> str:
    """The first sentence of a package's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or "").split())
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def layers() -> list[list[str]]:
    """The rooms of each layer, bottom to top, from the import contract."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = config["tool"]["importlinter"]["contracts"]
    rows = next(c["layers"] for c in contracts if c["type"] == "layers")
    return [[name.strip(" ()") for name in row.split("|")] for row in reversed(rows)]


def rooms() -> str:
    """The table of rooms in dependency order, sub-packages under their room."""
    lines = ["| room | what it is |", "| --- | --- |"]
    for layer in layers():
        for room in layer:
            for init in sorted((PACKAGE / room).rglob("__init__.py"), key=lambda p: p.parent.as_posix()):
                name = init.parent.relative_to(PACKAGE).as_posix()
                lines.append(f"| `{name}` | {sentence(init)} |")
    return "\n".join(lines)


def map_page(text: str) -> str:
    """docs/map.md with its table of rooms as the code has it now."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{rooms()}\n{END}{rest.partition(END)[2]}"


def env_page() -> str:
    """docs/reference/env.md."""
    tree = ast.parse((PACKAGE / "core" / "env.py").read_text(encoding="utf-8"))
    (table,) = (n.value for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign) and "VARIABLES" in _targets(n))
    assert table is not None, "VARIABLES is declared without a value"
    rows = [f"| `{name}` | {what} |" for name, what in ast.literal_eval(table).items()]
    head = "# Environment variables\n\nWritten by `scripts/docs.py` from `tamis.core.env`.\n\n"
    return "\n".join([head + "| name | what it does |", "| --- | --- |", *rows]) + "\n"


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    return [getattr(t, "id", "") for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]


def pages() -> dict[Path, str]:
    """Every generated page and what it should hold."""
    chart = ROOT / "docs" / "map.md"
    return {
        chart: map_page(chart.read_text(encoding="utf-8")),
        ROOT / "docs" / "reference" / "env.md": env_page(),
    }


def stale() -> list[Path]:
    """Pages that differ from what they should hold."""
    return [p for p, text in pages().items() if not p.exists() or p.read_text(encoding="utf-8") != text]


def main() -> int:
    """Write or check; the exit status."""
    if "--check" in sys.argv[1:]:
        for page in stale():
            print(f"{page.relative_to(ROOT)} is not fresh: run `make fix`")
        return int(bool(stale()))
    for page, text in pages().items():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
