"""Tokens drawn under one `Sampling`: what each filter and penalty leaves, and that draws repeat under a seed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tamis.core.errors import InvalidInput
from tamis.engine.sampling import Sampler, Sampling, Scored, draw_all

CPU = torch.device("cpu")


def drawn(logits: list[float], n: int = 300, prompt: tuple[int, ...] = (), **options: Any) -> set[int]:
    """The tokens that come up in n single draws."""
    row = torch.tensor(logits)
    return {Sampler(Sampling(temperature=1.0, seed=i, **options), CPU, prompt).draw(row) for i in range(n)}


class TestFilters:
    def test_each_leaves_what_it_says(self) -> None:
        logits = [math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]
        assert drawn(logits) == {0, 1, 2, 3}
        assert drawn(logits, top_k=2) == {0, 1}
        assert drawn(logits, top_p=0.7) == {0, 1}
        assert drawn(logits, min_p=0.29) == {0, 1, 2}
        assert drawn(logits, min_p=0.29, top_k=2) == {0, 1}

    def test_a_seed_repeats_and_another_does_not(self) -> None:
        rows = torch.randn(20, 50)
        texts = []
        for seed in (1, 1, 2):
            sampler = Sampler(Sampling(temperature=1.0, seed=seed), CPU)
            texts.append([sampler.draw(row) for row in rows])
        assert texts[0] == texts[1] != texts[2]


class TestPenalties:
    def test_presence_and_frequency_count_the_answer_alone(self) -> None:
        logits = torch.tensor([3.0, 2.6, 2.3, 0.0])
        presence = Sampler(Sampling(presence_penalty=0.5), CPU, (1, 2))
        assert [presence.draw(logits) for _ in range(4)] == [0, 1, 0, 0]
        frequency = Sampler(Sampling(frequency_penalty=0.5), CPU, (1, 2))
        assert [frequency.draw(logits) for _ in range(4)] == [0, 1, 0, 2]

    def test_repetition_counts_the_prompt_too_and_pushes_negative_logits_down(self) -> None:
        assert Sampler(Sampling(repetition_penalty=2.0), CPU, (0,)).draw(torch.tensor([3.0, 2.0])) == 1
        assert Sampler(Sampling(repetition_penalty=2.0), CPU, (0,)).draw(torch.tensor([-1.0, -1.5])) == 1
        assert Sampler(Sampling(repetition_penalty=2.0), CPU).draw(torch.tensor([3.0, 2.0])) == 0

    def test_logits_are_left_as_they_were(self) -> None:
        logits = torch.tensor([3.0, 2.0])
        Sampler(Sampling(repetition_penalty=2.0, frequency_penalty=1.0), CPU, (0,)).draw(logits)
        assert logits.tolist() == [3.0, 2.0]


def test_many_at_once_as_one_by_one() -> None:
    kinds = (Sampling(), Sampling(temperature=0.7, seed=3), Sampling(), Sampling(presence_penalty=1.0))
    rows = torch.randn(4, 30)
    together = draw_all([Sampler(s, CPU) for s in kinds], rows)
    assert together == [Sampler(s, CPU).draw(row) for s, row in zip(kinds, rows, strict=True)]


def test_scores_are_those_of_the_model() -> None:
    scored = Scored.of(torch.tensor([math.log(p) for p in (0.2, 0.5, 0.3)]), 0, 2)
    assert scored.logprob == pytest.approx(math.log(0.2))
    assert [token for token, _ in scored.top] == [1, 2] and scored.top[0][1] == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("wrong", [{"min_p": 1.0}, {"repetition_penalty": 0.0}, {"presence_penalty": 2.5}])
def test_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        Sampling(**wrong)
