"""Plain texts for training and evaluation, from question sets and files alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def texts_of(data: Sequence[str]) -> tuple[list[str], list[str]]:
    """The texts of question sets' passages (.jsonl) and of files (.txt, .md, …), and the names of what they came from.

    A folder stands for all such files in it. Nothing given: the language reference that every Python holds. Raises
    NothingFound where a folder holds none, and what the readers of the files do.
    """
    from tamis.core.errors import NothingFound
    from tamis.corpus.find import find_files
    from tamis.corpus.read import read_file
    from tamis.eval.questions import load_questions

    if not data:
        from pydoc_data.topics import topics

        return sorted(topics.values()), ["python-reference"]
    pieces: list[str] = []
    names: list[str] = []
    for name in data:
        path = Path(name).expanduser()
        sets = sorted(path.glob("*.jsonl")) if path.is_dir() else [path] if path.suffix == ".jsonl" else []
        files = () if path.suffix == ".jsonl" else find_files([name]).files
        for file in sets:
            for question in load_questions(file):
                pieces += [f"{d.title}\n{d.text}" if d.title else d.text for d in question.docs]
        pieces += [read_file(file).text for file in files]
        names += [file.stem for file in sets] + ([path.stem] if files else [])
    if not pieces:
        raise NothingFound(f"{', '.join(data)} hold no texts; name question sets (.jsonl), files or folders of them.")
    return pieces, names
