"""The text that stands for a document in a prompt: the same wherever it is turned into tokens."""

from __future__ import annotations


def document_text(title: str, text: str) -> str:
    """Its title as a line of its own, its text, an empty line. Empty for no text."""
    if not text.strip():
        return ""
    head = f"{title}\n" if title.strip() else ""
    return f"{head}{text.strip()}\n\n"
