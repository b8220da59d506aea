"""Ways to serve the same requests from the same pool: what each keeps, what it hits, what it must compute.

A provider decides by the real cache whether a request fits, holds its memory while it runs, and says what work is left.
Adding one is a class like these and a line in PROVIDERS.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from tamis.bench.reuse_cost import Pass, Work
from tamis.bench.reuse_pool import DEVICE, HOST, Pool
from tamis.bench.reuse_workload import Piece, Request
from tamis.cache.document import Payload, Wanted
from tamis.cache.keys import FINGERPRINT_BYTES, DocumentKey, PrefixKey, prefix_keys
from tamis.cache.spec import PAGE_TOKENS
from tamis.core.errors import CacheFull, InvalidInput
from tamis.core.registry import unknown

FINGERPRINT = bytes(FINGERPRINT_BYTES)
RECOMPUTED_SHARE = 0.16  # CacheBlend's default
CHAINS = 20_000  # prompts whose prefix keys are remembered


class Held(Protocol):
    """Memory of a running request."""

    def close(self) -> None: ...


@dataclass(slots=True)
class Admission:
    """A request that fits: its work, its memory, and how many tokens of documents, and of the prompt, were served."""

    work: Work
    hit_tokens: int = 0
    prompt_hit_tokens: int = 0
    held: list[Held] = field(default_factory=list)
    fell_back: bool = False

    def close(self) -> None:
        """Give the memory back."""
        while self.held:
            self.held.pop().close()


class Provider(Protocol):
    """admit: None, with nothing changed, if the request does not fit beside those that run."""

    def admit(self, request: Request) -> Admission | None: ...


class Recompute:
    """Every prompt from its first token on; nothing is stored."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def admit(self, request: Request) -> Admission | None:
        """The whole prompt is the request's own."""
        prompt = _tokens(request.pieces)
        size = prompt + request.output_tokens
        if not self.pool.fits((), self.pool.bytes_of(size)):
            return None
        return Admission(Work(Pass.of(prompt)), held=[self.pool.own([size])])


class Prefix:
    """Exact prefix caching in blocks of one page, shared in place: a block hits if everything before it did."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._chains = Chains()

    def admit(self, request: Request) -> Admission | None:
        """Holds the full blocks of the prompt; the rest and what is generated is the request's own."""
        prompt = _tokens(request.pieces)
        blocks = self._chains.blocks(request.pieces)
        rest = prompt - len(blocks) * PAGE_TOKENS + request.output_tokens
        if not self.pool.fits(blocks, self.pool.bytes_of(rest)):
            return None
        places = self.pool.places(blocks)
        # one token at least is computed: the first one generated needs it
        hit = min(_leading(places) * PAGE_TOKENS, prompt - 1)
        loaded = sum(PAGE_TOKENS for p in places[: _leading(places)] if p == HOST)
        # last block first: then the first ones are the last used, and a chain is evicted from its end
        held: list[Held] = [self.pool.hold(blocks[::-1])] if blocks else []
        held.append(self.pool.own([rest]))
        start = _tokens(request.prefix)
        of_documents = max(0, min(hit, start + _tokens(request.documents)) - start)
        return Admission(Work(Pass.of(prompt - hit, hit), loaded=loaded), of_documents, hit, held)


