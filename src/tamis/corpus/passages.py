"""Cut a text into passages that fit a token limit. Knows text and a counting function, no tokenizer.

A passage is a slice of its text, so nothing is lost or rewritten between a file and what is quoted from it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, takewhile

from tamis.core.errors import InvalidInput
from tamis.corpus.headings import find_headings
from tamis.corpus.read import Text

DEFAULT_TARGET_TOKENS = 384
CUTTER_VERSION = 1
"""Part of what makes a file unchanged: raise it when the same text would be cut elsewhere."""

TITLE_SEPARATOR = " > "

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # scripts written without spaces between words

# From coarse to fine: paragraph, sentence or list item, line. A match ends where the next piece begins.
_BORDERS = (
    re.compile(r"\n[^\S\n]*\n(?:[^\S\n]*\n)*"),
    re.compile(r"(?<=[.!?…])[\"'\u201d\u2019)\]*_]*\s+|(?<=[。\uff01\uff1f])|\n(?=[^\S\n]*(?:[-*+•|]|\d{1,3}[.)])\s)"),
    re.compile(r"\n(?:[^\S\n]*\n)*"),
)
_WORD_RUNS = len(_BORDERS)
_HALVES = _WORD_RUNS + 1
_WORD_END = re.compile(rf"\s+|(?<=[{_CJK}])")
_BLANK_LINES = re.compile(r"\s*\n")


@dataclass(frozen=True)
class Passage:
    """A piece of a document: `text` under the heading path `title`, from lines (PDF: pages) [first_line, last_line]."""

    text: str
    title: str
    source: str
    first_line: int
    last_line: int

    @property
    def id(self) -> str:
        """32 hex digits that depend on title and text alone, not on where the passage was found."""
        return passage_id(self.title, self.text)

    @property
    def place(self) -> str:
        """Where to look it up, for a person: `guide.md:12-18`, or `manual.pdf p. 3` for a PDF."""
        span = str(self.first_line)
        if self.last_line != self.first_line:
            span += f"-{self.last_line}"
        return f"{self.source} p. {span}" if self.source.lower().endswith(".pdf") else f"{self.source}:{span}"


def passage_id(title: str, text: str) -> str:
    """blake2b-128 of title and text, as hex."""
    return blake2b(f"{title}\0{text}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class _Unit:
    """Characters [start, stop) of the text, white space behind them included; never cut any further."""

    start: int
    stop: int
    tokens: int
    path: tuple[str, ...]
    is_heading: bool


def cut(text: Text, *, count: Callable[[str], int], target_tokens: int = DEFAULT_TARGET_TOKENS) -> list[Passage]:
    """`text` as passages in reading order, borders at paragraphs, else sentences, else lines, else words.

    `count(s)` is the number of tokens in `s`. It is called once per paragraph or smaller piece and the results are
    added, so for any count with count(a + b) <= count(a) + count(b) (words; tokenizers, as they split at white space)
    no passage exceeds `target_tokens`, except one that is a single word. A heading starts a new passage unless the
    passage before it is short and in the same chapter; it is never the last line of a passage with other text.
    Raises `InvalidInput` for a limit below 1.
    """
    if target_tokens < 1:
        raise InvalidInput(f"target_tokens is {target_tokens}; a passage needs at least 1 token (usual: 128 to 1024).")
    lines = text.text.split("\n")
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))[: len(lines)]
    passages = []
    for group in _pack(list(_units(text, lines, starts, count, target_tokens)), target_tokens):
        start, stop = _trim(text.text, group[0].start, group[-1].stop)
        if start == stop:
            continue
        first = bisect_right(starts, start) - 1
        last = bisect_right(starts, stop - 1) - 1
        passages.append(
            Passage(
                text=text.text[start:stop],
                title=_title(text.title, _common([u.path for u in group if not u.is_heading] or [group[-1].path])),
                source=text.source,
                first_line=text.numbers[first] if text.numbers else first + 1,
                last_line=text.numbers[last] if text.numbers else last + 1,
            )
        )
    return passages


def _units(text: Text, lines: list[str], starts: list[int], count: Callable[[str], int], limit: int) -> Iterator[_Unit]:
    """The whole text as adjoining units of at most `limit` tokens (a longer word excepted)."""
    at, path = 0, ()  # type: tuple[int, tuple[str, ...]]
    end = len(text.text)
    room = limit
    for heading in find_headings(lines, text.markup):
        first, last = heading.first, heading.last
        while last < len(lines) and not lines[last].strip():
            last += 1
        start, stop = starts[first], starts[last] if last < len(starts) else end
        if at < start:
            yield from (_Unit(a, b, n, path, False) for a, b, n in _split(text.text, at, start, count, room))
            room = limit
        for a, b, n in _split(text.text, start, stop, count, limit):
            # Room for its headings is kept beside a long paragraph, so that they need not stand alone.
            room = max(room - n, (limit + 1) // 2)
            yield _Unit(a, b, n, heading.path, True)
        at, path = stop, heading.path
    yield from (_Unit(a, b, n, path, False) for a, b, n in _split(text.text, at, end, count, room))


def _split(text: str, start: int, stop: int, count: Callable[[str], int], limit: int) -> Iterator[tuple[int, int, int]]:
    """[start, stop) as (start, stop, tokens), each the coarsest piece that fits, in order."""
    waiting = [(start, stop, 0)]
    while waiting:
        a, b, level = waiting.pop()
        # The whole (level 0) is never counted, nor what is far too long to fit: one count per paragraph is enough.
        tokens = count(text[a:b]) if level > 0 and b - a <= 32 * limit else None
        if a == b or (tokens is not None and tokens <= limit):
            if a < b:
                yield a, b, tokens or 0
            continue
        pieces = _pieces(text, a, b, level, limit)
        while len(pieces) == 1 and level < _HALVES and (level > 0 or b - a > 32 * limit):
            level += 1
            pieces = _pieces(text, a, b, level, limit)
        if len(pieces) == 1 and level == _HALVES:  # a single word
            yield a, b, count(text[a:b]) if tokens is None else tokens
        else:
            waiting += [(x, y, min(level + 1, _HALVES)) for x, y in reversed(pieces)]


def _pieces(text: str, start: int, stop: int, level: int, limit: int) -> list[tuple[int, int]]:
    """[start, stop) cut at the borders of `level`; one piece when there are none."""
    if level == _HALVES:
        return _halves(text, start, stop)
    pieces = []
    at = start
    if level == _WORD_RUNS:
        # About `limit` characters: few tokens are shorter than that, and halving sees to those.
        while border := _WORD_END.search(text, at + limit, stop):
            if border.end() == stop:
                break
            pieces.append((at, border.end()))
            at = border.end()
    else:
        for border in _BORDERS[level].finditer(text, start, stop):
            # Pieces of a few characters stay together: a count for each would cost more than it tells.
            if start < border.end() < stop and border.end() - at >= limit // 4:
                pieces.append((at, border.end()))
                at = border.end()
    return [*pieces, (at, stop)]


def _halves(text: str, start: int, stop: int) -> list[tuple[int, int]]:
    """[start, stop) cut at the word border next after its middle, else the last one before; a single word whole."""
    middle = (start + stop) // 2
    after = _WORD_END.search(text, max(middle, start + 1), stop)
    if after and after.end() < stop:
        return [(start, after.end()), (after.end(), stop)]
    before = [m.end() for m in _WORD_END.finditer(text, start, stop) if start < m.end() < stop]
    return [(start, before[-1]), (before[-1], stop)] if before else [(start, stop)]


def _pack(units: list[_Unit], limit: int) -> Iterator[list[_Unit]]:
    """Adjoining units together while they fit, headings with what follows them."""
    group: list[_Unit] = []
    size = 0
    for unit in units:
        full = size + unit.tokens > limit
        if group and (full or (unit.is_heading and _ends_passage(group, size, unit, limit))):
            kept = len(group)
            while kept > 0 and group[kept - 1].is_heading and not unit.is_heading:
                kept -= 1
            carried = group[kept:] if kept > 0 else []
            if sum(u.tokens for u in carried) + unit.tokens > limit:
                kept, carried = len(group), []
            yield group[:kept] if carried else group
            group = carried
            size = sum(u.tokens for u in group)
        group.append(unit)
        size += unit.tokens
    if group:
        yield group


def _ends_passage(group: list[_Unit], size: int, heading: _Unit, limit: int) -> bool:
    """Whether a passage of `group` should end before `heading`."""
    if group[-1].is_heading:
        return False
    return size >= limit // 4 or not _common([group[-1].path, heading.path])


def _common(paths: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The longest path that all of `paths` begin with."""
    same = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    return tuple(names[0] for names in same)


def _title(root: str, path: tuple[str, ...]) -> str:
    """The heading path under the file's own title, which is left out where the first heading repeats it."""
    if path and root and path[0].casefold() not in root.casefold() and root.casefold() not in path[0].casefold():
        path = (root, *path)
    return TITLE_SEPARATOR.join(path) if path else root


def _trim(text: str, start: int, stop: int) -> tuple[int, int]:
    """[start, stop) without blank lines in front and white space behind; indentation stays."""
    blank = _BLANK_LINES.match(text, start, stop)
    start = blank.end() if blank else start
    return start, start + len(text[start:stop].rstrip())
