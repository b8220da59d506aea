"""What the offline pass costs: documents observed and stored, against their dense prefill in the same packs.

Nothing is timed before documents that share a pass have been found to give what each gives alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from tamis.attention.hook import Switch, install
from tamis.attention.offline import Indexer, index_spec, observe_documents, pack_tokens_of, packed_forward, packs
from tamis.bench.results import Row
from tamis.bench.shapes import random_model
from tamis.bench.text import passages
from tamis.core.dtypes import name_of
from tamis.core.errors import ContextOverflow, InvalidInput, TamisError
from tamis.index.spec import IndexSpec, Thresholds
from tamis.index.store import RecordStore
from tamis.kernels import dispatch
from tamis.model.family import geometry

if TYPE_CHECKING:
    from tamis.engine.llm import LLM

PREFIX_TOKENS = 64  # where a shape, which has no template, is timed
GATE_DOCUMENTS, GATE_TILES = 3, 4
GATE_ERROR = 1e-4  # largest difference of a tile's mass in float32
GATE_ERROR_HALF = 0.05  # the same in bfloat16 and float16: other matrix sizes round otherwise


@dataclass(frozen=True)
class Subject:
    """A model with Tamis in it, and the documents (token ids) to observe behind `prefix`."""

    name: str
    model: Any
    switch: Switch
    spec: IndexSpec
    prefix: tuple[int, ...]
    documents: Sequence[Sequence[int]]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        found: torch.device = next(self.model.parameters()).device
        return found


@dataclass(frozen=True)
class IndexResult:
    """Seconds of whole passes over all documents, one number per round; offline and dense took turns."""

    model: str
    dtype: str
    documents: int
    tokens: int
    prefix_tokens: int
    pack_tokens: int
    passes: int
    offline_s: tuple[float, ...]
    dense_s: tuple[float, ...]
    gate_error: float

    @property
    def ratios(self) -> list[float]:
        """Offline over dense, round by round."""
        return [a / b for a, b in zip(self.offline_s, self.dense_s, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON; medians."""
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "offline_s": median(self.offline_s),
            "dense_s": median(self.dense_s),
            "ratio": median(self.ratios),
            "documents_per_s": self.documents / median(self.offline_s),
        }

    def rows(self) -> list[Row]:
        """For results/index.csv."""
        case = f"{self.model}/{self.documents} x {self.tokens}"
        offline = f"packed-{self.pack_tokens}"
        return [
            Row.of(case, offline, "offline_s", self.offline_s, unit="s"),
            Row.of(case, "dense", "dense_s", self.dense_s, unit="s"),
            Row.of(case, offline, "ratio", self.ratios, unit="1"),
            Row.of(case, offline, "documents_per_s", [self.documents / s for s in self.offline_s], unit="1/s"),
        ]