class Lazy:
    """Tamis: one copy of a document, read in place by any number of requests; missing ones are computed once."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._chains = Chains()
        self._keys: dict[Piece, Wanted] = {}

    def admit(self, request: Request) -> Admission | None:
        """Holds the documents, and exact blocks of the system prompt; own tokens alone are the request's own."""
        blocks = self._chains.blocks(request.prefix)
        wanted = list(dict.fromkeys(self.wanted(p) for p in request.documents))
        own = _own_tokens(request, blocks) + request.output_tokens
        if not self.pool.fits([*blocks, *wanted], self.pool.bytes_of(own)):
            return None
        found = Found.of(self.pool, blocks, wanted)
        held: list[Held] = [self.pool.hold([*blocks[::-1], *wanted])] if blocks or wanted else []
        held.append(self.pool.own([own]))
        # a second occurrence in one prompt reads the copy that the first one made
        computed = sum(w.n_tokens for w in found.missing)
        hit = _tokens(request.documents) - computed
        new = _own_tokens(request, blocks[: found.blocks])
        before = _tokens(request.pieces) - new
        work = Work(Pass.of(new, before), tuple(Pass.of(w.n_tokens) for w in found.missing), loaded=found.loaded)
        return Admission(work, hit, hit + found.blocks * PAGE_TOKENS, held)

    def wanted(self, piece: Piece) -> Wanted:
        """A document by its content address."""
        if piece not in self._keys:
            key = DocumentKey.of(_ids((piece,)), FINGERPRINT)
            self._keys[piece] = Wanted(key, piece.n_tokens)
        return self._keys[piece]


class Copies:
    """Position-free store whose documents are re-rotated into a copy of each request's own (Block-Attention); with a
    recomputed share, that many of their tokens are computed again in the prompt (CacheBlend).

    The copies lie in the same pool for as long as the request runs; the stored documents are not needed meanwhile and
    may be evicted. A document that finds no room in the store is computed for this request alone.
    """

    def __init__(self, pool: Pool, recomputed: float = 0.0) -> None:
        self.pool = pool
        self.recomputed = recomputed
        self._chains = Chains()
        self._lazy = Lazy(pool)  # for its keys

    def admit(self, request: Request) -> Admission | None:
        """Owns a copy of every document; holds exact blocks of the system prompt."""
        blocks = self._chains.blocks(request.prefix)
        rest = _own_tokens(request, blocks) + request.output_tokens
        sizes = [*(p.n_tokens for p in request.documents), rest]
        own_bytes = sum(map(self.pool.bytes_of, sizes))
        if not self.pool.fits(blocks, own_bytes):
            return None
        found = Found.of(self.pool, blocks, ())
        held: list[Held] = [self.pool.hold(blocks[::-1])] if blocks else []
        wanted = list(dict.fromkeys(self._lazy.wanted(p) for p in request.documents))
        stored, loaded = self._copied(wanted, sizes, own_bytes, held)
        missing = [w for w in wanted if w.key not in stored]
        kept = sum(w.n_tokens for w in missing if self._store(w))
        copied = sum(p.n_tokens for p in request.documents) - sum(w.n_tokens for w in missing) + kept
        return self._admission(request, blocks[: found.blocks], missing, copied, loaded + found.loaded, held)

    def _admission(
        self, request: Request, blocks: Sequence[Wanted], missing: Sequence[Wanted], copied: int, loaded: int,
        held: list[Held],
    ) -> Admission:  # fmt: skip
        documents = _tokens(request.documents)
        again = round(self.recomputed * documents)
        hit = round((documents - sum(w.n_tokens for w in missing)) * (1 - self.recomputed))
        new = _own_tokens(request, blocks)
        prompt = Pass.of(new, _tokens(request.pieces) - new)
        start = _tokens(request.prefix)
        # the tokens computed again lie anywhere in the documents: each sees the prefix and half of them on average
        prompt = Pass(prompt.tokens + again, prompt.pairs + again * (start + documents / 2), prompt.keys)
        work = Work(prompt, tuple(Pass.of(w.n_tokens) for w in missing), copied, loaded)
        return Admission(work, hit, hit + len(blocks) * PAGE_TOKENS, held)

    def _copied(
        self, wanted: Sequence[Wanted], sizes: Sequence[int], own_bytes: int, held: list[Held]
    ) -> tuple[set[Hashable], int]:
        """Own the copies; the stored documents that they were made of, and how many tokens came from the host."""
        places = dict(zip((w.key for w in wanted), self.pool.places(wanted), strict=True))
        there = [w for w in wanted if places[w.key]]
        lease = None
        if there and self.pool.fits(there, own_bytes):
            lease = self.pool.hold(there)
        held.append(self.pool.own(sizes))
        if lease is not None:
            lease.close()
        elif there:
            # not all of them fit beside the copy: those that the policy spared, and the host's, are copied
            there = [w for w in there if places[w.key] == HOST or self.pool.has(w.key)]
            if local := [w for w in there if places[w.key] == DEVICE]:
                self.pool.hold(local).close()
        return {w.key for w in there}, sum(w.n_tokens for w in there if places[w.key] == HOST)

    def _store(self, wanted: Wanted) -> bool:
        if not self.pool.fits([wanted], 0):
            return False
        try:
            self.pool.cache.put([(wanted.key, Payload(wanted.n_tokens))])
        except CacheFull:
            return False
        return True


