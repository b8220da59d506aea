"""What steps over blocks did so far: plain numbers, and counters that lie on the device until they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tamis.attention.report import BlockReport
from tamis.cache.block_layer import BlockLayer
from tamis.cache.offload import LayerBlocks


@dataclass
class BlockTrace:
    """Of the passes of one cache; outlives it. See `BlockReport`."""

    block: int = 0
    steps: int = 0
    kept: float = 0.0  # summed over steps
    host_bytes: int = 0
    device_bytes: int = 0
    streamed_bytes: int = 0
    block_bytes: int = 0  # of one KV head
    counts: list[torch.Tensor] = field(default_factory=list)  # of each layer in host memory: blocks copied, and wanted
    late: list[bool] = field(default_factory=list)  # layers whose blocks are known when they run, not before
    recalls: list[torch.Tensor] = field(default_factory=list)

    def note(self, layers: Sequence[BlockLayer], *, late: list[bool]) -> None:
        """Where the cache stands after a pass."""
        self.block, self.late = layers[0].form.rule.block, late
        self.host_bytes = sum(layer.host_bytes for layer in layers)
        self.device_bytes = sum(layer.device_bytes for layer in layers)
        hosts = [layer.blocks for layer in layers if isinstance(layer.blocks, LayerBlocks)]
        self.counts = [blocks.counts for blocks in hosts]
        if hosts:
            self.block_bytes = hosts[0].shape.block_bytes(hosts[0].host.element_size())
            self.streamed_bytes = self.block_bytes * sum(blocks.streamed for blocks in hosts)

    @property
    def hit_rate(self) -> float:
        """Share of the wanted blocks that lay in a slot already; 1 where none was wanted."""
        copied, asked = (sum(int(counts[i]) for counts in self.counts) for i in (0, 1))
        return 1 - copied / asked if asked else 1.0

    def report(self) -> BlockReport:
        """In shares and bytes. Waits for the device."""
        copied, wanted = ([int(counts[i]) for counts in self.counts] for i in (0, 1))
        asked = sum(wanted)
        late = sum(n for n, is_late in zip(copied, self.late, strict=False) if is_late)
        return BlockReport(
            block=self.block,
            kept=self.kept / self.steps if self.steps else 0.0,
            recall=float(torch.stack(self.recalls).mean()) if self.recalls else None,
            hit_rate=1 - sum(copied) / asked if asked else None,
            late=late / asked if asked else None,
            moved_bytes=self.streamed_bytes + self.block_bytes * sum(copied),
            host_bytes=self.host_bytes,
            device_bytes=self.device_bytes,
        )
