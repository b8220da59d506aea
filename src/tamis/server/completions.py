"""POST /v1/chat/completions and /v1/completions: ask, and answer whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tamis.engine.request import Request
from tamis.server.answered import Answered, ChatAnswered, CompletionAnswered
from tamis.server.asked import chat_requests, completion_requests
from tamis.server.keys import Key
from tamis.server.openapi import STREAM, refusals
from tamis.server.runs import Runs, Serving
from tamis.server.schema import ChatRequest, Common, CompletionRequest

CLIENT_GONE = 499  # nobody reads it; logs do


def router(serving: Serving, owner: Any) -> APIRouter:
    """The two ways of asking. `owner`: the dependency that gives whose key was sent."""
    made = APIRouter(prefix="/v1", tags=["answers"])
    tokenizer, name = serving.engine.llm.tokenizer, serving.settings.name

    told = refusals(400, 404, 429, 503, 504) | {200: {"content": STREAM}}

    @made.post("/chat/completions", responses=told, response_class=JSONResponse)
    async def chat_completions(http: HttpRequest, body: ChatRequest, key: Key = owner) -> Response:
        answered = ChatAnswered(name, tokenizer)
        answered.choices = body.n or 1
        return await answer(
            serving, http, key, body, partial(chat_requests, serving, key.name, body, answered.found), answered
        )

    @made.post("/completions", responses=told, response_class=JSONResponse)
    async def completions(http: HttpRequest, body: CompletionRequest, key: Key = owner) -> Response:
        answered = CompletionAnswered(name, tokenizer, len(body.prompts))
        return await answer(
            serving, http, key, body, partial(completion_requests, serving, key.name, body, answered.found), answered
        )

    return made


async def answer(
    serving: Serving,
    http: HttpRequest,
    key: Key,
    body: Common,
    make: Callable[[], Sequence[Request]],
    answered: Answered,
) -> Response:
    """Run what `make` gives. What fails before the first event is an answer with its status."""
    with ExitStack() as stack:
        stack.enter_context(serving.keys.running(key))
        runs = Runs(serving)
        try:
            await runs.start(make)
            if not body.stream:
                return await _whole(http, runs, answered)
        except Exception as e:
            runs.failed(e)
            raise
        usage = body.stream_options is not None and body.stream_options.include_usage
        stack.callback(runs.cancel)
        return Stream(_stream(runs, answered, usage=usage), stack.pop_all())


class Stream(StreamingResponse):
    """Server-sent events. When they have ended, or nobody reads them any more, `leave` is closed."""

    def __init__(self, events: AsyncIterator[str], leave: ExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._leave:
            await super().__call__(scope, receive, send)


async def _whole(http: HttpRequest, runs: Runs, answered: Answered) -> Response:
    """Wait for all events, or for the client to go."""

    async def collect() -> None:
        async for i, event in runs.events():
            answered.add(i, event)

    work, gone = asyncio.ensure_future(collect()), asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=CLIENT_GONE)
        work.result()
        return JSONResponse(answered.whole())
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _stream(runs: Runs, answered: Answered, *, usage: bool) -> AsyncIterator[str]:
    try:
        for chunk in answered.opening():
            yield _event(chunk)
        async for i, event in runs.events():
            answered.add(i, event)
            if (made := answered.chunk(i, event)) is not None:
                yield _event(made)
        if usage:
            yield _event(answered.usage_chunk())
    except Exception as e:
        yield _event(runs.failed(e).body)
    yield "data: [DONE]\n\n"


def _event(data: Any) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
