"""Content addresses of stored keys and values; knows token ids and fingerprints, not tensors. Needs no torch.

A document's address depends on its own tokens alone, a prefix block's on everything before it too. The two are
different types, hash under different tags and refuse each other's namespaces, so that an approximate (position-free)
document can never be taken for an exact prefix.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tamis.core.errors import InvalidInput
from tamis.prompt.segments import ID_BYTES, document_id

if TYPE_CHECKING:
    from tamis.model.fingerprint import ModelFingerprint

FINGERPRINT_BYTES = 16
NAMESPACE_CHARACTERS = 100
DOCUMENTS = "document"
PREFIXES = "prefix"


def namespaced(kind: str, owner: str) -> str:
    """The namespace of an owner's documents or prefixes; "" is everybody."""
    return f"{kind}/{owner}" if owner else kind


def fingerprint_digest(fingerprint: ModelFingerprint) -> bytes:
    """16 bytes that change with any field of a model's fingerprint."""
    text = json.dumps(asdict(fingerprint), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_BYTES).digest()


@dataclass(frozen=True)
class _Key:
    """What both kinds of address have: namespace, 16 bytes of the model's fingerprint, 16 bytes of the tokens."""

    namespace: str
    fingerprint: bytes
    digest: bytes

    kind: ClassVar[str] = ""
    refused: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, size in (("fingerprint", FINGERPRINT_BYTES), ("digest", ID_BYTES)):
            if len(getattr(self, name)) != size:
                raise InvalidInput(f"{name} has {len(getattr(self, name))} bytes; expected {size}.")
        plain = self.namespace.isascii() and self.namespace.isprintable()
        if not plain or not 1 <= len(self.namespace) <= NAMESPACE_CHARACTERS:
            raise InvalidInput(
                f"namespace {self.namespace!r}; allowed are 1 to {NAMESPACE_CHARACTERS} printable ASCII characters."
            )
        if self.namespace.split("/")[0] == self.refused:
            raise InvalidInput(
                f"a {self.kind} in namespace {self.namespace!r}; exact prefixes and position-free documents never "
                f"share one. Use {self.kind!r} or a name below it."
            )

    @cached_property
    def name(self) -> str:
        """32 hex digits that differ whenever kind, namespace, fingerprint or tokens do: fit for a file's name."""
        tag = f"{self.kind}\0{self.namespace}\0".encode()
        return hashlib.blake2b(tag + self.fingerprint + self.digest, digest_size=16).hexdigest()

    def __str__(self) -> str:
        return f"{self.kind} {self.digest.hex()[:12]} of {self.namespace!r}"


@dataclass(frozen=True)
class DocumentKey(_Key):
    """The address of a document computed alone, its first token at position 0 (LazyAttention)."""

    kind = DOCUMENTS
    refused = PREFIXES

    @classmethod
    def of(cls, tokens: Sequence[int], fingerprint: bytes, namespace: str = DOCUMENTS) -> DocumentKey:
        """The address of `tokens`; `fingerprint` is `fingerprint_digest` of the model. Raises InvalidInput if empty."""
        return cls(namespace, fingerprint, document_id(tokens))


@dataclass(frozen=True)
class PrefixKey(_Key):
    """The address of a block of an exact prefix: of its tokens and of all before them."""

    kind = PREFIXES
    refused = DOCUMENTS


def prefix_keys(
    tokens: Sequence[int], fingerprint: bytes, *, block: int, namespace: str = PREFIXES
) -> tuple[PrefixKey, ...]:
    """The addresses of the full blocks of `block` tokens from the prompt's start on; a rest has none.

    Each digest is blake2b over the one before (16 zero bytes at the start) and the block's ids, so that two prompts
    share an address exactly as far as they agree. Raises InvalidInput unless block is at least 1.
    """
    if block < 1:
        raise InvalidInput(f"blocks of {block} tokens; allowed is 1 or more.")
    keys, chain = [], bytes(ID_BYTES)
    ids = np.asarray(tokens)
    for start in range(0, len(ids) - block + 1, block):
        chain = hashlib.blake2b(chain + document_id(ids[start : start + block]), digest_size=ID_BYTES).digest()
        keys.append(PrefixKey(namespace, fingerprint, chain))
    return tuple(keys)
