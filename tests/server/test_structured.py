"""Answers that must be JSON: of any object or of a schema, whole, streamed, several at once; and schemas refused."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from live_server import Live

from tamis.core.errors import InvalidInput, Unavailable
from tamis.engine.grammar import FORMATS, Grammars, check_schema
from tiny_chat import tiny_tokenizer

STOP = 3  # <|im_end|> of the tiny tokenizer
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "lamp": {"enum": ["on", "off"]},
        "drops": {"type": "integer", "minimum": 0, "maximum": 90},
        "keepers": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["lamp", "drops"],
}
ASK: list[Any] = [{"role": "user", "content": "Where is the lamp?"}]


def form(schema: dict[str, Any], name: str = "answer") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def fits(text: str) -> bool:
    made = json.loads(text)
    few = all(isinstance(k, str) and len(k) <= 3 for k in made.get("keepers", []))
    return made["lamp"] in ("on", "off") and 0 <= made["drops"] <= 90 and few and len(made.get("keepers", [])) <= 2


@pytest.fixture
def live(serve: Callable[..., Live]) -> Live:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install 'tamis[structured]'")
    return serve(stop_tokens=frozenset({STOP}))


class TestAnswers:
    def test_of_a_schema_whole_streamed_and_several(self, live: Live) -> None:
        client = live.client()
        options: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 200, "response_format": form(SCHEMA)}
        made = client.chat.completions.create(**options, n=4, seed=1)
        assert len({c.message.content for c in made.choices}) > 1
        assert all(c.finish_reason == "stop" and fits(c.message.content) for c in made.choices)
        chunks = list(client.chat.completions.create(**options, temperature=0, stream=True))
        whole = client.chat.completions.create(**options, temperature=0).choices[0].message.content
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole and fits(whole)

    def test_any_object(self, live: Live) -> None:
        # what random weights write has no end: with a length it is a beginning that goes on like JSON
        made = live.client().chat.completions.create(
            model="tiny", messages=ASK, max_tokens=40, seed=3, response_format={"type": "json_object"}
        )
        assert made.choices[0].message.content.startswith("{")

    def test_beside_others_in_one_batch(self, live: Live) -> None:
        client = live.client()

        def one(i: int) -> str:
            extra: dict[str, Any] = {"response_format": form(SCHEMA)} if i % 2 else {}
            made = client.chat.completions.create(
                model="tiny", messages=ASK, max_tokens=60, temperature=i // 4, seed=i, frequency_penalty=0.5, **extra
            )
            return str(made.choices[0].message.content)

        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(one, range(8)))
        assert together == [one(i) for i in range(8)]
        assert all(fits(text) for text in together[1::2])

    def test_a_stop_text_and_a_length_end_it_sooner(self, live: Live) -> None:
        client = live.client()
        options: dict[str, Any] = {"model": "tiny", "messages": ASK, "temperature": 0, "response_format": form(SCHEMA)}
        cut = client.chat.completions.create(**options, max_tokens=60, stop=['"drops"']).choices[0]
        assert cut.finish_reason == "stop" and cut.message.content.endswith(", ")
        short = client.chat.completions.create(**options, max_tokens=3).choices[0]
        assert short.finish_reason == "length" and short.message.content.startswith("{")

    def test_log_probabilities_are_the_models_own(self, live: Live) -> None:
        made = live.client().chat.completions.create(
            model="tiny", messages=ASK, max_tokens=40, temperature=0, logprobs=True, response_format=form(SCHEMA)
        )
        assert all(-100 < one.logprob <= 0 for one in made.choices[0].logprobs.content)


class TestRefusals:
    @pytest.mark.parametrize(
        ("asked", "what"),
        [
            (form({"type": "strange"}), "type is"),
            (form({"type": "string", "pattern": "("}), "cannot be used"),
            (form({"type": "object", "properties": {}, "required": ["a"]}), "required"),
            (form({"type": "object", "patternProperties": {}}), "patternProperties"),
            (form({"$ref": "#/$defs/none"}), "leads nowhere"),
            ({"type": "json_schema"}, "response_format"),
            ({"type": "grammar"}, "response_format"),
        ],
        ids=["type", "pattern", "required", "unknown word", "reference", "no schema", "another form"],
    )
    def test_are_400(self, live: Live, asked: dict[str, Any], what: str) -> None:
        with live.http() as http:
            body = {"model": "tiny", "messages": ASK, "response_format": asked}
            answer = http.post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"].startswith("response_format") and what in error["message"]

    def test_without_the_package(self, serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "xgrammar", None)
        with serve().http() as http:
            body = {"model": "tiny", "messages": ASK, "response_format": {"type": "json_object"}}
            answer = http.post("/v1/chat/completions", json=body)
            text = body | {"response_format": {"type": "text"}, "max_tokens": 2}
            plain = http.post("/v1/chat/completions", json=text)
        assert answer.status_code == 400 and "tamis[structured]" in answer.json()["error"]["message"]
        assert plain.status_code == 200
        with pytest.raises(Unavailable):
            Grammars(tiny_tokenizer(), 512, [STOP]).json_object()


class TestSchemas:
    @pytest.mark.parametrize(
        "schema",
        [
            {"type": "string", "minLength": 1, "format": "uuid"},
            {"type": "string", "format": "date"},
            {"type": "string", "pattern": "a" * 201},
            {"type": "string", "pattern": "^(a{9}){9}$"},
            {"type": "string", "pattern": '"'},
            {"type": "string", "pattern": "(?=a)b"},
            {"type": "array", "items": {}, "maxItems": 2},
            {"type": "array", "items": {"type": "null"}, "maxItems": 10**9},
            {"anyOf": [{"type": "null"}], "type": "null"},
            {"oneOf": [{"type": "null"}]},
            {"type": ["string", "null"], "maxLength": 3},
            {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(300)}},
            {"type": "null", "description": "d" * 40_000},
            {"type": [[]]},
            {"type": "object", "properties": []},
            {"$ref": "http://example.org/schema"},
            {},
        ],
        ids=lambda schema: ",".join(schema) or "empty",
    )
    def test_what_cannot_be_kept_is_refused(self, schema: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput, match="schema"):
            check_schema(schema)

    def test_one_that_goes_too_deep(self) -> None:
        schema: dict[str, Any] = {"type": "null"}
        for _ in range(40):
            schema = {"type": "array", "items": schema}
        with pytest.raises(InvalidInput, match="inside each other"):
            check_schema(schema)

    def test_a_hundred_random_ones_are_kept_to_the_letter(self) -> None:
        """Random logits under each: what comes out is judged by another implementation of JSON schema."""
        pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install 'tamis[structured]'")
        judge = pytest.importorskip("jsonschema_rs", reason="jsonschema-rs is not installed: pip install 'tamis[dev]'")
        tokenizer = tiny_tokenizer()
        grammars = Grammars(tokenizer, 512, [STOP])
        ended = 0
        for i in range(100):
            schema = random_schema(random.Random(i))
            text = written(grammars.json_schema(schema).start(), tokenizer)
            if text is not None:
                ended += 1
                assert judge.validator_for(schema, validate_formats=True).is_valid(json.loads(text)), (schema, text)
        assert ended > 90

    def test_words_of_schemas_as_names_of_properties(self) -> None:
        pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install 'tamis[structured]'")
        named = {name: {"type": "string", "maxLength": 2} for name in ("enum", "type", "$ref", "anyOf", "minLength")}
        schema = {"type": "object", "properties": named, "required": list(named)}
        tokenizer = tiny_tokenizer()
        text = written(Grammars(tokenizer, 512, [STOP]).json_schema(schema).start(), tokenizer)
        assert text is not None and set(json.loads(text)) == set(named)


def written(state: Any, tokenizer: Any) -> str | None:
    """A text that random logits write, with a bent to come to an end; None: it did not."""
    tokens: list[int] = []
    ends = tokenizer('"]},').input_ids
    for _ in range(600):
        logits = 3 * torch.randn(512)
        logits[ends] += 4
        logits[STOP] += 8
        token = int(torch.multinomial(state.allowed(logits).softmax(-1), 1))
        state.accept(token)
        if token == STOP:
            return str(tokenizer.decode(tokens))
        tokens.append(token)
    return None


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """One of what is allowed."""
    flat = ["string", "integer", "number", "boolean"]
    kind = draw.choice([*flat, "object", "array", "null", "enum", "anyOf"] if depth < 3 else flat)
    if kind == "object":
        inside = {f"p{i}": random_schema(draw, depth + 1) for i in range(draw.randrange(4))}
        more: Any = draw.choice([False, True, {"type": "integer"}])
        wanted = draw.sample(list(inside), draw.randrange(len(inside) + 1))
        return {"type": kind, "properties": inside, "required": wanted, "additionalProperties": more}
    if kind == "array":
        made = {"type": kind, "items": random_schema(draw, depth + 1), "minItems": draw.randrange(3)}
        return made | draw.choice([{}, {"maxItems": 4}])
    if kind == "string":
        forms: list[dict[str, Any]] = [
            {},
            {"minLength": 2, "maxLength": draw.randrange(2, 9)},
            {"maxLength": 3},
            {"minLength": 3},
            {"format": FORMATS[0]},
            *({"pattern": p} for p in ("^[a-z]{2,5}$", "a+b", "^x?(yes|no)$", "[0-9]{3}", "^\\d+\\w*$", "^[^a].z$")),
        ]
        return {"type": kind} | draw.choice(forms)
    if kind in ("integer", "number"):
        low = draw.randrange(-50, 50) + (0.25 if kind == "number" else 0)
        high = low + draw.randrange(2, 200)
        bounds = [{}, {"minimum": low, "maximum": high}, {"exclusiveMinimum": low}, {"exclusiveMaximum": high}]
        return {"type": kind} | draw.choice(bounds)
    if kind == "enum":
        return {"enum": draw.sample([1, "x", None, True, {"a": [1]}, 'q"', 2.5], 3)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth + 1) for _ in range(2)]}
    return {"type": kind}