@dataclass
class DenseJob:
    """Dense attention of packed prompts of these lengths, as in the offline pass, looked at by nobody."""

    lengths: list[int]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Job.attend`."""
        return dispatch.packed_causal_attention(q, k, v, scale, self.lengths)


def bench_index(
    subject: Subject, *, repeats: int = 3, pack_tokens: int | None = None, note: Callable[[str], None] = lambda _: None
) -> IndexResult:
    """Observe and store all documents, and prefill them dense in the same packs, `repeats` times each after a warm-up.

    Raises InvalidInput for documents of one tile (they need no pass) or twice the same, ContextOverflow for those that
    do not fit the model, and TamisError if documents that share a pass do not give what each gives alone.
    """
    _check(subject)
    gate = check_packing(subject)
    room = pack_tokens_of(subject.device) if pack_tokens is None else pack_tokens
    prompts = [[*subject.prefix, *document] for document in subject.documents]
    cut = [[prompts[i] for i in pack] for pack in packs([len(p) for p in prompts], room)]
    offline, dense = [], []
    for i in range(repeats + 1):
        note(f"run {i} of {repeats}" if i else "warm-up")
        begin = time.perf_counter()
        _dense(subject, cut)
        between = time.perf_counter()
        store = RecordStore.open(None, subject.spec)
        indexer = Indexer(subject.model, subject.switch, store, subject.spec, subject.prefix, room)
        indexer.index(subject.documents)
        if i:  # the first round warms caches up
            dense.append(between - begin)
            offline.append(time.perf_counter() - between)
    return IndexResult(
        model=subject.name,
        dtype=name_of(next(subject.model.parameters()).dtype),
        documents=len(subject.documents),
        tokens=max(map(len, subject.documents)),
        prefix_tokens=len(subject.prefix),
        pack_tokens=room,
        passes=len(cut),
        offline_s=tuple(offline),
        dense_s=tuple(dense),
        gate_error=gate,
    )


def check_packing(subject: Subject) -> float:
    """Largest difference of a tile's attention mass between documents that share a pass and each of them alone."""
    few = [document[: GATE_TILES * subject.spec.tile + i] for i, document in enumerate(subject.documents)]
    few = few[:GATE_DOCUMENTS]
    beta = subject.spec.thresholds.beta

    def masses(documents: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        found = observe_documents(
            subject.model, subject.switch, documents, subject.prefix, tile=subject.spec.tile, beta=beta
        )
        return [stats.tile_mass for stats in found]

    alone = [mass for document in few for mass in masses([document])]
    differences = [(a - b).abs().max() for a, b in zip(masses(few), alone, strict=True)]
    error = float(torch.stack(differences).max())  # a NaN stays one
    allowed = GATE_ERROR if next(subject.model.parameters()).dtype == torch.float32 else GATE_ERROR_HALF
    if not error <= allowed:
        raise TamisError(
            f"documents that share a pass differ from each alone by {error:.2g} of a row's attention (allowed "
            f"{allowed:g}); nothing was timed. Please report this model."
        )
    return error


def text_subject(llm: LLM, n_documents: int, n_tokens: int, docs: Sequence[str] = ()) -> Subject:
    """`llm`'s model, with documents of exactly `n_tokens` cut from real text (`bench.text`), which is repeated from
    another place where there is too little of it."""
    stream: list[int] = []
    for passage in passages(n_documents * n_tokens, llm.template.count, docs):
        stream.extend(llm.template.document_tokens(passage.title, passage.text))
    step = n_tokens if n_documents * n_tokens <= len(stream) else max(1, len(stream) // n_documents)
    documents = [[stream[(i * step + at) % len(stream)] for at in range(n_tokens)] for i in range(n_documents)]
    runner, spec = llm.runner, llm.spec(llm.policy)
    return Subject(llm.name, runner.model, runner.switch, spec, llm.template.prefix_tokens, documents)


@contextmanager
def shape_subject(
    shape: str, n_documents: int, n_tokens: int, *, device: str, dtype: torch.dtype, layers: int | None = None
) -> Iterator[Subject]:
    """A model of that shape (`shapes.SHAPES`) with random weights, and random documents; for speed alone."""
    model = random_model(shape, device=device, dtype=dtype, layers=layers)
    draw = torch.Generator().manual_seed(0)
    size = (n_documents + 1, max(n_tokens, PREFIX_TOKENS))
    ids = torch.randint(0, model.config.vocab_size, size, generator=draw).tolist()
    prefix = tuple(ids[0][:PREFIX_TOKENS])
    spec = index_spec(model, None, prefix, Thresholds())
    name = f"{shape}-{layers}-layers" if layers else shape
    switch, uninstall = install(model)
    try:
        yield Subject(name, model, switch, spec, prefix, [row[:n_tokens] for row in ids[1:]])
    finally:
        uninstall()


def _check(subject: Subject) -> None:
    shortest = min(map(len, subject.documents), default=0)
    distinct = len({tuple(document) for document in subject.documents})
    if shortest <= subject.spec.tile or distinct < len(subject.documents):
        raise InvalidInput(
            f"{len(subject.documents)} documents, {distinct} of them different, the shortest of {shortest} tokens; "
            f"give different ones of more than {subject.spec.tile} tokens (a shorter one needs no pass)."
        )
    longest, limit = max(map(len, subject.documents)), geometry(subject.model.config).context_tokens
    if len(subject.prefix) + longest > limit:
        raise ContextOverflow(
            f"a document of {longest} tokens behind a prefix of {len(subject.prefix)} exceeds the model's {limit}; "
            "give fewer tokens."
        )


def _dense(subject: Subject, cut: Sequence[Sequence[Sequence[int]]]) -> None:
    for pack in cut:
        packed_forward(subject.model, subject.switch, pack, DenseJob([len(prompt) for prompt in pack]))
    if subject.device.type == "cuda":
        torch.cuda.synchronize(subject.device)
