"""The offline pass: run documents alone through the model, once, and keep their bits in a store.

Joins the model, the observer and the record store; knows token ids, not files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tamis.attention.hook import Switch
from tamis.core.errors import ContextOverflow
from tamis.index.encode import encode, trivial_bits
from tamis.index.observe import Observer
from tamis.index.record import Record, document_id
from tamis.index.spec import DocumentStats, Fingerprint, IndexSpec, Thresholds
from tamis.index.store import RecordStore
from tamis.kernels import dispatch
from tamis.kernels.lists import TILE
from tamis.model.family import geometry
from tamis.model.fingerprint import fingerprint, tokens_hash

Progress = Callable[[int, int], None]  # documents done, documents to do


def index_spec(
    model: Any, tokenizer: Any | None, prefix: Sequence[int], thresholds: Thresholds, tile: int = TILE
) -> IndexSpec:
    """What records made by this model behind these prefix tokens have in common."""
    shape = geometry(model.config)
    return IndexSpec(
        fingerprint=Fingerprint(**asdict(fingerprint(model, tokenizer))),
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        prefix=tokens_hash(prefix),
        tile=tile,
        thresholds=thresholds,
    )


@dataclass
class ObserveJob:
    """Dense attention that lets an observer look at every layer."""

    observer: Observer

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Job.attend`."""
        out, lse = dispatch.causal_attention(q, k, v, scale)
        self.observer.layer(layer, q, k, lse, scale)
        return out, lse


def observe_document(
    model: Any, switch: Switch, tokens: Sequence[int], prefix: Sequence[int], *, tile: int, beta: float
) -> DocumentStats:
    """Statistics of one document's dense prefill behind `prefix`. Raises ContextOverflow if both do not fit."""
    limit = geometry(model.config).context_tokens
    if len(prefix) + len(tokens) > limit:
        raise ContextOverflow(
            f"a document of {len(tokens)} tokens behind a prefix of {len(prefix)} exceeds the model's {limit}; "
            "cut it into passages (tamis index does)."
        )
    observer = Observer(len(prefix), len(tokens), tile=tile, beta=beta)
    ids = torch.tensor([[*prefix, *tokens]], device=next(model.parameters()).device)
    with torch.inference_mode(), switch.running(ObserveJob(observer), ids.shape[1]):
        model.base_model(ids, use_cache=False)
    assert observer.n_layers, f"the switch let no layer of an offline pass through: {switch.refused}"
    return observer.stats()


@dataclass(frozen=True)
class Indexer:
    """Makes what is missing in a store. Safe to interrupt: every document is committed on its own."""

    model: Any
    switch: Switch
    store: RecordStore
    spec: IndexSpec
    prefix: tuple[int, ...]

    def index(self, documents: Sequence[Sequence[int]], on_progress: Progress | None = None) -> int:
        """Observe and store those documents (token ids) that the store lacks. Returns how many were made."""
        ids = [document_id(d) for d in documents]
        known = dict(zip(ids, self.store.has(ids), strict=True))
        todo = {i: d for i, d in zip(ids, documents, strict=True) if not known[i]}
        small = [i for i, d in todo.items() if len(d) <= self.spec.tile]
        self.store.put([self._trivial(i, todo[i]) for i in small])
        for done, (identity, tokens) in enumerate((i, d) for i, d in todo.items() if len(d) > self.spec.tile):
            if on_progress:
                on_progress(len(small) + done, len(todo))
            self.store.put([self._observed(identity, tokens)])
        if on_progress:
            on_progress(len(todo), len(todo))
        return len(todo)

    def records(self, documents: Sequence[Sequence[int]]) -> list[Record | None]:
        """The stored records, None where there is none."""
        return self.store.get([document_id(d) for d in documents])

    def _trivial(self, identity: bytes, tokens: Sequence[int]) -> Record:
        bits = trivial_bits(self.spec.n_layers, self.spec.n_heads, len(tokens), self.spec.tile)
        return Record.of(bits, document_id=identity, spec=self.spec, n_tokens=len(tokens))

    def _observed(self, identity: bytes, tokens: Sequence[int]) -> Record:
        stats = observe_document(
            self.model, self.switch, tokens, self.prefix, tile=self.spec.tile, beta=self.spec.thresholds.beta
        )
        bits = encode(stats, self.spec.thresholds)
        return Record.of(bits, document_id=identity, spec=self.spec, n_tokens=len(tokens))
