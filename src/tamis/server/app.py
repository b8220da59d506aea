"""The application: routes, who may ask, how errors are told, and how large a request may be."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Depends, FastAPI, Header
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import tamis
from tamis.core.errors import InvalidInput, NothingFound, TamisError
from tamis.core.log import logger
from tamis.engine.chat import chat_prompt
from tamis.engine.library import Library
from tamis.engine.service import Engine
from tamis.server import completions, documents
from tamis.server.asked import check_model
from tamis.server.errors import Told, WrongField, wrong_field
from tamis.server.keys import Key, KeyRing
from tamis.server.metrics import Metrics
from tamis.server.openapi import WORDS, describe, refusals
from tamis.server.runs import Serving
from tamis.server.schema import DetokenizeRequest, TokenizeRequest
from tamis.server.settings import ServerSettings

log = logger("server")


def create_app(engine: Engine, library: Library, settings: ServerSettings, keys: KeyRing | None = None) -> FastAPI:
    """The ASGI application. Whoever runs it closes engine and library."""
    serving = Serving(engine, library, settings, keys or KeyRing(), Metrics(engine, settings.name))
    app = FastAPI(title="Tamis", version=tamis.__version__, docs_url=None, redoc_url=None)
    app.state.serving = serving
    describe(app, serving)

    async def owner(authorization: str | None = Header(None, include_in_schema=False)) -> Key:
        return serving.keys.owner(authorization)

    asks = Depends(owner)
    app.include_router(completions.router(serving, asks))
    app.include_router(documents.router(serving, asks))
    _about(app, serving, asks)
    _texts(app, serving, asks)
    _errors(app, settings)
    app.add_middleware(BodyLimit, most=settings.body_bytes)
    return app


def _about(app: FastAPI, serving: Serving, asks: Any) -> None:
    engine, name = serving.engine, serving.settings.name

    @app.get("/v1/models", responses=refusals())
    async def models(key: Key = asks) -> dict[str, Any]:
        return {"object": "list", "data": [_model(engine, name)]}

    @app.get("/v1/models/{model:path}", responses=refusals(404))
    async def model(model: str, key: Key = asks) -> dict[str, Any]:
        if model != name:
            raise NothingFound(f"model {model!r} is not served here; {name!r} is.")
        return _model(engine, name)

    @app.get("/health", responses=refusals() | {503: {"description": WORDS[503]}}, response_class=Response)
    async def health() -> Response:
        """200 while requests are taken; 503 when the server is stopping, or its engine has."""
        return Response(status_code=200 if engine.taking else 503)

    @app.get("/version", responses=refusals())
    async def version() -> dict[str, str]:
        return {"version": tamis.__version__}

    @app.get("/metrics", responses=refusals() | {200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        return Response(serving.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(engine: Engine, name: str) -> dict[str, Any]:
    most = engine.llm.runner.geometry.context_tokens
    return {"id": name, "object": "model", "created": 0, "owned_by": "tamis", "max_model_len": most}


def _texts(app: FastAPI, serving: Serving, asks: Any) -> None:
    llm = serving.engine.llm

    def tokens_of(body: TokenizeRequest) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise WrongField("give either prompt or messages.", "prompt")
        if body.messages is not None:
            return list(chat_prompt(llm, [m.plain for m in body.messages]).tokens)
        ids: list[int] = llm.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens).input_ids
        return ids

    @app.post("/tokenize", responses=refusals(400))
    async def tokenize(body: TokenizeRequest, key: Key = asks) -> dict[str, Any]:
        check_model(serving, body.model)
        ids = await asyncio.to_thread(tokens_of, body)
        return {"tokens": ids, "count": len(ids), "max_model_len": llm.runner.geometry.context_tokens}

    @app.post("/detokenize", responses=refusals(400))
    async def detokenize(body: DetokenizeRequest, key: Key = asks) -> dict[str, str]:
        check_model(serving, body.model)
        most = llm.runner.model.config.vocab_size
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < most:
            raise InvalidInput(f"tokens are 0 to {most - 1} in this model.")
        return {"prompt": await asyncio.to_thread(llm.tokenizer.decode, body.tokens)}


def _errors(app: FastAPI, settings: ServerSettings) -> None:
    @app.exception_handler(TamisError)
    async def ours(http: HttpRequest, error: TamisError) -> JSONResponse:
        return Told.of(error).response()

    @app.exception_handler(RequestValidationError)
    async def fields(http: HttpRequest, error: RequestValidationError) -> JSONResponse:
        return Told.of(wrong_field(error.errors())).response()

    @app.exception_handler(HTTPException)
    async def paths(http: HttpRequest, error: HTTPException) -> JSONResponse:
        if isinstance(error, _TooLarge):
            return too_large(settings.body_bytes).response()
        what = f"{http.method} {http.url.path}: {error.detail}."
        answer = Told(error.status_code, what, "invalid_request_error", None).response()
        if error.status_code == 405:
            answer.headers["Allow"] = ", ".join(sorted(_methods(http)))
        return answer

    @app.exception_handler(Exception)
    async def others(http: HttpRequest, error: Exception) -> JSONResponse:
        log.error("%s %s failed: %s", http.method, http.url.path, type(error).__name__)
        return Told.of(error).response()


def _methods(http: HttpRequest) -> set[str]:
    """What a path may be asked with, by all routes that it fits; one of this very name comes before patterns."""
    routes = http.app.openapi()["paths"]
    if http.url.path in routes:
        return {method.upper() for method in routes[http.url.path]}
    fitting = (item for path, item in routes.items() if compile_path(path)[0].match(http.url.path))
    return {method.upper() for item in fitting for method in item}


def too_large(most: int) -> Told:
    """What is told of a body of more than `most` bytes."""
    return Told(413, f"a request may have {most} bytes; send less.", "invalid_request_error", "too_large")


class BodyLimit:
    """Refuses bodies of more than `most` bytes with 413, before or while they come."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self.most:
            await too_large(self.most).response()(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                raise _TooLarge
            return message

        await self.app(scope, counted, send)


class _TooLarge(HTTPException):
    def __init__(self) -> None:
        super().__init__(413)
