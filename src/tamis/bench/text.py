"""Real text in any amount for benchmarks: given files, or the language reference that every Python holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tamis.core.errors import NothingFound
from tamis.corpus import Passage, Text, cut, find_files, read_file


def passages(
    n_tokens: int, count: Callable[[str], int], paths: Sequence[str] = (), *, target_tokens: int = 384
) -> list[Passage]:
    """Passages of about `target_tokens` that together hold at least `n_tokens` (all there are, if that is fewer)."""
    found: list[Passage] = []
    total = 0
    for text in _texts(paths):
        for passage in cut(text, count=count, target_tokens=target_tokens):
            found.append(passage)
            total += count(passage.text)
            if total >= n_tokens:
                return found
    if not found:
        raise NothingFound("the given files hold no passages; name others, or none to use the built-in text.")
    return found


def _texts(paths: Sequence[str]) -> list[Text]:
    if paths:
        return [read_file(path) for path in find_files(list(paths)).files]
    from pydoc_data.topics import topics

    # the longest topics first: the many short ones are lists of cross references
    return [
        Text(source=f"python/{name}.rst", text=body, title=name, markup="plain", numbers=(), warnings=())
        for name, body in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
