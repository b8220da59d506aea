"""Which blocks of keys a token reads: how keys are pooled, and how many blocks of which kind are taken.

Knows counts of tokens; not keys, models or weights. The rule is InfLLM-v2's, as MiniCPM4.1 has it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tamis.core.checks import check_fields
from tamis.core.errors import InvalidInput

MOST_TOGETHER = 32
COARSE = 4  # windows and strides of the second level are so many times as long


@dataclass(frozen=True)
class BlockRule:
    """top     blocks that a token reads, the forced ones among them; the defaults are MiniCPM4.1's
    first   blocks at the start that every token reads
    local   blocks before the token's own that it reads; its own too
    block   tokens of a block
    window, stride   tokens of a pooled key, and between the first tokens of two
    dense_tokens   contexts up to so many tokens are read in full
    stick, recent  a decode step counts a block as better by `stick` standard deviations of the scores of the blocks it
            may choose from, if one of the `recent` tokens before it read the block: fewer blocks move from the host.
            0: not at all. What was read decides, not what a device holds, so the choice is the same wherever blocks lie
    together  consecutive tokens of a prompt, counted from its start, that choose as one, by the sum of their scores: a
            power of 2 up to MOST_TOGETHER that divides the block. Decode steps choose for themselves
    """

    top: int = 96
    first: int = 1
    local: int = 32
    block: int = 64
    window: int = 32
    stride: int = 16
    dense_tokens: int = 8192
    stick: float = 0.0
    recent: int = 4
    together: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        for name, least in (("top", 1), ("first", 0), ("local", 0), ("block", 1), ("stride", 1), ("dense_tokens", 0),
                            ("stick", 0), ("recent", 1)):  # fmt: skip
            if getattr(self, name) < least:
                raise InvalidInput(f"{name} is {getattr(self, name)}; give {least} or more.")
        if self.window < self.stride or self.window % self.stride or self.block % self.stride:
            raise InvalidInput(
                f"windows of {self.window} tokens every {self.stride} in blocks of {self.block}; the window and the "
                "block must be whole multiples of the stride."
            )
        if not 1 <= self.together <= MOST_TOGETHER or self.together & (self.together - 1) or self.block % self.together:
            raise InvalidInput(
                f"{self.together} tokens choose together in blocks of {self.block}; give a power of 2 up to "
                f"{MOST_TOGETHER} that divides the block."
            )
        if self.window > self.block:
            raise InvalidInput(f"windows of {self.window} tokens in blocks of {self.block}; a window fits one block.")
        if self.forced > self.top:
            raise InvalidInput(
                f"{self.forced} blocks are forced (first {self.first}, local {self.local}, the own one) and top is "
                f"{self.top}; give top as many or more."
            )

    @property
    def forced(self) -> int:
        """Blocks of a late token that are read whatever their score."""
        return self.first + self.local + 1

    @property
    def chosen(self) -> int:
        """Blocks of a late token that are taken by score."""
        return self.top - self.forced

    @property
    def cells(self) -> int:
        """Pooled keys that begin in a block."""
        return self.block // self.stride

    @property
    def overlap(self) -> int:
        """Pooled keys that begin before a block and reach into it."""
        return self.window // self.stride - 1

    def n_choices(self, first: int, n_rows: int) -> int:
        """Choices that `n_rows` tokens from position `first` on have among them."""
        return (first + n_rows - 1) // self.together - first // self.together + 1 if n_rows else 0

    def n_blocks(self, n_tokens: int) -> int:
        """Blocks of `n_tokens`, the last one perhaps not full."""
        return -(-n_tokens // self.block)

    def n_pooled(self, n_tokens: int, times: int = 1) -> int:
        """Pooled keys of `n_tokens`: whole windows only. times: of windows and strides so many times as long."""
        return max(0, (n_tokens - times * self.window) // (times * self.stride) + 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)
