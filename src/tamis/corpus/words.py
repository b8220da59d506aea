"""What counts as a word when passages are matched by wording. Knows strings only."""

from __future__ import annotations

import importlib
import unicodedata
from collections.abc import Sequence
from typing import Any

WORDS_VERSION = 1
"""Part of a saved index's id: raise it when the same text would give other words."""

# Scripts without spaces are matched character by character; lone Latin letters ("s" of "keeper's") are left out,
# lone digits are kept, for "channel 9" is a good question.
_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_PATTERN = rf"[{_ALONE}]|(?:(?![{_ALONE}])\w){{2,}}|\d"


def bm25s() -> Any:
    """The library, imported when first needed (it has no types, hence `Any`)."""
    return importlib.import_module("bm25s")


def text_words(texts: Sequence[str]) -> list[list[str]]:
    """The words of each text: lower case, English plurals as singulars, without the commonest English words.

    Ligatures and character widths are unified first (NFKC), as PDFs are full of them.
    """
    return _words(texts, "en")


def question_words(question: str) -> list[str]:
    """The words to look for: also without "what", "how", "does" and the like, which say nothing of the subject."""
    return _words([question], "en_plus")[0]


def _words(texts: Sequence[str], stopwords: str) -> list[list[str]]:
    if not texts:
        return []
    plain = [unicodedata.normalize("NFKC", text) for text in texts]
    words: list[list[str]] = bm25s().tokenize(
        plain, token_pattern=_PATTERN, stopwords=stopwords, stemmer=_singular, return_ids=False, show_progress=False
    )
    return words


def _singular(words: list[str]) -> list[str]:
    """English plural endings taken off: the "S stemmer" of Harman, How Effective Is Suffixing? (JASIS, 1991)."""
    found = []
    for word in words:
        if word.endswith("ies"):
            word = word if word.endswith(("eies", "aies")) or len(word) < 5 else word[:-3] + "y"
        elif word.endswith("es"):
            word = word if word.endswith(("aes", "ees", "oes")) else word[:-1]
        elif word.endswith("s") and not word.endswith(("us", "ss")) and len(word) > 2:
            word = word[:-1]
        found.append(word)
    return found
