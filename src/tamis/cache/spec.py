"""What keys and values of a model cost in bytes: pure numbers, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tamis.core.dtypes import ITEM_BYTES, name_of
from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown

if TYPE_CHECKING:
    from tamis.model.family import Geometry

PAGE_TOKENS = 128


@dataclass(frozen=True)
class KVSpec:
    """The shape of a token's keys and values, and their dtype by torch's name ("bfloat16", "float16", "float32")."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; allowed is 1 or more.")
        if self.dtype not in ITEM_BYTES:
            raise InvalidInput(unknown("dtype of keys and values", self.dtype, list(ITEM_BYTES)))

    @classmethod
    def of(cls, geometry: Geometry, dtype: object) -> KVSpec:
        """The cost of a model's keys and values kept in `dtype`, a torch.dtype or its name."""
        return cls(geometry.n_layers, geometry.n_kv_heads, geometry.head_dim, name_of(dtype))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: keys and values of all layers and heads."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    def page_bytes(self, page: int = PAGE_TOKENS) -> int:
        """Bytes of one page of `page` tokens, filled or not."""
        return self.token_bytes * page

    def shape(self, n_tokens: int) -> tuple[int, int, int, int]:
        """The shape of a document's keys, and of its values: [layers, Hkv, n, D]."""
        return self.n_layers, self.n_kv_heads, n_tokens, self.head_dim


def pages_of(n_tokens: int, page: int = PAGE_TOKENS) -> int:
    """Pages that `n_tokens` of one segment take."""
    return -(-n_tokens // page)


def pages_in(budget_bytes: int, page_bytes: int) -> int:
    """Pages that fit into a budget. Raises InvalidInput if not even one does."""
    if budget_bytes < page_bytes:
        raise InvalidInput(f"a budget of {budget_bytes} bytes; one page takes {page_bytes}. Give at least that much.")
    return budget_bytes // page_bytes
