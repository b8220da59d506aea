"""One request of a batch: its documents in place, its own tokens in pages, its prompt part by part, its next token.

Knows token ids, pages and the model's passes; not who else is in the batch, and no text. A member can be parked: its
own keys and values then lie in host memory, and its documents are let go.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace

import torch

from tamis.attention.offline import Indexer
from tamis.attention.planner import Plan, plan_prefill
from tamis.attention.report import PrefillReport
from tamis.attention.reuse import ReuseEngine
from tamis.attention.reuse_layout import Layout
from tamis.attention.reuse_pass import PrefillPass, Stage
from tamis.attention.reuse_prefix import hold_prefix, store_prefix
from tamis.attention.reuse_store import Held
from tamis.cache.document import DocumentKV, Lease, Payload, Wanted
from tamis.cache.keys import DOCUMENTS, PREFIXES
from tamis.cache.store import RequestPages
from tamis.core.errors import CacheFull, CacheTimeout, PoolFull
from tamis.engine.paged import KeepingJob, PagedSession
from tamis.engine.placing import Placing, check_request
from tamis.engine.products import products_of
from tamis.engine.request import Request
from tamis.engine.sampling import Sampler

_SERIAL = itertools.count()
# stored documents and prefixes that parked requests read: they go back into the cache, exactly as they were
_SAVED: weakref.WeakValueDictionary[Hashable, Payload] = weakref.WeakValueDictionary()


class Member:
    """See the module. `take`, `park`, `restore` and `close` are for pages, `run_part` for the prompt."""

    def __init__(
        self, request: Request, engine: ReuseEngine, indexer: Callable[[], Indexer], *, chunk_tokens: int
    ) -> None:
        check_request(request, engine)
        self.request, self.engine, self.indexer = request, engine, indexer
        self.device = engine.store.pool.keys.device
        self.placing = Placing(request, engine.store.pool.page, chunk_tokens, self.device)
        self.serial = next(_SERIAL)
        self.sampler = Sampler(request.sampling, self.device, request.prompt.tokens)
        self.new: list[int] = []
        self.session: PagedSession | None = None
        self.moved = 0  # how often its pages became other ones
        self._plan: Plan | None = None
        self._own: RequestPages | None = None
        self._parked: tuple[tuple[int, ...], Payload] | None = None  # the pages it had, and what lay in them
        self._saved: list[tuple[Hashable, Payload]] = []  # what it read of others
        self._found: list[int] = []  # segments whose documents were asked for, in order
        self._cold: set[int] = set()  # of these, computed for this request
        self._held = Held([], [])
        self._stale = False  # its documents were let go before they were read
        self._todo: list[torch.Tensor] = []

    @property
    def position(self) -> int:
        """Of its newest token, whose key is not in place yet."""
        return len(self.request.prompt.tokens) + len(self.new) - 1

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were stored before."""
        held, cold = self._held, self._cold
        return sum(d.n_tokens for i, d in enumerate(held.documents) if d is not None and i not in cold)

    def take(self, pages: int) -> bool:
        """Own so many more pages, at the expense of documents that nobody uses. False: nothing was changed."""
        cache, page = self.engine.store.cache, self.engine.store.pool.page
        try:
            if self._own is None:
                self._own = cache.own(pages * page)
            else:
                more = self._own.extend(pages * page)
                if self.session is not None:
                    self.session.add(more)
        except (CacheFull, PoolFull):
            return False
        return True

    @property
    def parked(self) -> bool:
        """Whether its keys and values lie in host memory."""
        return self._parked is not None

    @property
    def left(self) -> list[int]:
        """Tokens that each part of the prompt that is left costs."""
        if self.session is not None:
            return [len(rows) for rows in self._todo]
        return self.placing.parts(self.engine.store)[len(self._found) :]

    @property
    def room(self) -> int:
        """Tokens that fit behind the prompt into the own pages; once they are laid out."""
        if self.session is None:
            return self.placing.needs()["start_room"]
        pages = self.session.pages
        return pages.page - pages.spans[-1][1] + len(pages.spare) * pages.page

    def run_part(self) -> torch.Tensor | None:
        """Do the next part of the prompt; logits [vocabulary] behind the prompt if it was the last one.

        Raises CacheFull if the documents leave too little room for what is computed here.
        """
        if len(self._found) < len(self.placing.documents):
            self._hold_next()
            return None
        products = products_of(self.engine.model)
        with self.engine.store.lock, torch.inference_mode(), products.running():
            if self.session is not None:
                return self._run_chunk(self.session)
            session = self._open()
            return self._run_whole(session) if self.placing.whole else self._run_chunk(session)

    def park(self) -> None:
        """Bring the own keys and values into host memory, and let go of pages and documents."""
        pool = self.engine.store.pool
        if self._own is not None and self.session is not None:
            index = torch.tensor(self._own.pages, device=pool.keys.device)
            kept = [_joined(t.index_select(1, index).cpu()) for t in (pool.keys, pool.values)]
            self._parked = (self._own.pages, Payload.of(*kept))
            self._saved = [(d.key, self._copy(d)) for d in self._held.documents if d is not None]
        else:
            self._stale = True
        self._let_go()

    def restore(self, pages: int) -> bool:
        """Undo `park`, on other pages. False: nothing was changed."""
        if self._parked is None or self.session is None:
            return self.take(pages)
        was, payload = self._parked
        if not self.take(max(pages, len(was))):
            return False
        assert self._own is not None, "it was taken"
        saved = dict(self._saved)
        try:
            wanted = [Wanted(key, kept.n_tokens) for key, kept in self._saved]
            lease = self.engine.store.cache.get(wanted, lambda row: saved[row.key]) if wanted else None
        except (CacheFull, PoolFull, CacheTimeout):
            self._let_go()
            return False
        self.engine.store.pool.write_tokens(self._own.pages[: len(was)], *payload.pieces[0])
        self.session.move(was, self._own, self._stored(lease))
        self._held.leases += [] if lease is None else [lease]
        self._parked, self._saved, self.moved = None, [], self.moved + 1
        return True

    def close(self) -> None:
        """Let go of everything, and save what was computed. Closing twice is harmless."""
        self._let_go()
        self._parked, self._saved = None, []
        if self.session is not None:
            self.session.close()

    def restart(self) -> None:
        """Begin anew, without pages or documents."""
        self._let_go()
        self.session, self._plan, self._parked, self._saved = None, None, None, []
        self._found, self._held, self._todo, self.new = [], self._released(), [], []

    def report(self) -> PrefillReport:
        """What was done for the prompt; call it after that."""
        assert self.session is not None, "the prompt was run"
        if self._plan is not None:
            return self._plan.report()
        made, why = self.session.report(), self.placing.dense_reason
        return replace(made, used="dense", reason=why) if why else made

    def _hold_next(self) -> None:
        """Bring one more document into place."""
        number, store = self.placing.documents[len(self._found)], self.engine.store
        compute = self.request.policy.missing == "store"
        tokens = self.request.prompt.segments[number].tokens
        held = store.hold([tokens], compute=compute, namespace=self.placing.namespace(DOCUMENTS))
        if held.origins[0] == "computed":
            self._cold.add(len(self._held.documents))
        self._found.append(number)
        for name in ("documents", "origins", "leases", "reasons"):
            getattr(self._held, name).extend(getattr(held, name))

    def _open(self) -> PagedSession:
        """Make the session: all documents are in place, or not to be had."""
        engine, request = self.engine, self.request
        assert self._own is not None, "its pages were taken"
        if request.policy.prefill == "prefix":
            self._held, pieces = hold_prefix(engine.store, request.prompt.tokens, self.placing.namespace(PREFIXES))
            layout = Layout.of(pieces, engine.store.pool.page)
        else:
            if self._stale:
                self._found, self._held, self._stale = [], self._released(), False
            while len(self._found) < len(self.placing.documents):
                self._hold_next()
            found = zip(self._found, self._held.documents, strict=True)
            layout = self.placing.layout({i: d for i, d in found if d is not None})
        short = len(layout.spans(layout.fresh)) - len(self._own.pages)
        if short > 0 and not self.take(short):
            raise CacheFull(
                f"documents that could not be stored take {short} more pages of the request, which are not free.",
                needed_bytes=short * engine.store.pool.page_bytes,
                available_bytes=0,
            )
        _, bits = engine.bits(request.prompt, request.policy, self.indexer, None)
        self.session = session = PagedSession(self._own, engine, request, layout, self._held, bits=bits)
        rows = layout.fresh.nonzero()[:, 0]
        self._todo = list(torch.split(rows, self.placing.cuts(len(rows))))
        return session

    def _run_whole(self, session: PagedSession) -> torch.Tensor:
        request, self._todo = self.request, []
        if not self.placing.sift:
            return session.prefill()
        policy = replace(request.policy, chunk_tokens=None)
        self._plan = plan_prefill(self.engine.model, request.prompt, policy, self.indexer)
        assert self._plan.job is not None, "a reason for a dense prefill was looked for"
        rows = torch.arange(session.layout.n_tokens)
        page, slot = (t.to(self.device) for t in session.pages.slots(rows))
        job = KeepingJob(self._plan.job, self.engine.store.pool, page, slot)
        logits = self.engine.forward(session.tokens, rows, job)
        self._finish(session)
        return logits

    def _run_chunk(self, session: PagedSession) -> torch.Tensor | None:
        """Tokens that only the request can compute, in order, so many as a chunk has."""
        rows = self._todo.pop(0)
        own = session.layout.fresh & (torch.arange(session.layout.n_tokens) <= rows[-1])
        stage = Stage.of(session.ground, session.layout, session.pages, rows=rows, own=own)
        logits = self.engine.forward(session.tokens[rows], rows, PrefillPass(session.ground.own, [stage]))
        if self._todo:
            return None
        self._finish(session)
        if self.request.policy.prefill == "prefix":
            mine = (session.ground.own, session.layout, session.pages)
            namespace = self.placing.namespace(PREFIXES)
            session.trace.notes += store_prefix(self.engine.store, *mine, session.prompt.tokens, namespace=namespace)
        return logits

    def _finish(self, session: PagedSession) -> None:
        """Say to the session what later tokens read, and what was computed."""
        none = torch.zeros(0, dtype=torch.int64)
        rows = session.layout.fresh.nonzero()[:, 0]
        session.trace.stages = (Stage(0, rows, none, none, (), session.layout.fresh),)

    def _copy(self, document: DocumentKV) -> Payload:
        """A stored document's keys and values in host memory, one copy for all parked requests."""
        saved = _SAVED.get(document.key)
        if saved is None:
            kept = self.engine.store.pool.read_tokens(document.pages, document.n_tokens)
            saved = _SAVED[document.key] = Payload.of(*(t.cpu() for t in kept))
        return saved

    def _stored(self, lease: Lease | None) -> Iterator[tuple[int, ...]]:
        """The pages of each stored piece of the layout, where the documents lie now."""
        pages = [] if lease is None else [document.pages for document in lease]
        if self.request.policy.prefill == "prefix":
            return iter([tuple(number for block in pages for number in block)])
        return iter(pages)

    def _released(self) -> Held:
        while self._held.leases:
            self._held.leases.pop().close()
        return Held([], [])

    def _let_go(self) -> None:
        """Without a page: documents are others' again, and so are the own pages."""
        self._released()
        if self.session is not None:
            self.session.let_go()
        if self._own is not None:
            self._own.close()
            self._own = None


def _joined(pages: torch.Tensor) -> torch.Tensor:
    """[layers, m, Hkv, page, D] → [layers, Hkv, m * page, D]."""
    return pages.transpose(1, 2).flatten(2, 3).contiguous()
