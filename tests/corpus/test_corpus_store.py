"""Keeping documents: what changes, what stays, what a kill leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tamis.core.errors import InvalidInput, NothingFound, StoreMismatch
from tamis.corpus import Corpus
from tamis.corpus.records import FORMAT

EXAMPLES = Path(__file__).parents[2] / "examples" / "documents"


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture(params=["memory", "disk"])
def corpus(request, tmp_path):
    with Corpus(None if request.param == "memory" else tmp_path / "kb.tamis") as opened:
        yield opened


def texts(corpus: Corpus) -> set[str]:
    return {p.text for p in corpus.passages()}


def test_files_are_read_once(corpus, folder):
    first = corpus.add_files([folder], count=words)
    assert (len(first.read), first.unchanged, first.passages_new, len(corpus)) == (3, 0, 3, 3)

    def forbidden(text: str) -> int:
        raise AssertionError("an unchanged file was cut again")

    again = corpus.add_files([folder], count=forbidden)
    assert (again.read, again.unchanged, again.passages_new, again.sources) == ((), 3, 0, first.sources)


def test_it_is_all_there_after_reopening(tmp_path, folder):
    with Corpus(tmp_path / "kb.tamis") as corpus:
        corpus.add_files([folder], count=words)
        before = list(corpus.passages())
    with Corpus(tmp_path / "kb.tamis") as corpus:
        assert list(corpus.passages()) == before
        assert [corpus.get(p.id) for p in before] == before
        assert corpus.add_files([folder], count=words).unchanged == 3


def test_a_changed_file_replaces_its_passages(corpus, folder):
    corpus.add_files([folder], count=words)
    (folder / "boat.txt").write_text("The ferry Marit sails on Fridays!!\n")
    report = corpus.add_files([folder], count=words)
    assert (report.read, report.passages_new, report.passages_removed) == ((str(folder / "boat.txt"),), 1, 1)
    assert "The ferry Marit sails on Fridays!!" in texts(corpus)
    assert not any("Tuesdays" in text for text in texts(corpus))


def test_same_size_and_time_but_other_bytes_is_noticed_in_a_file_just_written(corpus, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    corpus.add_files([path], count=words)
    now = path.stat()
    path.write_text("two")
    os.utime(path, ns=(now.st_atime_ns, now.st_mtime_ns))
    assert corpus.add_files([path], count=words).read == (str(path),)
    assert texts(corpus) == {"two"}


def test_another_time_but_the_same_bytes_is_unchanged(corpus, folder):
    corpus.add_files([folder], count=words)
    os.utime(folder / "boat.txt", (0, 0))
    assert corpus.add_files([folder], count=words).read == ()


@pytest.mark.parametrize("cutting", [{"target_tokens": 3}, {"count_name": "other tokenizer"}])
def test_another_way_of_cutting_cuts_again(corpus, folder, cutting):
    corpus.add_files([folder], count=words)
    assert len(corpus.add_files([folder], count=words, **cutting).read) == 3


def test_vanished_files_go_with_sync_or_prune_only(corpus, folder, tmp_path):
    elsewhere = tmp_path / "elsewhere.txt"
    elsewhere.write_text("kept although it vanished")
    corpus.add_files([folder, elsewhere], count=words)
    elsewhere.unlink()
    (folder / "boat.txt").unlink()
    assert corpus.add_files([folder], count=words).passages_removed == 0
    assert len(corpus) == 4
    report = corpus.sync([folder], count=words)
    assert (report.removed, report.passages_removed) == ((str(folder / "boat.txt"),), 1)
    assert len(corpus) == 3
    assert corpus.prune([elsewhere]).removed == (str(elsewhere),)


def test_remove_forgets_a_file_or_folder(corpus, folder):
    corpus.add_files([folder], count=words)
    assert corpus.remove(folder / "boat.txt") == 1
    assert corpus.remove(folder / "boat.txt") == 0
    assert corpus.remove(folder) == 2
    assert (len(corpus), corpus.sources()) == (0, [])


def test_identical_documents_share_a_passage_and_both_are_remembered(corpus, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the very same words")
    report = corpus.add_files([tmp_path / "a.txt", tmp_path / "b.txt"], count=words)
    assert (report.passages_new, len(corpus)) == (1, 1)
    (only,) = corpus.passages()
    assert [p.source for p in corpus.places(only.id)] == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert corpus.get(only.id, within={str(tmp_path / "b.txt")}).source == str(tmp_path / "b.txt")
    corpus.remove(tmp_path / "a.txt")
    assert [p.source for p in corpus.passages()] == [str(tmp_path / "b.txt")]
    corpus.remove(tmp_path / "b.txt")
    assert len(corpus) == 0


def test_problems_are_reported_and_the_rest_is_read(corpus, folder):
    (folder / "empty.md").write_text("")
    (folder / "binary.txt").write_bytes(b"\0\1\2")
    (folder / "latin.txt").write_bytes("Ein Café am Ufer der See".encode("latin-1"))
    (folder / "table.csv").write_text("a,b")
    report = corpus.add_files([folder, folder / "table.csv"], count=words)
    assert len(report.sources) == 4
    assert {Path(s.path).name for s in report.skipped} == {"empty.md", "binary.txt", "table.csv"}
    assert report.ignored == {".csv": 1}
    assert "latin.txt" in report.warnings[0]
    again = corpus.add_files([folder, folder / "table.csv"], count=words)
    assert (again.skipped, again.warnings) == (report.skipped, report.warnings)


def test_a_file_that_became_unreadable_is_no_longer_answered_from(corpus, folder):
    corpus.add_files([folder], count=words)
    (folder / "boat.txt").write_text("")
    report = corpus.add_files([folder], count=words)
    assert report.passages_removed == 1
    assert str(folder / "boat.txt") not in corpus.sources()


def test_nothing_readable_at_all_is_an_error_with_reasons(corpus, tmp_path):
    (tmp_path / "empty.md").write_text("")
    with pytest.raises(NothingFound, match=r"empty\.md is empty"):
        corpus.add_files([tmp_path / "empty.md"], count=words)
    with pytest.raises(InvalidInput, match="give a list"):
        corpus.add_files("docs", count=words)


def test_an_exception_in_the_middle_keeps_the_files_before_it(corpus, tmp_path):
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(f"document number {i}")

    def failing(text: str) -> int:
        if "3" in text:
            raise KeyboardInterrupt
        return words(text)

    with pytest.raises(KeyboardInterrupt):
        corpus.add_files([tmp_path], count=failing)
    assert texts(corpus) == {f"document number {i}" for i in range(3)}
    report = corpus.add_files([tmp_path], count=words)
    assert (len(report.read), report.unchanged, len(corpus)) == (3, 3, 6)


def test_an_interrupt_inside_a_change_writes_no_half_of_it(corpus, folder, monkeypatch):
    corpus.add_files([folder], count=words)
    before = texts(corpus)
    (folder / "boat.txt").write_text("something else entirely")

    def interrupted(self, key):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tamis.corpus.records.Batch._passage", interrupted)
        corpus.add_files([folder], count=words)
    assert texts(corpus) == before
    corpus.add_files([folder], count=words)
    assert "something else entirely" in texts(corpus)


KILLED = """
import os, signal, sys, time
from tamis.corpus import Corpus
def count(text):
    if "9" in text:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    return len(text.split())
