"""Weights that are changed while vLLM runs: what was computed with others is not found any more.

vLLM lets whoever asks call any method of its workers, `reload_weights`, `update_weights` or one of their own, and
empties no cache for it. All such calls go through the engine's core. Behind each of them the workers' tensors are
summed; if that says anything new, blocks get other names from then on, and the shelf is left alone until the weights
are again those that the engine began with. What changes weights past the core, by a worker's own hand, is not seen.
"""

from __future__ import annotations

import functools
import hashlib
import os
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tamis.core.log import logger
from tamis.integrations.vllm.config import settings_of
from tamis.integrations.vllm.hooks import Hasher, Hook, asked_of

AT_ONCE = 1 << 21  # words that are summed together, three times eight bytes of memory each
STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # any odd number; what a chunk's sum counts depends on its place
NAME_BYTES = 32  # of a block that nobody is to find
log = logger("vllm")


class Summed(NamedTuple):
    """What a worker's tensors come to; `whole`: all of the weights were among them."""

    digest: bytes
    whole: bool


def summed(worker: Any) -> Summed:
    """Of vLLM's worker: 16 bytes that are others when any bit of the model's tensors is. Runs in each worker."""
    model = worker.get_model()
    # what is packed for a CPU's products lies in something that is no tensor, and leaves an empty one behind; an empty
    # int32 one is the order of channels, or zero points, that Marlin's formats may do without
    whole = all((p.numel() or p.dtype == torch.int32) and not p.is_meta for p in model.parameters())
    found = [(n, t) for n, t in (*model.named_parameters(), *model.named_buffers()) if t.numel() and not t.is_meta]
    device = next((t.device for _, t in found), torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    factors = torch.randint(-(1 << 63), (1 << 63) - 1, (AT_ONCE,), generator=draw).to(device)
    said, sums = [], []
    for name, tensor in found:
        said.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
        sums.append(_sum(tensor, factors if tensor.device == device else factors.to(tensor.device)).to(device))
    numbers = torch.stack(sums).tolist() if sums else []
    digest = hashlib.blake2b(repr((said, numbers)).encode(), digest_size=16).digest()
    return Summed(digest, whole)


def _sum(tensor: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """int64 of a tensor's bits: its words times random factors, modulo 2^64, on its device."""
    kept = tensor.detach()
    dense = kept.permute(sorted(range(kept.dim()), key=kept.stride, reverse=True))  # as it lies in memory
    flat = dense.contiguous().reshape(-1)
    raw = (flat.clone() if flat.storage_offset() * flat.element_size() % 4 else flat).view(torch.uint8)
    words = raw[: raw.numel() // 4 * 4].view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in (*torch.split(words, AT_ONCE), raw[words.numel() * 4 :]):
        total = total * STEP + (chunk.long() * factors[: chunk.numel()]).sum()
    return total


class Watch:
    """One engine's core and what its weights were.

    first: the workers' digests when it was first looked, before anything was changed; now: the latest ones, None where
    a worker has weights that cannot be seen, and after calls that nobody could look behind.
    """

    def __init__(self, core: Any, settings: Any) -> None:
        self.core, self.settings = core, settings
        self.first: list[bytes] | None = None
        self.now: list[bytes] | None = None
        self._begun, self._own, self._name = False, True, ""

    def before(self) -> None:
        """Something may change the weights next."""
        if not self._begun:
            self._begun, self.first = True, self._look()
            self.now = self.first

    def after(self) -> None:
        """Something may have changed them."""
        found = self._look()
        if found is not None and found == self.now:
            return
        self.now = found
        self._rename(found is not None and found == self.first)

    def _look(self) -> list[bytes] | None:
        if "weights" in self.core.model_executor.sleeping_tags:
            return None  # they are in no memory that could be read
        try:
            found = self.core.model_executor.collective_rpc(summed)
        except Exception as e:
            log.warning("the model's weights cannot be looked at: %s", e)
            return None
        return [f.digest for f in found] if all(f.whole for f in found) else None

    def _rename(self, back: bool) -> None:
        """Other names for blocks from now on, and no shelf unless the weights are `back`."""
        hasher, scheduler = Hasher.named.get(id(self.core.vllm_config)), self.core.scheduler
        side = scheduler.connector.scheduler
        if hasher is not None and hasher.serving is not None:
            settings, config, name = hasher.serving
            self._name = self._name or name
            hasher.serving = settings, config, self._name + ("" if back else f"/{uuid.uuid4().hex}")
        side.reweighed(own=back)
        running = {id(request) for request in scheduler.running}
        for request in scheduler.requests.values():
            if asked_of(request, self.settings, self.core.vllm_config) is None:
                continue
            if id(request) in running:
                hide(request, side.block)
            else:
                rename(request)
        if back != self._own:
            what = "are those it began with again" if back else "were changed: older blocks and the shelf are not used"
            log.warning("the model's weights %s", what)
        self._own = back


def rename(request: Any) -> None:
    """The names of a request's blocks, made when it came, as they are made now."""
    request.block_hashes.clear()
    request.update_block_hashes()


def hide(request: Any, block: int) -> None:
    """Let nobody find what a request computes from now on, beside what it has of other weights."""
    request.tamis_mixed = True
    request._block_hasher = functools.partial(_nameless, block)
    del request.block_hashes[request.num_computed_tokens // block :]
    request.update_block_hashes()


def _nameless(block: int, request: Any) -> list[bytes]:
    """Names that are nobody else's, for the full blocks that have none."""
    return [os.urandom(NAME_BYTES) for _ in range(request.num_tokens // block - len(request.block_hashes))]


def _watch(core: Any) -> Watch | None:
    """The core's; None without Tamis."""
    settings = settings_of(core.vllm_config)
    if settings is None:
        return None
    if not hasattr(core, "tamis_watch"):
        core.tamis_watch = Watch(core, settings)
    made: Watch = core.tamis_watch
    return made


def _collective_rpc(stock: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _watch(self)
        if watch is None:
            return stock(self, *args, **kwargs)
        watch.before()
        try:
            return stock(self, *args, **kwargs)
        finally:
            watch.after()

    return collective_rpc


def _sleep(stock: Callable[..., Any]) -> Callable[..., Any]:
    def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _watch(self)
        if watch is not None:
            watch.before()  # behind it there may be nothing left to compare with
        return stock(self, *args, **kwargs)

    return sleep


HOOKS = (
    Hook("vllm.v1.engine.core", "EngineCore.collective_rpc", _collective_rpc),
    Hook("vllm.v1.engine.core", "EngineCore.sleep", _sleep),
)
