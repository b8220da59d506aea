"""Decode steps that read chosen blocks of keys and values, which may come from host memory as they are wanted.

Knows a cache in blocks and its passes; not how tokens are chosen, nor whose forecast it is. Where a device has streams,
copies run on one of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tamis.attention.block_choices import FusedChoice
from tamis.attention.block_kernels import KernelSteps
from tamis.attention.block_prefill import OwnChoice, PooledChoice
from tamis.attention.block_trace import BlockTrace
from tamis.attention.decode import State
from tamis.attention.hook import Switch
from tamis.attention.layer_inputs import LayerInputs
from tamis.attention.policy import Policy
from tamis.attention.report import DecodeReport
from tamis.cache.block_layer import BlockLayer, read_last
from tamis.cache.offload import LayerBlocks, Prefetcher
from tamis.cache.streams import Queues
from tamis.kernels.blocks import BlockRule
from tamis.kernels.blocks_dispatch import why_not
from tamis.kernels.reference.blocks import block_scores, sticking


@dataclass(frozen=True)
class Steps:
    """How steps get their blocks.

    prefetch  copy blocks that are known one layer ahead at once; else when their layer runs
    forget    evict everything at every step; changes no bit of the output
    measure   also count how many blocks of the layers' own choices were foreseen; costs those choices
    group     query heads of a KV head
    kernels   use kernels where they run; else plain PyTorch
    """

    prefetch: bool = True
    forget: bool = False
    measure: bool = False
    group: int = 1
    kernels: bool = True


@dataclass
class BlockState(State):
    """What goes on from one pass of a cache to the next, whether or not it is in blocks."""

    blocks: BlockTrace = field(default_factory=BlockTrace)
    prefetcher: Prefetcher | None = None
    kernels: KernelSteps | None = None
    queues: Queues | None = None


class BlockDecoding:
    """The `DecodeJob` of a cache's passes: `cache` goes to the model, `running` around every pass.

    cache    a transformers cache of `BlockLayer`s
    choose   who chooses; None: steps read everything. An `OwnChoice` chooses when the layer's query is there; any other
             one layer ahead, and its blocks are copied while the layer before computes
    seen     what `choose` looks at, where the passes are watched
    """

    def __init__(
        self,
        cache: Any,
        choose: PooledChoice | None,
        *,
        policy: Policy | None = None,
        state: BlockState | None = None,
        seen: LayerInputs | None = None,
        how: Steps | None = None,
    ) -> None:
        self.cache, self.choose, self.policy = cache, choose, policy or Policy()
        self.state, self.seen, self.how = state or BlockState(), seen, how or Steps()
        self.trace, self.blocks = self.state.trace, self.state.blocks
        self.trace.kv, self.trace.blocks = "blocks", self.blocks
        self.layers: list[BlockLayer] = list(cache.layers)
        self.ahead = choose is not None and not isinstance(choose, OwnChoice)
        self._wanted: dict[int, torch.Tensor] = {}
        self._n_tokens = 0  # with the running token
        self._rule = self.layers[0].form.rule
        self._position = torch.zeros(0)

    @contextmanager
    def running(self, switch: Switch, *, step: bool) -> Iterator[None]:
        """Make one forward pass inside. step: of one new token behind others; else of a prompt's tokens, which attend
        to everything."""
        sparse, before = step and self.choose is not None, self.layers[0].get_seq_length()
        if self.seen is not None:
            self.seen.first = before
        for layer in self.layers:
            layer.only_new = sparse
        try:
            with ExitStack() as passing:
                if sparse:
                    self._begin(before + 1)
                    passing.callback(self._end)
                    passing.enter_context(switch.decoding(self))
                    if isinstance(self.choose, FusedChoice):
                        passing.enter_context(self.choose.fused.running())
                yield
        finally:
            for layer in self.layers:
                layer.only_new = False
        self._note(step=step, sparse=sparse)

    def attend(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor | None:
        """See `attention.hook.DecodeJob`."""
        held = self.layers[layer]
        if not held.only_new:
            return None
        q = q[:, :, 0]
        if not (self.ahead and layer):
            self._choose(layer, q, scale)
            self._fetch(layer)
        if self.ahead and layer + 1 < len(self.layers):
            self._choose(layer + 1, q, scale)
            if self.how.prefetch:
                self._fetch(layer + 1)
        if self.ahead and layer and not self.how.prefetch:
            self._fetch(layer)
        if self.how.measure:
            self._measure(layer, q, scale)
        return self._read(layer, q, scale)[:, :, None]

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """See `attention.hook.DecodeJob`."""

    def report(self) -> DecodeReport:
        """What was done so far."""
        return self.trace.report(self.policy)

    @property
    def hit_rate(self) -> float:
        """Share of the wanted blocks that lay in a slot already."""
        return self.blocks.hit_rate

    def _begin(self, n_tokens: int) -> None:
        first, self._n_tokens = self.layers[0], n_tokens
        self._rule = first.form.rule_at(n_tokens)
        # made on the device: to bring a number there would wait for it
        self._position = torch.full((1,), n_tokens - 1, dtype=torch.int64, device=first.device)
        if self.state.queues is None:
            self.state.queues = Queues.of(first.device)
        if self._kernels_run():
            self.state.kernels = self.state.kernels or KernelSteps(self.layers, self.state.queues, group=self.how.group)
            self.state.kernels.begin(n_tokens, self._rule)
            return
        blocks = [layer.blocks for layer in self.layers]
        hosts = [b for b in blocks if isinstance(b, LayerBlocks)]
        known = self.state.prefetcher
        if hosts and (known is None or known.layers != hosts):
            self.state.prefetcher = Prefetcher(hosts, self.state.queues.compute, self.state.queues.copy)

    def _kernels_run(self) -> bool:
        """Whether kernels do what steps do here."""
        keys, blocks = self.layers[0].pooled, self.layers[0].blocks
        if not self.how.kernels or keys is None or blocks is None:
            return False
        if not (
            isinstance(self.choose, FusedChoice) or (isinstance(self.choose, OwnChoice) and not self.choose.coarse)
        ):
            return False
        return blocks.memory.dtype == keys.pooled.dtype and why_not(keys.pooled, self.how.group) is None

    def _end(self) -> None:
        if self.state.kernels is not None:
            self.state.kernels.end()

    def _choose(self, layer: int, q: torch.Tensor, scale: float) -> None:
        """Find the blocks that `layer` reads beside its own: q [B, Hq, D] of the layer that runs."""
        assert self.choose is not None, "a sparse step has someone who chooses"
        kernels = self.state.kernels
        if kernels is None:
            self._wanted[layer] = self._chosen_by(self.choose, layer, q.flatten(0, 1), scale, noted=True)
            return
        ahead, forget = bool(self.ahead and layer), self.how.forget
        if isinstance(self.choose, FusedChoice):
            f = self.choose.fused.query(layer, self._position).view(q.shape[0], -1, q.shape[2])
            kernels.choose(layer, f, scale=None, lag=int(ahead), beside=ahead, forget=forget)
        else:
            kernels.choose(layer, q, scale=scale, lag=0, beside=False, forget=forget)

    def _chosen_by(
        self, choose: PooledChoice, layer: int, q: torch.Tensor, scale: float, *, noted: bool = False
    ) -> torch.Tensor:
        """noted: as what is read, to which the rule may stick."""
        rule, own, keys = self._rule, (self._n_tokens - 1) // self._rule.block, self.layers[layer].pooled
        assert keys is not None, "the prompt's pass made them"
        scores = None
        if 0 < rule.chosen < own - rule.first - rule.local:
            cells = choose.cells(layer, q[:, None], keys, self._position, scale)
            scores = block_scores(cells, rule, own + 1)[:, 0]
        if not (noted and rule.stick):
            return step_blocks(scores, own, rule, keys.pooled)
        last, position = read_last(self.layers[layer], own + 1), self._n_tokens - 1
        if scores is not None:
            block = torch.arange(own + 1, device=scores.device)
            free = (block >= rule.first) & (block < own - rule.local) & (scores > -torch.inf)
            scores = sticking(scores, free, last[:, : own + 1] >= position - rule.recent, rule.stick)
        wanted = step_blocks(scores, own, rule, keys.pooled)
        last.scatter_(1, wanted, position)
        return wanted

    def _fetch(self, layer: int) -> None:
        if self.state.kernels is not None:
            self.state.kernels.fetch(layer)
        elif self.state.prefetcher is not None:
            self.state.prefetcher.want(layer, self._wanted[layer], forget=self.how.forget)

    def _read(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """The layer's attention: q [B, Hq, D] → the same shape."""
        if self.state.kernels is not None:
            return self.state.kernels.attend(layer, q, scale=scale)
        return self._read_plain(layer, q.flatten(0, 1), scale).view(q.shape)

    def _read_plain(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        blocks = self.layers[layer].blocks
        if self.state.prefetcher is None:
            assert blocks is not None and not isinstance(blocks, LayerBlocks), "it is on the device"
            return blocks.attend(q, self._wanted[layer], scale=scale)
        out: list[torch.Tensor] = []
        self.state.prefetcher.attend(layer, q, out, scale=scale, every=True)
        assert self.state.queues is not None, "made at the step's beginning"
        self.state.queues.settle()
        return out[0]

    def _measure(self, layer: int, q: torch.Tensor, scale: float) -> None:
        rule, own = self._rule, (self._n_tokens - 1) // self._rule.block
        if not self.ahead or not 0 < rule.chosen < own - rule.first - rule.local:
            return
        if self.state.kernels is not None:
            best, found = self.state.kernels.own_choice(layer, q, scale=scale), self.state.kernels.wanted(layer)
        else:
            best, found = self._chosen_by(OwnChoice(rule), layer, q.flatten(0, 1), scale), self._wanted[layer]
        free = (best >= rule.first) & (best < own - rule.local)
        named = (best[:, :, None] == found[:, None]).any(-1) & free
        self.blocks.recalls.append(named.sum() / free.sum())

    def _note(self, *, step: bool, sparse: bool) -> None:
        """Count a pass. All layers hold and read as many tokens, so the first one speaks for them."""
        trace, first, n = self.trace, self.layers[0], self.layers[0].get_seq_length()
        if not n or first.blocks is None:
            return
        n_heads, head_dim = self._heads()
        trace.n_tokens, count = n, len(self.layers)
        trace.kv_bytes = sum(layer.nbytes for layer in self.layers)
        trace.bf16_bytes = 4 * n_heads * head_dim * n * count
        self.blocks.note(self.layers, late=[not (self.ahead and i and self.how.prefetch) for i in range(count)])
        if first.form.bf16:
            trace.approximate |= first.device is not None and self._rounds()
        if not step:
            return
        trace.steps += 1
        trace.kernel = ("blocks" if self.state.kernels is None else "triton") if sparse else "sdpa"
        if not sparse:
            trace.attended += 1
            return
        block = self._rule.block
        width, in_own = first.form.width(n), (n - 1) % block + 1
        trace.sparse_steps += 1
        trace.sparse = self.policy.decode
        trace.attended += (width * block + in_own) / n
        trace.approximate |= width < (n - 1) // block
        self.blocks.kept += width + 1
        self.blocks.steps += 1

    def _heads(self) -> tuple[int, int]:
        held = self.layers[0].blocks
        assert held is not None, "the caller looked"
        return held.memory.shape[0], held.memory.shape[-1]

    def _rounds(self) -> bool:
        keys = self.layers[0].pooled
        return keys is None or keys.pooled.dtype != torch.bfloat16


def step_blocks(scores: torch.Tensor | None, own: int, rule: BlockRule, like: torch.Tensor) -> torch.Tensor:
    """Blocks that a token in block `own` reads beside it: int64 [H, W], forced ones first, then the best by score.

    scores [H, N], N > own; None where all or none of the others are taken. like: a tensor [H, ...] of the same heads.
    As `select_blocks` has them for one row, without waiting for the device.
    """
    heads, device = like.shape[0], like.device
    first = min(rule.first, own)
    near = max(first, own - rule.local)
    forced = torch.cat([torch.arange(first, device=device), torch.arange(near, own, device=device)])
    forced = forced.expand(heads, -1)
    count = min(rule.chosen, near - first)
    if scores is None:
        best = torch.arange(first, first + count, device=device).expand(heads, -1)
    else:
        best = scores[:, first:near].sort(dim=-1, descending=True, stable=True).indices[:, :count] + first
    return torch.cat([forced, best], -1)
