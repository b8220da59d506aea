"""Answers over chosen blocks, resident and from host memory: exact where all is read, to the bit where little is."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.attention.block_choices import ForecastChoice
from tamis.attention.block_prefill import BlockPrefill
from tamis.attention.layer_inputs import watching
from tamis.attention.policy import Policy
from tamis.cache.block_layer import BlockLayer
from tamis.cache.offload import LayerBlocks
from tamis.cache.slots import Moves, SlotMap
from tamis.cache.streams import Queues, Stream, run_all
from tamis.core.errors import InvalidInput, ModelNotFound, PoolFull, StoreMismatch
from tamis.engine.llm import LLM
from tamis.engine.sampling import Sampling
from tamis.kernels.blocks import BlockRule
from tamis.model.source import LoadedModel
from tamis.prompt.segments import Prompt
from tiny_chat import tiny_tokenizer
from tiny_forecast import save_forecast

Open = Callable[..., LLM]
QUESTION = "Where is the lamp?"
FEW = {"decode_budget": 0.1, "decode_least": 0, "decode_local": 1}


@pytest.fixture
def with_forecast(open_llm: Open, loaded: Any, tmp_path: Path) -> Callable[..., LLM]:
    """An LLM of a tiny model with a forecast of its own."""

    def get(family: str = "llama", *, layers: int = 3, **choices: Any) -> LLM:
        changes = {"num_hidden_layers": layers}
        folder = save_forecast(loaded(family, **changes), tmp_path / family)
        return open_llm(family, model=changes, forecast=folder, **choices)

    return get


def drawn(n: int, seed: int = 0) -> Prompt:
    draw = torch.Generator().manual_seed(seed)
    return Prompt.of([("question", torch.randint(4, 500, (n,), generator=draw).tolist())])


def tokens(llm: LLM, prompt: Prompt, n: int = 12, **choices: Any) -> tuple[list[int], Any]:
    start = llm.prefill(prompt, room_tokens=n, **choices)
    made = list(llm.runner.decode(start, Sampling(max_new_tokens=n), frozenset()))
    return made, start.decode_report


def logits(llm: LLM, prompt: Prompt, n: int, **choices: Any) -> torch.Tensor:
    """Of `n` steps with given tokens, [n, vocabulary]."""
    start = llm.prefill(prompt, room_tokens=n, **choices)
    return torch.stack([llm.runner._step(start, 7 * i % 500) for i in range(n)])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_all_blocks_are_dense(with_forecast: Callable[..., LLM], family: str) -> None:
    llm, prompt = with_forecast(family, layers=2), drawn(700)
    wanted, dense = tokens(llm, prompt, 20)
    for decode in ("blocks", "forecast"):
        for offload in ("none", "host"):
            options = {"decode": decode, "offload": offload, "decode_budget": 1.0}
            found, report = tokens(llm, prompt, 20, **options)
            assert found == wanted and (report.used, report.approximate) == (decode, False)
            assert report.attended == pytest.approx(1.0) and report.steps == 19
    assert dense.kv == "auto" and dense.blocks is None


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 129])
def test_lengths(with_forecast: Callable[..., LLM], n: int) -> None:
    """Up to 34 blocks all are forced, and read."""
    llm, prompt = with_forecast(layers=2), drawn(n)
    wanted, _ = tokens(llm, prompt)
    for decode in ("dense", "blocks", "forecast"):
        found, report = tokens(llm, prompt, decode=decode, offload="host")
        assert found == wanted and not report.approximate and report.n_tokens == n + 11


def test_two_requests_in_turns(with_forecast: Callable[..., LLM]) -> None:
    llm, few = with_forecast(), FEW | {"decode": "forecast", "offload": "host"}
    prompts = drawn(500), drawn(700, seed=1)
    alone = [logits(llm, prompt, 10, **few) for prompt in prompts]
    starts = [llm.prefill(prompt, room_tokens=10, **few) for prompt in prompts]
    for i in range(10):
        for start, truth in zip(starts, alone, strict=True):
            assert torch.equal(llm.runner._step(start, 7 * i % 500), truth[i])


class TestOffload:
    def test_sticking_moves_fewer_blocks_and_the_same_bits_wherever_they_lie(
        self, with_forecast: Callable[..., LLM]
    ) -> None:
        llm, prompt = with_forecast("qwen3"), drawn(1400)
        few = {**FEW, "decode": "blocks", "decode_budget": 0.3, "offload": "host"}
        loose, calm = (tokens(llm, prompt, 60, decode_stick=stick, **few)[1].blocks for stick in (0.0, 2.0))
        assert loose is not None and calm is not None and calm.moved_bytes < loose.moved_bytes
        resident = few | {"offload": "none", "decode_stick": 2.0}
        assert torch.equal(logits(llm, prompt, 60, **resident), logits(llm, prompt, 60, decode_stick=2.0, **few))
        # next to no preference changes no choice: what is added to the best ones' scores is all that differs
        assert torch.equal(logits(llm, prompt, 60, decode_stick=1e-9, **few), logits(llm, prompt, 60, **few))

    @pytest.mark.parametrize("decode", ["blocks", "forecast"])
    def test_from_the_host_as_resident(
        self, with_forecast: Callable[..., LLM], decode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm, prompt, few = with_forecast("qwen3"), drawn(700), FEW | {"decode": decode}
        truth = logits(llm, prompt, 150, **few)
        host = few | {"offload": "host"}
        assert torch.equal(logits(llm, prompt, 150, **host), truth)
        assert torch.equal(logits(llm, prompt, 150, prefetch=False, **host), truth)
        assert torch.equal(logits(llm, prompt, 150, offload_slots=10, **host), truth)
        compute, copy, chance = Stream("compute"), Stream("copy"), random.Random(0)
        queues = Queues(compute, copy, lambda: run_all([compute, copy], chance))
        monkeypatch.setattr(Queues, "of", lambda device: queues)
        place = SlotMap.place

        def evicting(self: SlotMap, wanted: torch.Tensor, *, forget: bool = False) -> Moves:
            return place(self, wanted, forget=True)

        monkeypatch.setattr(SlotMap, "place", evicting)
        assert torch.equal(logits(llm, prompt, 150, **host), truth), "everything evicted at every step"

    def test_a_slot_that_is_not_refreshed_is_seen(
        self, with_forecast: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm, prompt, few = with_forecast(), drawn(700), FEW | {"decode": "forecast"}
        truth = logits(llm, prompt, 20, **few)
        place = SlotMap.place

        def lazy(self: SlotMap, wanted: torch.Tensor, *, forget: bool = False) -> Moves:
            moves = place(self, wanted, forget=forget)
            if self._step == 9:
                moves.missing[0] = False
            return moves

        monkeypatch.setattr(SlotMap, "place", lazy)
        found = logits(llm, prompt, 20, offload="host", **few)
        assert torch.equal(found[:8], truth[:8]) and not torch.equal(found[8:], truth[8:])

    def test_dense_from_the_host(self, open_llm: Open) -> None:
        llm, prompt = open_llm(), drawn(300)
        wanted, _ = tokens(llm, prompt)
        found, report = tokens(llm, prompt, offload="host")
        assert found == wanted and (report.used, report.kv, report.approximate) == ("dense", "blocks", False)
        steps, blocks, layers, heads = 11, 300 // 64, 2, 2
        assert report.blocks.moved_bytes == steps * blocks * layers * heads * 2 * 64 * 64 * 4
        assert report.blocks.kept == 0 and report.blocks.host_bytes > report.blocks.device_bytes > 0

    def test_in_chunks_and_with_sift(self, open_llm: Open, documents: list[str]) -> None:
        llm = open_llm(prefill="sift", min_tokens=0)
        prompt = llm.template.prompt(QUESTION, [llm.document_tokens(d) for d in documents])
        whole = logits(llm, prompt, 5, decode="blocks", **FEW)
        for more in ({"offload": "none"}, {"offload": "host"}):
            parts = logits(llm, prompt, 5, decode="blocks", chunk_tokens=256, **more, **FEW)
            torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-3)

    def test_too_few_slots_are_said_before_a_step(self, open_llm: Open) -> None:
        refusal = r"a step over 712 tokens reads 4 blocks beside its own and offload_slots is 3; give 4 or more"
        with pytest.raises(PoolFull, match=refusal):
            tokens(open_llm(), drawn(700), decode="blocks", offload="host", offload_slots=3, **FEW)

    def test_an_answer_that_outgrows_its_room(self, open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tamis.cache.block_layer.ROOM", 1)
        llm, prompt, few = open_llm(), drawn(700), FEW | {"decode": "blocks", "decode_budget": 0.4}
        truth = logits(llm, prompt, 150, **few)
        for offload in ("host", "none"):
            start = llm.prefill(prompt, room_tokens=0, offload=offload, **few)
            before = start.cache.layers[0].nbytes
            found = torch.stack([llm.runner._step(start, 7 * i % 500) for i in range(150)])
            assert torch.equal(found, truth) and start.cache.layers[0].nbytes > before

    def test_bfloat16(self, open_llm: Open) -> None:
        llm, prompt, few = open_llm(), drawn(500), FEW | {"decode": "blocks", "kv": "bf16"}
        resident, report = tokens(llm, prompt, **few)
        found, moved = tokens(llm, prompt, offload="host", **few)
        assert found == resident and report.approximate and moved.blocks.host_bytes == 2 * 2 * 8 * 2 * 64 * 64 * 2


class TestReport:
    def test_of_an_answer(self, with_forecast: Callable[..., LLM], documents: list[str]) -> None:
        llm = with_forecast()
        options = FEW | {"decode": "forecast", "offload": "host", "measure_recall": True}
        answer = llm.generate(QUESTION, documents, sampling=Sampling(max_new_tokens=8), **options)
        report = answer.report.decode
        assert report is not None and report.blocks is not None and report.approximate
        assert (report.asked, report.used, report.kv) == ("forecast", "forecast", "blocks") and report.attended < 0.6
        blocks = report.blocks
        assert blocks.recall is not None and 0 < blocks.recall <= 1 and 3 <= blocks.kept < 8
        assert blocks.hit_rate is not None and blocks.late is not None
        assert 0 < blocks.late <= 1 - blocks.hit_rate < 1 and blocks.moved_bytes > 0
        text = str(answer.report)
        assert "blocks of 64 tokens a step and KV head, forecast recall" in text and "MB moved" in text
        said = json.loads(json.dumps(answer.to_dict()))["report"]["decode"]["blocks"]
        assert said["moved_bytes"] == blocks.moved_bytes

    def test_what_is_late(self, with_forecast: Callable[..., LLM]) -> None:
        """Forecast blocks come in time but for the first layer's; a layer's own choice and unfetched ones never do."""
        llm, prompt = with_forecast(), drawn(1400)
        kinds = {"ahead": {"decode": "forecast"}, "own": {"decode": "blocks"}}
        kinds["waiting"] = kinds["ahead"] | {"prefetch": False}  # type: ignore[dict-item]
        made = {name: tokens(llm, prompt, offload="host", **FEW, **kind)[1].blocks for name, kind in kinds.items()}
        assert made["own"].late == pytest.approx(1 - made["own"].hit_rate)
        assert made["waiting"].late == pytest.approx(1 - made["waiting"].hit_rate)
        assert 0 < made["ahead"].late < made["waiting"].late and made["ahead"].recall is None

    def test_memory(self, open_llm: Open) -> None:
        start = open_llm().prefill(drawn(700), room_tokens=12, decode="blocks", offload="host", **FEW)
        first = start.cache.layers[0]
        assert isinstance(first, BlockLayer) and isinstance(first.blocks, LayerBlocks)
        assert first.blocks.shape.n_slots == 4 and first.host_bytes == 2 * 12 * 2 * 64 * 64 * 4
        assert start.decode_report is not None and start.decode_report.kv_bytes == 2 * first.nbytes


class TestRefused:
    def test_a_foreign_forecast(self, open_llm: Open, loaded: Any, tmp_path: Path) -> None:
        folder = save_forecast(loaded("llama"), tmp_path)
        with pytest.raises(StoreMismatch, match=f"weights_bfloat16 of this model differ.*{AGAIN}"):
            open_llm("llama", model={"seed": 9}, forecast=folder)
        with pytest.raises(StoreMismatch, match="architecture"):
            open_llm("qwen3", forecast=folder)
        assert open_llm("llama", forecast=folder).prefill(drawn(20), decode="forecast").n_tokens == 20

    def test_none_at_all(self, open_llm: Open, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match="`tamis train forecast` makes one"):
            open_llm(forecast=tmp_path / "none")
        with pytest.raises(InvalidInput, match="decode='forecast' needs a forecast and none is loaded"):
            open_llm(decode="forecast")
        llm = open_llm()
        with pytest.raises(InvalidInput, match="or use decode='blocks'"):
            llm.prefill(drawn(20), decode="forecast")

    @pytest.mark.parametrize("prefill", ["reuse", "blend", "prefix"])
    def test_pages(self, open_llm: Open, documents: list[str], prefill: str) -> None:
        refusal = f"prefill='{prefill}' keeps documents in pages, which decode='blocks'"
        with pytest.raises(InvalidInput, match=refusal):
            open_llm().generate(QUESTION, documents, prefill=prefill, decode="blocks")


AGAIN = "train one for this model with `tamis train forecast`"


def test_the_model_is_as_it_was_after_closing(loaded: Any, tmp_path: Path) -> None:
    made = loaded("llama", num_hidden_layers=3)
    before = {name: t.clone() for name, t in made.model.state_dict().items()}
    with LLM(made, forecast=save_forecast(made, tmp_path), decode="forecast", **FEW) as llm:
        tokens(llm, drawn(300))
    assert all(torch.equal(made.model.state_dict()[name], t) for name, t in before.items())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in made.model.parameters())
    assert not any("forward" in vars(m) for m in made.model.modules())


FEW_PREFILLED = {"prefill": "blocks", "prefill_blocks": 4, "decode_local": 1}


class TestPrefill:
    def test_blocks(self, open_llm: Open) -> None:
        llm, prompt = open_llm(), drawn(700)
        dense, start = llm.prefill(prompt), llm.prefill(prompt, **FEW_PREFILLED)
        assert (start.report.used, start.report.selector, start.report.kernel) == ("blocks", "pooled keys", "reference")
        assert 0.4 < start.report.density < 0.9 and len(start.report.layers) == 2
        assert "density" in str(start.report) and not torch.equal(start.logits, dense.logits)
        every = llm.prefill(prompt, prefill="blocks", prefill_blocks=11, decode_local=1, min_tokens=0)
        assert every.report.density == 1.0 and every.report.used == "blocks"
        torch.testing.assert_close(every.logits, dense.logits, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("together", [1, 32])
    def test_by_a_forecast(self, with_forecast: Callable[..., LLM], together: int) -> None:
        """What the fused product chooses is what the forecast would from the layers' inputs; in chunks too."""
        llm, prompt = with_forecast(), drawn(700)
        few = {"prefill_blocks": 4, "decode_local": 1, "prefill_together": together}
        start = llm.prefill(prompt, prefill="forecast", **few)
        assert start.report.used == "forecast" and 0.4 < start.report.density < 0.9
        own = llm.prefill(prompt, prefill="blocks", **few)
        assert not torch.equal(start.logits, own.logits)
        fused, model = llm.runner.caching.forecast, llm.runner.model
        rule = BlockRule(top=4, local=1, dense_tokens=0, together=together)
        with watching(model) as seen, torch.inference_mode():
            choose = ForecastChoice(rule, fused.forecast, seen, fused.rotary)
            with llm.runner.switch.running(BlockPrefill.of(rule, choose), 700):
                expected = model(torch.tensor([prompt.tokens]), use_cache=False, logits_to_keep=1).logits[0, -1]
        torch.testing.assert_close(start.logits, expected, rtol=1e-4, atol=1e-4)
        parts = llm.prefill(prompt, prefill="forecast", chunk_tokens=192, tile=64, **few)
        assert parts.report.chunks == 4 and not parts.report.fallbacks
        torch.testing.assert_close(parts.logits, start.logits, rtol=1e-3, atol=1e-3)
        assert not fused._made and not fused.active

    def test_by_a_forecast_of_other_blocks(self, open_llm: Open, loaded: Any, tmp_path: Path) -> None:
        """What it was trained for counts: the length from which blocks are chosen, and what is read in any case."""
        trained = BlockRule(top=6, first=2, local=1, block=16, window=8, stride=4)
        llm = open_llm(forecast=save_forecast(loaded("llama"), tmp_path, trained))
        few = {"prefill": "forecast", "prefill_blocks": 8}
        assert "above 128" in llm.prefill(drawn(128), **few).report.reason
        for local in (1, 4):
            more = few if local == 1 else few | {"decode_local": local}
            with watching(llm.runner.model) as seen, torch.inference_mode():
                fused = llm.runner.caching.forecast
                rule = replace(trained, top=8, local=local, dense_tokens=0)
                choose = ForecastChoice(rule, fused.forecast, seen, fused.rotary)
                with llm.runner.switch.running(BlockPrefill.of(rule, choose), 300):
                    ids = torch.tensor([drawn(300).tokens])
                    expected = llm.runner.model(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
            start = llm.prefill(drawn(300), **more)
            assert start.report.used == "forecast"
            torch.testing.assert_close(start.logits, expected, rtol=1e-4, atol=1e-4)
        for wrong, says in (({"prefill_blocks": 3}, "4 blocks are forced"), ({"prefill_together": 32}, "blocks of 16")):
            with pytest.raises(InvalidInput, match=f"do not go with this forecast.*{says}"):
                llm.runner.check(Policy.of(**few | wrong))

    def test_none_to_prefill_by(self, open_llm: Open) -> None:
        with pytest.raises(InvalidInput, match=r"prefill='forecast' needs a forecast and none is loaded.*'blocks'"):
            open_llm().prefill(drawn(20), prefill="forecast")

    @pytest.mark.parametrize("together", [1, 32])
    def test_in_chunks(self, open_llm: Open, documents: list[str], together: int) -> None:
        """Documents of any length: chunks end where blocks do all the same."""
        llm, few = open_llm(), FEW_PREFILLED | {"prefill_together": together}
        prompt = llm.template.prompt(QUESTION, [llm.document_tokens(d) for d in documents])
        whole, parts = llm.prefill(prompt, **few), llm.prefill(prompt, chunk_tokens=192, tile=64, **few)
        assert parts.report.chunks > 1 and not parts.report.fallbacks
        assert parts.report.density == pytest.approx(whole.report.density)
        torch.testing.assert_close(parts.logits, whole.logits, rtol=1e-3, atol=1e-3)

    def test_short_ones_are_dense_and_say_so(self, open_llm: Open) -> None:
        report = open_llm().prefill(drawn(256), **FEW_PREFILLED).report
        assert report.used == "dense" and "blocks are chosen above 256" in report.reason


@pytest.mark.parametrize("decode", ["dense", "selfindex", "blocks", "forecast"])
def test_after_it_was_closed(with_forecast: Callable[..., LLM], decode: str) -> None:
    """Neither a new request nor the next token of one that has begun."""
    llm = with_forecast(decode=decode)
    begun = llm.runner.decode(llm.prefill(drawn(100)), Sampling(max_new_tokens=5), frozenset())
    next(begun)
    llm.close()
    asks: tuple[Callable[[], object], ...] = (
        lambda: llm.generate(QUESTION),
        lambda: llm.prefill(drawn(100)),
        lambda: llm.index([[1, 2, 3]]),
        llm.corpus,
        lambda: next(begun),
    )
    for ask in asks:
        with pytest.raises(InvalidInput, match="this LLM was closed"):
            ask()


@pytest.mark.gpu
@pytest.mark.parametrize("decode", ["blocks", "forecast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(tiny_model: Callable[..., Any], tmp_path: Path, decode: str, dtype: torch.dtype) -> None:
    model = tiny_model("llama", num_hidden_layers=3).to("cuda", dtype)
    loaded, prompt = LoadedModel(model, tiny_tokenizer(), "tiny", ""), drawn(1400)
    with LLM(loaded, forecast=save_forecast(loaded, tmp_path)) as llm:
        few = FEW | {"decode": decode}
        truth = logits(llm, prompt, 150, **few)
        for more in ({}, {"prefetch": False}, {"offload_slots": 12}):
            assert torch.equal(logits(llm, prompt, 150, offload="host", **more, **few), truth)
        start = llm.prefill(prompt, offload="host", **few)
        assert start.cache.layers[0].blocks.host.is_pinned()
        if dtype == torch.float32:
            wanted = tokens(llm, prompt)[0]
            assert tokens(llm, prompt, decode=decode, offload="host", decode_budget=1.0)[0] == wanted


def test_smollm2(smollm2: Any, tmp_path: Path) -> None:
    text = " ".join(f"Station {i} has {3 + 2 * i} lamps and a red roof." for i in range(45))
    prompt = Prompt.of([("question", smollm2.tokenizer(text).input_ids)])
    with LLM(smollm2, forecast=save_forecast(smollm2, tmp_path)) as llm:
        wanted = tokens(llm, prompt, 12)[0]
        assert tokens(llm, prompt, 12, decode="blocks", decode_budget=1.0)[0] == wanted
        truth, resident = tokens(llm, prompt, 12, decode="forecast", **FEW)
        found, report = tokens(llm, prompt, 12, decode="forecast", offload="host", **FEW)
    assert found == truth and report.attended == resident.attended < 0.5 and report.blocks.moved_bytes > 0
