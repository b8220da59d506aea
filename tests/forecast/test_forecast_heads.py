"""Projections: what they predict, how they are kept, whom they refuse; and the loss against loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.attention.hook import install
from tamis.attention.layer_inputs import decoder_layers, watching
from tamis.core.errors import InvalidInput, ModelNotFound, NothingFound, StoreDamaged, StoreMismatch
from tamis.forecast.heads import FILE, Forecast, ForecastInfo, added_parameters, first_weights
from tamis.forecast.recall import contested, recall
from tamis.forecast.teacher import LEAST, divergence, own_cells, teacher_cells
from tamis.forecast.texts import Sequences, Texts
from tamis.kernels.blocks import BlockRule
from tamis.kernels.reference.blocks import (
    block_scores,
    own_scores,
    pool_keys,
    raw_scores,
    select_blocks,
    visible,
)
from tamis.model.adapter_info import base_of
from tamis.model.rope import Rotary
from tiny_chat import tiny_tokenizer

RULE = BlockRule(top=5, first=1, local=1, block=16, window=8, stride=4, dense_tokens=0)
SCALE = 0.125


def forecast_of(model: Any, *, start: str = "query", bias: bool | None = None) -> Forecast:
    config = model.config
    weight, made = first_weights(decoder_layers(model), config.num_key_value_heads, config.head_dim, start=start)
    info = ForecastInfo(base_of(model, tiny_tokenizer()), "tiny", RULE, 3, ("a",), 0.1)
    return Forecast(weight, None if bias is False else made, config.num_key_value_heads, info)


class Seen:
    """A job that keeps queries and keys."""

    def __init__(self) -> None:
        self.q: dict[int, torch.Tensor] = {}
        self.k: dict[int, torch.Tensor] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        self.q[layer], self.k[layer] = q, k
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
        )
        return out[0], None


def seen_by(model: Any, n: int = 160) -> tuple[Seen, dict[int, torch.Tensor]]:
    """Queries and keys of all layers, and their normed inputs."""
    switch, uninstall = install(model)
    job = Seen()
    ids = torch.randint(0, 512, (1, n), generator=torch.Generator().manual_seed(0))
    with watching(model) as inputs, torch.no_grad(), switch.running(job, n):
        model(ids, use_cache=False, logits_to_keep=1)
    uninstall()
    assert not any(m._forward_pre_hooks for m in model.modules()), "the hooks are gone"
    return job, dict(inputs.normed)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_with_a_layers_own_weights_it_is_the_groups_mean_query(tiny_model: Callable[..., Any], family: str) -> None:
    """Row 0 is fed by layer 0 itself: there the weights to begin with give the mean of the group's rotated queries."""
    model = tiny_model(family)
    if family == "qwen2":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.bias.normal_()
    job, normed = seen_by(model)
    positions = torch.arange(160)
    found = forecast_of(model).query(0, normed[0], positions, Rotary.of(model))
    mean = job.q[0].unflatten(0, (2, -1)).mean(1)
    torch.testing.assert_close(found, mean, rtol=1e-4, atol=1e-4)
    some = torch.tensor([3, 77])
    torch.testing.assert_close(found[:, some], forecast_of(model).query(0, normed[0][some], some, Rotary.of(model)))


