"""Finding passages: the right ones, from the right sources, with an index that is never stale."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from tamis.core.errors import InvalidInput, ModelNotFound, Unavailable, UnknownName
from tamis.corpus import RETRIEVERS, Corpus, Passage, support
from tamis.corpus import bm25 as bm25_module

EXAMPLES = Path(__file__).parents[2] / "examples" / "documents"


def words(text: str) -> int:
    return len(text.split())


QUESTIONS = [
    ("How often must the lamp's lens be cleaned?", "lamp-and-lens.md", "every 14 days"),
    ("Which radio channel is used in fog?", "fog-and-radio.md", "working channel in fog"),
    ("How much can the crane lift?", "landings-and-boats.md", "750 kilograms"),
    ("When does the boat leave Haldvik in winter, October to March?", "boat-timetable.html", "09:45"),
    ("Why did the main lamp fail in January 2025?", "keepers-log.txt", "crack by the collar"),
    ("On which shelf are the ultraviolet tubes kept?", "spare-parts.pdf", "shelf D2"),
]


@pytest.fixture(scope="module")
def handbook():
    corpus = Corpus()
    corpus.add_files([EXAMPLES], count=words, target_tokens=150)
    return corpus


@pytest.mark.parametrize(("question", "file", "answer"), QUESTIONS)
def test_a_question_finds_its_own_document(handbook, question, file, answer):
    hits = handbook.search(question, 3)
    assert any(Path(h.passage.source).name == file and answer in h.passage.text for h in hits)
    assert [h.rank for h in hits] == list(range(len(hits)))
    assert [h.score for h in hits] == sorted((h.score for h in hits), reverse=True)


def test_within_answers_from_the_given_sources_alone(handbook):
    question = "How often must the lamp's lens be cleaned?"
    everywhere = handbook.search(question, 50)
    wanted = str(EXAMPLES / "spare-parts.pdf")
    inside = handbook.search(question, 50, within=[wanted])
    assert Path(everywhere[0].passage.source).name == "lamp-and-lens.md"
    assert inside and {h.passage.source for h in inside} == {wanted}
    assert handbook.search(question, 5, within=[]) == []


def test_a_shared_passage_is_cited_from_the_given_source(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("vinegar cleans the lens")
    corpus = Corpus()
    corpus.add_files([tmp_path], count=words)
    (hit,) = corpus.search("vinegar", 5, within={str(tmp_path / "b.txt")})
    assert hit.passage.source == str(tmp_path / "b.txt")


@pytest.mark.parametrize("question", ["zeppelin", "", "   ", "?!", "what is the of how", "s"])
def test_no_matching_word_finds_nothing(handbook, question):
    assert handbook.search(question, 5) == []


def test_small_corpora(tmp_path):
    corpus = Corpus()
    assert corpus.search("lens", 5) == []
    (tmp_path / "a.txt").write_text("!!! ...")
    corpus.add_files([tmp_path], count=words)
    assert corpus.search("lens", 5) == []
    (tmp_path / "b.txt").write_text("one lens")
    corpus.add_files([tmp_path], count=words)
    assert [h.passage.text for h in corpus.search("lens", 100)] == ["one lens"]


def test_digits_titles_plurals_and_ligatures_match(tmp_path):
    (tmp_path / "a.md").write_text("# Siren\n\nChannel 9 is free.\n")
    (tmp_path / "b.txt").write_text("The \ufb01lter is new.", encoding="utf-8")
    corpus = Corpus()
    corpus.add_files([tmp_path], count=words)
    assert corpus.search("9", 1)[0].passage.source.endswith("a.md")
    assert corpus.search("siren", 1)[0].passage.source.endswith("a.md")
    assert corpus.search("filters", 1)[0].passage.source.endswith("b.txt")


def test_the_saved_index_is_used_until_the_passages_change(tmp_path, folder, monkeypatch):
    builds = []
    build = bm25_module._build
    monkeypatch.setattr(bm25_module, "_build", lambda texts: builds.append(len(texts)) or build(texts))
    store = tmp_path / "kb.tamis"
    for expected in ([3], [3]):  # the second time it is loaded
        with Corpus(store) as corpus:
            corpus.add_files([folder], count=words)
            assert corpus.search("ferry", 1)[0].passage.source.endswith("boat.txt")
            assert corpus.search("puffins", 1)[0].passage.source.endswith("bird.md")
        assert builds == expected
    (folder / "boat.txt").write_text("Nothing sails any more.")
    with Corpus(store) as corpus:
        corpus.search("ferry", 1)
        corpus.add_files([folder], count=words)
        assert corpus.search("ferry", 1) == []
        assert corpus.search("sails", 1)[0].passage.text == "Nothing sails any more."
    assert builds == [3, 3]
    assert len(list(store.glob("bm25-*"))) == 1 and not list(store.glob(".bm25-*"))


@pytest.mark.parametrize("damage", ["truncate", "delete", "foreign"])
def test_a_damaged_index_is_made_anew(tmp_path, folder, damage):
    store = tmp_path / "kb.tamis"
    with Corpus(store) as corpus:
        corpus.add_files([folder], count=words)
        corpus.search("ferry", 1)
    (index,) = store.glob("bm25-*")
    if damage == "truncate":
        (index / "data.csc.index.npy").write_bytes(b"\x93NUMPY")
    elif damage == "delete":
        (index / "vocab.index.json").unlink()
    else:
        (index / "passages.json").write_text('{"id": "of other passages"}')
    with Corpus(store) as corpus:
        assert corpus.search("ferry", 1)[0].passage.source.endswith("boat.txt")


def test_an_index_that_cannot_be_saved_still_answers(folder, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space")

    monkeypatch.setattr(bm25_module.tempfile, "mkdtemp", full)
    with Corpus(tmp_path / "kb.tamis") as corpus:
        corpus.add_files([folder], count=words)
        assert corpus.search("ferry", 1)


WARM = """
import sys, time
began = time.perf_counter()
from tamis.corpus import Corpus
hits = Corpus(sys.argv[1]).search("ferry", 1)
took = time.perf_counter() - began
heavy = {"torch", "transformers", "pypdf", "bs4", "numba"} & set(sys.modules)
print(len(hits), took < 0.5, sorted(heavy), took)
"""


def test_a_second_search_is_fast_and_imports_nothing_heavy(tmp_path, folder):
    with Corpus(tmp_path / "kb.tamis") as corpus:
        corpus.add_files([folder], count=words)
        corpus.search("ferry", 1)
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, "-c", WARM, str(tmp_path / "kb.tamis")], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("1 True []"), done.stdout + done.stderr
    assert done.stderr == ""


def test_wrong_choices_are_named(handbook, monkeypatch):
    with pytest.raises(UnknownName, match="Did you mean 'bm25'"):
        handbook.search("x", 1, retriever="bm52")
    with pytest.raises(InvalidInput, match="k is 0"):
        handbook.search("x", 0)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(Unavailable, match="pip install sentence-transformers"):
        handbook.search("x", 1, retriever="embedding")
    assert set(RETRIEVERS) == {"bm25", "embedding"}


@pytest.fixture
def fake_embeddings(monkeypatch):
    """sentence-transformers with letter counts for vectors; records which texts were embedded."""
    import numpy as np

    embedded: list[str] = []

    class SentenceTransformer:
        def __init__(self, model: str) -> None:
            if model == "missing":
                raise OSError("no such model")

        def encode(self, texts, **options):
            embedded.extend(texts)
            rows = np.array([[t.lower().count(c) + 1e-3 for c in "abcdefghijklmnopqrstuvwxyz"] for t in texts])
            return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    library = types.ModuleType("sentence_transformers")
    library.SentenceTransformer = SentenceTransformer
    monkeypatch.setitem(sys.modules, "sentence_transformers", library)
    return embedded


def test_embeddings_rank_filter_and_are_kept(tmp_path, folder, fake_embeddings):
    store = tmp_path / "kb.tamis"
    with Corpus(store) as corpus:
        corpus.add_files([folder], count=words)
        hits = corpus.search("Puffins nest in burrows", 2, retriever="embedding")
        assert len(hits) == 2 and hits[0].passage.source.endswith("bird.md")
        boat = str(folder / "boat.txt")
        assert [h.passage.source for h in corpus.search("Puffins", 9, retriever="embedding", within={boat})] == [boat]
    fake_embeddings.clear()
    (folder / "new.txt").write_text("xylophone")
    with Corpus(store) as corpus:
        corpus.add_files([folder], count=words)
        assert corpus.search("xylophone", 1, retriever="embedding")[0].passage.text == "xylophone"
        with pytest.raises(ModelNotFound, match="missing"):
            corpus.search("x", 1, retriever="embedding", model="missing")
    assert fake_embeddings == ["xylophone", "xylophone"]  # the new passage, then the question


def test_support_tells_the_right_passage():
    passages = [
        Passage("The lens is cleaned every 14 days with vinegar.", "Lamp", "a", 1, 1),
        Passage("The boat sails every Tuesday.", "Boats", "b", 1, 1),
    ]
    right, wrong = support("Clean the lens every 14 days, with vinegar.", passages)
    assert 0.7 < right <= 1 and wrong < 0.3
    assert support("It is.", passages) == [0.0, 0.0]
    assert support("Lens", []) == []
    assert support("lens", passages) == [1.0, 0.0]
