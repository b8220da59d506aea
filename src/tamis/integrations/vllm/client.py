"""Requests to a vLLM server with Tamis: a prompt laid out, and what says where its documents lie. Plain Python.

Needs neither vLLM nor torch; knows token ids, not texts. The server is told of segments by `kv_transfer_params`, and
checks them: a document's key has to be that of its tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown
from tamis.integrations.vllm import namespaces
from tamis.integrations.vllm.request import MODES, PAD, VERSION, check_namespace
from tamis.prompt.segments import Kind, document_id

BLOCK_SIZE = 16  # vLLM's own default
PACK_TOKENS = 8192  # of a request that warms, pads included: what vLLM computes in a step by default on a server
Span = tuple[int, int, str, str | None]


@dataclass(frozen=True)
class Layout:
    """A prompt's tokens, and its segments (start, end, kind, key or None): contiguous from 0 to the end.

    Segments of kind "pad" fill a block of the cache up, so that each document begins on a block's border: nobody reads
    them, and they take no position.
    """

    tokens: tuple[int, ...]
    segments: tuple[Span, ...]

    @property
    def documents(self) -> list[tuple[int, int]]:
        """The spans of the documents, in order."""
        return [(start, end) for start, end, kind, _ in self.segments if kind == Kind.DOCUMENT]

    @property
    def pads(self) -> int:
        """Tokens that only fill blocks up."""
        return sum(end - start for start, end, kind, _ in self.segments if kind == PAD)


def layout(
    prefix: Sequence[int],
    documents: Iterable[Sequence[int]],
    question: Sequence[int],
    *,
    history: Sequence[int] = (),
    block_size: int | None = None,
    pad_id: int = 0,
) -> Layout:
    """Prefix, documents, history and question as one row of token ids.

    block_size   every document begins, and what follows the last one too, at a multiple of it; None: no pads
    Raises InvalidInput for an empty document or question, or a block_size below 1.
    """
    _check_block(block_size)
    if not len(question):
        raise InvalidInput("the question is empty; an answer goes on from it: give at least one token.")
    tokens: list[int] = []
    segments: list[Span] = []

    def add(kind: str, ids: list[int], key: str | None = None) -> None:
        if ids:
            segments.append((len(tokens), len(tokens) + len(ids), kind, key))
            tokens.extend(ids)

    def fill() -> None:
        if block_size is not None:
            add(PAD, [pad_id] * (-len(tokens) % block_size))

    add(Kind.PREFIX.value, _ids("the prefix", prefix))
    fill()
    for ids in _documents(documents):
        add(Kind.DOCUMENT.value, ids, document_id(ids).hex())
        fill()
    add(Kind.HISTORY.value, _ids("the history", history))
    add(Kind.QUESTION.value, _ids("the question", question))
    return Layout(tuple(tokens), tuple(segments))


def _ids(what: str, ids: Sequence[int]) -> list[int]:
    """Token ids of a part of a prompt. Raises InvalidInput."""
    try:
        if isinstance(ids, (str, bytes)):
            raise TypeError("it is a text")
        return [operator.index(i) for i in ids]
    except TypeError as e:
        raise InvalidInput(
            f"{what} is no row of token ids ({e}); give what the model's tokenizer makes of it, or the `token_ids` of "
            "GET /v1/documents/ID."
        ) from e


def _documents(documents: Any) -> list[list[int]]:
    if isinstance(documents, (str, bytes)):
        raise InvalidInput("documents are a text; give a list of documents, each a row of token ids.")
    made = [_ids(f"document {number}", ids) for number, ids in enumerate(documents, 1)]
    for number, ids in enumerate(made, 1):
        if not ids:
            raise InvalidInput(f"document {number} is empty; leave it out.")
    return made


def _check_block(block_size: int | None) -> None:
    if block_size is not None and (not isinstance(block_size, int) or block_size < 1):
        raise InvalidInput(f"block_size is {block_size!r}; give that of the server, a whole number from 1 on.")


def request(
    prefix_ids: Sequence[int],
    documents: Iterable[Sequence[int]],
    question_ids: Sequence[int],
    *,
    mode: str = "reuse",
    block_size: int = BLOCK_SIZE,
    history_ids: Sequence[int] = (),
    **choices: Any,
) -> dict[str, Any]:
    """The body of a request to `/v1/completions`, but for the model and how to sample: `prompt` (token ids) and
    `kv_transfer_params`.

    mode        "sift": attention computed where it matters; "reuse": documents' keys and values from earlier requests
    block_size  the server's (`--block-size`): documents of "reuse" are laid out on its borders
    choices     `selector`: another one than the server's default ("sift"); `namespace`: documents of one namespace are
                not shared with another (a server may want it signed); `pad_id`: the token that fills blocks, or 0
    With vLLM's own Python interface give `prompt` as `{"prompt_token_ids": ..}` and the parameters by
    `SamplingParams(extra_args={"kv_transfer_params": ..})`. Raises InvalidInput.
    """
    if mode not in MODES:
        raise InvalidInput(unknown("mode", mode, list(MODES)))
    pad_id = choices.pop("pad_id", 0)
    if strange := choices.keys() - {"selector", "namespace"}:
        raise InvalidInput(unknown("choice of a request", sorted(strange)[0], ["selector", "namespace", "pad_id"]))
    if mode == "reuse" and "selector" in choices:
        raise InvalidInput("a selector belongs to mode 'sift'; leave it out, or ask for that mode.")
    made = layout(
        prefix_ids,
        documents,
        question_ids,
        history=history_ids,
        block_size=block_size if mode == "reuse" else None,
        pad_id=pad_id,
    )
    tamis = {"v": VERSION, "mode": mode, "segments": [list(span) for span in made.segments]} | choices
    return {"prompt": list(made.tokens), "kv_transfer_params": {"tamis": tamis}}


def warm_for(
    prefix_ids: Sequence[int],
    documents: Iterable[Sequence[int]],
    known: Iterable[str] = (),
    *,
    block_size: int = BLOCK_SIZE,
    pack_tokens: int = PACK_TOKENS,
    **choices: Any,
) -> list[dict[str, Any]]:
    """What to send, in order, before a `request` of this prefix and these documents, so that it reuses all it can.

    vLLM looks for stored blocks from a prompt's start and stops at the first that is missing: of documents A, C, B with
    C new, B would be computed again, unless C is there first. What is missing behind everything known needs nothing:
    the request computes it, and it is kept all the same. So the answer is often empty. A prefix counts as a document.

    One server's scheduler takes requests as they come, and finds blocks that are computed in the very same step:
    nothing has to be waited for there. Wait for the answers where another server might take the request.
    known, pack_tokens, choices   as for `warm`
    """
    there = set(known)
    prompt = [ids for ids in (_ids("the prefix", prefix_ids), *_documents(documents)) if ids]
    found = []
    for ids in prompt:
        key = document_id(ids).hex()
        found.append(key in there)  # so is what stands in the prompt twice, once its first place is computed
        there.add(key)
    last = max((i for i, is_known in enumerate(found) if is_known), default=0)
    missing = [ids for ids, is_known in zip(prompt[:last], found, strict=False) if not is_known]
    return warm(missing, block_size=block_size, pack_tokens=pack_tokens, **choices)


def warm(
    documents: Iterable[Sequence[int]],
    known: Iterable[str] = (),
    *,
    block_size: int = BLOCK_SIZE,
    pack_tokens: int = PACK_TOKENS,
    **choices: Any,
) -> list[dict[str, Any]]:
    """Requests that have missing documents computed and kept, whatever will ask for them: to be sent with
    `max_tokens=1`. Before a certain prompt `warm_for` sends no more than it gains by.

    Documents go together, as few requests as at most pack_tokens each allow (a longer document has its own), since
    they do not see each other; the same one twice is asked for once. A prefix is kept as documents are: give it among
    them.
    known    keys (`document_id(ids).hex()`) that are there already, as `GET /v1/documents` lists them
    choices  as for `request`: `namespace` and `pad_id`
    """
    there, packs = set(known), list[tuple[int, list[Sequence[int]]]]()
    missing: dict[str, Sequence[int]] = {}
    _check_block(block_size)
    for ids in _documents(documents):
        if (key := document_id(ids).hex()) not in there:
            missing.setdefault(key, ids)
    for tokens in sorted(missing.values(), key=len, reverse=True):
        own = -(-len(tokens) // block_size) * block_size
        for i, (size, pack) in enumerate(packs):
            if size + own <= pack_tokens:
                packs[i] = (size + own, [*pack, tokens])
                break
        else:
            packs.append((own, [tokens]))
    return [request([], pack, [pack[-1][-1]], mode="reuse", block_size=block_size, **choices) for _, pack in packs]


def signed_namespace(secret: bytes, name: str) -> str:
    """What `namespace` has to be on a server whose `namespaces` are "signed" with this secret, for whoever hands them
    out: the name says whose documents these are, such as "document/CUSTOMER". Blanks at either end of the secret, as a
    file may have, do not count. Raises InvalidInput."""
    check_namespace(signed := namespaces.sign(secret.strip(), name))
    check_namespace(name)
    return signed
