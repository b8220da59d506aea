"""The server on loopback with a tiny model, asked by the official client and by plain requests."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_server import Live

from tamis.kernels.blocks import BlockRule
from tiny_forecast import save_forecast

ASK: list[dict[str, str]] = [{"role": "user", "content": "Where is the lamp?"}]
TEXTS = [
    " ".join(f"{name} {i * n} is the lamp of station {i}." for i in range(n)) for name, n in (("N", 14), ("E", 11))
]


@pytest.fixture
def live(serve: Callable[..., Live]) -> Live:
    return serve()


def chat(live: Live, **fields: Any) -> Any:
    """A plain request's answer."""
    with live.http() as http:
        return http.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK, "max_tokens": 5} | fields)


class TestAnswers:
    def test_whole_and_streamed_are_the_same(self, live: Live) -> None:
        client = live.client()
        options: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**options)
        assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 12
        chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        assert (
            "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
        )
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens and not chunks[-1].choices
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
        assert whole.model_extra["tamis"][0]["report"]["used"] == "prefix"

    def test_choices_differ_and_a_seed_repeats_them(self, live: Live) -> None:
        client = live.client()
        options: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 8, "n": 3, "seed": 7}
        first, again = (client.chat.completions.create(**options) for _ in range(2))
        texts = [c.message.content for c in first.choices]
        assert [c.index for c in first.choices] == [0, 1, 2] and len(set(texts)) > 1
        assert texts == [c.message.content for c in again.choices]
        assert first.usage.completion_tokens == 24

    def test_logprobs(self, live: Live) -> None:
        client = live.client()
        options: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "temperature": 0}
        made = client.chat.completions.create(messages=ASK, logprobs=True, top_logprobs=3, **options)
        content = made.choices[0].logprobs.content
        assert len(content) == 4 and all(len(one.top_logprobs) == 3 for one in content)
        assert all(one.logprob == one.top_logprobs[0].logprob <= 0 for one in content)
        plain = client.completions.create(prompt="The boat", logprobs=2, **options).choices[0].logprobs
        assert len(plain.tokens) == 4 and plain.text_offset[0] == 0 and len(plain.top_logprobs[0]) == 2

    def test_stop_texts_are_left_out(self, live: Live) -> None:
        client = live.client()
        options: dict[str, Any] = {"model": "tiny", "max_tokens": 30, "temperature": 0}
        whole = client.completions.create(prompt="The boat", **options).choices[0].text
        stop = whole[8:11]
        cut = client.completions.create(prompt="The boat", stop=[stop], **options).choices[0]
        assert cut.finish_reason == "stop" and cut.text == whole[: whole.find(stop)]

    def test_several_prompts_of_texts_or_tokens(self, live: Live) -> None:
        client = live.client()
        texts = ["The boat", "The crane lifts"]
        ids = [live.engine.llm.tokenizer(t).input_ids for t in texts]
        options: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0}
        made = [client.completions.create(prompt=p, **options) for p in (texts, ids)]
        assert [c.text for c in made[0].choices] == [c.text for c in made[1].choices]
        assert made[0].usage.prompt_tokens == sum(map(len, ids))

    def test_a_prefix_shows_as_cached(self, live: Live) -> None:
        long = [{"role": "user", "content": TEXTS[0]}]
        details = [chat(live, messages=long).json()["usage"]["prompt_tokens_details"] for _ in range(2)]
        assert details[0]["cached_tokens"] == 0 and details[1]["cached_tokens"] >= 128

    def test_sixteen_clients_at_once(self, live: Live) -> None:
        client = live.client()

        def one(i: int) -> tuple[str, int]:
            options: dict[str, Any] = {"model": "tiny", "max_tokens": 10 + i, "temperature": 0, "stream": True}
            chunks = list(client.completions.create(prompt=f"Station {i}: " * (i + 1), **options))
            return "".join(c.choices[0].text for c in chunks), sum(1 for c in chunks if c.choices[0].finish_reason)

        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(one, range(16)))
        assert together == [one(i) for i in range(16)]
        assert all(ends == 1 for _, ends in together)