Corpus(sys.argv[1]).add_files([sys.argv[2]], count=count)
"""


def test_a_kill_keeps_what_was_committed(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    for i in range(10):
        (docs / f"{i}.txt").write_text(f"document number {i}")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "kb.tamis"), str(docs)], check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    with Corpus(tmp_path / "kb.tamis") as corpus:
        assert 3 <= len(corpus) < 10
        assert all(corpus.places(p.id) for p in corpus.passages())
        corpus.add_files([docs], count=words)
        assert len(corpus) == 10


def test_unicode_in_names_and_texts(corpus, tmp_path):
    path = tmp_path / "Ærø – 灯台.md"
    path.write_text("# 灯台\n\nÞokulúður 👩‍🚀 e\u0301\n", encoding="utf-8")
    odd = tmp_path / os.fsdecode(b"caf\xe9.txt")
    odd.write_text("the name is not UTF-8")
    assert corpus.add_files([tmp_path / path.name, odd], count=words).passages_new == 2
    assert {p.title for p in corpus.passages()} == {"灯台", ""}
    assert corpus.search("灯台の光", 3)[0].passage.source == str(path)


def test_a_store_of_another_format_is_refused(tmp_path, folder):
    with Corpus(tmp_path / "kb.tamis") as corpus:
        corpus.add_files([folder], count=words)
        corpus._tables.write({FORMAT: {b"format": b"99"}})
    with pytest.raises(StoreMismatch, match="format 99"):
        Corpus(tmp_path / "kb.tamis")


def test_two_hundred_unchanged_files_take_no_time(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    for i in range(200):
        (docs / f"{i}.md").write_text(f"# Part {i}\n\n" + f"sentence {i}. " * 50)
    seen = []
    with Corpus(tmp_path / "kb.tamis") as corpus:
        corpus.add_files([docs], count=words, on_progress=lambda done, total, path: seen.append((done, total)))
        began = time.perf_counter()
        report = corpus.add_files([docs], count=words)
        assert time.perf_counter() - began < 0.2
    assert report.unchanged == 200
    assert seen[-1] == (200, 200) and len(seen) == 200


@pytest.mark.parametrize("same", [False, True], ids=["distinct", "identical"])
def test_ten_thousand_tiny_documents(tmp_path, same):
    docs = tmp_path / "docs"
    docs.mkdir()
    for i in range(10_000):
        (docs / f"{i:05}.txt").write_text("hello" if same else f"document {i}")
    with Corpus(tmp_path / "kb.tamis") as corpus:
        began = time.perf_counter()
        corpus.add_files([docs], count=words)
        assert time.perf_counter() - began < 10
        assert len(corpus) == (1 if same else 10_000)
        if not same:
            began = time.perf_counter()
            assert [h.passage.text for h in corpus.search("Where is 7321?", 5)] == ["document 7321"]
            assert time.perf_counter() - began < 5


def test_the_sample_documents_are_read_without_complaint(corpus):
    report = corpus.add_files([EXAMPLES], count=words)
    assert len(report.sources) >= 9
    assert (report.skipped, report.warnings, dict(report.ignored)) == ((), (), {})
