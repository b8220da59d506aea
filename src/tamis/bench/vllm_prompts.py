"""What the vLLM bench asks: prompts of random tokens, as plain requests and as requests that name their documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from tamis.bench.reuse_workload import Piece, Workload
from tamis.core.errors import InvalidInput
from tamis.integrations.vllm.client import request, warm_for
from tamis.prompt.segments import document_id

FIRST_ID = 10  # below lie a tokenizer's special tokens
POOL = 1 << 20  # seeds of the shared documents; prompts of their own take numbers below


@dataclass(frozen=True)
class Sizes:
    """Tokens of a prompt's parts; what does not divide into documents is added to the question."""

    prefix: int = 64
    document: int = 1024
    question: int = 128

    def documents(self, tokens: int) -> int:
        """How many a prompt of so many tokens has. Raises InvalidInput if there is no room for one."""
        count = (tokens - self.prefix - self.question) // self.document
        if count < 1:
            least = self.prefix + self.question + self.document
            raise InvalidInput(f"{tokens} tokens are too few: prefix, question and one document take {least}.")
        return count


@dataclass(frozen=True)
class Answers:
    """So many plain requests at once, with so many tokens of prompt and of answer each."""

    requests: int = 32
    prompt: int = 512
    tokens: int = 256


def drawn(seed: int, tokens: int, vocabulary: int) -> list[int]:
    """Random token ids, the same for the same seed."""
    ids: list[int] = np.random.default_rng(seed).integers(FIRST_ID, vocabulary, tokens).tolist()
    return ids


def plain(tokens: int, vocabulary: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """One prompt without documents for each seed."""
    return [{"prompt": drawn(seed, tokens, vocabulary)} for seed in seeds]


def sparse(tokens: int, vocabulary: int, seeds: Sequence[int], sizes: Sizes) -> list[dict[str, Any]]:
    """One prompt of documents of its own for each seed, to be computed sparsely; as long as a plain one."""
    made, count = [], sizes.documents(tokens)
    for seed in seeds:
        ids = drawn(seed, tokens, vocabulary)
        end = sizes.prefix + count * sizes.document
        documents = [ids[at : at + sizes.document] for at in range(sizes.prefix, end, sizes.document)]
        made.append(request(ids[: sizes.prefix], documents, ids[end:], mode="sift"))
    return made


def shared(tokens: int, vocabulary: int, sizes: Sizes) -> list[list[int]]:
    """The prefix and documents that prompts of `reused` share; those of a shorter prompt are among a longer one's."""
    documents = [drawn(POOL + i, sizes.document, vocabulary) for i in range(sizes.documents(tokens))]
    return [drawn(POOL - 1, sizes.prefix, vocabulary), *documents]


def reused(tokens: int, vocabulary: int, seeds: Sequence[int], sizes: Sizes, block_size: int) -> list[dict[str, Any]]:
    """One prompt for each seed: the shared prefix and documents, in an order of its own, and a question of its own."""
    (prefix, *documents), made = shared(tokens, vocabulary, sizes), []
    rest = tokens - len(documents) * sizes.document - sizes.prefix
    for seed in seeds:
        order = np.random.default_rng(seed).permutation(len(documents)).tolist()
        question = drawn(seed, rest, vocabulary)
        made.append(request(prefix, [documents[i] for i in order], question, mode="reuse", block_size=block_size))
    return made


def of_each_mode(
    lengths: Sequence[int], vocabulary: int, sizes: Sizes, block_size: int
) -> dict[str, list[dict[str, Any]]]:
    """Two prompts of each length, by what computes them: stock vLLM, "sift", "reuse"."""
    made = dict[str, list[dict[str, Any]]](stock=[], sift=[], reuse=[])
    for n in lengths:
        made["stock"] += plain(n, vocabulary, [1, 2])
        made["sift"] += sparse(n, vocabulary, [3, 4], sizes)
        made["reuse"] += reused(n, vocabulary, [5, 6], sizes, block_size)
    return made


def load(
    workload: Workload,
    vocabulary: int,
    *,
    requests: int,
    rate: float,
    cut_tokens: int | None,
    block_size: int | None,
    warm_up: int = 0,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The workload's first `warm_up` requests, which are there at once, and the next `requests` with Poisson arrivals:
    plain prompts, or (block_size given) such that name their documents, each behind one that computes what it could not
    reuse otherwise. To be sent in this order; nothing waits for another. `measured`: neither those nor the warm-up;
    `real`: tokens without pads."""
    chance, at = np.random.default_rng(0), 0.0
    first, then = list[dict[str, Any]](), list[dict[str, Any]]()
    known = set[str]()
    for number, row in enumerate(islice(workload.requests(0), warm_up + requests)):
        measured = number >= warm_up
        at += float(chance.exponential(1 / rate)) if measured else 0.0
        made = then if measured else first
        prefix = _ids(row.prefix, vocabulary, cut_tokens)
        documents = [_ids([piece], vocabulary, cut_tokens) for piece in row.documents]
        own = _ids(row.own, vocabulary, cut_tokens)
        asked = {"at_s": at, "measured": measured, "real": len(prefix) + sum(map(len, documents)) + len(own)}
        if block_size is None:
            made.append(asked | {"prompt": [*prefix, *(i for d in documents for i in d), *own]})
            continue
        for body in warm_for(prefix, documents, known, block_size=block_size):
            made.append(body | {"at_s": at, "measured": False, "max_tokens": 1})
        known |= {document_id(ids).hex() for ids in (prefix, *documents) if ids}
        made.append(asked | request(prefix, documents, own, mode="reuse", block_size=block_size))
    return first, then


def _ids(pieces: Sequence[Piece], vocabulary: int, cut: int | None) -> list[int]:
    lengths = [(p.first, p.n_tokens if cut is None else min(cut, p.n_tokens)) for p in pieces]
    return [i for first, n in lengths for i in drawn(POOL * 2 + first, n, vocabulary)]
