"""Workloads of the reuse bench: requests made of pieces whose tokens are known by name, from traces or from Zipf's law.

Knows who asks for what and when; nothing of caches or times. A piece's token ids are first .. first + n_tokens - 1, no
two pieces share one, so that the cache's own content addresses tell them apart as they would real text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tamis.core.errors import InvalidInput

TOKEN_IDS = 1 << 31
CHUNK = 4096  # synthetic requests drawn at once
MOONCAKE_FILE = "conversation_trace.jsonl"
MOONCAKE_BLOCK = 512


class Piece(NamedTuple):
    """Consecutive tokens that occur together: first, first + 1, ..."""

    first: int
    n_tokens: int


class Request(NamedTuple):
    """One prompt in order: prefix (system prompts), documents, own (history, question). arrival_s from the start."""

    arrival_s: float
    prefix: tuple[Piece, ...]
    documents: tuple[Piece, ...]
    own: tuple[Piece, ...]
    output_tokens: int

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The whole prompt."""
        return self.prefix + self.documents + self.own


@dataclass(frozen=True)
class Workload:
    """Requests by name. concurrency: so many clients, each sending its next request when its last is done (closed
    loop); None: they arrive when they say. `requests` starts anew each time, with the same ones for the same seed."""

    name: str
    n_requests: int
    concurrency: int | None
    requests: Callable[[int], Iterator[Request]]
    about: str
    random: bool = False