class TestDocuments:
    def test_their_life(self, live: Live) -> None:
        with live.http() as http:
            put = http.post("/v1/documents", json={"title": "North", "text": TEXTS[0]}).json()
            assert put["id"].startswith("doc-") and put["tier"] is None and not put["pinned"]
            assert http.post("/v1/documents", json={"title": "North", "text": TEXTS[0]}).json()["id"] == put["id"]
            named = http.put("/v1/documents/east", json={"text": TEXTS[1], "pin": True}).json()
            assert named["pinned"] and named["tier"] == "device"
            assert http.put("/v1/documents/east", json={"text": "other"}).status_code == 400
            assert http.post(f"/v1/documents/{put['id']}/warm").json()["origin"] == "computed"
            assert http.post(f"/v1/documents/{put['id']}/warm").json()["origin"] == "device"
            listed = http.get("/v1/documents", params={"limit": 1}).json()
            assert listed["has_more"] and listed["data"][0]["id"] == put["id"] and "text" not in listed["data"][0]
            assert http.get("/v1/documents/east").json()["text"] == TEXTS[1]
            assert not http.post("/v1/documents/east/unpin").json()["pinned"]
            assert http.delete("/v1/documents/east").json()["deleted"]
            assert http.get("/v1/documents/east").status_code == 404
            assert http.delete("/v1/documents/east").status_code == 404
        live.engine.reuse.store.cache.check()

    def test_by_id_and_by_text(self, live: Live) -> None:
        with live.http() as http:
            name = http.post("/v1/documents", json={"text": TEXTS[0], "warm": True}).json()["id"]
            tokens = http.get(f"/v1/documents/{name}").json()["tokens"]
        tamis = {"prefill": "reuse", "accept_block_attention": True}
        for given, cached in (([name], tokens), ([{"id": name}], tokens), ([{"text": TEXTS[1]}], 0)):
            made = chat(live, documents=given, tamis=tamis).json()
            assert made["usage"]["prompt_tokens_details"]["cached_tokens"] == cached, given
            assert made["tamis"][0]["report"]["reuse"]["approximate"]
        exact = chat(live, documents=[name], tamis={"prefill": "dense"}, temperature=0).json()
        assert exact["tamis"][0]["report"]["used"] == "dense"
        assert chat(live, documents=["nobody"]).status_code == 404

    def test_fifty_requests_for_one_missing_document_compute_it_once(self, serve: Callable[..., Live]) -> None:
        live = serve(llm={"prefill": "reuse", "accept_block_attention": True})
        with live.http() as http:
            name = http.post("/v1/documents", json={"text": TEXTS[0]}).json()["id"]
        with ThreadPoolExecutor(50) as pool:
            made = list(pool.map(lambda i: chat(live, documents=[name], max_tokens=2), range(50)))
        assert {r.status_code for r in made} == {200}
        cached = [r.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for r in made]
        assert sorted(cached)[0] == 0 and sum(c == 0 for c in cached) == 1
        assert live.engine.reuse.store.passes == 1

    def test_a_restart_brings_them_back(self, serve: Callable[..., Live], tmp_path: Path) -> None:
        llm = {"prefill": "reuse", "accept_block_attention": True, "cache_dir": tmp_path / "kv"}
        live = serve(llm=llm, store=tmp_path)
        with live.http() as http:
            http.put("/v1/documents/north", json={"text": TEXTS[0], "pin": True}).raise_for_status()
        live.stop()
        live.engine.close()
        live.engine.llm.close()
        again = serve(llm=llm, store=tmp_path)
        with again.http() as http:
            assert http.get("/v1/documents/north").json()["pinned"]
        assert again.engine.reuse.store.passes == 0
        usage = chat(again, documents=["north"]).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 100


