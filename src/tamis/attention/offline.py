"""The offline pass: run documents alone through the model, once, and keep their bits in a store.

Many documents go through in one forward pass, packed one behind another; none sees another.
Joins the model, the observer and the record store; knows token ids, not files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tamis.attention.hook import Job, Switch, packed_pass
from tamis.core.errors import ContextOverflow, InvalidInput
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

PACK_TOKENS = 32768  # of one forward pass over several documents
PACK_TOKENS_CPU = 640  # short passages gain 6 %; more tokens leave the CPU's cache and cost up to 10 %
HELD_BYTES = 1 << 30  # of statistics that may wait on a device for the end of a pass


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
    """Dense attention of packed prompts that lets an observer look at each, at every layer."""

    observers: Sequence[Observer]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [observer.tiling.n_tokens for observer in self.observers]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Job.attend`."""
        lengths = self.lengths
        out, lse = dispatch.packed_causal_attention(q, k, v, scale, lengths)
        for observer, n, end in zip(self.observers, lengths, itertools.accumulate(lengths), strict=True):
            own = slice(end - n, end)
            observer.layer(layer, q[:, own], k[:, own], lse[:, own], scale)
        if sum(observer.held_bytes for observer in self.observers) > HELD_BYTES:
            for observer in self.observers:
                observer.release()
        return out, lse


def packed_forward(model: Any, switch: Switch, prompts: Sequence[Sequence[int]], job: Job) -> None:
    """One pass over whole prompts (token ids), one behind another, each from position 0; `job` keeps them apart."""
    device = next(model.parameters()).device
    ids = torch.tensor([[token for prompt in prompts for token in prompt]], device=device)
    positions = torch.tensor([[at for prompt in prompts for at in range(len(prompt))]], device=device)
    n = ids.shape[1]
    with torch.inference_mode(), switch.running(job, n), packed_pass(n):
        model.base_model(ids, position_ids=positions, use_cache=False)


def observe_documents(
    model: Any, switch: Switch, documents: Sequence[Sequence[int]], prefix: Sequence[int], *, tile: int, beta: float
) -> list[DocumentStats]:
    """Statistics of each document's own dense prefill behind `prefix`, all in one pass.

    Raises ContextOverflow if a document and the prefix do not fit the model's context.
    """
    limit = geometry(model.config).context_tokens
    longest = max(map(len, documents), default=0)
    if len(prefix) + longest > limit:
        raise ContextOverflow(
            f"a document of {longest} tokens behind a prefix of {len(prefix)} exceeds the model's {limit}; "
            "cut it into passages (tamis index does)."
        )
    if not documents:
        return []
    observers = [Observer(len(prefix), len(tokens), tile=tile, beta=beta) for tokens in documents]
    packed_forward(model, switch, [[*prefix, *tokens] for tokens in documents], ObserveJob(observers))
    assert observers[0].n_layers, f"the switch let no layer of an offline pass through: {switch.refused}"
    return [observer.stats() for observer in observers]


def pack_tokens_of(device: torch.device) -> int:
    """Tokens of one pass where nothing else is asked for."""
    return PACK_TOKENS_CPU if device.type == "cpu" else PACK_TOKENS


def packs(lengths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Cut documents of these lengths into packs of at most `room` tokens, as indices, short ones first.

    Equal lengths come together, so that passes share their lists. One longer than `room` is a pack of its own. Raises
    InvalidInput if `room` is not positive.
    """
    if room < 1:
        raise InvalidInput(f"packs of {room} tokens; give 1 or more (a longer document is then a pack of its own).")
    pack: list[int] = []
    used = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if pack and used + lengths[i] > room:
            yield pack
            pack, used = [], 0
        pack.append(i)
        used += lengths[i]
    if pack:
        yield pack


@dataclass(frozen=True)
class Indexer:
    """Makes what is missing in a store. Safe to interrupt: every pack of documents is committed on its own.

    `pack_tokens` bounds the tokens of a pass, prefixes included (None: by device); a longer document goes alone.
    """

    model: Any
    switch: Switch
    store: RecordStore
    spec: IndexSpec
    prefix: tuple[int, ...]
    pack_tokens: int | None = None

    def index(self, documents: Sequence[Sequence[int]], on_progress: Progress | None = None) -> int:
        """Observe and store those documents (token ids) that the store lacks. Returns how many were made.

        `on_progress` is told about every document, once it is safe in the store.
        """
        ids = [document_id(d) for d in documents]
        known = dict(zip(ids, self.store.has(ids), strict=True))
        todo = {i: d for i, d in zip(ids, documents, strict=True) if not known[i]}
        tell = on_progress or (lambda done, total: None)
        small = [i for i, d in todo.items() if len(d) <= self.spec.tile]
        self.store.put([self._trivial(i, todo[i]) for i in small])
        done = len(small)
        tell(done, len(todo))
        large = [i for i, d in todo.items() if len(d) > self.spec.tile]
        room = pack_tokens_of(next(self.model.parameters()).device) if self.pack_tokens is None else self.pack_tokens
        for pack in packs([len(self.prefix) + len(todo[i]) for i in large], room):
            self.store.put(self._observed({large[at]: todo[large[at]] for at in pack}))
            for _ in pack:
                done += 1
                tell(done, len(todo))
        return len(todo)

    def records(self, documents: Sequence[Sequence[int]]) -> list[Record | None]:
        """The stored records, None where there is none."""
        return self.store.get([document_id(d) for d in documents])

    def _trivial(self, identity: bytes, tokens: Sequence[int]) -> Record:
        bits = trivial_bits(self.spec.n_layers, self.spec.n_heads, len(tokens), self.spec.tile)
        return Record.of(bits, document_id=identity, spec=self.spec, n_tokens=len(tokens))

    def _observed(self, documents: dict[bytes, Sequence[int]]) -> list[Record]:
        thresholds = self.spec.thresholds
        found = observe_documents(
            self.model, self.switch, list(documents.values()), self.prefix, tile=self.spec.tile, beta=thresholds.beta
        )
        return [
            Record.of(encode(stats, thresholds), document_id=identity, spec=self.spec, n_tokens=stats.n_tokens)
            for identity, stats in zip(documents, found, strict=True)
        ]
