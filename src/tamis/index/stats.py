"""How small an index is beside the keys and values it stands for, counted on records that the real encoder made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tamis.index.encode import encode
from tamis.index.record import Record, document_id, dump
from tamis.index.spec import DEFAULT_TILE, DocumentStats, Fingerprint, IndexSpec, n_pages


@dataclass(frozen=True)
class Shape:
    """The part of a model's configuration that sizes depend on. n_heads counts query heads."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int


SHAPES = {
    "llama-3.1-8b": Shape(32, 32, 8, 128),
    "qwen3-8b": Shape(36, 32, 8, 128),
    "qwen2.5-14b": Shape(48, 40, 8, 128),
    "qwen3-235b-a22b": Shape(94, 64, 4, 128),
    "minimax-m2.5": Shape(62, 48, 8, 128),
    "smollm2-135m": Shape(30, 9, 3, 64),
}


def metadata_ratio(
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    *,
    doc_tokens: int = 1024,
    tile: int = DEFAULT_TILE,
    kv_bytes_per_value: int = 2,
) -> dict[str, float]:
    """Bytes of one document's keys and values against bytes of its record, header included.

    Encodes random statistics and measures what `dump` gives; no formula for the record's size is used. Keys:
    kv_bytes, record_bytes, payload_bytes, bytes_per_layer_head (payload), kv_to_metadata_ratio (over the record).
    """
    stats = random_stats(n_layers, n_heads, doc_tokens, tile)
    spec = IndexSpec(Fingerprint(*["random"] * 5), n_layers, n_heads, "", tile)
    bits = encode(stats, spec.thresholds)
    record = Record.of(bits, document_id=document_id(range(doc_tokens)), spec=spec, n_tokens=doc_tokens)
    kv_bytes = 2 * n_layers * n_kv_heads * head_dim * doc_tokens * kv_bytes_per_value
    record_bytes = len(dump(record))
    return {
        "kv_bytes": kv_bytes,
        "record_bytes": record_bytes,
        "payload_bytes": len(record.payload),
        "bytes_per_layer_head": len(record.payload) / (n_layers * n_heads),
        "kv_to_metadata_ratio": kv_bytes / record_bytes,
    }


def ratio_table(*, doc_tokens: int = 1024, tile: int = DEFAULT_TILE) -> dict[str, dict[str, float]]:
    """`metadata_ratio` of every shape in SHAPES, with 2-byte keys and values."""
    return {
        name: metadata_ratio(s.n_layers, s.n_heads, s.n_kv_heads, s.head_dim, doc_tokens=doc_tokens, tile=tile)
        for name, s in SHAPES.items()
    }


def random_stats(n_layers: int, n_heads: int, n_tokens: int, tile: int = DEFAULT_TILE, seed: int = 0) -> DocumentStats:
    """Statistics of the right shapes and ranges with no meaning, the same for the same seed."""
    draw = torch.Generator().manual_seed(seed)
    pages = n_pages(n_tokens, tile)
    square = (n_layers, n_heads, pages, pages)
    ends = (torch.arange(n_tokens) // tile + 1) * tile
    later_rows = (n_tokens - ends).clamp(min=0).int()
    some = torch.rand(n_layers, n_heads, n_tokens, generator=draw)
    return DocumentStats(
        n_tokens=n_tokens,
        tile_max=torch.rand(square, generator=draw) ** 6,
        tile_mass=torch.rand(square, generator=draw) / pages,
        later_high=torch.where(some < 0.9, 0, (some - 0.9) * 10 * later_rows).int(),
        later_rows=later_rows,
        tile=tile,
    )
