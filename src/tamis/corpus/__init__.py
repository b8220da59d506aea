"""What the documents are: read files, cut passages, keep and retrieve them. Knows text, not tensors."""

from tamis.corpus.corpus import AddReport, Corpus
from tamis.corpus.find import Found, Skipped, find_files
from tamis.corpus.passages import DEFAULT_TARGET_TOKENS, Passage, cut
from tamis.corpus.read import SUFFIXES, Text, read_file
from tamis.corpus.retrieve import RETRIEVERS, Hit, Retriever, support

__all__ = [
    "DEFAULT_TARGET_TOKENS",
    "RETRIEVERS",
    "SUFFIXES",
    "AddReport",
    "Corpus",
    "Found",
    "Hit",
    "Passage",
    "Retriever",
    "Skipped",
    "Text",
    "cut",
    "find_files",
    "read_file",
    "support",
]
