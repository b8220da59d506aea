"""Turn a file into text with line numbers. Knows file formats, not passages or tokens."""

from __future__ import annotations

import codecs
import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tamis.core.errors import DocumentUnreadable

READER_VERSION = 1
"""Part of what makes a file unchanged: raise it when the same bytes would give other text."""

Markup = Literal["plain", "markdown", "rst"]

MARKUP: dict[str, Markup] = {
    ".txt": "plain",
    ".md": "markdown",
    ".markdown": "markdown",
    ".rst": "rst",
    ".html": "markdown",  # headings are rewritten as Markdown ones
    ".htm": "markdown",
    ".pdf": "plain",
}
SUFFIXES = tuple(MARKUP)

MAX_REPLACED_SHARE = 0.1
"""Above this share of undecodable characters a file is binary or in another encoding, not UTF-8 with a few slips."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)


@dataclass(frozen=True)
class Text:
    r"""What a file says.

    `text` has `\n` line ends only. `numbers[i]` is the line in the file (the page, for a PDF) of line `i` of `text`;
    empty means line `i` is line `i + 1` of the file. `title` is the file's own title, "" when it has none.
    """

    source: str
    text: str
    title: str = ""
    markup: Markup = "plain"
    numbers: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


def read_file(path: Path | str) -> Text:
    """The text of the file at `path`. Raises `DocumentUnreadable` when there is none to be had."""
    path = Path(path)
    check_suffix(path)
    try:
        data = path.read_bytes()
    except OSError as e:
        raise DocumentUnreadable(f"{path} cannot be opened ({e.strerror}). Check the path and its permissions.") from e
    return parse(path, data)


def check_suffix(path: Path) -> None:
    """Raises `DocumentUnreadable` unless `path` ends in one of `SUFFIXES` (case ignored)."""
    if path.suffix.lower() not in MARKUP:
        raise DocumentUnreadable(
            f"{path} has the suffix {path.suffix!r}; Tamis reads {', '.join(SUFFIXES)}. Convert it to one of these."
        )


def parse(path: Path, data: bytes) -> Text:
    """The text in `data`, the bytes of the file at `path` (its suffix says how to read them)."""
    suffix = path.suffix.lower()
    if not data.strip():
        raise DocumentUnreadable(f"{path} is empty. Leave it out, or write something into it.")
    if suffix == ".pdf":
        text = _parse_pdf(path, data)
    else:
        decoded, warnings = _decode(path, data, html=suffix in (".html", ".htm"))
        if suffix in (".html", ".htm"):
            from tamis.corpus.html import html_lines

            title, lines, numbers = html_lines(decoded)
            text = Text(str(path), "\n".join(lines), title, MARKUP[suffix], tuple(numbers), warnings)
        else:
            text = Text(str(path), decoded, "", MARKUP[suffix], (), warnings)
    if not text.text.strip():
        raise DocumentUnreadable(f"{path} holds no text once its markup is removed. Leave it out.")
    return text


def _decode(path: Path, data: bytes, *, html: bool) -> tuple[str, tuple[str, ...]]:
    encoding = "utf-8-sig"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif html and not data.startswith(codecs.BOM_UTF8) and (named := _CHARSET.search(data[:4096])):
        encoding = named[1].decode("ascii")
    try:
        text = data.decode(encoding, errors="replace")
    except (LookupError, UnicodeError):  # the page names no encoding of text: UTF-8 is the best guess
        encoding = "utf-8"
        text = data.decode(encoding, errors="replace")
    replaced = text.count("�") - data.count("�".encode())
    if "\0" in text or replaced > MAX_REPLACED_SHARE * len(text):
        raise DocumentUnreadable(
            f"{path} is binary, or not UTF-8 text. Save it as UTF-8, or leave it out; UTF-16 with a byte-order mark"
            " is read too."
        )
    warnings: tuple[str, ...] = ()
    if replaced > 0:
        warnings = (f"{path}: {replaced} places are not valid {encoding.removesuffix('-sig')} and were read as '�'",)
    return _clean(text), warnings


def _clean(text: str) -> str:
    # Lone surrogates come out of damaged PDFs and cannot be stored or tokenized.
    return _SURROGATE.sub("�", text.replace("\r\n", "\n").replace("\r", "\n"))


def _parse_pdf(path: Path, data: bytes) -> Text:
    import pypdf

    lines: list[str] = []
    pages: list[int] = []
    with _log_of("pypdf") as warnings:
        # pypdf meets damaged files with nearly any exception type, so each is turned into one sentence here.
        try:
            reader = pypdf.PdfReader(io.BytesIO(data))
            locked = reader.is_encrypted and not reader.decrypt("")
            count = 0 if locked else len(reader.pages)
        except Exception as e:
            raise DocumentUnreadable(f"{path} cannot be read as a PDF ({type(e).__name__}: {e}). Save it again.") from e
        if locked:
            raise DocumentUnreadable(f"{path} is encrypted. Save a copy without a password and add that.")
        for number in range(count):
            try:
                page = _clean(reader.pages[number].extract_text())
            except Exception as e:
                warnings.append(f"page {number + 1} was left out ({type(e).__name__}: {e})")
                continue
            page_lines = [line.rstrip() for line in page.replace("\0", "").strip("\n").split("\n")]
            lines += page_lines
            pages += [number + 1] * len(page_lines)
        try:
            title = str((reader.metadata and reader.metadata.title) or "").strip()
        except Exception as e:
            title = ""
            warnings.append(f"its title was left out ({type(e).__name__})")
    text = "\n".join(lines)
    if not text.strip():
        raise DocumentUnreadable(f"{path} has {count} pages and no text (a scan?). Run OCR on it, then add the result.")
    told = tuple(f"{path}: {w}" for w in dict.fromkeys(warnings))
    return Text(str(path), text, _clean(title), "plain", tuple(pages), told)


@contextmanager
def _log_of(name: str) -> Iterator[list[str]]:
    """Collects what logger `name` says, so that it reaches the report and not the terminal."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                messages.append(record.getMessage())

    handler = Collect()
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
