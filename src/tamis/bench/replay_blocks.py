"""A timed prefill over blocks (`prefill="blocks"`): the choice and the attention of real use, on random weights.

How long either takes depends on how many blocks are read, which the rule says, and on how far the choices of
neighbouring tokens overlap, which random weights do not say: tokens that choose together overlap whatever they choose.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from tamis.attention.block_prefill import BlockPrefill, OwnChoice, PooledChoice
from tamis.bench.clock import Clock
from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown
from tamis.kernels.blocks import BlockRule

NAMES = ("blocks", "blocks-forecast")


@dataclass(frozen=True)
class OneVector(PooledChoice):
    """A vector a KV head, as a forecast has it, and no softmax: the first query head of each. What makes the vector, a
    product of less than a hundredth of the layer's, is not there."""

    heads: int = 1

    def vectors(
        self, layer: int, q: torch.Tensor, positions: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, float | None]:
        """See `PooledChoice`."""
        return q[:: q.shape[0] // self.heads], None


@dataclass(frozen=True)
class BlockVariant:
    """Such as `blocks:together=32` or `blocks-forecast:top=64,local=16`: who chooses, and fields of `BlockRule`."""

    rule: BlockRule
    forecast: bool

    @classmethod
    def parse(cls, name: str) -> BlockVariant | None:
        """None for the name of something else. Raises InvalidInput for an option that cannot be."""
        kind, _, rest = name.partition(":")
        if kind not in NAMES:
            return None
        known, options = [f.name for f in fields(BlockRule) if f.type == "int"], {"dense_tokens": 0}
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            if key not in known:
                raise InvalidInput(unknown("option", key, known))
            if not (value.isascii() and value.isdigit()):
                raise InvalidInput(f"variant {name!r}: {key} is {value!r}; give a whole number.")
            options[key] = int(value)
        return cls(BlockRule(**options), kind == NAMES[1])

    def job(self, kv_heads: int, clock: Clock) -> BlockPrefill:
        """One prefill."""
        choose = OneVector(self.rule, kv_heads) if self.forecast else OwnChoice(self.rule, coarse=True)
        return BlockPrefill.of(self.rule, choose, part=clock.part)

    @property
    def note(self) -> str:
        """What a row must say."""
        return (
            "" if self.rule.together > 1 else "neighbours choose apart, at random: more blocks are visited than in use"
        )
