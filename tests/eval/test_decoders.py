"""Each way of attending against its definition written out in loops, and against exact attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tamis.attention.hook import install
from tamis.cache.selfindex.keep import Budget
from tamis.cache.selfindex.sequence import CodedSequence, Growth
from tamis.core.errors import InvalidInput, Unavailable
from tamis.eval.decode_session import Session
from tamis.eval.decoders import int4, presses, quest
from tamis.eval.decoders.base import LayerPrompt, LayerState, Method
from tamis.eval.decoders.doublesparse import DoubleSparse, heavy_channels
from tamis.eval.decoders.full import Full
from tamis.eval.decoders.methods import NAMES, labels, methods_of
from tamis.eval.decoders.selfindex import QuestEqual, SelfIndex, equal_page, equal_share
from tamis.eval.decoders.snapkv import SnapKV
from tamis.kernels.selfindex import Layout
from tamis.model.rope import Rotary

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 64, 203
SCALE = DIM**-0.5
ROTARY = Rotary(10_000.0 ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM), DIM)
New = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@pytest.fixture
def prompt() -> LayerPrompt:
    return layer(TOKENS)


def layer(n: int, index: int = 5) -> LayerPrompt:
    """Keys as a model has them: turned, with a mean of their own and a few that stand out."""
    keys = ROTARY.rotate(torch.randn(KV_HEADS, n, DIM) + 2 * torch.randn(KV_HEADS, 1, DIM), torch.arange(n))
    keys[:, ::37] *= 2
    return LayerPrompt(index, 8, torch.randn(HEADS, n, DIM) * 2, keys, torch.randn(KV_HEADS, n, DIM), SCALE, ROTARY)


def new_tokens(batch: int, sizes: Sequence[int]) -> New:
    return [
        (
            torch.randn(batch, HEADS, n, DIM) * 2,
            torch.randn(batch, KV_HEADS, n, DIM),
            torch.randn(batch, KV_HEADS, n, DIM),
        )
        for n in sizes
    ]


def run(state: LayerState, new: New) -> torch.Tensor:
    state = state.branch()
    return torch.cat([state.attend(*given) for given in new], -2)


def joined(x: LayerPrompt, new: New, b: int) -> tuple[torch.Tensor, ...]:
    """q of all new rows, keys and values of everything, for one budget."""
    q, k, v = (torch.cat([given[i][b] for given in new], -2) for i in range(3))
    return q, torch.cat([x.keys, k], -2), torch.cat([x.values, v], -2)


def attended(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    weights = torch.softmax(keys[tokens] @ q * SCALE, 0)
    return weights @ values[tokens]


def brute(x: LayerPrompt, new: New, shares: Sequence[float], choose: Callable[..., set[int]]) -> torch.Tensor:
    """Every budget, row and KV head by itself; choose(share, h, mean query, keys [n, D]) gives the tokens of a row."""
    out = []
    for b, share in enumerate(shares):
        q, keys, values = joined(x, new, b)
        rows = q.shape[1]
        made = torch.empty(HEADS, rows, DIM)
        for r in range(rows):
            n = x.keys.shape[1] + r + 1
            for h in range(KV_HEADS):
                group = q[h * 2 : h * 2 + 2, r]
                tokens = sorted(choose(share, h, group.mean(0), keys[h, :n]))
                for g in range(2):
                    made[h * 2 + g, r] = attended(group[g], keys[h], values[h], tokens)
        out.append(made)
    return torch.stack(out)


def quest_rule(share: float, h: int, q: torch.Tensor, keys: torch.Tensor) -> set[int]:
    n, page = len(keys), 16
    own = (n - 1) // page
    bounds = []
    for p in range(own):
        block = keys[p * page : (p + 1) * page]
        bounds.append(sum(max(float(q[d] * block[:, d].min()), float(q[d] * block[:, d].max())) for d in range(DIM)))
    count = max(3, math.ceil(math.ceil(share * n - 1e-9) / page)) - 1
    chosen = sorted(range(own), key=lambda p: -bounds[p])[:count]
    return {t for p in [*chosen, own] for t in range(p * page, min(n, (p + 1) * page))}


def test_quest(prompt: LayerPrompt) -> None:
    new, shares = new_tokens(2, [1, 7, 1, 12]), (0.1, 0.4)
    state = quest.Quest(shares).prefill(prompt)
    torch.testing.assert_close(run(state, new), brute(prompt, new, shares, quest_rule), rtol=1e-4, atol=1e-5)


def test_quest_with_a_wrong_page_maximum_is_noticed(prompt: LayerPrompt, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(keys: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = torch.unflatten(keys, -2, (-1, page)) if keys.shape[-2] else keys[..., None, :]
        return pages.amin(-2), pages.mean(-2)

    monkeypatch.setattr(quest, "page_bounds", wrong)
    new = new_tokens(1, [1, 7])
    found, true = run(quest.Quest((0.3,)).prefill(prompt), new), brute(prompt, new, (0.3,), quest_rule)
    assert (found - true).abs().max() > 0.01


def test_first_layers_read_everything() -> None:
    x, new = layer(TOKENS, index=1), new_tokens(1, [3])
    exact = run(Full().prefill(x), new)
    for method in (quest.Quest((0.02,)), DoubleSparse((0.02,))):
        assert torch.equal(run(method.prefill(x), new), exact)
    assert not torch.equal(run(quest.Quest((0.02,), dense_layers=0).prefill(x), new), exact)


def test_snapkv(prompt: LayerPrompt) -> None:
    shares, window = (0.2, 0.5), 32
    for pooling, pool in (("avg", lambda v: sum(v) / 7), ("max", max)):
        new = new_tokens(2, [1, 4])
        votes = torch.zeros(HEADS, TOKENS - window)
        for h in range(HEADS):
            for w in range(window):
                end = TOKENS - window + w + 1
                shared = torch.softmax(prompt.keys[h // 2, :end] @ prompt.q[h, TOKENS - window + w] * SCALE, 0)
                votes[h] += shared[: TOKENS - window]
        padded = torch.nn.functional.pad(votes, (3, 3))  # votes are above 0: padding changes no maximum
        pooled = torch.tensor(
            [
                [float(pool([float(x) for x in padded[h, t : t + 7]])) for t in range(votes.shape[1])]
                for h in range(HEADS)
            ]
        )
        mean = pooled.view(KV_HEADS, 2, -1).mean(1)

        def kept(share: float, h: int, q: torch.Tensor, keys: torch.Tensor, mean: torch.Tensor = mean) -> set[int]:
            best = mean[h].topk(math.ceil(share * TOKENS) - window).indices.tolist()
            return {*best, *range(TOKENS - window, len(keys))}

        method = SnapKV(shares, pooling=pooling)
        torch.testing.assert_close(method.votes(prompt, window)[:, 0], mean, rtol=1e-4, atol=1e-6)
        if pooling == "avg":  # the greatest of neighbours is often the same, and of equal votes any may win
            true = brute(prompt, new, shares, kept)
            torch.testing.assert_close(run(method.prefill(prompt), new), true, rtol=1e-4, atol=1e-5)


def test_doublesparse(prompt: LayerPrompt) -> None:
    new, shares = new_tokens(2, [1, 5, 2]), (0.05, 0.3)
    heavy = heavy_channels(prompt, 8)
    for h in range(KV_HEADS):
        moved = prompt.q[h * 2 : h * 2 + 2].abs().mean((0, 1)) * prompt.keys[h].abs().mean(0)
        assert set(heavy[h].tolist()) == set(moved.topk(8).indices.tolist())

    def rule(share: float, h: int, q: torch.Tensor, keys: torch.Tensor) -> set[int]:
        scores = keys[:, heavy[h]] @ q[heavy[h]]
        return {*scores.topk(math.ceil(share * len(keys) - 1e-9)).indices.tolist(), len(keys) - 1}

    state = DoubleSparse(shares).prefill(prompt)
    torch.testing.assert_close(run(state, new), brute(prompt, new, shares, rule), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [quest.Quest, SnapKV, DoubleSparse], ids=lambda m: m.__name__)
def test_a_budget_of_everything_is_exact_attention(
    make: Callable[[Sequence[float]], Method], prompt: LayerPrompt
) -> None:
    new = new_tokens(1, [1, 20, 3])
    exact = run(Full().prefill(prompt), new)
    q, keys, values = joined(prompt, new, 0)
    n = keys.shape[1]
    mask = torch.ones(24, n, dtype=torch.bool).tril(n - 24)
    stock = torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask, scale=SCALE, enable_gqa=True)
    torch.testing.assert_close(exact[0], stock, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run(make((1.0,)).prefill(prompt), new), exact, rtol=1e-5, atol=1e-6)
    half = run(make((0.2,)).prefill(prompt), new)
    assert (half - exact).abs().max() > 0.01, "a small budget must show"


@pytest.mark.parametrize("tokens", [500, 1500])
def test_selfindex_is_what_a_coded_sequence_attends(tokens: int) -> None:
    growth, shares = Growth(epoch=192, block=32, least=96), (0.05, 0.2)
    x, new = layer(tokens), new_tokens(2, [1] * 40 + [16] * 12)
    found = run(SelfIndex(shares, growth).prefill(x), new)
    for b, share in enumerate(shares):
        sequence = CodedSequence(Layout(DIM), growth, ROTARY)
        sequence.append(x.keys[None], x.values[None])
        sequence.observe(x.q[None])
        made = []
        for given in new:
            q, k, v = (t[b : b + 1] for t in given)
            sequence.settle()
            sequence.append(k, v)
            made.append(sequence.attend(q, Budget(share, least=0), scale=SCALE)[0])
            sequence.observe(q)
        assert len(sequence.parts) > 2
        true = torch.cat(made, -2)[0]
        # a step's count is that of its last row there, of each row here; near-equal scores may fall either way
        off = (found[b] - true).norm(dim=-1) / true.norm(dim=-1)
        assert off.median() < 1e-4 and off.mean() < 0.02


def test_selfindex_short_prompts_stay_whole(prompt: LayerPrompt) -> None:
    new = new_tokens(1, [1, 2])
    x = layer(200)
    torch.testing.assert_close(run(SelfIndex((0.05,)).prefill(x), new), run(Full().prefill(x), new))


def test_int4_kivi(prompt: LayerPrompt) -> None:
    new = new_tokens(1, [1] * 40)
    found = run(int4.Kivi().prefill(prompt), new)
    q, keys, values = joined(prompt, new, 0)
    for r in (0, 20, 39):
        n = TOKENS + r + 1
        done = max(0, n - 1 - 128) // 32 * 32
        k, v = keys[:, :n].clone(), values[:, :n].clone()
        for h in range(KV_HEADS):
            for begin in range(0, done, 32):
                for d in range(DIM):
                    k[h, begin : begin + 32, d] = four_bits(keys[h, begin : begin + 32, d])
            for t in range(done):
                for d in range(0, DIM, 32):
                    v[h, t, d : d + 32] = four_bits(values[h, t, d : d + 32])
        for h in range(HEADS):
            true = attended(q[h, r], k[h // 2], v[h // 2], list(range(n)))
            torch.testing.assert_close(found[0, h, r], true, rtol=1e-3, atol=1e-4)
    exact = run(Full().prefill(prompt), new)
    off = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0.001 < off.mean() < 0.1


def four_bits(x: torch.Tensor) -> torch.Tensor:
    low, step = x.min(), ((x.max() - x.min()) / 15).half().float()
    low = low.half().float()
    return ((x - low) / step).round().clamp(0, 15) * step + low


@pytest.mark.parametrize("name", ["selfindex", "quest", "snapkv", "doublesparse", "int4-kivi", "full"])
def test_rows_of_a_block_attend_as_single_steps(name: str, prompt: LayerPrompt) -> None:
    method = next(m for m in methods_of([name], (0.1, 0.5)) if m.name == name)
    state, batch = method.prefill(prompt), len(method.budgets)
    steps = new_tokens(batch, [1] * 9)
    block = [tuple(torch.cat([s[i] for s in steps], -2) for i in range(3))]
    torch.testing.assert_close(run(state, block), run(state, steps), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run(state, steps), run(state, steps), msg="a branch left something behind")


@pytest.mark.parametrize("tokens", [200, 1500])
def test_nothing_is_made_on_another_device_than_the_keys(tokens: int) -> None:
    """A CPU tensor among tensors of no data raises."""
    heads, dim = 12, 128
    rotary = Rotary(10_000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim), dim)

    def fresh(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device="meta")

    x = LayerPrompt(5, 28, fresh(heads, tokens, dim), fresh(2, tokens, dim), fresh(2, tokens, dim), 0.1, rotary)
    for method in methods_of(["selfindex", "quest", "quest-equal", "snapkv", "doublesparse", "int4-kivi"], (0.05, 0.3)):
        state, batch = method.prefill(x).branch(), len(method.budgets)
        for rows in (1, 1, *(16,) * 90):
            out = state.attend(fresh(batch, heads, rows, dim), fresh(batch, 2, rows, dim), fresh(batch, 2, rows, dim))
        assert out.shape == (batch, heads, 16, dim) and out.device.type == "meta"


def test_sizes() -> None:
    n, d = 8192, 128
    made = methods_of(["selfindex", "quest", "quest-equal", "snapkv", "doublesparse", "int4-kivi"], (0.075,))
    of = {label: s for m in made for label, s in zip(labels(m), m.sizes(n, d, 28), strict=True)}
    assert of["full"].held == of["full"].read == 512
    ours = of["selfindex@0.075"]
    assert 88 < ours.held < 100 and 16 + 0.075 * 72 < ours.read < 35
    assert of["quest@0.075"].held == 512 + 26 / 28 * 32
    assert of["quest@0.075"].read == pytest.approx(2 / 28 * 512 + 26 / 28 * (32 + 0.075 * 512), rel=0.01)
    assert of["quest-equal@0.075"].read == pytest.approx(ours.read, rel=0.1)
    assert of["snapkv@0.075"].held == of["snapkv@0.075"].read == pytest.approx(0.075 * 512, rel=0.01)
    assert of["doublesparse@0.075"].held == 512 + 26 / 28 * 32
    assert of["int4-kivi"].held == pytest.approx(160 + 128 / 8192 * 352)
    assert equal_page(ours.read, d) == 64 and equal_share(ours.read, d) < 0 < equal_share(ours.read, d, 64)
    equal = QuestEqual((0.075, 0.3))
    assert equal.shares(n, d)[1] > equal.shares(n, d)[0] > 0.03


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    made = methods_of(["full", "quest", "snapkv"], (0.02, 1.0))
    assert [x for m in made for x in labels(m)] == ["full", "quest@0.02", "quest@1", "snapkv@0.02", "snapkv@1"]
    with pytest.raises(InvalidInput, match="Did you mean 'quest'"):
        methods_of(["qest"], (0.1,))
    with pytest.raises(InvalidInput, match=r"a budget is 1\.5"):
        methods_of(["snapkv"], (1.5,))
    with pytest.raises(InvalidInput, match="give each once"):
        methods_of(["snapkv"], (0.1, 0.1))
    monkeypatch.setattr(int4, "available", lambda: [])
    assert methods_of(["int4"], (0.1,))[1].name == "int4-kivi"
    with pytest.raises(InvalidInput, match="run twice"):
        methods_of(["int4", "int4-kivi"], (0.1,))
    with pytest.raises(Unavailable, match="backend 'hqq'"):
        methods_of(["int4-hqq"], (0.1,))
    assert {m.name for n in NAMES if n not in ("int4-hqq", "int4-quanto") for m in methods_of([n], (0.1,))} == {
        n for n in NAMES if n not in ("int4", "int4-hqq", "int4-quanto")
    }


def test_a_press_needs_kvpress(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(presses, "importlib", SimpleNamespace(import_module=missing))
    with pytest.raises(Unavailable, match="pip install kvpress"):
        methods_of(["kvpress:SnapKVPress"], (0.1,))


class LastPress:
    """Stands for a press: keeps the last tokens."""

    def __init__(self, compression_ratio: float) -> None:
        self.ratio = compression_ratio

    def compress(self, module: Any, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> Any:
        assert hidden.shape[:2] == (1, keys.shape[-2]) and module.rotary_emb is not None
        kept = round(keys.shape[-2] * (1 - self.ratio))
        return keys[..., -kept:, :], values[..., -kept:, :]


def test_presses(tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def imported(name: str) -> Any:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = None  # as the package does: it wraps all of them
        return SimpleNamespace(__all__=["LastPress", "BarePress"], LastPress=LastPress, BarePress=SimpleNamespace)

    monkeypatch.setattr(presses, "importlib", SimpleNamespace(import_module=imported))
    methods = methods_of(["kvpress:LastPress"], (0.5, 1.0))
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    with pytest.raises(InvalidInput, match="Did you mean 'LastPress'"):
        methods_of(["kvpress:LstPress"], (0.5,))
    with pytest.raises(InvalidInput, match="layer by layer"):
        methods_of(["kvpress:BarePress"], (0.5,))
    model = tiny_model("llama")
    switch, undo = install(model)
    try:
        session = Session(model, switch, torch.randint(0, 512, (100,)).tolist(), methods)
        full, half, whole = session.step(torch.randint(0, 512, (1, 4)).expand(3, -1))
    finally:
        undo()
    assert not hasattr(model.model.layers[0].self_attn, "rotary_emb")
    torch.testing.assert_close(whole, full, rtol=1e-4, atol=1e-4)
    assert (half - full).abs().max() > 0.01