class TestForecast:
    FEW: dict[str, Any] = {"prefill": "dense", "decode": "forecast", "decode_local": 1}  # noqa: RUF012

    def test_steps_read_what_it_names(self, serve: Callable[..., Live], loaded: Any, tmp_path: Path) -> None:
        live = serve(llm={"forecast": save_forecast(loaded, tmp_path)})
        few = self.FEW | {"decode_budget": 0.1, "decode_least": 0}
        made = chat(live, documents=[{"text": t} for t in TEXTS], tamis=few, max_tokens=12, temperature=0)
        assert made.status_code == 200 and made.json()["usage"]["completion_tokens"] == 12, made.text
        again = chat(live, documents=[{"text": t} for t in TEXTS], tamis=few, max_tokens=12, temperature=0)
        assert again.json()["choices"][0]["message"] == made.json()["choices"][0]["message"]

    def test_there_is_none(self, live: Live) -> None:
        made = chat(live, tamis=self.FEW)
        assert made.status_code == 400 and "none is loaded" in made.json()["error"]["message"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_what_it_cannot_choose(
        self, serve: Callable[..., Live], loaded: Any, tmp_path: Path, *, stream: bool
    ) -> None:
        rule = BlockRule(top=6, local=1, block=16, window=8, stride=4)
        live = serve(llm={"forecast": save_forecast(loaded, tmp_path, rule)})
        few = {"prefill": "forecast", "prefill_blocks": 6, "min_tokens": 0}
        made = chat(live, tamis=few | {"prefill_together": 32}, stream=stream)
        assert made.status_code == 400 and "blocks of 16" in made.json()["error"]["message"], made.text
        assert chat(live, tamis=few | {"prefill_together": 16}, max_tokens=2).status_code == 200


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param", "code"),
        [
            ({"tools": []}, "tools", "unsupported_parameter"),
            ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
            ({"temprature": 1}, "temprature", "unknown_parameter"),
            ({"model": "gpt"}, "model", "model_not_found"),
            ({"max_tokens": 0}, "max_tokens", "invalid_value"),
            ({"temperature": "hot"}, "temperature", "invalid_value"),
            ({"messages": []}, "messages", "invalid_value"),
            ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "invalid_value"),
            ({"n": 99}, "n", "invalid_value"),
            ({"stop": [""]}, "stop", "invalid_value"),
            ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
            ({"tamis": {"prefil": "sift"}}, "tamis", "invalid_value"),
            ({"tamis": {"decode": "selfindex", "prefill": "reuse"}}, "tamis", "invalid_value"),
            ({"documents": [{"name": "x"}]}, "documents.0", "invalid_value"),
            ({"max_tokens": 5000}, None, "context_length_exceeded"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_nothing_is_ignored(self, live: Live, fields: dict[str, Any], param: str | None, code: str) -> None:
        answer = chat(live, **fields)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error"
        assert (error["param"], error["code"]) == (param, code), error

    def test_other_paths_and_bodies(self, serve: Callable[..., Live]) -> None:
        live = serve(settings={"body_bytes": 2000})
        with live.http() as http:
            assert "error" in http.get("/nothing").json()
            assert http.get("/v1/chat/completions").status_code == 405
            sent = {"Content-Type": "application/json"}
            assert http.post("/v1/completions", content=b"{", headers=sent).json()["error"]["code"] == "invalid_json"
            assert http.post("/v1/completions", content=b"[]", headers=sent).status_code == 400
            big = json.dumps({"model": "tiny", "prompt": "x" * 3000})
            assert http.post("/v1/completions", content=big).status_code == 413
            parts = (big[i : i + 500].encode() for i in range(0, len(big), 500))
            chunked = http.post("/v1/completions", content=parts, headers=sent)
            assert chunked.status_code == 413 and chunked.json()["error"]["code"] == "too_large"

    def test_a_full_queue(self, serve: Callable[..., Live]) -> None:
        live = serve(limits={"max_running": 1, "max_waiting": 1})
        with ThreadPoolExecutor(6) as pool:
            made = list(pool.map(lambda i: chat(live, max_tokens=60), range(6)))
        refused = [r for r in made if r.status_code == 429]
        assert refused and any(r.status_code == 200 for r in made)
        assert all(int(r.headers["Retry-After"]) >= 1 for r in refused)
        assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"

    def test_a_request_that_takes_too_long(self, serve: Callable[..., Live]) -> None:
        live = serve(settings={"timeout_s": 0.3})
        assert chat(live, max_tokens=1000).status_code == 504
        lines = chat(live, max_tokens=1000, stream=True).text.strip().split("\n\n")
        assert (
            json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "timeout" and lines[-1] == "data: [DONE]"
        )
        assert idle(live)


class TestKeys:
    def test_who_may_ask_and_sees_what(self, serve: Callable[..., Live], tmp_path: Path) -> None:
        from tamis.server.keys import KeyRing, new_key

        a, b = (new_key(tmp_path / "keys", name) for name in ("a", "b"))
        text = (tmp_path / "keys").read_text()
        assert a not in text and (tmp_path / "keys").stat().st_mode & 0o077 == 0
        live = serve(keys=KeyRing.read(tmp_path / "keys"), llm={"prefill": "reuse", "accept_block_attention": True})
        for wrong in (None, "x", "tamis-nobody"):
            with live.http(wrong) as http:
                answer = http.get("/v1/models")
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
                assert http.get("/health").status_code == 200
        ask: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 2, "documents": ["north"]}
        with live.http(a) as mine, live.http(b) as other:
            mine.put("/v1/documents/north", json={"text": TEXTS[0], "warm": True}).raise_for_status()
            assert other.get("/v1/documents").json()["data"] == []
            assert other.get("/v1/documents/north").status_code == 404
            assert other.post("/v1/chat/completions", json=ask).status_code == 404
            same = {**ask, "documents": [{"text": TEXTS[0]}]}
            usage = [c.post("/v1/chat/completions", json=same).json()["usage"] for c in (other, mine)]
            assert [u["prompt_tokens_details"]["cached_tokens"] > 0 for u in usage] == [False, True]

    def test_a_key_with_a_limit(self, serve: Callable[..., Live], tmp_path: Path) -> None:
        from tamis.server.keys import KeyRing, new_key

        key = new_key(tmp_path / "keys", "a", 1)
        live = serve(keys=KeyRing.read(tmp_path / "keys"))
        client = live.client(key)
        options: dict[str, Any] = {"model": "tiny", "messages": ASK}
        stream = client.chat.completions.create(**options, max_tokens=400, stream=True)
        next(iter(stream))
        with live.http(key) as http:
            assert http.post("/v1/chat/completions", json=options).status_code == 429
            stream.close()
            assert idle(live)
            assert http.post("/v1/chat/completions", json=options | {"max_tokens": 2}).status_code == 200

    @pytest.mark.parametrize("text", ["", "a", "a xyz", f"a {'0' * 64} many", f"a {'0' * 64}\na {'1' * 64}"])
    def test_a_file_that_is_none(self, tmp_path: Path, text: str) -> None:
        from tamis.core.errors import InvalidInput
        from tamis.server.keys import KeyRing

        (tmp_path / "keys").write_text(text)
        with pytest.raises(InvalidInput):
            KeyRing.read(tmp_path / "keys")


def idle(live: Live, within_s: float = 10.0) -> bool:
    """Whether the engine has nothing left to do, soon."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        now = live.engine.statistics()
        if not now.running + now.waiting:
            return True
        time.sleep(0.01)
    return False


class TestEnds:
    def test_a_client_that_leaves_is_not_computed_for(self, live: Live) -> None:
        client = live.client()
        options: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 1000}
        stream = client.chat.completions.create(**options, stream=True)
        next(iter(stream))
        stream.close()
        assert idle(live, 3.0)
        import httpx

        with live.http() as http, pytest.raises(httpx.TimeoutException):
            http.post("/v1/chat/completions", json=options, timeout=0.2)
        assert idle(live, 3.0)
        live.engine.reuse.store.cache.check()

    @pytest.mark.parametrize("grace_s", [30.0, 0.2], ids=["finishes", "hands back"])
    def test_a_stop(self, serve: Callable[..., Live], grace_s: float) -> None:
        live = serve(settings={"grace_s": grace_s})
        most = 150 if grace_s > 1 else 1200
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(chat, live, max_tokens=most, stream=bool(i % 2)) for i in range(4)]
            while live.engine.statistics().running < 4:
                time.sleep(0.01)
            live.stop()
            answers = [one.result() for one in asked]
        if grace_s > 1:
            assert {a.status_code for a in answers} == {200}
            assert all('"finish_reason":"length"' in a.text for a in answers)
        else:
            assert [a.status_code for a in answers] == [503, 200, 503, 200]
            assert all("shutting down" in a.text for a in answers)
            assert answers[0].headers["Retry-After"]

    def test_no_text_of_a_prompt_in_logs(self, live: Live, caplog: pytest.LogCaptureFixture) -> None:
        secret = "the crane is at station seventeen"
        with caplog.at_level(logging.DEBUG):
            assert chat(live, messages=[{"role": "user", "content": secret}]).status_code == 200
            assert chat(live, messages=[{"role": "tool", "content": secret}]).status_code == 400
            assert secret not in chat(live, messages=secret).text
        assert secret not in caplog.text


class TestAbout:
    def test_small_ones(self, live: Live) -> None:
        with live.http() as http:
            assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
            assert http.get("/v1/models/tiny").json()["max_model_len"] == 1500
            assert http.get("/health").status_code == 200 and "version" in http.get("/version").json()
            made = http.post("/tokenize", json={"prompt": "The lamp"}).json()
            assert made["count"] == len(made["tokens"])
            assert http.post("/detokenize", json={"tokens": made["tokens"]}).json()["prompt"] == "The lamp"
            assert http.post("/tokenize", json={"messages": ASK}).json()["count"] > made["count"]
            assert http.post("/tokenize", json={}).status_code == 400
            assert http.post("/detokenize", json={"tokens": [99999]}).status_code == 400

    def test_metrics(self, live: Live) -> None:
        chat(live, max_tokens=5)
        chat(live, tools=[])
        with live.http() as http:
            lines = http.get("/metrics").text.splitlines()
        numbers = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        label = '{model_name="tiny"}'
        assert float(numbers[f"tamis:generation_tokens_total{label}"]) == 5
        assert float(numbers[f"tamis:time_to_first_token_seconds_count{label}"]) == 1
        assert float(numbers[f"tamis:inter_token_latency_seconds_count{label}"]) == 4
        assert float(numbers['tamis:request_success_total{finished_reason="length",model_name="tiny"}']) == 1
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
            assert f"tamis:{name}{label}" in numbers


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = {t for t in threading.enumerate() if t.name == "tamis-engine"}
    yield
    assert {t for t in threading.enumerate() if t.name == "tamis-engine"} <= before
