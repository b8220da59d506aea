"""What the server says of itself at /openapi.json: every status that can come, errors' form, the model, the choices."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from tamis.engine.library import NAME
from tamis.server.runs import Serving

WORDS = {
    400: "The request is wrong.",
    401: "No key, or one that is not known.",
    404: "There is no such thing.",
    405: "Not with this method.",
    413: "The body is too large.",
    429: "The queue is full, or the key has as many requests running as it may.",
    503: "The server is stopping, or there is no room.",
    504: "It took too long.",
}
EVERYWHERE = (405, 413)
OPEN = ("/health", "/version", "/metrics")  # to everybody
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
STREAM = {"text/event-stream": {"schema": EVENT}}


class ErrorDetail(BaseModel):
    """What went wrong. `param`: the field; `code`: a stable word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is no success."""

    error: ErrorDetail


class DocumentShown(BaseModel):
    """A document. tier: where its keys and values lie now, null if they are not stored."""

    id: str
    object: str
    title: str
    created: int
    tokens: int
    pinned: bool
    tier: str | None


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: its statuses beside those that every route has."""
    return {status: {"model": ErrorBody, "description": WORDS[status]} for status in sorted({*EVERYWHERE, *statuses})}


def describe(app: FastAPI, serving: Serving) -> None:
    """Have `app` tell its document as this server is: its model, its choices, its keys."""

    def made() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _finish(document, serving)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = made  # type: ignore[method-assign]


def _finish(document: dict[str, Any], serving: Serving) -> None:
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own form, which is never sent
        schemas.pop(name, None)
    for name in ("ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest"):
        model = schemas[name]["properties"]["model"]
        model.get("anyOf", [model])[0]["enum"] = [serving.settings.name]  # of the text, where it may be null
    schemas["Choices"]["properties"] |= _choices(serving)
    schemas["Choices"]["additionalProperties"] = False
    for path, item in document["paths"].items():
        for operation in item.values():
            operation["responses"].pop("422", None)
            if serving.keys.keys and path not in OPEN:
                operation["security"] = [{"key": []}]
                operation["responses"]["401"] = _told(401)
            for parameter in operation.get("parameters", []):
                if parameter["name"] == "name":
                    parameter["schema"]["pattern"] = f"^{NAME.pattern}$"
                elif parameter["name"] == "model":
                    parameter["schema"]["enum"] = [serving.settings.name]
    if serving.keys.keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}


def _told(status: int) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    return {"description": WORDS[status], "content": content}


def _choices(serving: Serving) -> dict[str, Any]:
    """The fields of a policy with their types, as JSON has them."""
    types = {"str": "string", "bool": "boolean", "int": "integer", "float": "number", "None": "null"}
    default = serving.engine.llm.policy
    made: dict[str, Any] = {}
    for field in fields(default):
        words = [part.strip() for part in str(field.type).split("|")]
        known = [name for kind, name in types.items() if kind in words]
        made[field.name] = {"type": known, "default": getattr(default, field.name)}
    return made
