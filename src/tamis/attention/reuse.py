"""Prefill and decode of one prompt whose documents lie in the cache, each stored once and read in place anywhere.

LazyAttention (position-free documents), its baselines and the blend with recomputed tokens share this: what differs
is which tokens are computed, and from where the others are read. Knows token ids, not text. No transformers cache is
used: a pass gets the rows it computes and explicit positions, everything else is read from pages.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tamis.attention.blend import CHOOSERS
from tamis.attention.hook import Job, Switch, packed_pass
from tamis.attention.offline import Indexer, Progress
from tamis.attention.policy import Policy
from tamis.attention.report import PrefillReport, ReuseReport
from tamis.attention.reuse_fresh import FreshChoice
from tamis.attention.reuse_layout import Layout, OwnPages, Piece
from tamis.attention.reuse_pass import DecodePass, Ground, PrefillPass, Stage, copied_into, rows_of
from tamis.attention.reuse_prefix import hold_prefix, store_prefix
from tamis.attention.reuse_store import DocumentStore, Held
from tamis.cache.formats import stored_dtype
from tamis.cache.pool import PagePool
from tamis.cache.store import RequestPages
from tamis.core.errors import CacheFull, InvalidInput, PoolFull
from tamis.model.rope import Rotary, self_test
from tamis.prompt.segments import Kind, Prompt
from tamis.select.scene import DocumentBits

ROOM_TOKENS = 128  # for the answer, reserved before the prefill where nothing else is asked for


class ReuseEngine:
    """One model with its stored documents. Raises ModelUnsupported where stored keys could not be moved rightly."""

    def __init__(self, model: Any, switch: Switch, store: DocumentStore, *, block_tuned: bool = False) -> None:
        self_test(model)
        self.model, self.switch, self.store, self.block_tuned = model, switch, store, block_tuned
        self.rotary = Rotary.of(model)

    def begin(
        self,
        prompt: Prompt,
        policy: Policy,
        *,
        room_tokens: int = ROOM_TOKENS,
        indexer: Callable[[], Indexer] | None = None,
        on_index: Progress | None = None,
    ) -> Session:
        """Bring the prompt's documents into place, computing those that are missing. Raises InvalidInput.

        `indexer` gives that of the documents' stored bits; it is only called where the policy works from some.
        """
        check_allowed(policy, next(self.model.parameters()).dtype, block_tuned=self.block_tuned)
        begin = time.perf_counter()
        indexed, bits = self.bits(prompt, policy, indexer, on_index)
        before = self.store.passes
        if policy.prefill == "prefix":
            held, pieces = hold_prefix(self.store, prompt.tokens)
        else:
            held, pieces = hold_documents(self.store, prompt, policy)
        took = time.perf_counter() - begin
        try:
            layout = Layout.of(pieces, self.store.pool.page)
            session = Session(self, prompt, policy, layout, held, room_tokens=room_tokens, bits=bits)
        except BaseException:
            held.close()
            raise
        session.hold_s, session.document_passes, session.indexed = took, self.store.passes - before, indexed
        return session

    def bits(
        self, prompt: Prompt, policy: Policy, indexer: Callable[[], Indexer] | None, on_index: Progress | None
    ) -> tuple[int, list[DocumentBits | None]]:
        """How many documents were observed now, and the stored bits of each, None where there are none."""
        documents = [d.tokens for d in prompt.documents]
        chosen = (
            policy.fresh == "sift" and policy.prefill in ("reuse", "blend") and policy.make_selector().needs_records
        )
        if indexer is None or not (policy.needs_records or chosen):
            return 0, [None] * len(documents)
        with self.store.lock:
            found = indexer()
            made = found.index(documents, on_index) if policy.needs_records else 0
            return made, [None if r is None else r.bits() for r in found.records(documents)]

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, job: Job) -> torch.Tensor:
        """Logits [vocabulary] behind the last of the rows: tokens and positions, integers [n], seen through `job`."""
        n, device = len(tokens), self.store.pool.keys.device
        ids, places = tokens[None].to(device), positions[None].to(device)
        refused = sum(self.switch.refused.values())
        with torch.inference_mode(), self.switch.running(job, n), packed_pass(n):
            logits: torch.Tensor = self.model(ids, position_ids=places, use_cache=False, logits_to_keep=1).logits[0, -1]
        assert sum(self.switch.refused.values()) == refused, f"layers did not reach the job: {self.switch.refused}"
        return logits


def check_allowed(policy: Policy, dtype: torch.dtype, *, block_tuned: bool) -> None:
    """Raises InvalidInput for a mode that ruins answers unless it was asked for knowingly, or that pages cannot do."""
    plain = policy.prefill == "reuse" or (policy.prefill == "blend" and policy.recompute == 0)
    if plain and not (block_tuned or policy.accept_block_attention):
        raise InvalidInput(
            f"prefill={policy.prefill!r} without recomputed tokens on a model that was not trained for it: its "
            "documents do not see each other, which costs a stock model about 1.25 nats KL of the first token (F1 "
            "0.13 instead of 0.22 on MuSiQue). Use prefill='blend' with recompute=0.15 or more, or prefill='sift', "
            "or load a block adapter (LLM(…, adapter=DIR), made by `tamis train block-adapter`). To have it anyway: "
            "accept_block_attention=True."
        )
    if stored_dtype(policy.kv, dtype) != dtype:
        raise InvalidInput(
            f"kv={policy.kv!r} with prefill={policy.prefill!r} on a {dtype} model; pages hold the model's dtype. "
            "Use kv='auto', or load the model in bfloat16."
        )


def hold_documents(store: DocumentStore, prompt: Prompt, policy: Policy) -> tuple[Held, list[Piece]]:
    """The documents of a prompt in place, and where everything lies. What ends the prompt is always computed."""
    spans = list(zip(prompt.segments, prompt.spans, strict=True))
    numbers = [i for i, (s, _) in enumerate(spans[:-1]) if s.kind is Kind.DOCUMENT]
    held = store.hold([spans[i][0].tokens for i in numbers], compute=policy.missing == "store")
    if spans[-1][0].kind is Kind.DOCUMENT:
        held.reasons.append("the last document ends the prompt and is computed in place: generation goes on from it")
    found = dict(zip(numbers, held.documents, strict=True))
    pieces = []
    for i, (segment, (start, _)) in enumerate(spans):
        document = found.get(i)
        stored = () if document is None else document.pages
        pieces.append(Piece(start, len(segment.tokens), stored, None if document is None else 0))
    return held, pieces


@dataclass
class _Handles:
    """What a request must give back."""

    held: Held
    own: RequestPages | None = None

    def close(self) -> None:
        self.held.close()
        if self.own is not None:
            self.own.close()
            self.own = None


@dataclass
class Trace:
    """What a session did so far, for its report."""

    logits: torch.Tensor | None = None
    stages: tuple[Stage, ...] = ()
    recomputed: int = 0
    copied: int = 0
    choose_s: float = 0.0
    prefill_s: float = 0.0
    notes: list[str] = field(default_factory=list)


class Session:
    """One prompt: `prefill`, then `step` for each new token. Its documents stay in place until `close`."""

    def __init__(
        self,
        engine: ReuseEngine,
        prompt: Prompt,
        policy: Policy,
        layout: Layout,
        held: Held,
        *,
        room_tokens: int = ROOM_TOKENS,
        bits: Sequence[DocumentBits | None] = (),
    ) -> None:
        self.engine, self.prompt, self.policy, self.layout, self.held = engine, prompt, policy, layout, held
        self.tokens = torch.tensor(prompt.tokens)
        self.n_tokens = layout.n_tokens
        self.trace = Trace()
        self.hold_s, self.document_passes, self.indexed = 0.0, 0, 0
        self.bits = tuple(bits) or (None,) * len(prompt.documents)
        self._handles = _Handles(held)
        self._finalizer = weakref.finalize(self, _Handles.close, self._handles)
        self._finalizer.atexit = False
        self.read_own = torch.ones_like(layout.fresh) if policy.reuse_copies else layout.fresh
        self.ground, self.pages = self._own(room_tokens)
        self._decode: DecodePass | None = None
        self._choice = self._fresh_choice()

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that are stored."""
        return sum(piece.length for piece in self.layout.reused)

    def prefill(self) -> torch.Tensor:
        """Logits [vocabulary] of the first new token."""
        begin = time.perf_counter()
        with self.engine.store.lock, torch.inference_mode():
            if self.policy.reuse_copies:
                self.trace.copied = copied_into(self.ground, self.layout, self.pages, self.engine.rotary)
            if self.policy.prefill == "blend" and self.policy.recompute and self.layout.reused:
                logits: torch.Tensor = CHOOSERS.get(self.policy.blend)(self, self.policy.recompute)
            else:
                logits = self.run(PrefillPass(self.ground.own, [self.stage(self.layout.fresh)]))
            if self.policy.prefill == "prefix":
                mine = (self.ground.own, self.layout, self.pages)
                self.trace.notes += store_prefix(self.engine.store, *mine, self.prompt.tokens)
            if logits.is_cuda:
                torch.cuda.synchronize()
        self.trace.logits, self.trace.prefill_s = logits, time.perf_counter() - begin
        return logits

    def stage(
        self,
        rows: torch.Tensor,
        *,
        first: int = 0,
        own: torch.Tensor | None = None,
        written: torch.Tensor | None = None,
    ) -> Stage:
        """From layer `first` on the tokens of `rows` bool [n_tokens] are computed, and those of `own` (default: the
        same) read from own pages. `written`: see `Stage.of`."""
        own = self.read_own | (rows if own is None else own)
        self.pages.cover(self.layout.spans(own))
        return Stage.of(
            self.ground, self.layout, self.pages, rows=rows.nonzero()[:, 0], own=own, first=first, written=written
        )

    def run(self, job: PrefillPass) -> torch.Tensor:
        """The pass over the rows of `job`'s first stage; its stages are what later tokens read by."""
        rows = job.stages[0].rows
        if self._choice is not None:
            self._choice.begin()
            job.choose_reads = self._choice.reads
        with rows_of(job, self.engine.model, self.engine.switch):
            logits = self.engine.forward(self.tokens[rows], rows, job)
        self.trace.stages = tuple(job.stages)
        return logits

    def step(self, token: int) -> torch.Tensor:
        """Logits behind one more token. Raises CacheFull if there is no room for it."""
        with self.engine.store.lock, torch.inference_mode():
            if self.pages.full:
                self.pages.spare += self._more()
            if self._decode is None:
                self._decode = DecodePass(self.ground, self.layout, self.pages, self.trace.stages)
            self._decode.begin(self.n_tokens)
            logits = self.engine.forward(torch.tensor([token]), torch.tensor([self.n_tokens]), self._decode)
        self.n_tokens += 1
        return logits

    def close(self) -> None:
        """Let go of documents and pages, and save what was computed. Closing twice is harmless."""
        if self._finalizer.detach():
            self._handles.close()
            self.engine.store.save()

    def report(self) -> PrefillReport:
        """What was done; call it after the prefill."""
        n, stages, layers = self.layout.n_tokens, self.trace.stages, self.ground.own.spec.n_layers
        ends = [*(s.first for s in stages[1:]), layers]
        area: float = sum(int((s.rows + 1).sum()) * (end - s.first) for s, end in zip(stages, ends, strict=True))
        if self._choice is not None:
            area -= self._choice.skipped
        by_tier: Counter[str] = Counter()
        origins = self.held.origins
        held = [(d, o) for d, o in zip(self.held.documents, origins, strict=True) if d is not None]
        for document, origin in held:
            by_tier[origin] += document.n_tokens
        documents = self.prompt.documents
        fallbacks = (*self.held.reasons, *self.trace.notes)
        return PrefillReport(
            asked=self.policy.prefill,
            used=self.policy.prefill,
            selector="" if self._choice is None else self.policy.selector,
            kernel="paged",
            prompt_tokens=n,
            documents=len(documents),
            document_tokens=sum(len(d.tokens) for d in documents),
            density=min(1.0, area / (layers * n * (n + 1) / 2)),
            indexed=self.indexed,
            fallbacks=fallbacks,
            reuse=ReuseReport(
                by_tier=dict(by_tier),
                fresh=int(self.layout.fresh.sum()),
                recomputed=self.trace.recomputed,
                recomputed_share=self._recomputed_share(ends),
                copied=self.trace.copied,
                approximate=self.policy.prefill != "prefix" and bool(held) and not self._all_recomputed(),
                own_pages=len(self.pages.pages) + len(self.pages.spare),
                private=self.ground.own is not self.ground.stored,
                stages=tuple((s.first, len(s.rows)) for s in stages),
                choose_s=self.trace.choose_s,
            ),
        )

    def _fresh_choice(self) -> FreshChoice | None:
        """What chooses the tiles of fresh documents, if the policy asks for it and it can win."""
        policy, n, device = self.policy, self.layout.n_tokens, self.engine.store.pool.keys.device
        if policy.fresh != "sift" or policy.prefill not in ("reuse", "blend"):
            return None
        selector = policy.make_selector()
        choice = FreshChoice.of(
            self.prompt, self.layout, selector, self.bits, tile=policy.tile, device=device
        )  # fmt: skip
        if choice is not None and n < (least := policy.crossover_tokens(device.type)):
            self.trace.notes.append(
                f"fresh documents are dense: the prompt has {n} tokens and a choice of tiles pays from {least} on this "
                f"{device.type}"
            )
            return None
        return choice

    def _recomputed_share(self, ends: list[int]) -> float:
        """Recomputed tokens of documents in the mean over layers, as a share of the reused ones."""
        fresh, layers = int(self.layout.fresh.sum()), self.ground.own.spec.n_layers
        rows = sum((len(s.rows) - fresh) * (e - s.first) for s, e in zip(self.trace.stages, ends, strict=True))
        return rows / (layers * self.reused_tokens) if self.reused_tokens else 0.0

    def _all_recomputed(self) -> bool:
        return all(len(s.rows) == self.layout.n_tokens for s in self.trace.stages)

    def _own(self, room_tokens: int) -> tuple[Ground, OwnPages]:
        """Pages for the tokens that the request computes: of the cache, or, where that is full, of its own."""
        store, page = self.engine.store, self.layout.page
        spans = self.layout.spans(self.read_own)
        count = len(spans) + -(-max(0, room_tokens - (page - spans[-1][1])) // page)
        if self.policy.prefill == "blend" and not self.policy.reuse_copies:
            # which pages are needed shows later; a stage recomputes at most twice the share, see blend_attention.SPREAD
            chosen = round(2 * self.policy.recompute * self.reused_tokens)
            count += min(sum(-(-piece.length // page) for piece in self.layout.reused), chosen)
        try:
            self._handles.own = store.cache.own(count * page)
            pool, numbers = store.pool, self._handles.own.pages
        except (CacheFull, PoolFull) as e:
            self.held.reasons.append(f"the request's own keys lie outside the cache: {e}")
            pool = PagePool(store.pool.spec, count, device=store.pool.keys.device, page=page)
            numbers = pool.allocator.allocate(count)
        return Ground(store.pool, pool, self.engine.rotary.angles), OwnPages.of(spans, numbers, page)

    def _more(self) -> tuple[int, ...]:
        """Another page for new tokens."""
        if self._handles.own is not None:
            return self._handles.own.extend(self.layout.page)
        raise CacheFull(
            f"the answer has outgrown the {ROOM_TOKENS} tokens and more that were reserved outside a full cache. Give "
            "the cache more bytes, or say beforehand how long the answer may become.",
            needed_bytes=self.ground.own.page_bytes,
            available_bytes=0,
        )
