"""One document's stored index as bytes: a fixed header, the packed bits, a checksum over both. Never pickle.

Layout, little-endian: magic 8 · format version u16 · zero u16 · document id 16 · spec digest 16 · tokens u32 ·
layers u16 · query heads u16 · tile u16 · zero u16 · payload bytes u32 · checksum 8 · payload.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tamis.core.errors import InvalidInput, StoreDamaged
from tamis.core.table import REBUILD
from tamis.index.spec import DIGEST_BYTES, IndexSpec, n_pages, payload_bytes
from tamis.prompt.segments import ID_BYTES, document_id

if TYPE_CHECKING:
    from tamis.index.encode import Bits

__all__ = ["ID_BYTES", "Record", "document_id", "dump", "load"]

MAGIC = b"TAMISREC"
FORMAT_VERSION = 1
_BODY = struct.Struct("<8sHH16s16sIHHHHI")
_CHECKSUM_BYTES = 8
HEADER_BYTES = _BODY.size + _CHECKSUM_BYTES


@dataclass(frozen=True)
class Record:
    """A document's bits, still packed, with what they need to be read. `payload` is what `encode.pack` gave.

    document_id and spec_digest are 16 bytes; n_heads counts query heads; tile is in tokens.
    """

    document_id: bytes
    spec_digest: bytes
    n_tokens: int
    n_layers: int
    n_heads: int
    tile: int
    payload: bytes

    def __post_init__(self) -> None:
        for name, size in (("document_id", ID_BYTES), ("spec_digest", DIGEST_BYTES)):
            if len(getattr(self, name)) != size:
                raise InvalidInput(f"{name} has {len(getattr(self, name))} bytes; expected {size}.")
        for name, top in (("n_layers", 65535), ("n_heads", 65535), ("n_tokens", 2**32 - 1)):
            if not 1 <= getattr(self, name) <= top:
                raise InvalidInput(f"{name} is {getattr(self, name)}; allowed are 1 to {top}.")
        pages = n_pages(self.n_tokens, self.tile)
        wanted = payload_bytes(self.n_layers, self.n_heads, self.n_tokens, self.tile)
        if len(self.payload) != wanted:
            raise InvalidInput(
                f"{len(self.payload)} bytes of bits; {self.n_layers} layers, {self.n_heads} heads and {pages} tiles "
                f"take {wanted}."
            )

    @classmethod
    def of(cls, bits: Bits, *, document_id: bytes, spec: IndexSpec, n_tokens: int) -> Record:
        """Pack the bits of a document of `n_tokens`. Raises InvalidInput if they do not have the spec's shape."""
        from tamis.index.encode import pack

        layers, heads = bits.ca.shape[:2]
        if (layers, heads) != (spec.n_layers, spec.n_heads):
            raise InvalidInput(
                f"bits of {layers} layers and {heads} heads; the index has {spec.n_layers} and {spec.n_heads}."
            )
        return cls(document_id, spec.digest, n_tokens, layers, heads, spec.tile, pack(bits, n_tokens, spec.tile))

    def bits(self) -> Bits:
        """Unpack the bits: bool tensors on the CPU, decoded anew at each call."""
        from tamis.index.encode import unpack

        return unpack(
            self.payload, n_layers=self.n_layers, n_heads=self.n_heads, n_tokens=self.n_tokens, tile=self.tile
        )


def dump(record: Record) -> bytes:
    """The record as bytes; `load` is the inverse."""
    body = _BODY.pack(
        MAGIC,
        FORMAT_VERSION,
        0,
        record.document_id,
        record.spec_digest,
        record.n_tokens,
        record.n_layers,
        record.n_heads,
        record.tile,
        0,
        len(record.payload),
    )
    return body + _checksum(body, record.payload) + record.payload


def load(data: bytes) -> Record:
    """Read a record. Raises StoreDamaged if it is cut, not a record, of a newer format or changed in any byte."""
    if len(data) < HEADER_BYTES:
        raise _damaged(f"it has {len(data)} bytes, a header alone has {HEADER_BYTES}")
    magic, version, _, identity, spec_digest, n_tokens, layers, heads, tile, _, size = _BODY.unpack_from(data)
    if magic != MAGIC:
        raise _damaged(f"it starts with {magic!r}, not with {MAGIC!r}")
    if version > FORMAT_VERSION:
        raise StoreDamaged(
            f"a record has format {version} and was written by a newer Tamis; this one reads up to {FORMAT_VERSION}. "
            f"Update Tamis, or {REBUILD}."
        )
    body, payload = data[: _BODY.size], data[HEADER_BYTES:]
    if len(payload) != size:
        raise _damaged(f"it is cut or padded: {len(payload)} bytes of bits, {size} expected")
    if data[_BODY.size : HEADER_BYTES] != _checksum(body, payload):
        raise _damaged("its checksum does not match")
    if version < 1:
        raise _damaged(f"format {version} never existed")
    try:
        return Record(identity, spec_digest, n_tokens, layers, heads, tile, payload)
    except InvalidInput as e:
        raise _damaged(f"its header contradicts itself: {e}") from e


def _checksum(body: bytes, payload: bytes) -> bytes:
    state = hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES)
    state.update(payload)
    return state.digest()


def _damaged(reason: str) -> StoreDamaged:
    return StoreDamaged(f"a record is damaged: {reason}. To make it anew, {REBUILD}.")