class Found(NamedTuple):
    """What of a request is there: leading blocks, missing documents, and tokens to load from the host."""

    blocks: int
    missing: tuple[Wanted, ...]
    loaded: int

    @classmethod
    def of(cls, pool: Pool, blocks: Sequence[Wanted], wanted: Sequence[Wanted]) -> Found:
        """Looks, changes nothing."""
        places = pool.places(blocks)
        leading = _leading(places)
        loaded = sum(PAGE_TOKENS for p in places[:leading] if p == HOST)
        missing = []
        for w, place in zip(wanted, pool.places(wanted), strict=True):
            if place is None:
                missing.append(w)
            elif place == HOST:
                loaded += w.n_tokens
        return cls(leading, tuple(missing), loaded)


class Chains:
    """The exact-prefix blocks of prompts, the latest remembered."""

    def __init__(self) -> None:
        self._known: dict[tuple[Piece, ...], list[Wanted]] = {}

    def blocks(self, pieces: tuple[Piece, ...]) -> list[Wanted]:
        """One `Wanted` a full block, from the prompt's start on."""
        if len(pieces) > 1:
            head = _tokens(pieces[:-1])
            if (head + pieces[-1].n_tokens) // PAGE_TOKENS == head // PAGE_TOKENS:
                return self.blocks(pieces[:-1])  # the last piece, mostly a question, ends no block
        if pieces not in self._known:
            if len(self._known) >= CHAINS:
                self._known.clear()
            keys: tuple[PrefixKey, ...] = prefix_keys(_ids(pieces), FINGERPRINT, block=PAGE_TOKENS) if pieces else ()
            self._known[pieces] = [Wanted(key, PAGE_TOKENS) for key in keys]
        return self._known[pieces]


PROVIDERS: dict[str, Callable[[Pool], Provider]] = {
    "recompute": Recompute,
    "prefix": Prefix,
    "block": Copies,
    "cacheblend": lambda pool: Copies(pool, RECOMPUTED_SHARE),
    "lazy": Lazy,
}


def new_provider(name: str, pool: Pool) -> Provider:
    """Raises InvalidInput for an unknown name."""
    if name not in PROVIDERS:
        raise InvalidInput(unknown("provider", name, list(PROVIDERS)))
    return PROVIDERS[name](pool)


def fallback(request: Request) -> Admission:
    """A request that does not fit an empty pool: computed whole, in memory that is not the pool's."""
    return Admission(Work(Pass.of(_tokens(request.pieces))), fell_back=True)


def _own_tokens(request: Request, blocks: Sequence[Wanted]) -> int:
    return _tokens(request.prefix) - len(blocks) * PAGE_TOKENS + _tokens(request.own)


def _tokens(pieces: Sequence[Piece]) -> int:
    return sum(p.n_tokens for p in pieces)


def _leading(places: Sequence[str | None]) -> int:
    return next((i for i, place in enumerate(places) if place is None), len(places))


def _ids(pieces: Sequence[Piece]) -> Any:
    return np.concatenate([np.arange(p.first, p.first + p.n_tokens, dtype=np.int64) for p in pieces])
