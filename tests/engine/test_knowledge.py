"""Folders of documents: observed once, resumed where an interruption left them, never mixed up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tamis.core.errors import InvalidInput, NothingFound, StoreMismatch, TamisError
from tamis.engine.knowledge import KnowledgeBase
from tamis.engine.llm import LLM
from tamis.engine.sampling import Sampling

ONE = Sampling(max_new_tokens=1)
Open = Callable[..., LLM]


def write(folder: Path, n: int, words: int = 80, name: str = "lamp") -> Path:
    """`n` files, each one passage of more than a tile of 128 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        body = " ".join(f"{name} {i} burns {i * w} hours" for w in range(words // 5))
        (folder / f"{name}{i}.md").write_text(f"# The {name} {i}\n\n{body}.\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "docs", 5)


@pytest.fixture
def base(llm: LLM, tmp_path: Path) -> Any:
    with llm.corpus(tmp_path / "kb") as base:
        yield base


class TestAddFiles:
    def test_first_and_second_time(self, llm: LLM, base: KnowledgeBase, folder: Path) -> None:
        first = base.add_files(folder)
        assert len(first.files.read) == 5 and first.indexed == len(base.corpus) == len(base.indexer.store) == 5
        seen: list[int] = []
        hook = llm.runner.model.base_model.register_forward_pre_hook(lambda *_: seen.append(1))
        second = base.add_files(str(folder))
        hook.remove()
        assert (second.indexed, second.files.unchanged, second.files.read, seen) == (0, 5, (), [])
        assert base.indexer.store.verify() == []

    def test_without_observing(self, llm: LLM, base: KnowledgeBase, folder: Path) -> None:
        seen: list[int] = []
        hook = llm.runner.model.base_model.register_forward_pre_hook(lambda *_: seen.append(1))
        first = base.add_files(folder, observe=False)
        hook.remove()
        assert (first.indexed, len(base.indexer.store), seen) == (0, 0, []) and len(base.corpus) == 5
        assert base.search("lamp 3 burns", k=2)
        assert base.add_files(folder).indexed == 5, "what is missing is made later"
        assert base.add_files(folder, observe=False).indexed == 0 and len(base.indexer.store) == 5

    def test_answers_need_no_observing(self, llm: LLM, base: KnowledgeBase, folder: Path) -> None:
        base.add_files(folder)
        hits = base.search("lamp 3 burns", k=2)
        answer = llm.generate("lamp 3?", hits, sampling=ONE)
        assert (answer.report.prefill.used, answer.report.prefill.indexed) == ("sift", 0)
        assert answer.sources[0].place.startswith(str(folder / "lamp3.md"))

    def test_reopened_in_another_llm(self, open_llm: Open, folder: Path, tmp_path: Path) -> None:
        first = open_llm(prefill="sift", min_tokens=0)
        with first.corpus(tmp_path / "kb") as base:
            base.add_files(folder)
        first.close()
        with open_llm(prefill="sift", min_tokens=0).corpus(tmp_path / "kb") as base:
            assert base.add_files(folder).indexed == 0

    @pytest.mark.parametrize("at", [0, 2, 4])
    def test_interrupted(self, base: KnowledgeBase, folder: Path, at: int) -> None:
        def stop(done: int, total: int) -> None:
            if done == at:
                raise KeyboardInterrupt

        base.indexer = replace(base.indexer, pack_tokens=1)  # what is packed together is committed together
        with pytest.raises(KeyboardInterrupt):
            base.add_files(folder, on_index=stop)
        assert len(base.indexer.store) == at and base.indexer.store.verify() == []
        seen: list[tuple[int, int]] = []
        again = base.add_files(folder, on_index=lambda done, total: seen.append((done, total)))
        assert again.indexed == 5 - at and seen[-1] == (5 - at, 5 - at)

    def test_interrupted_while_reading(self, base: KnowledgeBase, folder: Path) -> None:
        def stop(done: int, total: int, path: str) -> None:
            if done == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            base.add_files(folder, on_file=stop)
        again = base.add_files(folder)
        assert (len(again.files.read), again.indexed) == (2, 5)

    def test_changed_and_vanished(self, base: KnowledgeBase, folder: Path) -> None:
        base.add_files(folder)
        (folder / "lamp0.md").write_text("# Another\n\nThe crane lifts " + "stores " * 200)
        (folder / "lamp1.md").unlink()
        report = base.add_files(folder)
        assert [Path(p).name for p in report.files.read] == ["lamp0.md"]
        assert [Path(p).name for p in report.files.removed] == ["lamp1.md"]
        assert report.indexed > 0
        assert base.search("crane lifts")[0].passage.source.endswith("lamp0.md")
        assert all(not h.passage.source.endswith("lamp1.md") for h in base.search("lamp 1 burns", k=50))
        before = len(base.indexer.store)
        assert base.drop_unused() == 2 and len(base.indexer.store) == before - 2
        assert base.drop_unused() == 0 and base.add_files(folder).indexed == 0

    def test_two_folders_in_one_store(self, base: KnowledgeBase, folder: Path, tmp_path: Path) -> None:
        other = write(tmp_path / "other", 3, name="boat")
        mine = base.add_files(folder).files.sources
        theirs = base.add_files(other).files.sources
        for k in (1, 50):
            assert {h.passage.source for h in base.search("burns hours", k, within=theirs)} <= set(theirs)
            assert {h.passage.source for h in base.search("burns hours", k, within=mine)} <= set(mine)
        with pytest.raises(NothingFound, match=r"none of the"):
            base.search("boat", within=mine)

    def test_one_passage_in_files_of_two_titles(self, llm: LLM, base: KnowledgeBase, tmp_path: Path) -> None:
        text = "The boat comes on Monday. " * 40
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            (tmp_path / name / f"{name}.txt").write_text(text)
        base.add_files([tmp_path / "a", tmp_path / "b"])
        for name in ("a", "b"):
            hits = base.search("boat", within=[str(tmp_path / name / f"{name}.txt")])
            assert hits and all(h.passage.source.endswith(f"{name}.txt") for h in hits)
            assert llm.generate("boat?", hits, sampling=ONE).report.prefill.used == "sift"

    def test_what_is_not_there(self, base: KnowledgeBase, tmp_path: Path) -> None:
        with pytest.raises(TamisError, match=r"nowhere"):
            base.add_files(tmp_path / "nowhere")
        (tmp_path / "empty").mkdir()
        with pytest.raises(NothingFound, match=r"no readable document"):
            base.add_files(tmp_path / "empty")
        with pytest.raises(NothingFound):
            base.search("anything")


class TestManyTinyDocuments:
    def test_ten_thousand_need_no_forward_pass(self, llm: LLM, tmp_path: Path) -> None:
        folder = tmp_path / "many"
        folder.mkdir()
        for i in range(10_000):
            (folder / f"{i}.txt").write_text(f"boat {i}")
        seen: list[int] = []
        hook = llm.runner.model.base_model.register_forward_pre_hook(lambda *_: seen.append(1))
        with llm.corpus(tmp_path / "kb") as base:
            assert base.add_files(folder).indexed == 10_000
            begin = time.perf_counter()
            assert base.add_files(folder).indexed == 0
            assert time.perf_counter() - begin < 5
            hits = base.search("boat 777", k=3)
        hook.remove()
        assert hits[0].passage.text.strip() == "boat 777" and seen == []


class TestStores:
    def test_in_memory(self, llm: LLM, folder: Path) -> None:
        base = llm.corpus()
        assert base.add_files(folder).indexed == 5 and base.add_files(folder).indexed == 0
        assert llm.generate("lamp 3?", base.search("lamp 3", 2), sampling=ONE).report.prefill.indexed == 0

    def test_of_another_model(self, open_llm: Open, folder: Path, tmp_path: Path) -> None:
        first = open_llm()
        with first.corpus(tmp_path / "kb") as base:
            base.add_files(folder)
        other = open_llm("qwen2")
        with pytest.raises(StoreMismatch, match=r"architecture is 'llama.*weights is .*--rebuild"):
            other.corpus(tmp_path / "kb")
        with other.corpus(tmp_path / "kb", rebuild=True) as base:
            assert len(base.indexer.store) == 0 and base.add_files(folder).indexed == 5
        with pytest.raises(StoreMismatch, match=r"architecture is 'qwen2"):
            first.corpus(tmp_path / "kb")

    def test_of_other_thresholds(self, open_llm: Open, tmp_path: Path) -> None:
        first = open_llm()
        with first.corpus(tmp_path / "kb"):
            pass
        first.close()
        with pytest.raises(StoreMismatch, match=r"alpha is 0\.001 against 0\.5"):
            open_llm(alpha=0.5).corpus(tmp_path / "kb")

    def test_a_closed_store_is_not_used_again(self, llm: LLM, folder: Path, tmp_path: Path) -> None:
        with llm.corpus(tmp_path / "kb") as base:
            base.add_files(folder)
            hits = base.search("lamp 3", 2)
        base.close()  # twice is harmless
        assert llm.generate("lamp 3?", hits, sampling=ONE).report.prefill.indexed == 2

    def test_two_at_once(self, llm: LLM, folder: Path, tmp_path: Path) -> None:
        with llm.corpus(tmp_path / "a") as first, llm.corpus(tmp_path / "b") as second:
            first.add_files(folder)
            assert (len(first.indexer.store), len(second.indexer.store)) == (5, 0)
        with llm.corpus(tmp_path / "a") as first, llm.corpus(tmp_path / "a") as again:
            assert len(first.indexer.store) == len(again.indexer.store) == 5
            again.close()
            assert first.add_files(folder).indexed == 0

    def test_a_file_in_the_stores_place(self, llm: LLM, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(InvalidInput, match=r"is a file; a store is a folder"):
            llm.corpus(tmp_path / "file")
        with llm.corpus(tmp_path / "kb"):
            pass