@dataclass(frozen=True)
class Zipf:
    """Documents drawn by rank with probability ~ rank ** -exponent: LazyAttention's sweep parameters by default.

    repeat   may a prompt hold a document twice? Otherwise they are drawn one after the other without replacement.
    Documents stand in random order: what a retriever ranks first is not what is asked for most.
    """

    exponent: float = 2.1
    documents: int = 100
    document_tokens: int = 2048
    per_prompt: int = 5
    question_tokens: int = 64
    output_tokens: int = 64
    requests: int = 200
    concurrency: int = 16
    repeat: bool = False

    def __post_init__(self) -> None:
        for name in ("documents", "document_tokens", "per_prompt", "question_tokens", "output_tokens", "requests"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; allowed is 1 or more.")
        if not self.exponent >= 0 or self.concurrency < 1:
            raise InvalidInput(
                f"exponent {self.exponent}, concurrency {self.concurrency}; allowed are 0 or more, and 1 or more."
            )
        if not self.repeat and self.per_prompt > self.documents:
            raise InvalidInput(f"{self.per_prompt} different documents a prompt of {self.documents}; ask for fewer.")
        if self.documents * self.document_tokens + self.question_tokens >= TOKEN_IDS:
            raise InvalidInput("documents times their tokens must stay below 2**31; make them fewer or shorter.")

    @property
    def name(self) -> str:
        """Such as "zipf2.1"; what differs from the paper's sweep is added."""
        plain = Zipf()
        parts = [f"zipf{self.exponent:g}"]
        parts += [
            f"{tag}{getattr(self, field)}"
            for field, tag in (("documents", "n"), ("document_tokens", "t"), ("per_prompt", "k"),
                               ("question_tokens", "q"), ("output_tokens", "o"), ("concurrency", "c"))
            if getattr(self, field) != getattr(plain, field)
        ]  # fmt: skip
        return "-".join(parts + ["repeat"] * self.repeat)

    def workload(self) -> Workload:
        """Closed loop of `concurrency` clients."""
        about = (
            f"{self.documents} documents of {self.document_tokens} tokens, {self.per_prompt} a prompt "
            f"{'with' if self.repeat else 'without'} repetition, question {self.question_tokens}, "
            f"{self.output_tokens} generated, {self.concurrency} clients"
        )
        return Workload(self.name, self.requests, self.concurrency, self._draw, about, random=True)

    def _draw(self, seed: int) -> Iterator[Request]:
        rng = np.random.default_rng(seed)
        weights = np.arange(1, self.documents + 1, dtype=np.float64) ** -self.exponent
        weights /= weights.sum()
        pieces = [Piece(i * self.document_tokens, self.document_tokens) for i in range(self.documents)]
        start = self.documents * self.document_tokens
        room = TOKEN_IDS - start - self.question_tokens
        for at in range(0, self.requests, CHUNK):
            rows = _drawn(rng, weights, min(CHUNK, self.requests - at), self.per_prompt, repeat=self.repeat).tolist()
            for number, row in enumerate(rows, at):
                question = Piece(start + number * self.question_tokens % room, self.question_tokens)
                yield Request(0.0, (), tuple(pieces[i] for i in row), (question,), self.output_tokens)


def _drawn(rng: np.random.Generator, weights: Any, n: int, k: int, *, repeat: bool) -> np.ndarray[Any, Any]:
    """[n, k] document numbers in random order."""
    if repeat:
        return rng.choice(len(weights), size=(n, k), p=weights)
    # the k largest of log p + Gumbel noise are k draws without replacement (Vieira, Gumbel-max trick)
    noisy = np.log(weights) + rng.gumbel(size=(n, len(weights)))
    chosen = np.argpartition(-noisy, k - 1, axis=1)[:, :k]
    return rng.permuted(chosen, axis=1)


def ragpulse(
    folder: Path | str, *, speed: float = 1.0, limit: int | None = None, recorded_order: bool = False
) -> Workload:
    """RAGPulse: a week of a real RAG service. speed: so many times faster than it was recorded; limit: first requests.

    Passages are the documents, in the prompt's order; history, web search (texts of one request) and the question are
    the request's own. A system prompt has three parts: 3 different first ones, 1,415 second, 5,480 third. The first is
    the prefix and the others follow the passages, which is the best that prefix caching can hope for; recorded_order
    leaves all three in front. Raises InvalidInput if files are missing or are not that trace.
    """
    folder = Path(folder)
    if not speed > 0:
        raise InvalidInput(f"speed is {speed}; allowed is any number above 0.")
    made = {}
    first = 0
    for kind, (file, column) in _PIECES.items():
        lengths = {}
        for row in _rows(folder / file):
            number, n_tokens = _whole(row, column, file), _whole(row, "token_length", file)
            lengths[number] = Piece(first, n_tokens)
            first += n_tokens
        made[kind] = lengths
    rows = sorted(_rows(folder / _TRACE), key=lambda row: _whole(row, "timestamp", _TRACE))[:limit]
    start = _whole(rows[0], "timestamp", _TRACE)
    requests = [_ragpulse_request(row, made, (_whole(row, "timestamp", _TRACE) - start) / speed) for row in rows]
    if not recorded_order:
        requests = [r._replace(prefix=r.prefix[:1], own=r.prefix[1:] + r.own) for r in requests]
    name = "ragpulse" + "-recorded" * recorded_order + _pace(speed)
    return Workload(name, len(requests), None, lambda _: iter(requests), f"{len(requests)} recorded requests")


_TRACE = "0_trace.jsonl"
_PIECES = {
    "sys_prompt": ("1_sys_prompt.jsonl", "sys_prompt_id"),
    "passages_ids": ("2_passages.jsonl", "passage_id"),
    "history": ("3_history.jsonl", "history_id"),
    "user_input": ("4_user_input.jsonl", "user_input_id"),
    "web_search": ("5_web_search.jsonl", "web_search_id"),
}


def _ragpulse_request(row: dict[str, Any], made: dict[str, dict[int, Piece]], arrival_s: float) -> Request:
    def pieces(kind: str) -> tuple[Piece, ...]:
        try:
            return tuple(made[kind][int(i)] for i in row["hash_ids"][kind])
        except (KeyError, TypeError, ValueError) as e:
            raise InvalidInput(
                f"{_TRACE} has a request whose {kind} cannot be looked up ({type(e).__name__}: {e}); the files of the "
                "folder must be of one RAGPulse release."
            ) from None

    own = pieces("history") + pieces("web_search") + pieces("user_input")
    output = max(1, _whole(row, "output_length", _TRACE))
    return Request(arrival_s, pieces("sys_prompt"), pieces("passages_ids"), own, output)


def mooncake(folder: Path | str, *, speed: float = 1.0, limit: int | None = None) -> Workload:
    """Mooncake's conversation trace (its folder, or a file of that form), blocks of 512 tokens as documents: a control.

    A block's hash covers everything before it, so the same block never has another prefix: nothing is to be gained
    over prefix caching. Raises InvalidInput if the file is missing or is not that trace.
    """
    path = Path(folder)
    path = path if path.is_file() else path / MOONCAKE_FILE
    if not speed > 0:
        raise InvalidInput(f"speed is {speed}; allowed is any number above 0.")
    requests = []
    lone = TOKEN_IDS - 1
    for row in list(_rows(path))[:limit]:
        left, blocks = _whole(row, "input_length", path.name), []
        for number in row.get("hash_ids", []):
            blocks.append(Piece(int(number) * MOONCAKE_BLOCK, min(MOONCAKE_BLOCK, left)))
            left -= MOONCAKE_BLOCK
        if not blocks or left > 0 or blocks[-1].n_tokens < 1:
            raise InvalidInput(f"{path} has a request whose hash_ids do not cover its input_length; give the original.")
        # the last block, full or not, is the question: a prompt must end in tokens of its own
        own = blocks.pop()
        lone -= own.n_tokens
        arrival = _whole(row, "timestamp", path.name) / 1000 / speed
        output = max(1, _whole(row, "output_length", path.name))
        requests.append(Request(arrival, (), tuple(blocks), (Piece(lone, own.n_tokens),), output))
    requests.sort(key=lambda request: request.arrival_s)
    return Workload(
        "mooncake" + _pace(speed), len(requests), None, lambda _: iter(requests), f"{len(requests)} recorded requests"
    )


def trace(
    folder: Path | str, *, speed: float = 1.0, limit: int | None = None, recorded_order: bool = False
) -> Workload:
    """The trace that lies in `folder`, told by its files; recorded_order is for RAGPulse alone.

    Raises InvalidInput if it holds none that is known.
    """
    folder = Path(folder)
    if (folder / _TRACE).is_file():
        return ragpulse(folder, speed=speed, limit=limit, recorded_order=recorded_order)
    if (folder / MOONCAKE_FILE).is_file():
        return mooncake(folder, speed=speed, limit=limit)
    raise InvalidInput(
        f"{folder} holds no trace that is known: expected {_TRACE} and its tables (RAGPulse) or {MOONCAKE_FILE} "
        "(Mooncake). Give the folder with those files."
    )


def _pace(speed: float) -> str:
    return "" if speed == 1 else f"-x{speed:g}"


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise InvalidInput(f"{path} cannot be read ({e.strerror}); give a folder with the whole trace.") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            raise InvalidInput(
                f"{path}, line {number}: not JSON ({e.msg}); give the file as it was published."
            ) from None
        if not isinstance(row, dict):
            raise InvalidInput(f"{path}, line {number}: {type(row).__name__}; expected an object a line.")
        rows.append(row)
    if not rows:
        raise InvalidInput(f"{path} is empty; give the file as it was published.")
    return rows


def _whole(row: dict[str, Any], column: str, file: str) -> int:
    try:
        value = int(row[column])
    except (KeyError, TypeError, ValueError):
        raise InvalidInput(
            f"{file} has a row with {column} {row.get(column)!r}; expected a whole number in each row."
        ) from None
    if value < 0 or (column == "token_length" and not value):
        raise InvalidInput(f"{file} has a row with {column} {value}; lengths are 1 or more, the rest 0 or more.")
    return value
