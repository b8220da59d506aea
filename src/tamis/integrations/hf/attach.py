"""`attach`: SIFT for a transformers model that somebody else calls, `generate` included.

The prompt is the caller's: documents are found in it by their token ids. What is not found, or a pass that no plan
fits (a batch, padding, a chunk that ends inside a tile), runs the stock attention, and the report says so. Chunks that
fit (`generate(prefill_chunk_size=…)`) have one report together; a lone token behind others that does not come from
`generate` is taken for a decode step. Where the policy asks for another form of cache, the one that `generate` makes is
given it; see `integrations.hf.caches`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from tamis.attention.caching import Caching, check_form
from tamis.attention.fused import FusedForecast
from tamis.attention.hook import attention_layers, install
from tamis.attention.offline import Indexer, index_spec
from tamis.attention.planner import Plan, plan_prefill
from tamis.attention.policy import Policy
from tamis.attention.report import DecodeReport, PrefillReport
from tamis.core.errors import InvalidInput
from tamis.forecast.heads import Forecast
from tamis.index.store import RecordStore
from tamis.integrations.hf.caches import CACHE, MASK, Caches, argument, rows
from tamis.integrations.hf.chunks import NOT_FOUND, Begun, Foretold, fit, whole_documents
from tamis.model.family import geometry
from tamis.prompt.segments import Prompt, find_documents

ENDS = sorted(product(range(3), repeat=2), key=sum)[1:]  # tokens left out at a document's beginning and end
MIN_CUT_TOKENS = 16


def attach(
    model: Any,
    *,
    documents: Sequence[str | Sequence[int]] = (),
    tokenizer: Any | None = None,
    store: str | None = None,
    prefix: Sequence[int] = (),
    policy: Policy | None = None,
    measure_recall: bool = False,
    forecast: str | Path | None = None,
    **choices: Any,
) -> Attached:
    """Put Tamis into `model` until the returned object is closed (use it in a `with` block).

    model      a transformers causal language model of a supported family
    documents  texts (needs `tokenizer`) or token ids, as they will stand in the prompt
    store      folder of records, kept between runs; None keeps them in memory
    prefix     token ids that documents are observed behind; best what stands before them in the prompt
    forecast   folder that `tamis train forecast` wrote for this model (needs `tokenizer`, which it is bound to as well)
    choices    fields of `Policy`: prefill="sift", selector=…, kv="selfindex", decode="selfindex", offload="host"

    Raises ModelUnsupported for a model whose attention Tamis has not been proved on.
    """
    made = Policy.of(policy, **choices)
    heads = None if forecast is None else _forecast(forecast, model, tokenizer)
    return Attached(model, documents, tokenizer, store, tuple(prefix), made, measure_recall, heads)


class Attached:
    """A model with Tamis in it. `report` and `reports` tell what its prefills did, `decode_report` what came behind."""

    def __init__(
        self,
        model: Any,
        documents: Sequence[str | Sequence[int]],
        tokenizer: Any | None,
        store: str | None,
        prefix: tuple[int, ...],
        policy: Policy,
        measure_recall: bool,
        forecast: Forecast | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
            raise InvalidInput(
                f"model is a {type(model).__name__}; give a transformers model, as from_pretrained does."
            )
        if isinstance(documents, str):
            raise InvalidInput("documents is one text; give a list of documents: [text].")
        geometry(model.config)
        attention_layers(model)
        self.model, self.policy = model, policy
        self.documents = [_token_ids(d, tokenizer) for d in documents]
        self.reports: list[PrefillReport] = []
        self._measure_recall, self._prefix = measure_recall, prefix
        spec = index_spec(model, tokenizer, prefix, policy.thresholds, policy.tile)
        with ExitStack() as undo:
            self._switch, uninstall = install(model)
            undo.callback(uninstall)
            fused = None if forecast is None else FusedForecast(model, forecast)
            if fused is not None:
                undo.callback(fused.close)
            check_form(policy, model, fused)
            self._foretold = Foretold(model)
            undo.callback(self._foretold.close)
            self._store = RecordStore.open(store, spec)
            self._undo = undo.pop_all()
        self._indexer = Indexer(model, self._switch, self._store, spec, prefix)
        self._caching = Caching(model, fused, measure=measure_recall)
        self._caches = Caches(model, policy, self._caching)
        self._running: tuple[Plan | None, ExitStack] | None = None
        self._begun: Begun | None = None
        self._continued: Plan | None = None  # a plan whose report takes the place of the last one
        self._closed = False
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    @property
    def report(self) -> PrefillReport | None:
        """What the last prefill did."""
        return self.reports[-1] if self.reports else None

    @property
    def decode_report(self) -> DecodeReport | None:
        """What was done with the cache that a pass used last; None where kv is "auto" and decode "dense"."""
        return self._caches.report

    def new_cache(self) -> Any:
        """An empty cache of the policy's form, for callers that keep one over several turns."""
        return self._caches.new_cache()

    def close(self) -> None:
        """Take Tamis out of the model and close the store. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._end_pass()
        for hook in self._hooks:
            hook.remove()
        self._undo.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _before(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._end_pass()  # of a pass that was interrupted: torch calls no hooks after Ctrl-C
        n, prompt = rows(args, kwargs), self._foretold.prompt()
        if not n or self._switch.job is not None:
            return None
        ids = argument(args, kwargs, 0, "input_ids")
        plan = self._plan(ids, args, kwargs) if ids is not None and ids.dim() == 2 and (n > 1 or prompt) else None
        decoding = self._caches.of_pass(args, kwargs)
        passing = ExitStack()
        self._running = (plan, passing)
        if plan is not None:
            passing.enter_context(plan.running(self._switch))
        if decoding is not None:
            if len(args) > CACHE:  # None was passed by its place
                args = (*args[:CACHE], decoding.cache, *args[CACHE + 1 :])
            step = n == 1 and not prompt and decoding.cache.get_seq_length() > 0
            passing.enter_context(decoding.running(self._switch, step=step))
        return args, kwargs

    def _plan(self, ids: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        mask = argument(args, kwargs, MASK, "attention_mask")
        cache = argument(args, kwargs, CACHE, "cache", "past_key_values")  # renamed in transformers 5.24
        begun, self._begun = self._begun, None
        past = int(cache.get_seq_length()) if cache is not None else 0
        tokens, reason = ids[0].tolist(), ""
        if ids.shape[0] != 1:
            reason = f"a batch of {ids.shape[0]} prompts; a sparse prefill takes one"
        elif mask is not None and mask.dim() == 2 and not bool(mask.all()):
            reason = "the prompt is padded"
        elif past and (begun is None or not begun.goes_on(cache)):
            reason = "the prompt goes on after cached tokens"
        if not reason:
            so_far = [*begun.tokens, *tokens] if past and begun is not None else tokens
            plan = self._plan_chunk(so_far, past, begun if past else None)
            if plan is not None:
                self._continued = plan if past and begun is not None and begun.job else None
                self._begun = Begun(weakref.ref(cache), so_far, plan) if cache is not None else None
                return plan
            reason = "the prompt goes on after cached tokens, with a chunk that begins or ends inside a tile"
        dense = Plan(_find(tokens, self.documents), self.policy, None, reason if self.policy.prefill != "dense" else "")
        if past and begun is not None and cache is not None and begun.goes_on(cache):
            self._begun = Begun(begun.cache, [*begun.tokens, *tokens], dense)
        return dense

    def _plan_chunk(self, tokens: list[int], past: int, begun: Begun | None) -> Plan | None:
        """The plan of tokens[past:], behind what has `begun`. None: a chunk that fits no tiles."""
        found = _find(tokens, self.documents)
        # the chunk may end inside a document; if not on a border of its tiles, that document's rows are dense
        sparse = False
        for prompt in dict.fromkeys((whole_documents(found, self.documents, self.policy.tile), found)):
            plan = self._plan_prompt(prompt)
            if fit(plan, past, len(tokens), begun):
                return None if past and sparse and plan.job is None else plan
            sparse = True
        return None

    def _plan_prompt(self, prompt: Prompt) -> Plan:
        policy = replace(self.policy, chunk_tokens=None)  # the caller makes the passes
        plan = plan_prefill(
            self.model, prompt, policy, lambda: self._indexer, measure_recall=self._measure_recall,
            forecast=self._caching.forecast,
        )  # fmt: skip
        missing = len(self.documents) - len(prompt.documents)
        if missing and self.policy.prefill != "dense":
            plan.fallbacks.append(f"{missing} of {len(self.documents)} {NOT_FOUND}")
            if plan.reason and not prompt.documents:
                plan.reason = f"{plan.reason}; {plan.fallbacks[-1]}"
        return plan

    def _after(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        plan = self._end_pass()
        if plan is None:
            return
        if output is None:  # the pass raised
            self._begun = None
            return
        if plan is self._continued:
            self.reports.pop()
        self.reports.append(plan.report())

    def _end_pass(self) -> Plan | None:
        if self._running is None:
            return None
        plan, passing = self._running
        self._running = None
        passing.close()
        return plan


def _find(tokens: list[int], documents: Sequence[tuple[int, ...]]) -> Prompt:
    """Where the documents stand, if need be without a token or two at their ends.

    A tokenizer may join a text's first or last character with what stands beside it in the prompt: ".\\n\\n" is one
    token of Llama 3 and Qwen.
    """
    prompt = find_documents(tokens, documents)
    if len(prompt.documents) == len(documents):
        return prompt
    found = Counter(d.tokens for d in prompt.documents)
    as_they_stand = []
    for document in documents:
        if found[document]:
            found[document] -= 1
            as_they_stand.append(document)
            continue
        shorter = (document[a : len(document) - b] for a, b in ENDS if len(document) >= MIN_CUT_TOKENS)
        as_they_stand.append(next((s for s in shorter if find_documents(tokens, [s]).documents), document))
    return find_documents(tokens, as_they_stand)


def _forecast(folder: str | Path, model: Any, tokenizer: Any | None) -> Forecast:
    if tokenizer is None:
        raise InvalidInput(f"the forecast {folder} is bound to a model and its tokenizer; pass tokenizer=… too.")
    return Forecast.load(folder, model, tokenizer)


def _token_ids(document: str | Sequence[int], tokenizer: Any | None) -> tuple[int, ...]:
    if not isinstance(document, str):
        return tuple(int(t) for t in document)
    if tokenizer is None:
        raise InvalidInput("documents given as text need a tokenizer; pass tokenizer=… or token ids.")
    return tuple(tokenizer(document, add_special_tokens=False).input_ids)
