"""Documents by what they say: those that were put, those of an index, and requests that look for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import Live, live

from tamis.engine.llm import LLM

TEXTS = {
    "crane": ("Crane", "The crane lifts 900 kilograms. Its rope is changed every spring by the second keeper."),
    "fog": ("Fog", "In fog the keepers listen to radio channel 16. The horn sounds every two minutes."),
    "boat": (
        "Boat",
        "The supply boat comes on Monday at noon. " + "Nobody lands in a storm. " * 60 + "The mail is blue.",
    ),
}
REUSE = {"prefill": "reuse", "accept_block_attention": True}


def put_all(http: Any) -> None:
    for name, (title, text) in TEXTS.items():
        http.put(f"/v1/documents/{name}", json={"text": text, "title": title}).raise_for_status()


def search(http: Any, query: str, **options: Any) -> list[dict[str, Any]]:
    answer = http.post("/v1/documents/search", json={"query": query} | options)
    answer.raise_for_status()
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


@pytest.fixture
def indexed(loaded: Any, tmp_path: Path) -> Iterator[Live]:
    """A server on a store that `tamis index` could have made."""
    (tmp_path / "docs").mkdir()
    for name, (title, text) in TEXTS.items():
        (tmp_path / "docs" / f"{name}.md").write_text(f"# {title}\n\n{text}\n")
    store = tmp_path / "kb.tamis"
    with LLM(loaded, prefill="sift", min_tokens=0, cache_bytes=64 << 20) as llm, llm.corpus(store) as base:
        base.add_files(tmp_path / "docs")
    with LLM(loaded, prefill="prefix", cache_bytes=64 << 20) as llm, llm.corpus(store) as base:
        llm.stop_tokens = frozenset()
        with live(llm, store=store, index=base) as running:
            yield running


class TestPut:
    def test_the_best_come_first_with_what_fits(self, serve: Callable[..., Live]) -> None:
        with serve().http() as http:
            assert search(http, "radio channel") == []
            put_all(http)
            found = search(http, "Which radio channel do the keepers listen to in fog?")
            assert found[0]["id"] == "fog" and found[0]["score"] > found[-1]["score"] > 0
            assert "channel 16" in found[0]["snippet"] and found[0]["within"] == "documents"
            (mail,) = search(http, "blue mail", top_k=1)
            assert mail["id"] == "boat" and "mail is blue" in mail["snippet"] and len(mail["snippet"]) < 400
            assert search(http, "zebra") == [] and search(http, "the of and") == []

    def test_what_changes_is_seen_and_other_owners_documents_are_not(
        self, serve: Callable[..., Live], tmp_path: Path
    ) -> None:
        from tamis.server.keys import KeyRing, new_key

        a, b = (new_key(tmp_path / "keys", name) for name in ("a", "b"))
        running = serve(keys=KeyRing.read(tmp_path / "keys"))
        with running.http(a) as mine, running.http(b) as other:
            put_all(mine)
            assert search(mine, "radio") and search(other, "radio") == []
            mine.delete("/v1/documents/fog").raise_for_status()
            assert search(mine, "radio") == []
            mine.put("/v1/documents/again", json={"text": "The radio is old."}).raise_for_status()
            mine.put("/v1/documents/twin", json={"text": "The radio is old."}).raise_for_status()
            assert [hit["id"] for hit in search(mine, "radio")] == ["again"]

    def test_owners_with_as_many_documents_each_find_their_own(
        self, serve: Callable[..., Live], tmp_path: Path
    ) -> None:
        """Word counts are kept by owner and number of changes: with the same number only the owner tells them apart."""
        from tamis.server.keys import KeyRing, new_key

        a, b = (new_key(tmp_path / "keys", name) for name in ("a", "b"))
        running = serve(keys=KeyRing.read(tmp_path / "keys"))
        with running.http(a) as mine, running.http(b) as other:
            mine.put("/v1/documents/fog", json={"text": TEXTS["fog"][1]}).raise_for_status()
            other.put("/v1/documents/boat", json={"text": TEXTS["boat"][1]}).raise_for_status()
            for _ in range(2):
                assert [hit["id"] for hit in search(mine, "radio channel")] == ["fog"]
                assert search(other, "radio channel") == []
                assert [hit["id"] for hit in search(other, "supply boat")] == ["boat"]
                assert search(mine, "supply boat") == []

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "query"),
            ({"query": ""}, "query"),
            ({"query": "x", "top_k": 0}, "top_k"),
            ({"query": "x", "top_k": 101}, "top_k"),
            ({"query": "x", "within": "files"}, "within"),
            ({"query": "x", "k": 3}, "k"),
        ],
        ids=["no query", "empty", "none", "many", "elsewhere", "unknown"],
    )
    def test_refusals(self, serve: Callable[..., Live], body: dict[str, Any], param: str) -> None:
        with serve().http() as http:
            answer = http.post("/v1/documents/search", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


class TestIndex:
    def test_its_passages_are_found_read_and_not_changed(self, indexed: Live) -> None:
        with indexed.http() as http:
            (found,) = search(http, "radio channel", top_k=1)
            assert found["within"] == "index" and found["source"].startswith("fog.md:")
            name = found["id"]
            assert http.get(f"/v1/documents/{name}").json()["text"].startswith("# Fog")
            assert http.get("/v1/documents").json()["data"] == []
            assert http.delete(f"/v1/documents/{name}").status_code == 404
            assert http.post(f"/v1/documents/{name}/pin").status_code == 404
            assert http.post(f"/v1/documents/{name}/warm").json()["origin"] == "computed"
            ask = {"model": "tiny", "messages": [{"role": "user", "content": "Which channel?"}], "max_tokens": 2}
            made = http.post("/v1/chat/completions", json=ask | {"documents": [name], "tamis": REUSE}).json()
            assert made["usage"]["prompt_tokens_details"]["cached_tokens"] > 10

    def test_records_made_beforehand_serve_a_sparse_prefill(self, indexed: Live) -> None:
        with indexed.http() as http:
            ids = [hit["id"] for hit in search(http, "keepers boat crane", top_k=3)]
            sift = {"prefill": "sift", "min_tokens": 0}
            ask = {"model": "tiny", "messages": [{"role": "user", "content": "Which?"}], "max_tokens": 2}
            made = http.post("/v1/chat/completions", json=ask | {"documents": ids, "tamis": sift}).json()
        report = made["tamis"][0]["report"]
        assert report["used"] == "sift" and report["indexed"] == 0 and report["documents"] == 3

    def test_beside_documents_that_were_put(self, indexed: Live) -> None:
        with indexed.http() as http:
            http.put("/v1/documents/mine", json={"text": "My radio has a channel."}).raise_for_status()
            both = {hit["within"] for hit in search(http, "radio channel")}
            assert both == {"documents", "index"}
            for within in ("documents", "index"):
                assert {hit["within"] for hit in search(http, "radio channel", within=within)} == {within}


class TestRequests:
    def test_one_looks_for_its_documents(self, serve: Callable[..., Live]) -> None:
        with serve().http() as http:
            put_all(http)
            ask: dict[str, Any] = {"model": "tiny", "max_tokens": 2}
            messages = [{"role": "user", "content": "Which radio channel in fog?"}]
            found = {"search": {"top_k": 1}}
            made = http.post("/v1/chat/completions", json=ask | {"messages": messages, "tamis": found | REUSE}).json()
            assert made["tamis"][0]["documents_found"] == ["fog"] and made["tamis"][0]["report"]["used"] == "reuse"
            by_hand = ask | {"messages": messages, "documents": ["fog"], "tamis": REUSE}
            same = http.post("/v1/chat/completions", json=by_hand).json()
            assert same["usage"]["prompt_tokens"] == made["usage"]["prompt_tokens"]
            asked = ask | {"prompt": "a", "tamis": {"search": {"query": "crane rope keeper boat"}}}
            text = http.post("/v1/completions", json=asked).json()
            assert text["tamis"][0]["documents_found"][-1] == "crane", "the best stands next to the question"
            none = http.post("/v1/completions", json=ask | {"prompt": "zebra", "tamis": {"search": {}}}).json()
            assert "documents_found" not in none["tamis"][0]
            wrong = http.post("/v1/completions", json=ask | {"prompt": ["a", "b"], "tamis": {"search": {}}})
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "tamis.search.query"
            wrong = http.post("/v1/completions", json=ask | {"prompt": "a", "tamis": {"search": {"k": 1}}})
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "tamis.search.k"
