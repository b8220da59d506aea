"""Exact prefix caching, the baseline: blocks of a prompt's beginning at absolute positions, shared by prompts.

An address covers everything before a block, so that the same tokens behind others are other blocks; they never share
a namespace with position-free documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tamis.attention.reuse_layout import Layout, OwnPages, Piece
from tamis.attention.reuse_store import DocumentStore, Held
from tamis.cache.document import Payload, Wanted
from tamis.cache.keys import PREFIXES, PrefixKey, prefix_keys
from tamis.cache.pool import PagePool
from tamis.core.errors import CacheFull, CacheTimeout, NotCached, PoolFull


def hold_prefix(store: DocumentStore, tokens: Sequence[int], namespace: str = PREFIXES) -> tuple[Held, list[Piece]]:
    """The stored blocks that `tokens` begins with, in place, without its last token; the rest is to be computed."""
    page = store.pool.page
    keys, tiers = _stored(store, tokens, namespace)
    known = len(tiers)
    held = Held([], [])
    if known:
        try:
            held.leases.append(store.cache.get([Wanted(key, page) for key in keys[:known]]))
        except (NotCached, CacheFull, PoolFull, CacheTimeout) as e:
            held.reasons.append(f"{known} stored blocks of the prefix are computed again: {e}")
            known = 0
    if known:
        held.documents += held.leases[0].documents
        held.origins += tiers
    pieces = [Piece(0, known * page, tuple(d.pages[0] for d in held.leases[0].documents))] if known else []
    return held, [*pieces, Piece(known * page, len(tokens) - known * page)]


def known_blocks(store: DocumentStore, tokens: Sequence[int], namespace: str = PREFIXES) -> int:
    """How many blocks of pages `hold_prefix` would find now."""
    return len(_stored(store, tokens, namespace)[1])


def _stored(store: DocumentStore, tokens: Sequence[int], namespace: str) -> tuple[tuple[PrefixKey, ...], list[str]]:
    """The addresses of all blocks that may be read, and the tiers of those that are stored, up to the first gap."""
    page = store.pool.page
    keys = prefix_keys(tokens, store.fingerprint, block=page, namespace=namespace)[: (len(tokens) - 1) // page]
    return keys, [str(t) for t in itertools.takewhile(lambda tier: tier is not None, store.cache.where(keys))]


def store_prefix(
    store: DocumentStore,
    pool: PagePool,
    layout: Layout,
    pages: OwnPages,
    tokens: Sequence[int],
    *,
    namespace: str = PREFIXES,
) -> list[str]:
    """Copy the whole blocks that the request computed (in `pool`) into the cache; what could not be, and why."""
    page = layout.page
    fresh = layout.pieces[-1]
    keys = prefix_keys(tokens, store.fingerprint, block=page, namespace=namespace)[fresh.start // page :]
    blocks = [number for (_, length), number in zip(pages.spans, pages.pages, strict=True) if length == page]
    if not keys:
        return []
    items = [(key, Payload.of(*pool.read_tokens([number], page))) for key, number in zip(keys, blocks, strict=True)]
    try:
        store.cache.put(items)
    except (CacheFull, PoolFull) as e:
        return [f"{len(keys)} blocks of the prefix are not stored: {e}"]
    return []
