"""Selector variants on long prompts: what a line means, what a killed run leaves, and how demand is traced back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.core.errors import ContextOverflow, InvalidInput, StoreDamaged
from tamis.engine.llm import LLM
from tamis.eval.demand import demand
from tamis.eval.metrics import kl_divergence
from tamis.eval.questions import Passage, Question
from tamis.eval.research import (
    METRICS,
    Bench,
    DensePass,
    Study,
    calibrate_on,
    kl_rows,
    long_prompt,
    research,
    scene_of,
    summarise,
)
from tamis.eval.selectors import eval_selectors
from tamis.eval.variants import DEFAULT_VARIANTS, Variant, parse_variant
from tamis.kernels import dispatch
from tamis.prompt.segments import Prompt
from tamis.select.oracle import true_mass
from tamis.select.rules import Share, Threshold
from tamis.select.scene import Scene
from tamis.select.variants import RowSampled
from tamis.select.vertical_slash import VerticalSlash


def question(number: int) -> Question:
    docs = tuple(Passage(f"Station {i}", f"The crane {number * 7 + i} lifts stores. " * 14) for i in range(3))
    return Question(f"q{number}", "What lifts stores?", ("the crane",), docs, (1,))


QUESTIONS = [question(1), question(2), question(3)]


def variants(*specs: str) -> list[Variant]:
    return [parse_variant(s) for s in specs]


class TestParse:
    def test_parts(self) -> None:
        found = parse_variant("sampled: rows=4, mass=0.95, paired=true")
        made = found.selector
        assert isinstance(made, RowSampled) and made.rule == Share(0.95)
        assert (found.spec, made.rows, made.paired) == ("sampled:rows=4,mass=0.95,paired=true", 4, True)
        made = parse_variant("threshold:theta=0.02,floor=0,reduce=max+mean").selector
        assert isinstance(made, RowSampled) and (made.rule, made.reduce) == (Threshold(0.02, 0), "max")
        made = parse_variant("threshold:rows=4,theta=0.01,power=0.5").selector
        assert isinstance(made, RowSampled) and (made.rule, made.rows) == (Threshold(0.01, power=0.5), 4)
        found = parse_variant("stored:alpha=0.1,gamma_ca=0.3")
        assert found.bits == {"alpha": 0.1, "gamma": 0.3} and not found.corrected
        made = parse_variant("oracle:mass=0.8").selector
        assert isinstance(made, RowSampled) and (made.rows, made.local, made.rule) == (0, "sampled", Share(0.8))
        made = parse_variant("vertical_slash:budget=none").selector
        assert isinstance(made, VerticalSlash) and made.budget is None

    @pytest.mark.parametrize("spec", DEFAULT_VARIANTS)
    def test_defaults(self, spec: str) -> None:
        assert parse_variant(spec).spec == spec

    @pytest.mark.parametrize(
        ("spec", "says"),
        [
            ("sampeld", "Did you mean 'sampled'"),
            ("sampled:row=4", "Did you mean 'rows'"),
            ("sampled:theta=1", "unknown option of sampled 'theta'"),
            ("sampled:rows", "'rows' is not an option=value"),
            ("sampled:rows=4,rows=2", "'rows=2' is not an option=value of its own"),
            ("sampled:rows=200", "rows is 200"),
            ("threshold:power=-1", "power is -1"),
            ("xattention+mean", "needs estimated masses"),
            ("sampled+median", "only \\+mean"),
            ("xattention:stride=wide", "variant xattention: stride is 'wide'; give a whole number"),
            ("vertical_slash:rows=1.5", "rows is '1.5'; give a whole number"),
            ("sampled:rows=true", "rows is 'true'; give a whole number"),
            ("sampled:paired=no", "paired is 'no'; give true or false"),
            ("sampled:rows=0,paired=true", "paired tiles need an even number of rows, 2 or more"),
            ("threshold:theta=high", "theta is 'high'; give a number"),
            ("sampled:question=5", "question is 5; allowed are shares"),
            ("oracle:rows=4", "unknown option of oracle 'rows'"),
            ("calibrated:file=nowhere.json", "no thresholds file"),
            ("", "unknown selector"),
        ],
    )
    def test_what_is_not_allowed(self, spec: str, says: str) -> None:
        with pytest.raises(InvalidInput, match=says):
            parse_variant(spec)


class TestPrompt:
    def test_filled_with_other_passages(self, llm: LLM) -> None:
        own = [llm.template.document_tokens(d.title, d.text) for d in QUESTIONS[0].docs]
        alone = long_prompt(llm, QUESTIONS, 0, None)
        assert [d.tokens for d in alone.documents] == own
        found = long_prompt(llm, QUESTIONS, 0, 1000)
        documents = [d.tokens for d in found.documents]
        assert 1000 - max(map(len, own)) - 10 < len(found.tokens) <= 1000
        assert len(documents) > 3 and set(own) <= set(documents) and len(set(documents)) == len(documents)
        assert long_prompt(llm, QUESTIONS, 0, 1000) == found
        assert documents[:3] != own, "not shuffled"

    def test_passages_with_the_answer_come_first(self, llm: LLM) -> None:
        room = len(long_prompt(llm, QUESTIONS, 0, None).tokens) - 2 * len(
            long_prompt(llm, QUESTIONS, 0, None).documents[0].tokens
        )
        found = long_prompt(llm, QUESTIONS, 0, room + 5)
        gold = QUESTIONS[0].docs[1]
        assert [d.tokens for d in found.documents] == [llm.template.document_tokens(gold.title, gold.text)]

    def test_too_few_and_too_many(self, llm: LLM) -> None:
        with pytest.raises(InvalidInput, match="give more questions"):
            long_prompt(llm, QUESTIONS, 0, 10_000)
        with pytest.raises(InvalidInput, match="no passage of question 'q1' fits"):
            long_prompt(llm, QUESTIONS, 0, 120)
        with pytest.raises(ContextOverflow):
            research(llm, [QUESTIONS[0], *(question(n) for n in range(4, 16))], variants("none"), Study("c", 2500))


class TestRun:
    def test_numbers_of_a_variant(self, llm: LLM) -> None:
        found = research(
            llm, QUESTIONS, variants("all", "none", "sampled:mass=0.5", "oracle:mass=0.5"), Study("c", 700, limit=1)
        )
        by = {r["variant"]: r for r in found}
        assert [r["question"] for r in found] == ["q1"] * 4
        every = by["all"]
        assert every["density"] == 1 and every["recall"] == pytest.approx(1, abs=1e-4) and every["agreement"] == 1
        assert max(every["kl"], every["kl_rows"]) < 1e-6 and every["demand_keys"] == 1
        assert by["none"]["density"] < by["sampled:mass=0.5"]["density"] < 1
        assert by["none"]["kl"] > 1e-6 and by["none"]["recall"] < 0.999
        assert len(every["layers"]) == 2 and every["documents"] > 3 and 600 < every["tokens"] <= 700

    def test_the_dense_pass_attends_once(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        scene = scene_of(llm, long_prompt(llm, QUESTIONS, 0, None), None)
        n = scene.tiling.n_tokens
        q, k, v = torch.randn(4, n, 64), torch.randn(2, n, 64), torch.randn(2, n, 64)
        wanted = true_mass(q, k, 0.125, scene)
        attend, calls = dispatch.causal_attention, []
        monkeypatch.setattr(dispatch, "causal_attention", lambda *a, **b: calls.append(1) or attend(*a, **b))
        dense = DensePass(scene)
        out, lse = dense.attend(0, q, k, v, 0.125)
        assert len(calls) == 1 and torch.equal(out, attend(q, k, v, 0.125)[0]) and lse.shape == (4, n)
        torch.testing.assert_close(dense.truth[0], wanted)
        torch.testing.assert_close(dense.truth[0].sum(-1), torch.ones(4, len(scene)))

    def test_the_same_as_eval_selectors(self, llm: LLM) -> None:
        scores = eval_selectors(llm, QUESTIONS[:1], ["stored", "sampled"], answer_tokens=0)
        for result in research(llm, QUESTIONS[:1], variants("stored", "sampled"), Study("c")):
            wanted = scores[result["variant"]]
            assert result["density"] == pytest.approx(wanted.density[0], abs=1e-9)
            assert result["kl"] == pytest.approx(wanted.kl[0], rel=1e-2, abs=1e-6)
            assert result["recall"] == pytest.approx(wanted.recall[0], abs=2e-3)

    def test_every_default_runs(self, llm: LLM) -> None:
        found = research(llm, QUESTIONS, variants(*DEFAULT_VARIANTS, "sampled:question=0.5"), Study("c", 600, limit=1))
        assert len(found) == len(DEFAULT_VARIANTS) + 1
        for r in found:
            assert all(0 <= r[m] <= 1 + 1e-4 for m in METRICS if not m.startswith("kl")), r
        summary = summarise(found)
        assert summary["none"]["density"].n == 1 and list(summary) == [*DEFAULT_VARIANTS, "sampled:question=0.5"]

    def test_kl_rows(self) -> None:
        p, q = torch.randn(3, 50), torch.randn(3, 50)
        wanted = [kl_divergence(a, b) for a, b in zip(p, q, strict=True)]
        assert kl_rows(p, q).tolist() == pytest.approx(wanted)
        assert kl_rows(p, p).tolist() == [0, 0, 0]


class TestLog:
    def study(self, path: Path, **changes: Any) -> Study:
        return Study(**{"case": "c", "tokens": 600, "log": path / "log" / "r.jsonl", "limit": 2} | changes)

    def test_a_second_run_goes_on(self, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        study = self.study(tmp_path)
        first = research(llm, QUESTIONS, variants("none"), study)
        assert study.log is not None and len(study.log.read_text().splitlines()) == 2
        with study.log.open("a") as file:
            file.write('{"case": "c", "quest')  # killed while writing
        ran: list[str] = []
        real = Bench.run
        monkeypatch.setattr(Bench, "run", lambda self, v: (ran.append(v.spec), real(self, v))[1])
        steps: list[tuple[int, int]] = []
        both = research(llm, QUESTIONS, variants("none", "all"), study, note=lambda *s: steps.append(s))
        assert ran == ["all", "all"] and both[:2] == first and len(both) == 4 and steps == [(1, 4), (3, 4), (4, 4)]
        assert [json.loads(line) for line in study.log.read_text().splitlines()] == both
        monkeypatch.setattr(Bench, "of", lambda *_: pytest.fail("a dense pass for nothing"))
        assert research(llm, QUESTIONS, variants("none", "all"), study) == both
        assert research(llm, [], [], self.study(tmp_path, case="other")) == []

    @pytest.mark.parametrize("other", [{"dtype": "bfloat16"}, {"device": "cuda"}, {"dtype": None}])
    def test_what_another_dtype_or_device_made_is_made_again(
        self, llm: LLM, tmp_path: Path, other: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        study = self.study(tmp_path, limit=1)
        (first,) = research(llm, QUESTIONS, variants("none"), study)
        assert (first["dtype"], first["device"]) == ("float32", "cpu") and study.log is not None
        strange = {name: value for name, value in (first | other | {"kl": 99.0}).items() if value is not None}
        study.log.write_text(json.dumps(strange) + "\n")
        (made,) = research(llm, QUESTIONS, variants("none"), study)
        assert made["kl"] == first["kl"] and "1 results of c" in caplog.text and "float32 on cpu" in caplog.text
        assert len(study.log.read_text().splitlines()) == 2
        caplog.clear()
        assert research(llm, QUESTIONS, variants("none"), study) == [made]

    def test_deadline(self, llm: LLM, tmp_path: Path) -> None:
        assert research(llm, QUESTIONS, variants("none"), self.study(tmp_path, deadline_s=-1.0)) == []

    @pytest.mark.parametrize("line", ["{", "[]", "{}", '{"case": "c"}'])
    def test_a_file_of_another_kind(self, llm: LLM, tmp_path: Path, line: str) -> None:
        path = tmp_path / "r.jsonl"
        path.write_text(line + "\n")
        with pytest.raises(StoreDamaged, match="line 1"):
            research(llm, QUESTIONS, variants("none"), Study("c", 600, path))


def test_calibrated_shares_keep_the_density(llm: LLM, tmp_path: Path) -> None:
    floor = research(llm, QUESTIONS, variants("sampled:mass=0.3", "sampled:mass=0.995"), Study("c", 900, limit=1))
    target = sum(r["density"] for r in floor) / 2
    calibrate_on(llm, QUESTIONS, target, tokens=900, limit=1).save(tmp_path / "t.json")
    made = variants(f"calibrated:file={tmp_path / 't.json'}")
    found = research(llm, QUESTIONS, made, Study("c", 900, limit=1))[0]
    assert floor[0]["density"] <= found["density"] <= target + 1e-6


class TestDemand:
    SCENE = Scene.of(Prompt.of([("prefix", range(2)), ("document", range(8)), ("document", range(8)),
                                ("question", range(2))]), [None, None], 4)  # fmt: skip

    def masks(self, *lists: dict[int, list[int]]) -> list[torch.Tensor]:
        """One mask [2, 6, 6] per layer: each tile sees itself and, in the second head, those listed."""
        made = torch.eye(6, dtype=torch.bool).repeat(len(lists), 2, 1, 1)
        for mask, seen in zip(made, lists, strict=True):
            for row, columns in seen.items():
                mask[1, row, columns] = True
        return list(made)

    def test_by_hand(self) -> None:
        # tiles: prefix 0 (2 tokens), documents 1, 2 and 3, 4 (4 each), question 5 (2); 20 tokens
        masks = self.masks({3: [1]}, {4: [3], 2: [1]}, {5: [4, 0]})
        # layer 2 for tile 5 alone, reads 0 and 4; layer 1 for 0, 4, 5, reads 3; layer 0 for 0, 3, 4, 5, reads 1
        wanted = [(12, 16), (8, 12), (2, 8)]
        assert demand(masks, self.SCENE) == [(pytest.approx(a / 20), pytest.approx(b / 20)) for a, b in wanted]

    def test_everything_and_nothing(self) -> None:
        everything = torch.ones(2, 6, 6, dtype=torch.bool).tril()
        assert demand([everything] * 2, self.SCENE) == [(pytest.approx(1), pytest.approx(1)), (0.1, pytest.approx(1))]
        assert demand(self.masks({}, {}), self.SCENE) == [(0.1, 0.1), (0.1, 0.1)]
