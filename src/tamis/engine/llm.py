"""`LLM`: a model that answers questions from documents, and says what it did."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tamis.attention.offline import Indexer, Progress, index_spec
from tamis.attention.policy import Policy
from tamis.attention.reuse import ROOM_TOKENS, ReuseEngine
from tamis.attention.reuse_store import DocumentStore, settings_of
from tamis.cache.keys import fingerprint_digest
from tamis.core.dtypes import name_of
from tamis.core.errors import ContextOverflow, InvalidInput
from tamis.corpus import Corpus, Hit, Passage, support
from tamis.engine.answer import Answer, Comparison, Report, Source, Timing
from tamis.engine.knowledge import KnowledgeBase
from tamis.engine.runner import Prefilled, Runner
from tamis.engine.sampling import Sampling, TextStream, sampling_of, stop_tokens
from tamis.engine.template import Template, Turn
from tamis.forecast.heads import Forecast
from tamis.index.spec import IndexSpec
from tamis.index.store import RecordStore
from tamis.model.fingerprint import ModelFingerprint
from tamis.model.source import DEFAULT_MODEL, LoadedModel, load_model
from tamis.prompt.segments import Prompt

Document = Passage | Hit | str


class LLM:
    """A causal language model with Tamis's attention.

    model     "smollm2", a directory (safetensors or GGUF), a .gguf file, a hub name, or a `LoadedModel`
    device, dtype, yarn, adapter   see `model.source.load_model`
    forecast  folder that `tamis train forecast` wrote for this very model: what decode="forecast" reads by
    policy    the defaults of every request; single choices may be given by name: LLM("…", prefill="sift")
    choices   of the policy, and those of the documents' cache: `cache_bytes`, `host_bytes`, `cache_dir`, `disk_bytes`,
              see `attention.reuse_store.CacheSettings`

    It works on one request at a time, others wait. Use it in a `with` block, or `close` it, to release its stores.
    """

    def __init__(
        self,
        model: str | LoadedModel = DEFAULT_MODEL,
        *,
        device: str | None = None,
        dtype: str | None = None,
        yarn: float | None = None,
        adapter: str | Path | None = None,
        forecast: str | Path | None = None,
        policy: Policy | None = None,
        on_convert: Callable[[str], None] | None = None,
        **choices: Any,
    ) -> None:
        self._cache_settings = settings_of(choices)
        self.policy = Policy.of(policy, **choices)
        if isinstance(model, LoadedModel):
            for name, value in (("yarn", yarn), ("adapter", adapter)):
                if value is not None:
                    raise InvalidInput(f"{name} is {value}, but model {model.name!r} is loaded; give it to load_model.")
            loaded = model
        else:
            options: dict[str, Any] = {"device": device, "dtype": dtype, "yarn": yarn, "on_convert": on_convert}
            loaded = load_model(model, adapter=adapter, **options)
        self.name, self.tokenizer = loaded.name, loaded.tokenizer
        self.runner = Runner(loaded.model, self.policy, _forecast(forecast, loaded))
        self.template = Template(self.tokenizer)
        self.stop_tokens = stop_tokens(loaded.model, self.tokenizer)
        self._spec: IndexSpec | None = None
        self._stores: dict[bytes, RecordStore] = {}
        self._block_tuned = loaded.block_tuned
        self._reuse: ReuseEngine | None = None

    def corpus(self, path: str | Path | None = None, *, rebuild: bool = False) -> KnowledgeBase:
        """Open or make the knowledge base in the folder `path` (None: in memory). Its records serve later requests.

        Raises StoreMismatch if the folder was written with another model, tokenizer, tile size or thresholds; with
        `rebuild` its records are dropped and made again.
        """
        spec = self.spec(self.policy)
        store = RecordStore.open(path, spec, rebuild=rebuild)
        try:
            corpus = Corpus(path)
        except BaseException:
            store.close()
            raise
        self._stores[spec.digest] = store
        base = KnowledgeBase(corpus, self._indexer(self.policy), self.template, spec.fingerprint.tokenizer)
        base.on_close = lambda: self._forget(store)
        return base

    def generate(
        self,
        question: str,
        documents: Sequence[Document] = (),
        *,
        history: Sequence[Turn] = (),
        sampling: Sampling | None = None,
        on_text: Callable[[str], None] | None = None,
        measure_recall: bool = False,
        **choices: Any,
    ) -> Answer:
        """Answer `question` from `documents`: passages, hits or plain texts, the best first.

        In the prompt the best stands last, next to the question, where small models read it best.

        on_text   called with each piece of the answer as it comes
        choices   overrides of the policy for this request

        Raises ContextOverflow if the prompt does not fit the model; `fit` says what would.
        """
        stream = self._answer(question, documents, history, sampling_of(sampling), measure_recall, choices)
        while True:
            try:
                piece = next(stream)
            except StopIteration as end:
                answer: Answer = end.value
                return answer
            if on_text:
                on_text(piece)

    def stream(
        self, question: str, documents: Sequence[Document] = (), *, sampling: Sampling | None = None, **choices: Any
    ) -> Iterator[str]:
        """The answer of `generate`, piece by piece."""
        yield from self._answer(question, documents, (), sampling_of(sampling), False, choices)

    def compare(
        self,
        question: str,
        documents: Sequence[Document] = (),
        *,
        sampling: Sampling | None = None,
        measure_recall: bool = False,
        **choices: Any,
    ) -> Comparison:
        """The same prompt prefilled dense and as asked for (default: with SIFT), in one run, after a warm-up.

        Bits and stored documents are made beforehand.
        """
        from tamis.engine.compare import compare

        asked = self.policy.prefill if self.policy.prefill != "dense" else "sift"
        choices = {"prefill": asked} | choices
        return compare(self, question, documents, sampling=sampling, measure_recall=measure_recall, choices=choices)

    @property
    def dtype(self) -> str:
        """The weights' dtype, such as "float32"."""
        return name_of(next(self.runner.model.parameters()).dtype)

    def fit(self, question: str, documents: Sequence[Document], *, room: int = 128) -> list[Document]:
        """The longest beginning of `documents` that leaves `room` tokens for the answer.

        Raises ContextOverflow if not even the question alone does.
        """
        used = len(self.template.prompt(question, []).tokens) + room
        self.runner.check_fits(used)
        kept: list[Document] = []
        for document in documents:
            used += len(self.document_tokens(document))
            if used >= self.runner.geometry.context_tokens:
                break
            kept.append(document)
        if documents and not kept:
            raise ContextOverflow(
                f"the first document has {len(self.document_tokens(documents[0]))} tokens and does not fit the "
                f"model's {self.runner.geometry.context_tokens} beside the question. Cut it into passages."
            )
        return kept

    def document_tokens(self, document: Document) -> tuple[int, ...]:
        """The tokens that stand for a document in a prompt."""
        if isinstance(document, str):
            return self.template.document_tokens("", document)
        passage = document.passage if isinstance(document, Hit) else document
        return self.template.document_tokens(passage.title, passage.text)

    def prefill(
        self, prompt: Prompt, *, measure_recall: bool = False, room_tokens: int = ROOM_TOKENS, **choices: Any
    ) -> Prefilled:
        """Only prefill a prompt of token segments; for benchmarks and evaluation.

        Where documents are reused, `room_tokens` more are reserved for the answer, and what is returned holds on to
        the documents until it is decoded, closed or gone.
        """
        policy = Policy.of(self.policy, **choices)
        options: dict[str, Any] = {"measure_recall": measure_recall, "room_tokens": room_tokens}
        return self.runner.prefill(prompt, policy, lambda: self._indexer(policy), reuse=self.reuse_engine, **options)

    def reuse_engine(self) -> ReuseEngine:
        """The stored documents of this model and how requests read them; made at first use, with its cache.

        Raises ModelUnsupported for a model whose keys could not be moved rightly.
        """
        with self.runner.lock:
            if self._reuse is None:
                fingerprint = fingerprint_digest(ModelFingerprint(**asdict(self.spec(self.policy).fingerprint)))
                model, switch, lock = self.runner.model, self.runner.switch, self.runner.lock
                store = DocumentStore(model, switch, fingerprint, settings=self._cache_settings, lock=lock)
                self._reuse = ReuseEngine(model, switch, store, block_tuned=self._block_tuned)
            return self._reuse

    def index(self, documents: Sequence[Sequence[int]], on_progress: Progress | None = None, **choices: Any) -> int:
        """Observe documents (token ids) now rather than at their first prompt. Returns how many were new."""
        return self._indexer(Policy.of(self.policy, **choices)).index(documents, on_progress)

    def spec(self, policy: Policy) -> IndexSpec:
        """What records for this model under `policy` have in common. Raises InvalidInput once it is closed."""
        self.runner.check_open()
        if self._spec is None:
            prefix = self.template.prefix_tokens
            self._spec = index_spec(self.runner.model, self.tokenizer, prefix, policy.thresholds, policy.tile)
        return replace(self._spec, thresholds=policy.thresholds, tile=policy.tile)

    def close(self) -> None:
        """Save stored documents where there is a `cache_dir`, close the stores, put the stock attention back."""
        if self._reuse is not None:
            self._reuse.store.close()
            self._reuse = None
        for store in self._stores.values():
            store.close()
        self._stores.clear()
        self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _forget(self, store: RecordStore) -> None:
        self._stores = {digest: s for digest, s in self._stores.items() if s is not store}

    def _indexer(self, policy: Policy) -> Indexer:
        """The indexer of the store that fits `policy`: the knowledge base opened last, else one in memory."""
        spec = self.spec(policy)
        if spec.digest not in self._stores:
            self._stores[spec.digest] = RecordStore.open(None, spec)
        store = self._stores[spec.digest]
        return Indexer(self.runner.model, self.runner.switch, store, spec, self.template.prefix_tokens)

    def _answer(
        self,
        question: str,
        documents: Sequence[Document],
        history: Sequence[Turn],
        sampling: Sampling,
        measure_recall: bool,
        choices: dict[str, Any],
    ) -> Generator[str, None, Answer]:
        begin = time.perf_counter()
        prompt = self.template.prompt(question, [self.document_tokens(d) for d in reversed(_docs(documents))], history)
        prompted = time.perf_counter()
        start = self.prefill(prompt, measure_recall=measure_recall, room_tokens=sampling.max_new_tokens, **choices)
        text, first = TextStream(self.tokenizer, sampling.stop), time.perf_counter()
        new: list[int] = []
        for token in self.runner.decode(start, sampling, self.stop_tokens):
            if not new:
                first = time.perf_counter()
            new.append(token)
            if piece := text.push(token):
                yield piece
            if text.stopped:
                break
        ended = len(new) < self.runner.most_tokens(start, sampling) or text.stopped
        if piece := text.finish():
            yield piece
        timing = Timing(
            ttft_s=first - begin,
            retrieval_s=0.0,
            index_s=start.index_s,
            prompt_s=prompted - begin + start.plan_s,
            prefill_s=start.prefill_s,
            decode_s=time.perf_counter() - first,
        )
        report = Report(start.report, timing, len(new), "stop" if ended else "length", decode=start.decode_report)
        return Answer(text.text, report, _sources(documents, text.text), tuple(new), start.logits)


def _docs(documents: Sequence[Document]) -> Sequence[Document]:
    """Themselves. Raises InvalidInput for what is none, and for one text where a list of them belongs: its letters
    would be taken for documents."""
    if isinstance(documents, str):
        raise InvalidInput("documents is one text; give a list of documents: [text].")
    if wrong := {type(d).__name__ for d in documents if not isinstance(d, str | Passage | Hit)}:
        raise InvalidInput(f"documents has {', '.join(sorted(wrong))}; give texts, passages or hits.")
    return documents


def _forecast(folder: str | Path | None, loaded: LoadedModel) -> Forecast | None:
    return None if folder is None else Forecast.load(folder, loaded.model, loaded.tokenizer)


def _sources(documents: Sequence[Document], answer: str) -> tuple[Source, ...]:
    passages = [
        d.passage if isinstance(d, Hit) else Passage(d, "", f"text {i}", 1, 1) if isinstance(d, str) else d
        for i, d in enumerate(documents, 1)
    ]
    scores = support(answer, passages) if passages else []
    return tuple(Source(i, p.place, p.title, s) for i, (p, s) in enumerate(zip(passages, scores, strict=True), start=1))
