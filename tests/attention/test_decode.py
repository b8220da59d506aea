"""Steps over a self-indexed cache, inside a model: held against stock transformers over the same dequantised keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tamis.attention.caching import check_form
from tamis.attention.decode import Decoding, Trace
from tamis.attention.hook import Switch
from tamis.attention.policy import Policy
from tamis.attention.report import DecodeReport
from tamis.cache.formats import cache_argument, cache_bytes, new_cache
from tamis.cache.selfindex.keep import Budget
from tamis.cache.selfindex.sequence import CodedSequence
from tamis.core.errors import InvalidInput, ModelUnsupported

Attach = Callable[[Any], Switch]
SPARSE = Policy(kv="selfindex", decode="selfindex")
EVERYTHING = Policy(kv="selfindex", decode="selfindex", decode_budget=1.0)
DENSE = Policy(kv="selfindex")


def drawn(n: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 512, (batch, n), generator=torch.Generator().manual_seed(seed))


class Run:
    """A model, its switch, and one cache that passes are made over."""

    def __init__(self, model: Any, switch: Switch, policy: Policy) -> None:
        self.model, self.switch = model, switch
        self.cache = new_cache(policy.kv_form, model.config)
        self.decoding = Decoding(model, self.cache, policy)

    def __call__(self, ids: torch.Tensor, *, step: bool = False) -> torch.Tensor:
        with torch.inference_mode(), self.decoding.running(self.switch, step=step):
            return passed(self.model, ids, self.cache)

    def sequence(self, layer: int = 0) -> CodedSequence:
        found: CodedSequence = self.cache.layers[layer].sequence
        return found

    def as_stock(self) -> DynamicCache:
        """Keys and values as they are held now, dequantised, in a stock cache."""
        held = DynamicCache(config=self.model.config)
        for i, layer in enumerate(self.cache.layers):
            held.update(*(t.clone() for t in layer.sequence.dense()), i)
        return held


def passed(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, **{cache_argument(model): cache}, use_cache=True).logits
    return logits


@pytest.fixture
def start(llama: Any, attach: Attach) -> Callable[[Policy], Run]:
    switch = attach(llama)
    return lambda policy: Run(llama, switch, policy)


@pytest.mark.parametrize("policy", [EVERYTHING, DENSE], ids=["every record chosen", "dense reading"])
@pytest.mark.parametrize("n", [700, 321, 1201])
def test_steps_are_those_of_transformers_over_dequantised_keys(
    stock: Any, attach: Attach, policy: Policy, n: int
) -> None:
    run = Run(stock, attach(stock), policy)
    run(drawn(n))
    for token in range(70):  # a block leaves the open run on the way
        ids = drawn(1, seed=token)
        if token in (0, 69):
            run.decoding.compress()
            wanted = passed(stock, ids, run.as_stock())
            torch.testing.assert_close(run(ids, step=True), wanted, rtol=1e-3, atol=1e-3)
        else:
            run(ids, step=True)
    assert run.sequence().n_compressed > n - 64 and run.cache.get_seq_length() == n + 70


def test_a_small_budget_reads_less_and_differs(start: Callable[[Policy], Run]) -> None:
    ids, token = drawn(1000), drawn(1, seed=9)
    logits = []
    for share, least in ((1.0, 0), (0.3, 0), (0.0, 0)):
        run = start(Policy(decode="selfindex", decode_budget=share, decode_least=least))
        run(ids)
        logits.append(run(token, step=True))
        report = run.decoding.report()
        n = run.sequence().n_tokens
        whole = run.sequence().parts[0].exact.shape[-1] + n - run.sequence().n_compressed
        assert report.attended == pytest.approx(min(n, whole + math.ceil(share * n)) / n)
    assert float((logits[0] - logits[2]).abs().max()) > 10 * 1e-3
    near, far = ((logits[0] - x).norm() for x in logits[1:])
    assert near < far


def test_a_sparse_step_never_dequantises_everything(
    start: Callable[[Policy], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(SPARSE)
    run(drawn(600))
    seen: list[Budget] = []
    attend = CodedSequence.attend

    def counted(self: CodedSequence, q: torch.Tensor, budget: Budget, **options: Any) -> Any:
        seen.append(budget)
        return attend(self, q, budget, **options)

    monkeypatch.setattr(CodedSequence, "attend", counted)
    monkeypatch.setattr(CodedSequence, "dense", lambda self: pytest.fail("everything was dequantised"))
    run(drawn(1), step=True)
    assert seen == [Budget(0.075, 96)] * 2


class TestPrompts:
    @pytest.mark.parametrize("n", [1, 2, 63, 500, 1001])
    def test_a_prompt_is_exact(self, stock: Any, attach: Attach, n: int) -> None:
        before = passed(stock, drawn(n), DynamicCache(config=stock.config))
        run = Run(stock, attach(stock), SPARSE)
        assert torch.equal(run(drawn(n)), before)
        assert run.sequence().n_compressed == 0 and not run.decoding.report().approximate

    def test_so_are_its_chunks(self, llama: Any, attach: Attach) -> None:
        ids = drawn(1000)
        before = passed(llama, ids, DynamicCache(config=llama.config))
        run = Run(llama, attach(llama), SPARSE)
        made = [run(ids[:, a:b]) for a, b in ((0, 400), (400, 999), (999, 1000))]
        torch.testing.assert_close(torch.cat(made, 1), before, rtol=1e-4, atol=1e-4)
        assert run.sequence().n_compressed == 0

    def test_short_ones_stay_whole_and_exact(self, llama: Any, attach: Attach) -> None:
        switch = attach(llama)
        ids = drawn(40)
        run, plain = Run(llama, switch, SPARSE), DynamicCache(config=llama.config)
        for begin, end in ((0, 1), *((i, i + 1) for i in range(1, 40))):
            made, wanted = run(ids[:, begin:end], step=begin > 0), passed(llama, ids[:, begin:end], plain)
            torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)
        report = run.decoding.report()
        assert (report.steps, report.approximate, report.attended) == (39, False, 1.0)
        assert "exact" in str(report)

    def test_a_second_turn_sees_the_dequantised_first(self, start: Callable[[Policy], Run]) -> None:
        run = start(SPARSE)
        run(drawn(700))
        for i in range(5):
            run(drawn(1, seed=i), step=True)
        held, turn = run.as_stock(), drawn(301, seed=7)
        wanted = passed(run.model, turn, held)
        torch.testing.assert_close(run(turn), wanted, rtol=1e-3, atol=1e-3)
        before = run.sequence().n_compressed
        run(drawn(1, seed=8), step=True)
        assert run.sequence().n_compressed >= before + 256 and run.sequence().n_tokens == 700 + 5 + 301 + 1

    def test_a_batch(self, start: Callable[[Policy], Run]) -> None:
        together, alone = start(SPARSE), [start(SPARSE) for _ in range(2)]
        ids, token = drawn(500, batch=2), drawn(1, batch=2, seed=3)
        together(ids)
        made = together(token, step=True)
        for i, run in enumerate(alone):
            run(ids[i : i + 1])
            torch.testing.assert_close(run(token[i : i + 1], step=True), made[i : i + 1], rtol=1e-3, atol=1e-3)
        assert together.decoding.report().bf16_bytes == 2 * alone[0].decoding.report().bf16_bytes


def kept_whole(run: Run) -> None:
    """What only queries can tell: tokens that the prompt's end attends to stay whole."""
    for layer in run.cache.layers:
        assert layer.sequence.parts[0].exact.shape[-1] == 4 + 60


