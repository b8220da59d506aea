"""Where the headings of a text are, and what they make of the lines below them. Knows markup, not passages."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tamis.corpus.read import Markup

_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ATTRIBUTES = re.compile(r"\s*\{[#.][^}]*\}$")
_UNDERLINE = {"markdown": re.compile(r" {0,3}(=|-)\1*[ \t]*$"), "rst": re.compile(r"([=\-`:'\"~^_*+#<>.])\1*\s*$")}
_NOT_A_TITLE = re.compile(r"\s*(?:[-*+>|#]|\d+[.)])\s|\s*$|\s*\|")


@dataclass(frozen=True)
class Heading:
    """A heading on lines [first, last) of a text, counted from 0; `path` includes itself, outermost first."""

    first: int
    last: int
    path: tuple[str, ...]


def find_headings(lines: list[str], markup: Markup) -> list[Heading]:
    """The headings of `lines` in order; code fences and a YAML front matter hold none."""
    if markup == "plain":
        return []
    raw = _markdown(lines) if markup == "markdown" else _rst(lines)
    headings = []
    path: list[tuple[int, str]] = []
    for first, last, level, title in raw:
        while path and path[-1][0] >= level:
            path.pop()
        if title:
            path.append((level, title))
        headings.append(Heading(first, last, tuple(name for _, name in path)))
    return headings


def _markdown(lines: list[str]) -> list[tuple[int, int, int, str]]:
    found = []
    fence = ""
    taken = _front_matter(lines)  # lines before this one belong to something and are no heading's text
    for i in range(taken, len(lines)):
        line = lines[i]
        mark = _FENCE.match(line)
        if fence:
            taken = i + 1
            if mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif mark:
            fence, taken = mark[1], i + 1
        elif atx := _ATX.match(line):
            taken = i + 1
            found.append((i, i + 1, len(atx[1]), _ATTRIBUTES.sub("", atx[2] or "")))
        elif (rule := _UNDERLINE["markdown"].match(line)) and i > taken and _is_title(lines, i - 1):
            taken = i + 1
            found.append((i - 1, i + 1, 1 if rule[1] == "=" else 2, lines[i - 1].strip()))
    return found


def _rst(lines: list[str]) -> list[tuple[int, int, int, str]]:
    found = []
    levels: dict[str, int] = {}
    taken = 0  # lines before this one are of an earlier heading
    for i, line in enumerate(lines):
        rule = _UNDERLINE["rst"].match(line)
        if rule is None or i == 0 or len(line.rstrip()) < max(3, len(lines[i - 1].rstrip())):
            continue
        overlined = i - 2 >= taken and lines[i - 2].rstrip() == line.rstrip()
        if not lines[i - 1].strip() or _UNDERLINE["rst"].match(lines[i - 1]):
            continue
        if overlined or _is_title(lines, i - 1):
            taken = i + 1
            level = levels.setdefault(rule[1] * (1 + overlined), len(levels) + 1)
            found.append((i - 2 if overlined else i - 1, i + 1, level, lines[i - 1].strip()))
    return found


def _is_title(lines: list[str], i: int) -> bool:
    """Whether line `i` can be the text of an underlined heading: one line, alone, not a list item or a table row."""
    return i >= 0 and not _NOT_A_TITLE.match(lines[i]) and (i == 0 or not lines[i - 1].strip())


def _front_matter(lines: list[str]) -> int:
    if not lines or lines[0].rstrip() != "---":
        return 0
    return next((i + 1 for i in range(1, min(len(lines), 200)) if lines[i].rstrip() in ("---", "...")), 0)
