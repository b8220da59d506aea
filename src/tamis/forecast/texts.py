"""The texts that a forecast is trained and measured on: split by their words, cut into sequences of equal length.

Knows texts and tokens; not files or models. What is drawn depends on the seed and the number alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from tamis.core.errors import NothingFound
from tamis.model.adapter_info import held_out

BETWEEN = "\n\n"  # separates texts of one sequence


@dataclass(frozen=True)
class Texts:
    """What is learnt from, what is kept out of it, and what the forecast says of them (`ForecastInfo.data`)."""

    taught: tuple[str, ...]
    kept: tuple[str, ...]
    names: tuple[str, ...] = ()
    holdout: float = 0.0

    @classmethod
    def split(cls, pieces: Iterable[str], names: Sequence[str], holdout: float) -> Texts:
        """The same split wherever a text occurs: it goes by its words. Equal texts count once."""
        every = [text for text in dict.fromkeys(pieces) if text.strip()]
        kept = [held_out(text, holdout) for text in every]
        return cls(
            tuple(t for t, out in zip(every, kept, strict=True) if not out),
            tuple(t for t, out in zip(every, kept, strict=True) if out),
            tuple(names),
            holdout,
        )

    @property
    def digest(self) -> str:
        """32 hex digits of all texts and of how they were split."""
        parts = [self.taught, self.kept, self.names, self.holdout]
        return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class Sequences:
    """Sequences of exactly `tokens` tokens, the texts in a new order for each pass over them, cut without regard to
    where one ends. Raises NothingFound where they do not fill one."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], tokens: int, *, seed: int = 0) -> None:
        self.tokens, self.seed = tokens, seed
        ends = tokenizer(BETWEEN, add_special_tokens=False)["input_ids"]
        self._texts = [[*tokenizer(text, add_special_tokens=False)["input_ids"], *ends] for text in texts]
        self._total = sum(map(len, self._texts))
        if self._total < tokens:
            raise NothingFound(
                f"{len(texts)} texts hold {self._total} tokens; one sequence takes {tokens}. Give more texts, or "
                "shorter sequences."
            )
        self._stream = lru_cache(maxsize=1)(self._made)

    def __len__(self) -> int:
        """Sequences of one pass over the texts."""
        return self._total // self.tokens

    def get(self, number: int) -> list[int]:
        """Token ids of the sequence of that number; any number from 0 on."""
        turn, place = divmod(number, len(self))
        return self._stream(turn)[place * self.tokens : (place + 1) * self.tokens]

    def _made(self, turn: int) -> list[int]:
        order = list(range(len(self._texts)))
        random.Random(f"{self.seed}:{turn}").shuffle(order)
        return [token for i in order for token in self._texts[i]]
