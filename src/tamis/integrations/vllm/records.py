"""Stored bits of documents for "sift" inside vLLM: an index that `tamis index` made, read by every process.

Opened read-only and checked against the served model once, by the scheduler's process: layer and head counts, rotary
parameters, dtype, and the weights' own files. Tokens are what documents are found by, so tokenizers are not compared.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tamis.core.dtypes import name_of
from tamis.core.errors import StoreMismatch, Unavailable
from tamis.index.encode import Bits
from tamis.index.store import RecordStore
from tamis.integrations.vllm.request import Asked
from tamis.model.fingerprint import architecture, rotary, tokens_hash, weights_of_files
from tamis.prompt.segments import Kind

if TYPE_CHECKING:
    from tamis.integrations.vllm.config import Settings


class Records:
    """An index of documents' bits."""

    def __init__(self, folder: Path | str) -> None:
        """Raises NothingFound, StoreDamaged or StoreBusy."""
        self.folder = folder
        self.store = RecordStore.open(folder, None, create=False, readonly=True)

    def check(self, vllm_config: Any, tile: int) -> None:
        """Raises StoreMismatch where the bits are not this model's, Unavailable where that cannot be told."""
        model, spec = vllm_config.model_config, self.store.spec
        config, dtype = model.hf_text_config, name_of(model.dtype)
        made, found = spec.fingerprint, []
        served = {"architecture": architecture(config), "rotary": rotary(config), "dtype": dtype}
        for name, value in served.items():
            if getattr(made, name) != value:
                found.append(f"{name} is {getattr(made, name)!r} there, {value!r} here")
        if spec.tile != tile:
            found.append(f"tiles have {spec.tile} tokens there, {tile} here")
        if not found:
            if model.quantization is not None or not Path(model.model).is_dir():
                raise Unavailable(
                    f"whether the index {self.folder} belongs to {model.model} cannot be told: give the model as a "
                    "folder of safetensors files that are not quantised, or leave `index` out."
                )
            tied = bool(getattr(config, "tie_word_embeddings", False))
            if weights_of_files(Path(model.model), model.dtype, tied=tied) != made.weights:
                found.append("the weights are others")
        if found:
            raise StoreMismatch(
                f"the index {self.folder} was made by another model: {'; '.join(found)}. Make one with `tamis index "
                f"--model {model.model}`, or leave `index` out of kv_connector_extra_config."
            )

    def known(self, asked: Asked, tokens: Sequence[int]) -> tuple[str, ...]:
        """Keys of the request's documents that have bits, which were observed behind this very prefix."""
        first = asked.spans[0]
        prefix = tokens[: first.end] if first.kind == Kind.PREFIX else ()
        if tokens_hash(prefix) != self.store.spec.prefix:
            return ()
        keys = list(dict.fromkeys(s.key for s in asked.spans if s.kind == Kind.DOCUMENT))
        there = self.store.has(bytes.fromhex(key) for key in keys)
        return tuple(key for key, has in zip(keys, there, strict=True) if has)

    def bits(self, asked: Asked, heads: slice) -> list[Bits | None]:
        """Of each document of the prompt the bits of these query heads; None where `asked.recorded` names it not."""
        keys = [s.key for s in asked.spans if s.kind == Kind.DOCUMENT]
        wanted = [key for key in dict.fromkeys(keys) if key in asked.recorded]
        found = dict(zip(wanted, self.store.get(bytes.fromhex(key) for key in wanted), strict=True))
        made: dict[str, Bits | None] = {}
        for key, record in found.items():
            whole = None if record is None else record.bits()
            made[key] = None if whole is None else Bits(whole.la[:, heads], whole.ca[:, heads])
        return [made.get(key) for key in keys]


def recorded(asked: Asked | None, tokens: Sequence[int], settings: Settings) -> Asked | None:
    """The request, with the documents named whose bits its selector will read."""
    from tamis.integrations.vllm.config import policy_of

    if asked is None or asked.mode != "sift" or not settings.index:
        return asked
    if not policy_of(asked.selector or settings.selector, settings).needs_records:
        return asked
    return replace(asked, recorded=opened(settings.index).known(asked, tokens))


def heads_of(vllm_config: Any) -> slice:
    """The query heads of every layer that the worker of this process computes."""
    parallel = vllm_config.parallel_config
    size = parallel.tensor_parallel_size
    each = vllm_config.model_config.hf_text_config.num_attention_heads // size
    first = parallel.rank % size * each
    return slice(first, first + each)


@functools.cache
def opened(folder: str) -> Records:
    """The process's one handle on an index."""
    return Records(folder)
