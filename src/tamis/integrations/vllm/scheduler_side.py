"""The connector beside vLLM's scheduler: knows requests, their blocks and the shelf's names, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tamis.core.errors import Unavailable
from tamis.integrations.vllm.config import Settings
from tamis.integrations.vllm.hooks import asked_of
from tamis.integrations.vllm.request import Asked, Unit
from tamis.integrations.vllm.step import Counters, Move, Row, Step


@dataclass
class _Known:
    """A request of Tamis: its blocks so far, and the tokens [first, end) that wait to be loaded."""

    asked: Asked
    blocks: list[int]
    waits: tuple[int, int] = (0, 0)
    reused: int = 0


class SchedulerSide:
    """Matches documents that lie on the shelf, and says each step what the workers do."""

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any, address: bytes) -> None:
        check_config(settings, vllm_config, kv_cache_config)
        self.settings, self.config = settings, vllm_config
        self.block: int = vllm_config.cache_config.block_size
        self.counters = Counters()
        self.shelf = settings.shelf(address, (0, parts_of(vllm_config)))
        self._known: dict[str, _Known] = {}
        self._matched: dict[str, tuple[int, int]] = {}
        self._saving: set[tuple[str, str]] = set()
        self._gone: list[str] = []

    def matched(self, request: Any, computed: int) -> int:
        """Tokens behind the `computed` ones that the shelf has: whole blocks of documents, one behind another."""
        asked = asked_of(request, self.settings, self.config)
        if asked is None:
            return 0
        end: int = computed
        if asked.mode == "reuse" and self.shelf is not None:
            for unit in asked.units:
                last = self._whole(unit)
                if unit.start <= end < last:
                    if not self.shelf.has(unit.key, asked.namespace or None):
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
        first, end = self._matched.get(request.request_id, (0, 0))
        known = self._known[request.request_id] = _Known(asked, [])
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
            loads += self._loads(known)
            saves += self._saves(row)
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

    def _whole(self, unit: Unit) -> int:
        """The token behind the last of a document's blocks that hold nothing else."""
        return unit.full if unit.full % self.block == 0 else unit.end // self.block * self.block

    def _loads(self, known: _Known) -> list[Move]:
        first, end = known.waits
        known.waits = (0, 0)
        made = []
        for unit in known.asked.units:
            begin, stop = max(first, unit.start), min(end, unit.end)
            if begin < stop:
                made.append(self._move(known.asked, unit, (begin, stop), known.blocks))
        return made

    def _saves(self, row: Row) -> list[Move]:
        made = []
        for unit in row.asked.units if row.asked.mode == "reuse" and self.shelf is not None else ():
            place = (unit.key, row.asked.namespace)
            if row.computed < unit.end <= row.end and place not in self._saving:
                assert self.shelf is not None
                if not self.shelf.has(unit.key, row.asked.namespace or None):
                    self._saving.add(place)
                    made.append(self._move(row.asked, unit, (unit.start, unit.end), list(row.blocks)))
        if len(self._saving) > 1 << 16:  # what was written is found on the shelf itself
            self._saving.clear()
        return made

    def _move(self, asked: Asked, unit: Unit, at: tuple[int, int], blocks: list[int]) -> Move:
        own = tuple(blocks[at[0] // self.block : -(-at[1] // self.block)])
        return Move(
            unit.key,
            asked.namespace,
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
        f"a KV cache in {cache.cache_dtype}": cache.cache_dtype not in ("auto", "bfloat16", "float16", "float32"),
        f"{len(kv_cache_config.kv_cache_groups)} groups of KV caches (a hybrid model)": (
            len(kv_cache_config.kv_cache_groups) != 1
        ),
        f"max_num_batched_tokens below {least} (two tiles, and max_num_seqs)": scheduler.max_num_batched_tokens < least,
        f"long_prefill_token_threshold below two tiles, {2 * settings.tile}": 0 < threshold < 2 * settings.tile,
        "an encoder": bool(vllm_config.model_config.is_encoder_decoder),
        "microbatches (--enable-dbo)": bool(getattr(parallel, "enable_dbo", False)),
    }
    for what, so in refused.items():
        if so:
            raise Unavailable(f"TamisConnector with {what} is not supported; leave one of them out.")
