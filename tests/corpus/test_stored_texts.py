"""Documents' texts that several processes share: whose they are, what they say, and that nothing is lost or mixed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tamis.core.errors import InvalidInput, NothingFound
from tamis.corpus.stored import SharedTexts, namespace_of, new_document


@pytest.fixture(params=["disk", "memory"])
def texts(request: pytest.FixtureRequest, tmp_path: Path) -> SharedTexts:
    return SharedTexts(tmp_path / "texts" if request.param == "disk" else None)


def test_an_owner_finds_own_documents_only(texts: SharedTexts) -> None:
    a = texts.put("a", new_document("T", "text", 3, "one"))
    assert texts.get("a", "one") == a
    assert texts.put("a", new_document("T", "text", 3, "one")) == a, "the same again changes nothing"
    with pytest.raises(InvalidInput, match="another text"):
        texts.put("a", new_document("T", "other", 3, "one"))
    with pytest.raises(NothingFound):
        texts.get("b", "one")
    with pytest.raises(NothingFound):
        texts.delete("b", "one")
    assert texts.list("b") == ([], False)
    assert texts.delete("a", "one") == a and texts.list("a") == ([], False)
    texts.close()


def test_lists_are_in_order_and_cut(texts: SharedTexts) -> None:
    for name in ("c", "a", "b", "d"):
        texts.put("x", new_document("", f"text {name}", 1, name))
    texts.put("y", new_document("", "text", 1, "e"))
    found, more = texts.list("x", limit=2)
    assert ([d.id for d in found], more) == (["a", "b"], True)
    found, more = texts.list("x", after="b")
    assert ([d.id for d in found], more) == (["c", "d"], False)
    texts.close()


def test_the_same_text_under_another_id_is_told(texts: SharedTexts) -> None:
    one = texts.put("a", new_document("T", "text", 1, "one"))
    assert not texts.same("a", one)
    texts.put("b", new_document("T", "text", 1, "two"))
    assert not texts.same("a", one), "another owner's is another document"
    texts.put("a", new_document("T", "text", 1, "two"))
    assert texts.same("a", one)
    texts.close()


def test_ids_are_made_of_what_a_document_says() -> None:
    assert new_document("a", "b", 1).id == new_document("a", "b", 1).id != new_document("ab", "", 1).id
    for name in ("", "-x", "a/b", "search", "x" * 65):
        with pytest.raises(InvalidInput, match="document id"):
            new_document("", "t", 1, name)
    with pytest.raises(InvalidInput, match="empty"):
        new_document("", "", 0)
    assert namespace_of("") == "" and namespace_of("a") != namespace_of("b")


def test_another_process_sees_and_adds(tmp_path: Path) -> None:
    texts = SharedTexts(tmp_path)
    texts.put("a", new_document("", "mine", 1, "one"))
    code = (
        "import sys; from tamis.corpus.stored import SharedTexts, new_document; t = SharedTexts(sys.argv[1]);"
        "assert t.get('a', 'one').text == 'mine'; t.put('a', new_document('', 'theirs', 1, 'two')); t.close()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert [d.id for d in texts.list("a")[0]] == ["one", "two"]
    texts.close()