class TestQueriesAreObserved:
    def prompted(self, start: Callable[[Policy], Run]) -> Run:
        run = start(SPARSE)
        run(drawn(700))
        run(drawn(1), step=True)
        return run

    def test_after_a_pass(self, start: Callable[[Policy], Run]) -> None:
        kept_whole(self.prompted(start))

    def test_without_it_the_check_fails(self, start: Callable[[Policy], Run], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Decoding, "observe", lambda self, layer, q: None)
        with pytest.raises(AssertionError):
            kept_whole(self.prompted(start))

    def test_each_layer_gets_its_own(self, start: Callable[[Policy], Run], monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[tuple[int, tuple[int, ...]]] = []
        monkeypatch.setattr(Decoding, "observe", lambda self, layer, q: seen.append((layer, tuple(q.shape))))
        self.prompted(start)
        assert seen == [(0, (1, 4, 700, 64)), (1, (1, 4, 700, 64)), (0, (1, 4, 1, 64)), (1, (1, 4, 1, 64))]

    def test_a_prompt_s_queries_are_not_held(self, start: Callable[[Policy], Run]) -> None:
        run = start(SPARSE)
        run(drawn(700))
        window = run.sequence()._window
        assert window is not None and window.untyped_storage().nbytes() == 4 * 32 * 64 * 4


class TestReport:
    def test_bytes_and_words(self, start: Callable[[Policy], Run]) -> None:
        run = start(SPARSE)
        run(drawn(900))
        assert run.decoding.report().kv_bytes == cache_bytes(run.cache) == 2 * 2 * 900 * 2 * 64 * 4
        for i in range(3):
            run(drawn(1, seed=i), step=True)
        report = run.decoding.report()
        assert (report.asked, report.used, report.kv, report.kernel) == ("selfindex", "selfindex", "selfindex", "cpu")
        assert (report.steps, report.n_tokens, report.approximate) == (3, 903, True)
        assert report.kv_bytes == cache_bytes(run.cache) and report.bf16_bytes == 2 * 2 * 903 * 2 * 64 * 2
        assert report.kv_bytes < 0.75 * report.bf16_bytes
        assert 0 < report.compress_s < 60 and 0.1 < report.attended < 0.5
        assert "3 steps" in str(report) and "approximate" in str(report)

    def test_dense_reading_is_approximate_too(self, start: Callable[[Policy], Run]) -> None:
        run = start(DENSE)
        run(drawn(900))
        run(drawn(1), step=True)
        report = run.decoding.report()
        assert (report.used, report.kernel, report.attended, report.approximate) == ("dense", "sdpa", 1.0, True)

    @pytest.mark.parametrize(("kv", "approximate"), [("auto", False), ("bf16", True)])
    def test_other_forms_are_counted(self, start: Callable[[Policy], Run], kv: str, approximate: bool) -> None:
        run = start(Policy(kv=kv))
        run(drawn(30))
        run(drawn(1), step=True)
        report = run.decoding.report()
        assert (report.used, report.kv, report.steps, report.approximate) == ("dense", kv, 1, approximate)
        assert report.kv_bytes == cache_bytes(run.cache) == report.bf16_bytes * (2 if kv == "auto" else 1)
        assert run.switch.decode is None

    def test_nothing_yet(self) -> None:
        report = Trace().report(Policy())
        assert (report.used, report.steps, report.attended) == ("dense", 0, 1.0) and "0 steps" in str(report)


def test_an_interrupted_pass_leaves_the_switch_clean(
    start: Callable[[Policy], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(SPARSE)
    run(drawn(400))
    monkeypatch.setattr(Decoding, "observe", lambda self, layer, q: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(drawn(1), step=True)
    assert run.switch.decode is None and not any(layer.only_new or layer.whole for layer in run.cache.layers)


class TestRefused:
    def test_head_dims(self, tiny_model: Callable[..., Any]) -> None:
        model = tiny_model("llama", head_dim=96)
        for policy in (SPARSE, DENSE, Policy(decode="selfindex")):
            with pytest.raises(ModelUnsupported, match=r"head_dim 96; .* 64 and 128\. Use kv='auto'"):
                check_form(policy, model)
        check_form(Policy(kv="bf16"), model)

    def test_rotary_that_changes_with_length(self, tiny_model: Callable[..., Any]) -> None:
        model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
        with pytest.raises(ModelUnsupported, match="rotary type 'dynamic'"):
            check_form(SPARSE, model)

    def test_beams_and_taking_back(self, start: Callable[[Policy], Run]) -> None:
        run = start(SPARSE)
        run(drawn(40))
        with pytest.raises(InvalidInput, match="beam search"):
            run.cache.reorder_cache(torch.tensor([0]))
        with pytest.raises(InvalidInput, match="only grows"):
            run.cache.layers[0].crop(-1)
        run.cache.layers[0].crop(0)


@pytest.mark.slow
def test_four_thousand_generated_tokens(tiny_model: Callable[..., Any], attach: Attach) -> None:
    model = tiny_model("llama", max_position_embeddings=8192, num_hidden_layers=1)
    run = Run(model, attach(model), SPARSE)
    logits = run(drawn(300))
    for _ in range(4096):
        logits = run(logits[:, -1:].argmax(-1), step=True)
    report, sequence = run.decoding.report(), run.sequence()
    assert (report.steps, report.n_tokens) == (4096, 4396) and sequence.open is not None
    assert sequence.open[0].shape[-2] < 128 + 64 and len(sequence.parts) == 5
    whole, n_open = sum(p.exact.shape[-1] for p in sequence.parts), sequence.open[0].shape[-2]
    records = sequence.layout.total_bytes(4396 - n_open, tables=5)
    assert report.kv_bytes == 2 * (records + (whole + n_open) * 2 * 64 * 4 + whole * 8)  # the model is in float32
    assert report.attended < 0.3
    token = drawn(1)
    run.decoding.compress()
    wanted = passed(model, token, run.as_stock())[0, -1]
    found = run(token, step=True)[0, -1]
    assert bool(found.isfinite().all())
    assert float((found - wanted).norm() / wanted.norm()) < 0.5


def test_a_report_says_larger_where_it_is() -> None:
    told = [
        str(DecodeReport("selfindex", "selfindex", "selfindex", "cpu", 1, 10, kv, bf16))
        for kv, bf16 in ((100, 500), (200, 100), (100, 0), (0, 0))
    ]
    assert "5.0x smaller" in told[0] and "2.0x larger" in told[1] and "KV 0.0 MB" in told[3]
