"""Text of an HTML page, line by line, with the line of the file each came from. Knows tags, not files."""

from __future__ import annotations

from dataclasses import dataclass, field

DROPPED = frozenset({"script", "style", "nav", "template", "noscript", "svg", "iframe", "head", "object"})
BLOCKS = frozenset(
    {"address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "dialog", "div", "dl", "dt"}
    | {"fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hgroup"}
    | {"hr", "html", "li", "main", "ol", "p", "pre", "section", "summary", "table", "tbody", "tfoot", "thead", "tr"}
    | {"ul"}
)
HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}


def html_lines(page: str) -> tuple[str, list[str], list[int]]:
    """`page` → (title, lines, numbers): `numbers[i]` is the 1-based line of `page` where `lines[i]` begins.

    Scripts, styles and navigation are dropped; headings become Markdown headings, list items "- ", table cells are
    joined by " | "; an empty line stands between blocks.
    """
    from bs4 import BeautifulSoup
    from bs4.element import NavigableString, PreformattedString, Tag

    soup = BeautifulSoup(page, "html.parser")
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    out = _Lines()
    line = 1
    for node in soup.descendants:
        if isinstance(node, Tag):
            line = max(line, node.sourceline or 1)
            if node.name == "br":
                out.break_line(line)
            elif node.name in ("td", "th"):
                out.cell(line)
        elif isinstance(node, NavigableString):
            text = str(node)
            at, line = line, line + text.count("\n")
            if isinstance(node, PreformattedString):  # comments, doctypes: not shown by a browser
                continue
            block, shown = _owner(node)
            if shown:
                out.enter(block)
                out.add(text, at)
    out.flush()
    return title, out.lines, out.numbers


def _owner(node: object) -> tuple[object, bool]:
    """(the nearest block tag around `node`, whether it is shown)."""
    block = None
    for parent in node.parents:  # type: ignore[attr-defined]
        if parent.name in DROPPED:
            return None, False
        if block is None and parent.name in BLOCKS:
            block = parent
    return block, True


@dataclass
class _Lines:
    lines: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    pending: list[tuple[int, str]] = field(default_factory=list)
    block: object = None

    def enter(self, block: object) -> None:
        if block is not self.block:
            self.flush()
            self.block = block

    def add(self, text: str, line: int) -> None:
        """`text` goes on where the last one ended; its own line ends count from `line`."""
        first, *rest = text.split("\n")
        if self.pending:
            self.pending[-1] = (self.pending[-1][0], self.pending[-1][1] + first)
        else:
            self.pending.append((line, first))
        self.pending += [(line + offset, part) for offset, part in enumerate(rest, 1)]

    def break_line(self, line: int) -> None:
        if self.pending:
            self.pending.append((line, ""))

    def cell(self, line: int) -> None:
        if any(text.strip() for _, text in self.pending):
            self.add(" | ", line)

    def flush(self) -> None:
        """Writes the pending block out, after an empty line unless it is a list item or a table row."""
        name = getattr(self.block, "name", "")
        kept = [(number, raw.rstrip() if name == "pre" else " ".join(raw.split())) for number, raw in self.pending]
        kept = [(number, text) for number, text in kept if text.strip()]
        self.pending = []
        if not kept:
            return
        if name in HEADINGS:
            kept = [(kept[0][0], HEADINGS[name] + " ".join(text for _, text in kept))]
        elif name == "li":
            kept[0] = (kept[0][0], "- " + kept[0][1])
        if self.lines and name not in ("li", "tr", "dd"):
            kept.insert(0, (kept[0][0], ""))
        for number, text in kept:
            self.numbers.append(number)
            self.lines.append(text)
