"""The server says truly what it takes and answers: its own OpenAPI document against it, and requests that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_server import Live


@pytest.fixture
def document(serve: Callable[..., Live]) -> dict[str, Any]:
    with serve().http() as http:
        found: dict[str, Any] = http.get("/openapi.json").json()
    return found


def test_every_route_says_how_it_refuses(document: dict[str, Any]) -> None:
    for path, item in document["paths"].items():
        for operation in item.values():
            assert {"200", "405", "413"} <= set(operation["responses"]) and "422" not in operation["responses"], path
    assert {"400", "404", "429", "503", "504"} <= set(document["paths"]["/v1/chat/completions"]["post"]["responses"]), (
        "what may come under load"
    )


def test_it_names_the_model_and_the_choices_of_a_policy(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == ["tiny"]
    assert schemas["Choices"]["properties"]["recompute"] == {"type": ["number"], "default": 0.15}
    assert "search" in schemas["Choices"]["properties"] and schemas["Choices"]["additionalProperties"] is False


def test_keys_are_asked_for_where_there_are_some(serve: Callable[..., Live], tmp_path: Path) -> None:
    from tamis.server.keys import KeyRing, new_key

    new_key(tmp_path / "keys", "a")
    with serve(keys=KeyRing.read(tmp_path / "keys")).http() as http:
        found = http.get("/openapi.json").json()
    assert found["paths"]["/v1/models"]["get"]["security"] and "security" not in found["paths"]["/health"]["get"]


def test_a_wrong_method_is_told_all_right_ones(serve: Callable[..., Live]) -> None:
    with serve().http() as http:
        answer = http.patch("/v1/documents/x")
        assert answer.status_code == 405 and answer.headers["Allow"] == "DELETE, GET, PUT"
        assert http.options("/v1/documents").headers["Allow"] == "GET, POST"
        assert http.options("/v1/documents/search").headers["Allow"] == "POST"
        assert http.put("/v1/documents/search", json={"text": "a"}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", '{"prompt": "\\ud800"}', "prompt"),
        ("/tokenize", '{"messages": []}', "messages"),
        ("/v1/documents", '{"text": ""}', "text"),
        ("/v1/completions", '{"model": "tiny", "prompt": "a", "repetition_penalty": 5e-324}', "repetition_penalty"),
        ("/v1/completions", '{"model": "tiny", "prompt": "a", "temperature": NaN}', "temperature"),
        ("/v1/completions", '{"model": "tiny", "prompt": "a", "tamis": {"\\udfff": 1}}', "tamis"),
    ],
    ids=["surrogate", "no messages", "no text", "penalty", "NaN", "a choice"],
)
def test_faults_that_were_found(serve: Callable[..., Live], path: str, body: str, param: str) -> None:
    with serve().http() as http:
        answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_temperature_close_to_zero_is_zero(serve: Callable[..., Live]) -> None:
    client = serve().client()
    texts = [
        client.completions.create(model="tiny", prompt="The boat", max_tokens=9, temperature=t).choices[0].text
        for t in (0, 1e-300)
    ]
    assert texts[0] == texts[1]
