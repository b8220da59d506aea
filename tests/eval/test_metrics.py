"""Metrics against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.core.errors import InvalidInput
from tamis.eval.metrics import Interval, bootstrap, exact_match, kl_divergence, normalise, token_f1, top1_agrees

INF = float("inf")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The Cat.", "cat"),
        ("  an  Apple,\n a day ", "apple day"),
        ("Theatre and then", "theatre and then"),  # articles only as whole words
        ("U.S.A.", "usa"),
        ("rock-'n'-roll", "rocknroll"),
        ("the-end", "theend"),  # punctuation goes first, without leaving a blank
        ("Österreich – 1989", "österreich – 1989"),  # ASCII punctuation only
        ("A", ""),
        ("", ""),
    ],
)
def test_normalise(text: str, wanted: str) -> None:
    assert normalise(text) == wanted


def test_exact_match() -> None:
    assert exact_match("The Eiffel Tower!", ["Louvre", "eiffel tower"]) == 1.0
    assert exact_match("Eiffel Tower in Paris", ["Eiffel Tower"]) == 0.0
    assert exact_match("", ["Paris"]) == 0.0


@pytest.mark.parametrize(
    ("prediction", "answers", "wanted"),
    [
        ("the cat sat", ["a cat sat down"], 0.8),  # 2 common of 2 and 3: precision 1, recall 2/3
        ("cat cat cat", ["cat dog"], 0.4),  # bags: one cat in common of 3 and 2
        ("cat dog cat", ["cat cat"], 0.8),  # 2 in common of 3 and 2
        ("Paris, France", ["London", "Paris", "paris france"], 1.0),  # the best answer counts
        ("Berlin", ["Paris"], 0.0),
        ("", ["Paris"], 0.0),
        ("the", ["A"], 1.0),  # no words on either side
    ],
)
def test_token_f1(prediction: str, answers: list[str], wanted: float) -> None:
    assert token_f1(prediction, answers) == pytest.approx(wanted, abs=1e-12)


words = st.lists(st.sampled_from(["cat", "dog", "Sun", "the"]), max_size=5).map(" ".join)


@given(words, st.lists(words, min_size=1, max_size=3))
@settings(max_examples=100)
def test_f1_is_between_match_and_one(prediction: str, answers: list[str]) -> None:
    f1 = token_f1(prediction, answers)
    assert exact_match(prediction, answers) <= f1 <= 1.0
    assert token_f1(prediction, [answers[0]]) == token_f1(answers[0], [prediction])


@pytest.mark.parametrize("metric", [exact_match, token_f1])
@pytest.mark.parametrize("answers", [[], "Paris"])
def test_answers_must_be_a_list(metric: object, answers: object) -> None:
    with pytest.raises(InvalidInput, match="list of at least one"):
        metric("Paris", answers)  # type: ignore[operator]


class TestBootstrap:
    def test_a_constant_has_no_spread(self) -> None:
        assert bootstrap([0.25] * 7) == Interval(0.25, 0.25, 0.25, 7)

    def test_two_values_by_hand(self) -> None:
        # resampled means are 0, 1/2 and 1 with 1/4, 1/2 and 1/4: the outer 2.5 % are 0 and 1, the outer 30 % are 1/2
        assert bootstrap([0.0, 1.0]) == Interval(0.5, 0.0, 1.0, 2)
        assert bootstrap([0.0, 1.0], level=0.4) == Interval(0.5, 0.5, 0.5, 2)

    def test_close_to_the_normal_interval(self) -> None:
        values = np.random.default_rng(3).normal(10, 2, 400).tolist()
        found = bootstrap(values)
        half = 1.96 * np.std(values) / math.sqrt(400)
        assert found.high - found.mean == pytest.approx(half, rel=0.06)
        assert found.mean - found.low == pytest.approx(half, rel=0.06)

    def test_covers_the_truth_as_often_as_it_says(self) -> None:
        draw = np.random.default_rng(4)
        hits = 0
        for i in range(200):
            found = bootstrap(draw.uniform(0, 1, 60).tolist(), resamples=400, seed=i)
            hits += found.low <= 0.5 <= found.high
        assert 0.89 <= hits / 200 <= 0.99

    def test_seeded(self) -> None:
        values = list(map(float, range(30)))
        assert bootstrap(values) == bootstrap(values) != bootstrap(values, seed=1)

    def test_large_samples_are_drawn_in_parts(self) -> None:
        values = np.random.default_rng(0).uniform(size=50_000).tolist()
        found = bootstrap(values, resamples=200)
        assert found.low < found.mean < found.high and found.high - found.low < 0.01

    def test_text(self) -> None:
        assert str(Interval(0.5, 0.25, 0.75, 4)) == "0.500 [0.250, 0.750]"

    @pytest.mark.parametrize("values", [[], [1.0, float("nan")], [INF]])
    def test_values_that_have_no_mean(self, values: list[float]) -> None:
        with pytest.raises(InvalidInput, match="finite numbers"):
            bootstrap(values)

    @pytest.mark.parametrize("level", [0.0, 1.0, 95.0])
    def test_level_out_of_range(self, level: float) -> None:
        with pytest.raises(InvalidInput, match="level is"):
            bootstrap([1.0], level=level)


class TestKl:
    def test_by_hand(self) -> None:
        p, q = torch.tensor([0.0, math.log(3)]), torch.tensor([0.0, 0.0])  # 1/4, 3/4 against 1/2, 1/2
        assert kl_divergence(p, q) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-6)
        assert kl_divergence(q, p) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-6)

    def test_shifting_logits_changes_nothing(self) -> None:
        p, q = torch.randn(100), torch.randn(100)
        assert kl_divergence(p + 5, q - 3) == pytest.approx(kl_divergence(p, q), rel=1e-4)
        assert kl_divergence(p, p) == 0.0 and kl_divergence(p, p + 1) < 1e-6

    def test_zero_probabilities(self) -> None:
        p, q = torch.tensor([0.0, -INF, 0.0]), torch.tensor([0.0, -INF, 0.0])
        assert kl_divergence(p, q) == 0.0
        assert kl_divergence(p, torch.zeros(3)) == pytest.approx(math.log(1.5))
        assert kl_divergence(torch.zeros(3), q) == INF

    def test_small_differences_survive(self) -> None:
        """In float32 the terms of 100,000 entries cancel down to noise."""
        p = torch.randn(100_000, dtype=torch.float64)
        step = 1e-4 * torch.randn(100_000, dtype=torch.float64)
        share = p.softmax(-1)
        wanted = 0.5 * float((share * step**2).sum() - (share * step).sum() ** 2)  # second order
        assert kl_divergence(p, p + step) == pytest.approx(wanted, rel=1e-3)

    def test_bfloat16(self) -> None:
        p, q = torch.randn(50).bfloat16(), torch.randn(50).bfloat16()
        assert kl_divergence(p, q) == kl_divergence(p.double(), q.double()) > 0.1

    @pytest.mark.parametrize("metric", [kl_divergence, top1_agrees])
    @pytest.mark.parametrize(
        ("p", "q"),
        [(torch.zeros(3), torch.zeros(4)), (torch.zeros(1, 3), torch.zeros(1, 3)), (torch.zeros(0), torch.zeros(0)),
         (torch.zeros(2), torch.tensor([0.0, float("nan")]))],
    )  # fmt: skip
    def test_refusals(self, metric: object, p: torch.Tensor, q: torch.Tensor) -> None:
        with pytest.raises(InvalidInput, match="expected two vectors"):
            metric(p, q)  # type: ignore[operator]


def test_top1_agrees() -> None:
    assert top1_agrees(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([-1.0, 0.5, 0.0]))
    assert not top1_agrees(torch.tensor([1.0, 3.0]), torch.tensor([3.0, 1.0]))
