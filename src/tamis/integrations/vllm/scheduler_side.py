"""The connector beside vLLM's scheduler: knows requests, their blocks and the shelf's names, no tensors."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any

from tamis.cache.keys import DOCUMENTS, namespaced
from tamis.core.dtypes import ITEM_BYTES
from tamis.core.errors import Unavailable
from tamis.integrations.vllm import compat, records, weights
from tamis.integrations.vllm.config import Settings
from tamis.integrations.vllm.hooks import asked_of, check_named
from tamis.integrations.vllm.request import Asked, Unit
from tamis.integrations.vllm.step import Counters, Move, Row, Step

KEEPS = "tamis_keeps"  # in a request's `extra_args`: what it finds in blocks is to be kept, however lately it was
AGAIN_S = 60.0  # before another request has a document of blocks copied again, as where the shelf has no room for it


@dataclass
class _Known:
    """A request of Tamis: its blocks so far, and the tokens [first, end) that wait to be loaded. `place`: the namespace
    of its documents on the shelf, None where they are not kept. `begins`: no step of it was scheduled yet."""

    asked: Asked
    blocks: list[int]
    place: str | None = None
    waits: tuple[int, int] = (0, 0)
    reused: int = 0
    keeps: bool = False
    begins: bool = True


class SchedulerSide:
    """Matches documents that lie on the shelf, and says each step what the workers do."""

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any, address: bytes) -> None:
        check_config(settings, vllm_config, kv_cache_config)
        if settings.index:
            records.opened(settings.index).check(vllm_config, settings.tile)
        self.settings, self.config = settings, vllm_config
        self.block: int = vllm_config.cache_config.block_size
        self.counters = Counters()
        self.shelf = settings.shelf(address, (0, parts_of(vllm_config)))
        self._known: dict[str, _Known] = {}
        self._matched: dict[str, tuple[int, int]] = {}
        self._gone: list[str] = []
        self._lately: dict[tuple[str, str], float] = {}  # documents of blocks that were to be kept, the oldest first
        self._own = True  # whether the model's weights are those that the shelf is of
        self._changed = False

    def came(self, request: Any) -> None:
        """A request is new. Its blocks were named when it was made, which may be before the weights were changed."""
        if self._changed and asked_of(request, self.settings, self.config) is not None:
            weights.rename(request)

    def reweighed(self, *, own: bool) -> None:
        """The model has other weights than before. own: those that the shelf is of, again."""
        self._changed, self._own = True, own
        for known in self._known.values():
            known.place = None  # part of its documents is of other weights

    def matched(self, request: Any, computed: int) -> int:
        """Tokens behind the `computed` ones that the shelf has: whole blocks of documents, one behind another."""
        asked = asked_of(request, self.settings, self.config)
        if asked is None:
            return 0
        end: int = computed
        place = self._place(request, asked)
        # one whose documents could not be read is not matched again, or a file that stays would be tried for ever
        if place is not None and self.shelf is not None and not getattr(request, "tamis_computes", False):
            for unit in asked.units:
                last = self._whole(unit)
                if unit.start <= end < last:
                    if not self.shelf.has(unit.key, place):
                        break
                    end = last
        end = max(computed, min(end, (request.num_tokens - 1) // self.block * self.block))
        self._matched[request.request_id] = (computed, end)
        return end - computed

    def allocated(self, request: Any, external: int) -> None:
        """The request begins, or begins anew after a preemption, with what was matched last."""
        asked = asked_of(request, self.settings, self.config)
        if asked is None:
            return
        check_named(request, self.config)
        first, end = self._matched.get(request.request_id, (0, 0))
        known = self._known[request.request_id] = _Known(asked, [], self._place(request, asked))
        sampling = getattr(request, "sampling_params", None)
        known.keeps = bool((getattr(sampling, "extra_args", None) or {}).get(KEEPS))
        if external:
            known.waits = (first, first + external)
        if asked.mode == "reuse":
            known.reused = sum(max(0, min(u.end, end) - u.start) for u in asked.units)
            self.counters.reused_tokens += known.reused

    def step(self, output: Any) -> Step:
        """What the workers do in the step that vLLM scheduled."""
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            if new.req_id in self._known:
                self._known[new.req_id].blocks = list(new.block_ids[0])
                computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            known = self._known.get(name)
            if known is None:
                continue
            more = cached.new_block_ids[i]
            if name in cached.resumed_req_ids:
                known.blocks = []
            known.blocks += more[0] if more else []
            computed[name] = cached.num_computed_tokens[i]
        gone = (*self._gone, *(getattr(output, "preempted_req_ids", None) or ()))
        self._gone = []
        rows, loads, saves = [], [], []
        for name, at in computed.items():
            known = self._known[name]
            row = Row(name, known.asked, at, output.num_scheduled_tokens[name], tuple(known.blocks))
            saves += self._saves(row, known)
            loads += self._loads(known)
            if known.asked.mode == "reuse" or known.asked.has_documents(row.computed, row.end):
                rows.append(row)
        done = tuple(n for n, k in self._known.items() if n in computed and _prefilled(k.asked, computed[n]))
        return Step(tuple(rows), tuple(loads), tuple(saves), (*gone, *done))

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forget a request; what its answer says of it."""
        self._matched.pop(request.request_id, None)
        known = self._known.pop(request.request_id, None)
        if known is None:
            return None
        self._gone.append(request.request_id)
        return {"tamis": {"mode": known.asked.mode, "reused_tokens": known.reused}}

    def close(self) -> None:
        """Let go of the shelf."""
        if self.shelf is not None:
            self.shelf.close()

    def _place(self, request: Any, asked: Asked) -> str | None:
        """Where a request's documents lie on the shelf. With an adapter they are not the model's and lie nowhere: its
        name does not say which weights it has after a restart."""
        if asked.mode != "reuse" or self.shelf is None or request.lora_request:
            return None
        if not self._own or getattr(request, "tamis_mixed", False):
            return None
        place = asked.namespace or self.settings.namespace
        if not request.cache_salt:
            return place
        apart = hashlib.blake2b(f"{place}\0{request.cache_salt}".encode(errors="replace"), digest_size=16)
        return namespaced(DOCUMENTS, f"salt/{apart.hexdigest()}")

    def _whole(self, unit: Unit) -> int:
        """The token behind the last of a document's blocks that hold nothing else."""
        return unit.full if unit.full % self.block == 0 else unit.end // self.block * self.block

    def _loads(self, known: _Known) -> list[Move]:
        first, end = known.waits
        known.waits = (0, 0)
        if first == end:
            return []
        made = []
        for unit in known.asked.units:
            begin, stop = max(first, unit.start), min(end, unit.end)
            if begin < stop:
                made.append(self._move(unit, (begin, stop), known.blocks, known.place))
        return made

    def _saves(self, row: Row, known: _Known) -> list[Move]:
        """Documents that are not there: those that end in this step, and in a request's first step those that it found
        in blocks, since the shelf may have lost them or had no room. Workers know which of them are being written."""
        place, begins, known.begins = known.place, known.begins, False
        if place is None or self.shelf is None:
            return []
        first, end = known.waits
        made: dict[str, Move] = {}
        for unit in known.asked.units:
            computed = row.computed < unit.end <= row.end
            # what is loaded in this step is there, and its blocks hold nothing if it cannot be read after all
            found = begins and unit.end <= row.computed and (unit.full <= first or unit.start >= end)
            if unit.key in made or not (computed or found):
                continue
            if found and not known.keeps and self._was_lately(unit.key, place):
                continue
            if not self.shelf.has(unit.key, place):
                made[unit.key] = self._move(unit, (unit.start, unit.end), list(row.blocks), place)
                if found:
                    self._lately.pop((unit.key, place), None)
                    self._lately[unit.key, place] = time.monotonic()
        return list(made.values())

    def _was_lately(self, key: str, place: str) -> bool:
        """Whether a document was to be kept of blocks in the last AGAIN_S."""
        since = time.monotonic() - AGAIN_S
        while self._lately and self._lately[oldest := next(iter(self._lately))] < since:
            del self._lately[oldest]
        return (key, place) in self._lately

    def _move(self, unit: Unit, at: tuple[int, int], blocks: list[int], place: str | None) -> Move:
        own = tuple(blocks[at[0] // self.block : -(-at[1] // self.block)])
        return Move(
            unit.key,
            place or "",
            unit.end - unit.start,
            at[0] - unit.start,
            at[1] - at[0],
            at[0] % self.block,
            own,
        )


def _prefilled(asked: Asked, computed: int) -> bool:
    """Whether a prompt's documents are all computed, so that a worker can report of it."""
    return asked.mode == "sift" and not asked.has_documents(computed, asked.n_tokens)


def parts_of(vllm_config: Any) -> int:
    """Workers that hold a share of the model each."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def check_config(settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises Unavailable for what Tamis has not been made to work with."""
    parallel, cache, scheduler = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.scheduler_config
    least = 2 * settings.tile + scheduler.max_num_seqs  # else a chunk might never reach the next border beside decodes
    threshold = getattr(scheduler, "long_prefill_token_threshold", 0) or 0
    refused = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        f"a KV cache in {cache.cache_dtype}": cache.cache_dtype not in ("auto", *ITEM_BYTES),
        f"{len(kv_cache_config.kv_cache_groups)} groups of KV caches (a hybrid model)": (
            len(kv_cache_config.kv_cache_groups) != 1
        ),
        f"max_num_batched_tokens below {least} (two tiles, and max_num_seqs)": scheduler.max_num_batched_tokens < least,
        f"long_prefill_token_threshold below two tiles, {2 * settings.tile}": 0 < threshold < 2 * settings.tile,
        "an encoder": bool(vllm_config.model_config.is_encoder_decoder),
        # a share of a first stage that cannot be read would be told to nobody, and its blocks taken for loaded
        "pipeline parallelism in vLLM's older Ray executor (VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1 has the newer one)": (
            parallel.pipeline_parallel_size > 1 and compat.older_ray(parallel)
        ),
        "microbatches (--enable-dbo)": bool(getattr(parallel, "enable_dbo", False)),
    }
    for what, so in refused.items():
        if so:
            raise Unavailable(f"TamisConnector with {what} is not supported; leave one of them out.")
