"""What an index was made with and from: thresholds, the model's fingerprint, and one document's observed statistics.

Knows neither how statistics are gathered nor how bits are stored. Needs no torch to import.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from tamis.core.checks import check_fields
from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown

if TYPE_CHECKING:
    import torch

DEFAULT_TILE = 128  # derived from the SIFT paper's storage table; also the attention kernels' tile
MAX_TILE = 255  # tile lists keep a length in eight bits
DIGEST_BYTES = 16
CaRule = Literal["any", "share"]


@dataclass(frozen=True)
class Thresholds:
    """When a score counts (SIFT, arXiv 2606.09441, sections 3.5 and 4; post-softmax probabilities, all in 0..1).

    alpha    a local tile is kept if one probability in it is at least this
    beta     a later query row looks at a key token if it gives the token more than this
    gamma    the share that must be exceeded for a page to be kept for other documents
    ca_rule  of what gamma is the share. "any": of the page's tokens, those that ANY later row looks at (the paper's
             page rule). "share": of the later rows, those that look at one token; one such token keeps the page
             (the paper's validation rule).
    """

    alpha: float = 0.001
    beta: float = 0.01
    gamma: float = 0.1
    ca_rule: CaRule = "any"

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("alpha", "beta", "gamma"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InvalidInput(f"{name} is {value!r}; allowed are numbers from 0 to 1. Give a probability.")
            object.__setattr__(self, name, float(value))  # 1 and 1.0 are equal, and so must their digests be
        if self.ca_rule not in get_args(CaRule):
            raise InvalidInput(unknown("ca_rule", str(self.ca_rule), list(get_args(CaRule))))


@dataclass(frozen=True)
class Fingerprint:
    """What decides a model's attention scores: hex hashes or plain words, none of them empty."""

    architecture: str
    weights: str
    tokenizer: str
    rotary: str
    dtype: str

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, str) or not value:
                raise InvalidInput(f"fingerprint field {f.name} is {value!r}; expected a word or a hash.")

    @property
    def digest(self) -> bytes:
        """16 bytes that change with any field."""
        return _digest(asdict(self))

    def difference(self, other: Fingerprint) -> list[str]:
        """One phrase for each field that differs: its name, this value, the other one."""
        return _difference(asdict(self), asdict(other))


@dataclass(frozen=True)
class IndexSpec:
    """What all records of one store have in common. Two stores with equal specs hold interchangeable records.

    n_heads counts QUERY heads: SIFT's bits are per query head. `tile` is 1..255 tokens. `prefix` is a hash of the
    tokens that stood before each document when it was observed.
    """

    fingerprint: Fingerprint
    n_layers: int
    n_heads: int
    prefix: str
    tile: int = DEFAULT_TILE
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        for name, top in (("n_layers", 65535), ("n_heads", 65535), ("tile", MAX_TILE)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= top:
                raise InvalidInput(f"{name} is {value!r}; allowed are whole numbers from 1 to {top}.")
        if not isinstance(self.prefix, str):
            raise InvalidInput(f"prefix is {self.prefix!r}; expected the hash of the prefix tokens, as text.")

    @property
    def digest(self) -> bytes:
        """16 bytes that change with any field."""
        return _digest(self.as_dict())

    def difference(self, other: IndexSpec) -> list[str]:
        """One phrase for each field that differs, those of the fingerprint and the thresholds included."""
        return _difference(_flat(self), _flat(other))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> IndexSpec:
        """The inverse of `as_dict`. Raises InvalidInput if a field is missing, unknown or out of range."""
        try:
            rest = dict(values)
            fingerprint, thresholds = Fingerprint(**rest.pop("fingerprint")), Thresholds(**rest.pop("thresholds"))
            return cls(fingerprint=fingerprint, thresholds=thresholds, **rest)
        except (KeyError, TypeError, ValueError) as e:
            raise InvalidInput(f"this is not the description of an index: {e}. Expected what `as_dict` gave.") from e


@dataclass(frozen=True, eq=False)
class DocumentStats:
    """What one document's stand-alone dense prefill shows, with P = ceil(n_tokens / tile). Tensors on the CPU.

    tile_max   float16 or float32 [L, H, P, P]  largest post-softmax probability in each tile (query tile, key tile);
                                                only the lower triangle is read
    tile_mass  float32 [L, H, P, P]             sum of the probabilities in the tile / rows of the query tile
    later_high int32 [L, H, n_tokens]           later query rows, outside the key's own diagonal tile, that give the
                                                key more than beta
    later_rows int32 [n_tokens]                 how many such rows there are
    tile                                        tokens of a tile, the last one may have fewer
    """

    n_tokens: int
    tile_max: torch.Tensor
    tile_mass: torch.Tensor
    later_high: torch.Tensor
    later_rows: torch.Tensor
    tile: int = DEFAULT_TILE

    def __post_init__(self) -> None:
        pages = n_pages(self.n_tokens, self.tile)
        layers, heads = (*self.tile_max.shape, 0, 0)[:2]
        wanted = {
            "tile_max": (layers, heads, pages, pages),
            "tile_mass": (layers, heads, pages, pages),
            "later_high": (layers, heads, self.n_tokens),
            "later_rows": (self.n_tokens,),
        }
        for name, shape in wanted.items():
            got = tuple(getattr(self, name).shape)
            if got != shape:
                raise InvalidInput(
                    f"{name} is {list(got)}; {self.n_tokens} tokens in tiles of {self.tile} need {list(shape)}."
                )


def n_pages(n_tokens: int, tile: int) -> int:
    """Tiles (and pages) of a document: ceil(n_tokens / tile). Raises InvalidInput for an empty one."""
    if n_tokens < 1 or not 1 <= tile <= MAX_TILE:
        raise InvalidInput(
            f"{n_tokens} tokens in tiles of {tile}; allowed are 1 token or more, tiles of 1 to {MAX_TILE}."
        )
    return -(-n_tokens // tile)


def payload_bytes(n_layers: int, n_heads: int, n_tokens: int, tile: int) -> int:
    """Size of the packed bits: P (P + 1) / 2 + P bits per (layer, head), padded to a byte once per document."""
    pages = n_pages(n_tokens, tile)
    return -(-n_layers * n_heads * (pages * (pages + 1) // 2 + pages) // 8)


def _digest(values: Mapping[str, Any]) -> bytes:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def _flat(spec: IndexSpec) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in spec.as_dict().items():
        flat.update(value if isinstance(value, dict) else {name: value})
    return flat


def _difference(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [f"{name} is {mine[name]!r} against {other[name]!r}" for name in mine if mine[name] != other[name]]
