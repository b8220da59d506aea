"""The connector in a worker: its layers' caches, the shelf's documents in and out of them, and what steps need."""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from tamis.core.errors import ModelUnsupported, StoreDamaged, TamisError, Unavailable
from tamis.core.log import logger
from tamis.integrations.vllm import backend, compat, hooks, records
from tamis.integrations.vllm.config import Settings
from tamis.integrations.vllm.rows import Worker
from tamis.integrations.vllm.scheduler_side import parts_of
from tamis.integrations.vllm.step import ALIKE, Counters, Move, Step
from tamis.integrations.vllm.warm_up import build_kernels
from tamis.model.rope import Rotary

WAITING_BYTES = 4 << 30  # of host memory for documents that a slower disk has not taken yet
log = logger("vllm")
FAR = 65_536  # positions at which a model's own table is compared, as far as it has them
TOLERANCE = 1e-4  # of cosines in float32, beyond the rounding of the angle


class WorkerSide:
    """Installs the hooks of a worker when it is made, and refuses a model or layers that Tamis cannot serve."""

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any, address: bytes) -> None:
        hooks.install(hooks.WORKER)
        if compat.device_type() == "cuda":
            hooks.install(hooks.WORKER_V2)
        self.settings, self.config = settings, vllm_config
        self.block: int = vllm_config.cache_config.block_size
        kv_heads = vllm_config.model_config.get_num_kv_heads(vllm_config.parallel_config)
        self.state = Worker(settings, self.block, kv_heads)
        if settings.index:
            heads = records.heads_of(vllm_config)
            self.state.bits = functools.partial(records.opened(settings.index).bits, heads=heads)
        self.part = vllm_config.parallel_config.rank % max(1, parts_of(vllm_config))
        self.shelf = settings.shelf(address, (self.part, parts_of(vllm_config)))
        self.caches: dict[int, torch.Tensor] = {}
        self._errors: set[int] = set()
        self._unread: set[int] = set()  # blocks that hold nothing: not loaded, nor computed since
        self._writer = ThreadPoolExecutor(1, "tamis-shelf")
        self._writing: dict[tuple[str, str], tuple[Future[None], int]] = {}

    @property
    def counters(self) -> Counters:
        """Sums since the last report."""
        return self.state.counters

    def taken_counters(self) -> dict[str, float]:
        """These sums, which start again; of those that all workers have alike only the first worker's."""
        found = self.counters.taken()
        return {name: value for name, value in found.items() if not self.part or name not in ALIKE}

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Take the layers' caches. Raises Unavailable where a layer does not run Tamis's implementation."""
        layers = self.config.compilation_config.static_forward_context
        for name, cache in caches.items():
            impl: Any = getattr(layers.get(name), "impl", None)
            check_layer(name, impl)
            number = compat.layer_number(name)
            if number in self.caches:
                raise Unavailable(f"two attention layers have the number {number}; the model is not supported.")
            if compat.pages(cache, impl.head_size)[0].shape[2] != self.block:
                raise Unavailable(
                    f"layer {name} keeps pages of {cache.shape[2]} tokens and blocks have {self.block}; give "
                    f"--block-size {cache.shape[2]}."
                )
            self.caches[number] = cache

    def check_model(self, model: Any) -> None:
        """Check the rotary geometry that "reuse" turns keys by. Raises ModelUnsupported."""
        if "reuse" not in self.settings.served:
            return
        rotary = Rotary.of(self.config.model_config.hf_text_config)
        check_rotary(rotary, model)
        self.state.rotary = rotary

    def warm_up(self) -> None:
        """Build kernels, with the model checked and its caches there."""
        layers = self.config.compilation_config.static_forward_context
        names = [name for name in layers if hasattr(getattr(layers[name], "impl", None), "num_heads")]
        if names and self.caches:
            name = names[0]
            build_kernels(self.state, layers[name].impl, self.caches[compat.layer_number(name)])

    def load(self, step: Step) -> None:
        """Copy documents from the shelf into their blocks."""
        for move in step.loads:
            try:
                self._load(move)
                self._unread -= set(move.blocks)
                self.counters.documents_loaded += 1
            except (TamisError, OSError) as e:
                log.warning("a document that was matched cannot be loaded, and is computed again: %s", e)
                self.counters.documents_unread += 1
                self._errors |= set(move.blocks)
                self._unread |= set(move.blocks)

    def save(self, step: Step) -> None:
        """Copy whole documents out of their blocks; a thread writes them. Not what lies in blocks that could not be
        loaded: the scheduler may have planned this step before it heard of it."""
        for row in step.rows if self._unread else ():
            self._unread.difference_update(row.blocks[row.computed // self.block : -(-row.end // self.block)])
        self._writing = {place: w for place, w in self._writing.items() if not w[0].done()}
        for move in step.saves:
            if (move.key, move.namespace) in self._writing or self._unread & set(move.blocks):
                continue
            if sum(size for _, size in self._writing.values()) > WAITING_BYTES:
                log.warning("document %s is not kept: the shelf is slower than documents are computed", move.key)
                continue
            blocks, slots = self._slots(move)
            pieces: dict[int, torch.Tensor] = {}
            for number, cache in self.caches.items():
                keys, values = compat.pages(cache, cache.shape[-1] // 2)
                both = torch.stack([keys[blocks, :, slots], values[blocks, :, slots]])  # [2, n, Hkv, D]
                pieces[number] = both.transpose(1, 2).to("cpu", non_blocking=True)
            event = None
            if blocks.is_cuda:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
            size = sum(piece.nbytes for piece in pieces.values())
            self._writing[move.key, move.namespace] = self._writer.submit(self._write, move, pieces, event), size

    def taken_errors(self) -> set[int]:
        """Blocks that could not be loaded since the last call."""
        found, self._errors = self._errors, set()
        return found

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.shutdown(wait=True)
        if self.shelf is not None:
            self.shelf.close()

    def _load(self, move: Move) -> None:
        assert self.shelf is not None, "the scheduler matched on a shelf that is not there"
        blocks, slots = self._slots(move)
        numbers, at, end = sorted(self.caches), 0, move.first + move.count
        with self.shelf.hold(move.key, move.namespace or None) as payload:
            for keys, values in payload.pieces:
                if keys.shape[0] != len(numbers):
                    raise StoreDamaged(f"document {move.key} has {keys.shape[0]} layers, this model {len(numbers)}.")
                if (keys.shape[1], keys.shape[3]) != self._shape:
                    raise StoreDamaged(f"document {move.key} is of {keys.shape[1]} heads of {keys.shape[3]} dims.")
                first, last = max(move.first, at), min(end, at + keys.shape[2])
                where = slice(first - move.first, last - move.first)
                for i, number in enumerate(numbers) if first < last else ():
                    cache = self.caches[number]
                    # whole pieces: only they lie in one run, which a copy need not wait for
                    k, v = (t[i].to(cache.device, non_blocking=True)[:, first - at : last - at] for t in (keys, values))
                    compat.put(cache, k, v, (blocks[where], slots[where]))
                at += keys.shape[2]
            if at != move.n_tokens:
                raise StoreDamaged(f"document {move.key} has {at} tokens on the shelf and {move.n_tokens} here.")
            if blocks.is_cuda:
                torch.cuda.current_stream().synchronize()

    def _write(self, move: Move, pieces: dict[int, torch.Tensor], event: Any) -> None:
        if event is not None:
            event.synchronize()
        assert self.shelf is not None, "the scheduler asked for a shelf that is not there"
        try:
            if self.shelf.has(move.key, move.namespace or None):
                return  # written since the scheduler looked
            if self.shelf.save(move.key, pieces, move.namespace or None):
                self.counters.documents_saved += 1
        except TamisError as e:
            log.warning("a document is not kept: %s", e)

    @property
    def _shape(self) -> tuple[int, int]:
        cache = next(iter(self.caches.values()))
        return cache.shape[1], cache.shape[-1] // 2

    def _slots(self, move: Move) -> tuple[torch.Tensor, torch.Tensor]:
        device = next(iter(self.caches.values())).device
        at = torch.arange(move.index, move.index + move.count)
        blocks = torch.tensor(move.blocks)[at // self.block]
        return blocks.to(device, non_blocking=True), (at % self.block).to(device, non_blocking=True)


def check_layer(name: str, impl: Any) -> None:
    """Raises Unavailable for a layer that Tamis does not stand in front of, or does not compute rightly."""
    if not backend.is_ours(impl):
        ours = compat.BACKENDS[compat.device_type()].name
        raise Unavailable(
            f"layer {name} runs {type(impl).__name__}, not Tamis's backend. Start vLLM with --attention-backend "
            f"{ours}, or leave TamisConnector out."
        )
    window = getattr(impl, "sliding_window", None)
    what = {
        "a sliding window": window not in (None, -1, (-1, -1)),
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "a soft cap": bool(getattr(impl, "logits_soft_cap", 0)),
        "attention sinks": getattr(impl, "sinks", None) is not None,
        "a cache shared between layers": getattr(impl, "kv_sharing_target_layer_name", None) is not None,
        f"attention of kind {impl.attn_type}": str(getattr(impl.attn_type, "value", impl.attn_type)) != "decoder",
    }
    for found, so in what.items():
        if so:
            raise Unavailable(f"layer {name} has {found}, which Tamis does not compute; leave TamisConnector out.")


def check_rotary(rotary: Rotary, model: Any) -> None:
    """Raises ModelUnsupported unless the model turns its heads as `rotary` does: by vLLM's own table of cosines."""
    found = {id(m): m for m in model.modules() if isinstance(getattr(m, "cos_sin_cache", None), torch.Tensor)}
    if not found:
        raise ModelUnsupported("the model has no rotary table, so documents cannot be moved; use mode 'sift' alone.")
    for module in found.values():
        if not getattr(module, "is_neox_style", False):
            raise ModelUnsupported("the model turns neighbouring dims, not halves; use mode 'sift' alone.")
        table = module.cos_sin_cache
        n = table.shape[0]
        at = torch.tensor(sorted({i for i in (0, 1, 17, 1000, n // 2, min(n - 1, FAR)) if i < n}))
        own = torch.cat([t * rotary.scaling for t in rotary.angles(at)], -1)
        theirs = table[at.to(table.device)].float().cpu()
        if own.shape != theirs.shape:
            raise ModelUnsupported(f"vLLM turns {theirs.shape[-1]} dims, the configuration says {own.shape[-1]}.")
        wide = table.dtype == torch.float32
        rounding = (at[:, None] * rotary.inv_freq * 2.0**-23).repeat(1, 2) + (TOLERANCE if wide else 2.0**-7)
        worst = float(((own - theirs).abs() / rounding / max(1.0, rotary.scaling)).max())
        if not worst <= 1:
            raise ModelUnsupported(
                f"vLLM's rotary table is {worst:.1f} times its rounding away from {rotary.kind!r} rotation, so "
                "documents cannot be moved; use mode 'sift' alone."
            )
