"""How new tokens read the keys and values before them: all of them, or a share of a cache that is its own index.

A prompt's passes see its keys in full precision. Compression waits for the first token behind it, so that it delays no
first token and chunks of a prompt see each other exactly.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tamis.attention.block_trace import BlockTrace
from tamis.attention.hook import Switch
from tamis.attention.policy import Policy
from tamis.attention.report import DecodeReport
from tamis.cache.formats import form_of, layer_bytes
from tamis.cache.selfindex.keep import Budget
from tamis.cache.selfindex.layer import SelfIndexLayer
from tamis.cache.selfindex.sequence import CodedSequence


class Reader(Protocol):
    """Computes one layer's attention of a step over its sequence; one object for all layers of one cache.

    kernel: what computes it; nbytes: what it keeps beside the cache.
    """

    kernel: str

    @property
    def nbytes(self) -> int: ...

    def read(
        self, layer: int, sequence: CodedSequence, q: torch.Tensor, *, budget: Budget, scale: float
    ) -> torch.Tensor:
        """q [B, Hq, 1, D] of the newest token, whose key is appended → out [B, Hq, 1, D]."""


class SequenceReader:
    """Reads the sequence where it lies, by PyTorch."""

    nbytes = 0

    def __init__(self, device: torch.device) -> None:
        self.kernel = "cpu" if device.type == "cpu" else "reference"

    def read(
        self, layer: int, sequence: CodedSequence, q: torch.Tensor, *, budget: Budget, scale: float
    ) -> torch.Tensor:
        """See `Reader`."""
        return sequence.attend(q, budget, scale=scale)[0]


def reader_for(device: torch.device) -> Reader:
    """The reader to use on a device."""
    if device.type == "cuda":
        from tamis.attention.decode_arena import ArenaReader

        return ArenaReader()
    return SequenceReader(device)


@dataclass
class Trace:
    """What the passes of one cache did so far; plain numbers, which outlive the cache. See `DecodeReport`."""

    kv: str = "auto"
    kernel: str = ""
    steps: int = 0
    sparse_steps: int = 0
    n_tokens: int = 0
    kv_bytes: int = 0
    bf16_bytes: int = 0
    attended: float = 0.0  # summed over steps
    compress_s: float = 0.0
    approximate: bool = False
    reason: str = ""
    sparse: str = "selfindex"  # what the sparse steps were
    blocks: BlockTrace | None = None

    def report(self, policy: Policy) -> DecodeReport:
        """In words and shares."""
        return DecodeReport(
            asked=policy.decode,
            used=self.sparse if self.sparse_steps else "dense",
            kv=self.kv,
            kernel=self.kernel,
            steps=self.steps,
            n_tokens=self.n_tokens,
            kv_bytes=self.kv_bytes,
            bf16_bytes=self.bf16_bytes,
            attended=self.attended / self.steps if self.steps else 1.0,
            compress_s=self.compress_s,
            approximate=self.approximate,
            reason=self.reason,
            blocks=None if self.blocks is None else self.blocks.report(),
        )


@dataclass
class State:
    """What goes on from one pass of a cache to the next."""

    trace: Trace = field(default_factory=Trace)
    reader: Reader | None = None


class Decoding:
    """One transformers cache and how a policy reads it: the `DecodeJob` of its passes, which `running` makes it.

    A cache in which nothing is Tamis's own (kv "auto", "bf16") is only counted.
    """

    def __init__(self, model: Any, cache: Any, policy: Policy, state: State | None = None) -> None:
        self.cache, self.policy, self.state = cache, policy, state or State()
        self.trace = self.state.trace
        self.trace.kv = form_of(cache)
        self._rounded = self.trace.kv == "bf16" and next(model.parameters()).dtype != torch.bfloat16
        self._coded = [layer for layer in cache.layers if isinstance(layer, SelfIndexLayer)]
        self._budget = policy.budget if self._coded and policy.decode == "selfindex" else None
        self._bf16_token = 0

    @contextmanager
    def running(self, switch: Switch, *, step: bool) -> Iterator[None]:
        """Make one forward pass inside. step: of one new token behind others; else of a prompt's tokens."""
        if step:
            self.compress()
        for layer in self._coded:
            layer.whole, layer.only_new = True, step and self._budget is not None
        try:
            if self._coded:
                with switch.decoding(self):
                    yield
            else:
                yield
        finally:
            for layer in self._coded:
                layer.whole = layer.only_new = False
        self._note(step)

    def compress(self) -> int:
        """Compress what need not stay whole any longer; returns the tokens of a layer. Part of every step."""
        begin, n = time.perf_counter(), 0
        with torch.no_grad():
            for layer in self._coded:
                n = layer.sequence.settle() if layer.sequence is not None else 0
        if n:
            if self._coded[0].device.type == "cuda":
                torch.cuda.synchronize()
            self.trace.compress_s += time.perf_counter() - begin
        return n

    def attend(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor | None:
        """See `hook.DecodeJob`."""
        held = self.cache.layers[layer]
        if self._budget is None or not held.only_new:
            return None
        if self.state.reader is None:
            self.state.reader = reader_for(q.device)
        out = self.state.reader.read(layer, held.sequence, q, budget=self._budget, scale=scale)
        self.trace.kernel = self.state.reader.kernel
        return out

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """See `hook.DecodeJob`."""
        self.cache.layers[layer].sequence.observe(q.detach())

    def sequences(self) -> list[CodedSequence] | None:
        """All layers, if steps over them may be made elsewhere, for many requests at once; they are counted by
        `count_step` then. None: only `running` makes them."""
        if self._budget is None or len(self._coded) < len(self.cache.layers):
            return None
        found = [layer.sequence for layer in self._coded if layer.sequence is not None]
        able = [s for s in found if s.noted is not None and s.open is not None and s.open[0].shape[0] == 1]
        return able if len(able) == len(self._coded) else None

    @property
    def budget(self) -> Budget | None:
        """What a sparse step reads; None where steps are dense."""
        return self._budget

    def count_step(self, n_tokens: int, n_whole: int, *, compressed: bool, kernel: str, kv_bytes: int) -> None:
        """A step was made elsewhere: tokens held now, and those read whole."""
        trace = self.trace
        trace.n_tokens, trace.kernel, trace.kv_bytes = n_tokens, kernel, kv_bytes
        trace.bf16_bytes = self._token_bytes() * n_tokens
        trace.approximate = self._rounded or compressed
        self._count_sparse(n_tokens, n_whole)

    def report(self) -> DecodeReport:
        """What was done so far."""
        return self.trace.report(self.policy)

    def _token_bytes(self) -> int:
        """What a token takes in bfloat16."""
        if not self._bf16_token:
            first = self.cache.layers[0]
            sequence: CodedSequence | None = first.sequence if isinstance(first, SelfIndexLayer) else None
            newest = first.keys if sequence is None or sequence.open is None else sequence.open[0]
            batch, heads, _, head_dim = newest.shape
            self._bf16_token = 4 * batch * heads * head_dim * len(self.cache.layers)
        return self._bf16_token

    def _count_sparse(self, n_tokens: int, n_whole: int) -> None:
        trace = self.trace
        assert self._budget is not None, "a sparse step"
        trace.steps += 1
        trace.sparse_steps += 1
        trace.attended += min(n_tokens, n_whole + self._budget.count(n_tokens)) / n_tokens

    def _note(self, step: bool) -> None:
        """Count a pass. All layers hold the same numbers of everything, so the first one speaks for them."""
        trace, first = self.trace, self.cache.layers[0]
        n = trace.n_tokens = int(first.get_seq_length())
        if not n:
            return
        sequence: CodedSequence | None = first.sequence if isinstance(first, SelfIndexLayer) else None
        reader = 0 if self.state.reader is None else self.state.reader.nbytes
        trace.kv_bytes = layer_bytes(first) * len(self.cache.layers) + reader
        trace.bf16_bytes = self._token_bytes() * n
        trace.approximate = self._rounded or (sequence is not None and sequence.n_compressed > 0)
        if not step:
            return
        if sequence is None or sequence.open is None or self._budget is None:
            trace.steps += 1
            trace.attended += 1
            trace.kernel = "sdpa"
            return
        n_whole = sequence.open[0].shape[-2] + sum(p.exact.shape[-1] for p in sequence.parts)
        self._count_sparse(n, n_whole)
