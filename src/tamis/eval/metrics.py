"""How good an answer is, how far two distributions lie apart, and how sure a mean is.

Knows strings, logits and numbers; not models, prompts or question sets.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tamis.attention.divergence import check_logits, kl_divergence
from tamis.core.errors import InvalidInput

if TYPE_CHECKING:
    import torch

__all__ = ["Interval", "bootstrap", "exact_match", "kl_divergence", "normalise", "token_f1", "top1_agrees"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_DRAWS_AT_ONCE = 1 << 22


def normalise(text: str) -> str:
    """Lower case without ASCII punctuation, articles and extra blanks (SQuAD, arXiv 1606.05250, section 6.1)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the prediction is one of the answers after `normalise`, else 0.0."""
    return _best(lambda answer: float(normalise(prediction) == normalise(answer)), answers)


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """F1 of the words of prediction and answer after `normalise`, counted as bags; the best over the answers.

    0..1. Where either side has no words left, 1.0 if both have none and 0.0 otherwise.
    """
    return _best(lambda answer: _f1(normalise(prediction).split(), normalise(answer).split()), answers)


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval [low, high], over `n` values."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Percentile bootstrap interval of the mean: the same values and seed give the same interval.

    Raises InvalidInput if there are no values, one is not a finite number, or `level` is not between 0 and 1.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not sample.size or not np.isfinite(sample).all():
        raise InvalidInput(
            f"values are {list(sample.shape)} with {int((~np.isfinite(sample)).sum())} that are not finite; "
            "give one row of finite numbers, not empty."
        )
    if not 0 < level < 1 or resamples < 1:
        raise InvalidInput(
            f"level is {level} and resamples {resamples}; allowed are a share between 0 and 1, and 1 or more."
        )
    draw = np.random.default_rng(seed)
    step = max(1, _DRAWS_AT_ONCE // sample.size)
    means = [
        sample[draw.integers(0, sample.size, (min(step, resamples - at), sample.size))].mean(1)
        for at in range(0, resamples, step)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(sample.mean()), float(low), float(high), int(sample.size))


def top1_agrees(p: torch.Tensor, q: torch.Tensor) -> bool:
    """Whether two logit vectors [V] have their largest entry at the same place (the first one among equals)."""
    check_logits(p, q)
    return int(p.argmax()) == int(q.argmax())


def _best(score: Callable[[str], float], answers: Sequence[str]) -> float:
    if isinstance(answers, str) or not answers:
        raise InvalidInput(f"answers is {answers!r}; give a list of at least one accepted answer.")
    return max(score(answer) for answer in answers)


def _f1(prediction: list[str], answer: list[str]) -> float:
    if not prediction or not answer:
        return float(prediction == answer)
    common = sum((Counter(prediction) & Counter(answer)).values())
    return 2 * common / (len(prediction) + len(answer))
