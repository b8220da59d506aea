"""How one request's prompt is cut: what is stored, what is computed in which parts, and how many pages it takes.

Numbers and layouts only: nothing is taken, computed or held.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from tamis.attention.planner import chunk_ranges, dense_reason
from tamis.attention.policy import PAGED
from tamis.attention.reuse import ReuseEngine, check_allowed
from tamis.attention.reuse_layout import Layout, Piece
from tamis.attention.reuse_prefix import known_blocks
from tamis.attention.reuse_store import DocumentStore
from tamis.cache.document import DocumentKV
from tamis.cache.keys import DOCUMENTS, PREFIXES, namespaced
from tamis.engine.request import Request
from tamis.kernels.lists import Tiling
from tamis.prompt.segments import Kind


@dataclass(frozen=True)
class Placing:
    """page: tokens of one; chunk_tokens: of a part of a prompt that need not go in one pass."""

    request: Request
    page: int
    chunk_tokens: int
    device: torch.device

    @cached_property
    def dense_reason(self) -> str:
        """Why a sparse prefill is not made though it was asked for; "" where it is, or was not asked for."""
        asked = self.request.policy.prefill == "sift"
        return dense_reason(self.request.prompt, self.request.policy, self.device) if asked else ""

    @property
    def sift(self) -> bool:
        """Whether the prefill is sparse."""
        return self.request.policy.prefill == "sift" and not self.dense_reason

    @property
    def whole(self) -> bool:
        """Whether all that is computed goes in one pass, as choices of tiles and of tokens to recompute need it."""
        policy = self.request.policy
        chosen = policy.reuse_copies or policy.fresh == "sift"
        return self.sift or policy.prefill == "blend" or (chosen and policy.prefill == "reuse")

    @cached_property
    def documents(self) -> tuple[int, ...]:
        """Numbers of the prompt's segments that may be stored documents."""
        if self.request.policy.prefill not in ("reuse", "blend"):
            return ()
        # what ends the prompt is always computed: generation goes on from it
        kinds = enumerate(self.request.prompt.segments[:-1])
        return tuple(i for i, segment in kinds if segment.kind is Kind.DOCUMENT)

    def namespace(self, kind: str) -> str:
        """Of the request's documents or prefixes."""
        return namespaced(kind, self.request.namespace)

    def layout(self, found: dict[int, DocumentKV] | None = None) -> Layout:
        """Where the tokens lie with the documents `found`, by segment; None: as if all were stored."""
        pieces = []
        for i, (start, end) in enumerate(self.request.prompt.spans):
            pages: tuple[int, ...] = ()
            if found is None and i in self.documents:
                pages = tuple(range(-(-(end - start) // self.page)))
            elif found is not None and i in found:
                pages = found[i].pages
            pieces.append(Piece(start, end - start, pages, 0 if pages else None))
        return Layout.of(pieces, self.page)

    def needs(self) -> dict[str, int]:
        """`start_pages`, `start_room` and `most_pages` of `Scheduler.submit`."""
        policy, layout = self.request.policy, self.layout()
        own = torch.ones_like(layout.fresh) if policy.reuse_copies else layout.fresh
        start, reused = len(layout.spans(own)), layout.reused
        stored = sum(len(piece.stored) for piece in reused)
        if policy.prefill == "blend" and not policy.reuse_copies:  # as a session reserves them
            start += min(stored, round(2 * policy.recompute * sum(piece.length for piece in reused)))
        room = -layout.pieces[-1].length % self.page
        grown = -(-max(0, self.request.sampling.max_new_tokens - 1 - room) // self.page)
        return {"start_pages": start, "start_room": room, "most_pages": start + stored + grown}

    def parts(self, store: DocumentStore) -> list[int]:
        """Tokens that each part of the prompt costs: documents one by one (0: stored), then what is computed here."""
        segments, fresh = self.request.prompt.segments, int(self.layout().fresh.sum())
        if self.request.policy.prefill == "prefix":
            fresh -= self.page * known_blocks(store, self.request.prompt.tokens, self.namespace(PREFIXES))
        tokens = [segments[i].tokens for i in self.documents]
        places = store.cache.where([store.key(t, self.namespace(DOCUMENTS)) for t in tokens])
        computed = self.request.policy.missing == "store"
        costs = [len(t) if tier is None and computed else 0 for t, tier in zip(tokens, places, strict=True)]
        return costs + ([fresh] if self.whole else self.cuts(fresh))

    def cuts(self, n: int) -> list[int]:
        """The parts of n tokens: the same ones whoever else is there."""
        return [end - start for start, end in chunk_ranges(Tiling.of_segments([n]), self.chunk_tokens)]


def check_request(request: Request, engine: ReuseEngine) -> None:
    """Raises InvalidInput for what a batch over pages cannot do."""
    policy = request.policy
    if policy.prefill in PAGED:
        check_allowed(policy, next(engine.model.parameters()).dtype, block_tuned=engine.block_tuned)
