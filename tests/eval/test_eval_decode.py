"""Answers and texts by several ways of attending: against the stock model, resumed, summed up, and from the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tamis.attention.hook import install
from tamis.bench.results import read_rows
from tamis.bench.text import passages
from tamis.cli.main import app
from tamis.core.errors import InvalidInput
from tamis.engine.llm import LLM
from tamis.eval import decode
from tamis.eval.answers import Log, settings_of
from tamis.eval.decode import Decoded, Text, eval_decode
from tamis.eval.decode_session import Session
from tamis.eval.decoders.base import Growing, LayerPrompt
from tamis.eval.decoders.methods import labels, methods_of
from tamis.eval.needle import needle_tasks
from tamis.eval.questions import Passage, Question
from tamis.eval.tasks import Item, Task, qa_task
from tiny_chat import tiny_tokenizer

SPARSE = ["selfindex", "quest", "snapkv", "doublesparse", "int4-kivi"]


def stock_logits(model: Any, tokens: Sequence[int], last: int) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0, -last:]
    return logits


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_session_is_the_stock_model_where_everything_is_read(tiny_model: Callable[..., Any], family: str) -> None:
    model, methods = tiny_model(family), methods_of(["quest", "snapkv", "doublesparse"], (0.1, 1.0), dense_layers=0)
    tokens = torch.randint(0, 512, (1, 320))
    true = stock_logits(model, tokens[0].tolist(), 20)
    switch, undo = install(model)
    try:
        session = Session(model, switch, tokens[0, :300].tolist(), methods)
        names = [name for m in methods for name in labels(m)]
        for sizes in ([20], [1] * 20, [1, 7, 12]):
            session.begin()
            parts, at = [], 300
            for n in sizes:
                parts.append(session.step(tokens[:, at : at + n].expand(session.rows, -1)))
                at += n
            for name, logits in zip(names, torch.cat(parts, 1), strict=True):
                off = float((logits - true).abs().max())
                assert off < 2e-3 if "@0.1" not in name else off > 0.05, f"{name} is off by {off}"
    finally:
        undo()


def test_rows_go_their_own_ways(tiny_model: Callable[..., Any]) -> None:
    model, tokens = tiny_model("llama"), torch.randint(0, 512, (200,)).tolist()
    ways = torch.randint(0, 512, (3, 5))
    true = [stock_logits(model, tokens + way.tolist(), 5) for way in ways]
    switch, undo = install(model)
    try:
        session = Session(model, switch, tokens, methods_of(["snapkv"], (0.99999, 1.0)))
        logits = torch.cat([session.step(ways[:, i : i + 1]) for i in range(5)], 1)
    finally:
        undo()
    torch.testing.assert_close(logits, torch.stack(true), rtol=1e-3, atol=2e-3)


def questions(n: int) -> list[Question]:
    docs = tuple(Passage(f"Station {i}", f"The crane {i} lifts stores. " * 8) for i in range(3))
    return [Question(f"q{i}", f"Where is crane {i}?", ("station",), docs) for i in range(n)]


def text(n: int = 360) -> Text:
    return Text("perplexity/300+59", "0", tuple(torch.randint(5, 200, (n,)).tolist()), 300)


def test_all_kinds(llm: LLM) -> None:
    needles = needle_tasks(llm.template, haystack(llm), [600], size=1)
    methods = methods_of(SPARSE, (0.1, 1.0), dense_layers=0)
    tasks = [qa_task("tiny", questions(2)), *needles]
    found = eval_decode(llm, tasks, methods, texts=[text()], answer_tokens=3)
    assert found.complete and not found.skipped and len(found.variants) == 1 + 4 * 2 + 1
    assert {o.variant for o in found.outcomes} == set(found.variants) and len(found.outcomes) == (2 + 3 + 1) * 10
    for o in found.outcomes:
        if o.variant in ("full", "quest@1", "snapkv@1", "doublesparse@1"):
            assert o.kl < 1e-4 and o.agreement == 1, f"{o.variant} of {o.task} reads everything"
            if o.scores.get("perplexity_ratio"):
                assert o.scores["perplexity_ratio"] == pytest.approx(1, abs=1e-4)
        assert 0 < o.density <= 1 + 1 / 16 or o.variant == "doublesparse@1"
    assert max(o.kl for o in found.outcomes if o.variant == "snapkv@0.1") > 0.01
    full = {(o.task, o.id): o.text for o in found.outcomes if o.variant == "full"}
    assert all(full[o.task, o.id] == o.text for o in found.outcomes if o.variant == "snapkv@1")
    assert json.dumps(found.summary()) and {u for *_, u in found.rows()} == {"1", "nat"}
    assert {g for g, *_ in found.rows()} >= {"qa/tiny", "needle", "needle/600/0.5", "perplexity/300+59"}


def test_perplexity_is_the_stock_models(llm: LLM) -> None:
    given = text()
    logits = stock_logits(llm.runner.model, given.tokens[:-1], 59).log_softmax(-1)
    loss = -float(logits.gather(-1, torch.tensor(given.tokens[-59:])[:, None]).mean())
    found = eval_decode(llm, [], methods_of([], ()), texts=[given]).outcomes
    assert [o.variant for o in found] == ["full"]
    assert found[0].scores["perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)


def test_answers_are_what_the_model_generates(llm: LLM) -> None:
    item = qa_task("tiny", questions(1)).make(0)
    made = llm.prefill(item.prompt(llm.template), prefill="dense")
    from tamis.engine.sampling import Sampling

    tokens = list(llm.runner.decode(made, Sampling(max_new_tokens=6), llm.stop_tokens))
    found = eval_decode(llm, [Task("qa/tiny", 1, lambda i: item)], methods_of([], ()), answer_tokens=6).outcomes[0]
    assert llm.tokenizer.decode(tokens).strip().startswith(found.text) and found.text


def test_a_wrong_method_shows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: new tokens that do not see each other."""
    append = Growing.attend

    def forgets(self: Growing, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.tail = tuple(t[..., :0, :] for t in self.tail)
        return append(self, q, k, v)

    made = methods_of(["snapkv"], (1.0,))
    good = eval_decode(llm, [], made, texts=[text()]).outcomes
    prefill = made[1].prefill

    def spoiled(x: LayerPrompt) -> Any:
        state = prefill(x)
        monkeypatch.setattr(type(state), "attend", forgets)
        return state

    monkeypatch.setattr(made[1], "prefill", spoiled)
    bad = eval_decode(llm, [], made, texts=[text()]).outcomes
    assert good[1].kl < 1e-5 < 0.01 < bad[1].kl


def test_resumed(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tasks = tmp_path / "log.jsonl", [qa_task("tiny", questions(2))]
    settings = settings_of(llm)
    first = eval_decode(llm, tasks, methods_of(["snapkv"], (0.1,)), log=Log(path, settings), answer_tokens=2)
    more = eval_decode(llm, tasks, methods_of(["snapkv", "quest"], (0.1,)), log=Log(path, settings), answer_tokens=2)
    assert [o for o in more.outcomes if o.variant in first.variants] == list(first.outcomes)
    assert len(path.read_text().splitlines()) == 1 + 2 * 3
    monkeypatch.setattr(decode, "Session", None)
    again = eval_decode(llm, tasks, methods_of(["quest"], (0.1,)), log=Log(path, settings), answer_tokens=2)
    assert again.complete and len(again.outcomes) == 4
    late = eval_decode(llm, tasks, methods_of(["quest"], (0.2,)), deadline_s=0.0, answer_tokens=2)
    assert not late.complete and not late.outcomes


def test_too_long_is_left_out_and_full_comes_first(llm: LLM) -> None:
    long = Item("qa/long", "x", "Why?", tuple(Passage("", "crane " * 400) for _ in range(6)), ("a",), ("f1",))
    found = eval_decode(llm, [Task("qa/long", 1, lambda i: long)], methods_of(["snapkv"], (0.1,)), answer_tokens=2)
    assert found.skipped == ("qa/long: x",) and found.complete
    with pytest.raises(InvalidInput, match="the first must be full"):
        eval_decode(llm, [], methods_of(["snapkv"], (0.1,))[1:])
    with pytest.raises(InvalidInput, match="two behind it"):
        Text("perplexity", "0", (1, 2, 3), 2)


def test_found_counts_where_full_finds() -> None:
    def outcome(i: int, variant: str, score: float) -> decode.Outcome:
        return decode.Outcome("needle/8/0.5", str(i), "", variant, "", {"match_part": score}, 0.0, 1.0, 1.0, 8)

    scores = {"full": (1.0, 1.0, 0.0), "snapkv@0.1": (1.0, 0.0, 1.0)}
    outcomes = tuple(outcome(i, name, s) for name, each in scores.items() for i, s in enumerate(each))
    cells = {(c.variant, c.metric): c for c in Decoded(tuple(scores), outcomes, (), True).cells}
    assert cells["snapkv@0.1", "found"].values == (1.0, 0.0) and cells["full", "found"].values == (1.0, 1.0)
    assert cells["snapkv@0.1", "match_part"].values == (1.0, 0.0, 1.0)


def haystack(llm: LLM) -> list[Passage]:
    return [Passage(p.title, p.text) for p in passages(2000, llm.template.count)]


@pytest.fixture(scope="module")
def model_folder(tiny_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_command(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    words = ["eval", "decode", "--model", model_folder, "--tasks", "needle,perplexity,overlap", "--tokens", "600"]
    words += ["--generated", "40", "--limit", "1", "--budgets", "0.1,1", "--answer-tokens", "2", "--log", "log.jsonl"]
    ran = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    found = json.loads(ran.stdout)
    assert found["complete"] and not found["skipped"]
    assert set(found["tasks"]) == {f"needle/600/{d}" for d in (0.1, 0.5, 0.9)} | {"needle", "perplexity/600+40"}
    rows = read_rows(found["results"])
    assert Path(found["results"]).name == "decode_quality.csv"
    cases = {r["case"].rpartition("/float32/")[2] for r in rows}
    assert cases >= {"needle/600/3", "needle/600/0.5/1", "perplexity/600+40/1", "bytes/600", "overlap/600"}
    assert "overlap/600/layer-1" in cases
    metrics = {r["metric"] for r in rows if r["provider"] == "selfindex@0.1"}
    assert metrics >= {"kl_mean", "match_part_mean", "perplexity_ratio_mean", "bytes_per_token", "read_bytes_per_token"}
    shown = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert "quest-equal@0.1" in shown and "16-token pages" in shown and "overlap study" in shown
    with pytest.raises(InvalidInput, match="give shares of the tokens"):
        CliRunner().invoke(app, ["eval", "decode", "--budgets", "x"], catch_exceptions=False)
    with pytest.raises(InvalidInput, match="Did you mean 'needle'"):
        CliRunner().invoke(app, ["eval", "decode", "--model", model_folder, "--tasks", "nedle"], catch_exceptions=False)


def test_smollm2(smollm2: Any) -> None:
    with LLM(smollm2) as llm:
        tasks = needle_tasks(llm.template, haystack(llm), [1024], size=1, depths=(0.5,))
        found = eval_decode(llm, tasks, methods_of(SPARSE, (0.075, 1.0)), answer_tokens=6)
        of = {o.variant: o for o in found.outcomes}
        for name in ("quest@1", "snapkv@1", "doublesparse@1"):
            assert of[name].kl < 1e-4 and of[name].text == of["full"].text
        assert of["selfindex@1"].kl < 0.05 and of["int4-kivi"].kl < 0.05
        assert of["selfindex@0.075"].kl < of["quest@0.075"].kl, "more keys are worth it"