def test_norms_of_other_gains_are_turned_into_each_other(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.uniform_(0.5, 2.0)
    layers = decoder_layers(model)
    hidden = torch.randn(5, 256)
    x, other = (layer.input_layernorm(hidden) for layer in layers)
    made = torch.nn.functional.linear(x, forecast_of(model).weight[1])
    torch.testing.assert_close(
        made.unflatten(-1, (2, 64)), layers[1].self_attn.q_proj(other).unflatten(-1, (2, 2, 64)).mean(2),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip


def test_a_forecast_that_is_the_query_gives_the_base_selection(tiny_model: Callable[..., Any]) -> None:
    """One query head a KV head: the forecast of layer 0 is its query, and chooses what the layer chooses."""
    model = tiny_model("llama", num_attention_heads=2)
    job, normed = seen_by(model)
    positions, pooled = torch.arange(160), pool_keys(job.k[0], RULE.window, RULE.stride)
    f = forecast_of(model).query(0, normed[0], positions, Rotary.of(model))
    own = block_scores(own_scores(job.q[0], pooled, positions, RULE, scale=SCALE), RULE, 10)
    found = block_scores(raw_scores(f, pooled, positions, RULE), RULE, 10)
    picks = [select_blocks(s, positions, RULE) for s in (own, found)]
    use = contested(positions, RULE)
    assert use.sum() == 160 - 5 * 16
    right = recall(picks[1][:, use], picks[0][:, use], positions[use], RULE)
    assert float(right.mean()) > 0.995, "all but rounding of near ties"
    moved = recall(picks[1][:, use].roll(1, -1), picks[0][:, use], positions[use], RULE)
    assert float(moved.mean()) < 0.8, "a choice that is one block off is seen"


def test_one_product_makes_queries_and_forecasts(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen2")
    made = forecast_of(model)
    x, positions = torch.randn(7, 256), torch.arange(7)
    rows, bias = made.rows(0)
    assert rows.shape == (2 * 128, 256) and bias is not None and made.rows(1)[0].shape == (0, 256)
    q_proj = model.model.layers[0].self_attn.q_proj
    fused = torch.nn.functional.linear(x, torch.cat([q_proj.weight, rows]), torch.cat([q_proj.bias, bias]))
    torch.testing.assert_close(fused[:, :256], q_proj(x))
    rotary = Rotary.of(model)
    for number, part in enumerate(fused[:, 256:].split(128, -1)):
        turned = rotary.rotate(part.unflatten(-1, (2, 64)).transpose(0, 1), positions)
        torch.testing.assert_close(turned, made.query(number, x, positions, rotary))


def test_saved_read_and_refused(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    made = forecast_of(model, start="uniform")
    assert float(made.weight.abs().max()) <= 256**-0.5 and made.bias is None
    made.save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [FILE]
    found = Forecast.load(tmp_path, model, tokenizer)
    assert torch.equal(found.weight, made.weight) and found.info == made.info and found.n_kv_heads == 2
    Forecast.load(tmp_path, tiny_model("llama").to(torch.bfloat16), tokenizer)
    with pytest.raises(StoreMismatch, match="weights_bfloat16 of this model differ"):
        Forecast.load(tmp_path, tiny_model("llama", seed=2), tokenizer)
    with pytest.raises(StoreMismatch, match="architecture, "):
        Forecast.load(tmp_path, tiny_model("qwen3"), tokenizer)
    with pytest.raises(ModelNotFound, match="tamis train forecast"):
        Forecast.read(tmp_path / "none")
    (tmp_path / FILE).write_bytes(b"\0" * 40)
    with pytest.raises(StoreDamaged, match="tamis train forecast"):
        Forecast.read(tmp_path)


def test_a_forecast_with_a_bias_keeps_it(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    made = forecast_of(tiny_model("qwen2"))
    made.save(tmp_path)
    found = Forecast.read(tmp_path)
    assert found.bias is not None and made.bias is not None and torch.equal(found.bias, made.bias)
    assert made.parameters == added_parameters(2, 256, 2, 64, bias=True) == 2 * 128 * 257
    with pytest.raises(InvalidInput, match="for 3 KV heads"):
        replace(made, n_kv_heads=3)


def test_the_published_count_of_parameters() -> None:
    assert added_parameters(32, 4096, 2, 128) == 33_554_432


def divergence_by_loops(q: torch.Tensor, k: torch.Tensor, f: torch.Tensor, row: int, head: int, group: int) -> float:
    """One row and KV head, each step as it is described."""
    r = RULE
    fine = [j for j in range(k.shape[1] - 1) if j + 2 <= row + 1]
    mass = torch.zeros(k.shape[1])
    for g in range(group):
        keys = torch.stack([k[head, j : j + 2].mean(0) for j in fine])
        mass[: len(fine)] += (q[head * group + g, row] @ keys.T * SCALE).softmax(0)
    windows = [c for c in range(r.n_pooled(k.shape[1])) if r.stride * c + r.window <= row + 1]
    cells = {c: float(mass[max(0, r.stride * c - 1) : r.stride * (c + 1)].max()) for c in windows}
    whole = sum(cells.values())
    teacher = {c: p / whole for c, p in cells.items()}
    pooled = torch.stack([k[head, r.stride * c : r.stride * c + r.window].mean(0) for c in windows])
    student = dict(zip(windows, (f[head, row] @ pooled.T * SCALE).softmax(0).tolist(), strict=True))
    own = row // r.block
    score = {
        b: max((teacher[c] for c in range(4 * b - 1, 4 * b + 4) if c in teacher), default=-1.0)
        for b in range(own + 1)
        if b >= r.first and b < own - r.local
    }
    best = sorted(score, key=lambda b: (-score[b], b))[: r.chosen]
    picked = [c for b in best for c in range(4 * b, 4 * b + 4)]

    def outcomes(p: dict[int, float]) -> torch.Tensor:
        some = [p[c] for c in picked]
        made = torch.tensor([*some, 1 - sum(some)], dtype=torch.float64).clamp(min=LEAST)
        return made / made.sum()

    wanted, found = outcomes(teacher), outcomes(student)
    return float((wanted * (wanted / found).log()).sum())


@pytest.mark.parametrize("n", [100, 163])
def test_the_divergence_is_the_described_one(n: int) -> None:
    draw = torch.Generator().manual_seed(n)
    q, k, f = (torch.randn((h, n, 64), generator=draw) for h in (6, 2, 2))
    positions = torch.arange(n)
    teacher = teacher_cells(q, k, positions, RULE, scale=SCALE)
    student = raw_scores(f, pool_keys(k, RULE.window, RULE.stride), positions, RULE) * SCALE
    found = divergence(teacher, student, positions, RULE, n)
    assert found.shape == (2, n) and bool(found.isfinite().all())
    assert float(found[:, : 3 * 16].abs().max()) < 1e-6, "where every block is forced there is nothing to tell apart"
    for row in (3 * 16, 70, n - 1):
        for head in range(2):
            wanted = divergence_by_loops(q, k, f, row, head, 3)
            assert float(found[head, row]) == pytest.approx(wanted, rel=1e-3, abs=1e-5), (row, head)


def test_the_divergence_is_nothing_for_the_teacher_itself() -> None:
    draw = torch.Generator().manual_seed(3)
    q, k = torch.randn((4, 160, 64), generator=draw), torch.randn((2, 160, 64), generator=draw)
    positions = torch.arange(160)
    teacher = teacher_cells(q, k, positions, RULE, scale=SCALE)
    torch.testing.assert_close(teacher[:, 7:].sum(-1), torch.ones(2, 153))
    assert float(divergence(teacher, teacher.log(), positions, RULE, 160).abs().max()) < 1e-5
    wrong = teacher.roll(3, -1).log().masked_fill(~visible(positions, teacher.shape[-1], 8, 4), -math.inf)
    assert float(divergence(teacher, wrong, positions, RULE, 160)[:, 100:].mean()) > 0.05


def test_free_cells_as_outcomes_and_the_layers_own_scores() -> None:
    draw = torch.Generator().manual_seed(5)
    q, k, f = (torch.randn((h, 160, 64), generator=draw) for h in (4, 2, 2))
    positions, pooled = torch.arange(160), pool_keys(k, RULE.window, RULE.stride)
    own = own_cells(q, pooled, positions, RULE, scale=SCALE)
    scores = own_scores(q, pooled, positions, RULE, scale=SCALE)
    torch.testing.assert_close(own[1, 90, :21], scores[1, 90, :21] / 2)
    assert float(own[:, 90, 21:].abs().max()) == 0 and float(own[:, :7].abs().max()) == 0
    student = raw_scores(f, pooled, positions, RULE) * SCALE
    found = divergence(own, student, positions, RULE, 160, apart="free")
    p, s, row = own[0, 140].double(), student[0, 140].double().softmax(-1), 140
    free = [c for c in range(p.numel()) if 4 <= c < 28 and 4 * c + 8 <= row + 1]  # block 0, the own and one are forced
    both = [torch.cat([x[free], 1 - x[free].sum()[None]]) for x in (p, s)]
    assert float(found[0, row]) == pytest.approx(float((both[0] * (both[0] / both[1]).log()).sum()), rel=1e-3)
    assert float(found[:, : 3 * 16].abs().max()) < 1e-6
    chosen = divergence(own, student, positions, RULE, 160)
    assert bool((found >= chosen - 1e-6).all()), "more outcomes tell more apart"


def test_the_gradient_leads_to_the_teacher() -> None:
    draw = torch.Generator().manual_seed(4)
    q, k = torch.randn((4, 160, 64), generator=draw) * 2, torch.randn((2, 160, 64), generator=draw)
    positions, pooled = torch.arange(160), pool_keys(k, RULE.window, RULE.stride)
    teacher = teacher_cells(q, k, positions, RULE, scale=SCALE)
    f = torch.zeros((2, 160, 64), requires_grad=True)
    optimiser = torch.optim.Adam([f], lr=0.1)
    losses = []
    for _ in range(40):
        loss = divergence(teacher, raw_scores(f, pooled, positions, RULE) * SCALE, positions, RULE, 160).mean()
        optimiser.zero_grad()
        loss.backward()
        assert f.grad is not None and bool(f.grad.isfinite().all())
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]
    use = contested(positions, RULE)
    teachers = select_blocks(block_scores(teacher[:, use], RULE, 10), positions[use], RULE)

    def named(f: torch.Tensor) -> float:
        scores = block_scores(raw_scores(f[:, use], pooled, positions[use], RULE), RULE, 10)
        return float(recall(select_blocks(scores, positions[use], RULE), teachers, positions[use], RULE).mean())

    # not 1: all else is one outcome, so what is left to it may gather in a block that the teacher does not take
    assert named(f.detach()) > 0.75 > 0.5 > named(torch.randn((2, 160, 64), generator=draw))


def test_sequences_are_the_texts_in_a_new_order_each_time() -> None:
    texts = [f"the lamp of station {i} " * 9 for i in range(7)]
    made = Sequences(tiny_tokenizer(), texts, 50, seed=1)
    assert len(made) == 8 and all(len(made.get(i)) == 50 for i in range(2 * len(made)))
    again = Sequences(tiny_tokenizer(), texts, 50, seed=1)
    assert [again.get(i) for i in (9, 0, 30)] == [made.get(i) for i in (9, 0, 30)], "in any order"
    passes = [[t for i in range(len(made)) for t in made.get(p * len(made) + i)] for p in (0, 1)]
    assert passes[0] != passes[1] and len(passes[0]) == len(passes[1])
    with pytest.raises(NothingFound, match="one sequence takes 5000"):
        Sequences(tiny_tokenizer(), texts, 5000)


def test_the_split_goes_by_the_words_of_a_text() -> None:
    pieces = [f"A text about crane {i}." for i in range(400)]
    split = Texts.split([*pieces, *pieces, " "], ["a"], 0.2)
    assert len(split.taught) + len(split.kept) == 400 and 50 < len(split.kept) < 110
    other = Texts.split(pieces[::-1], ["a"], 0.2)
    assert set(other.kept) == set(split.kept) and other.digest != split.digest
