"""Errors as OpenAI's clients know them: a JSON object, a status, and when to try again; no text of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from fastapi.responses import JSONResponse

from tamis.core.errors import (
    Busy,
    CacheFull,
    CacheTimeout,
    Cancelled,
    ContextOverflow,
    InvalidInput,
    ModelUnsupported,
    NothingFound,
    PoolFull,
    Refused,
    StoreBusy,
    TamisError,
    Unavailable,
)

# fields of OpenAI's interface that are known and not done here, with what to do instead
NOT_DONE = {
    "tools": "Tools are not called by this server.",
    "tool_choice": "Tools are not called by this server.",
    "functions": "Tools are not called by this server.",
    "function_call": "Tools are not called by this server.",
    "parallel_tool_calls": "Tools are not called by this server.",
    "tool_calls": "Tools are not called by this server.",
    "response_format": "Chat completions take it.",
    "logit_bias": "Leave it out.",
    "best_of": "Ask for n choices and keep the best.",
    "echo": "Leave it out.",
    "suffix": "Leave it out.",
    "audio": "Only text is understood.",
    "modalities": "Only text is understood.",
    "prediction": "Leave it out.",
    "reasoning_effort": "Leave it out.",
    "service_tier": "Use priority: 0 is served first.",
    "store": "Nothing is kept of a conversation; leave it out.",
    "metadata": "Nothing is kept of a conversation; leave it out.",
    "user": "Give every user a key of their own.",
}

_STATUS: Sequence[tuple[type[Exception], int, str]] = (
    (ContextOverflow, 400, "invalid_request_error"),
    (InvalidInput, 400, "invalid_request_error"),
    (ModelUnsupported, 400, "invalid_request_error"),
    (Unavailable, 400, "invalid_request_error"),
    (Refused, 401, "authentication_error"),
    (NothingFound, 404, "not_found_error"),
    (Busy, 429, "rate_limit_error"),
    (CacheFull, 503, "server_error"),
    (PoolFull, 503, "server_error"),
    (CacheTimeout, 503, "server_error"),
    (StoreBusy, 503, "server_error"),
    (Cancelled, 503, "server_error"),
)
_CODES = {"context_overflow": "context_length_exceeded", "refused": "invalid_api_key", "busy": "rate_limit_exceeded"}


class TooLate(TamisError, TimeoutError):
    """A request took longer than the server allows."""

    code = "timeout"


class WrongField(InvalidInput):
    """A field of a request is not one, has a wrong value, or asks for what is not done here."""

    def __init__(self, message: str, param: str | None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True)
class Told:
    """An error as it is sent."""

    status: int
    message: str
    type: str
    code: str | None
    param: str | None = None
    retry_after_s: int | None = None

    @classmethod
    def of(cls, error: Exception) -> Told:
        """What a client is told of an error; of one that is not ours, only that it happened."""
        if isinstance(error, TooLate):
            return cls(504, str(error), "server_error", error.code)
        code = _CODES.get(getattr(error, "code", ""), getattr(error, "code", None))
        for kind, status, name in _STATUS:
            if isinstance(error, kind):
                after = getattr(error, "retry_after_s", 1 if status == 503 else None)
                return cls(status, str(error), name, code, getattr(error, "param", None), after)
        return cls(500, "the server failed at this request; its log says more.", "server_error", "internal_error")

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def wrong_field(errors: Sequence[Any]) -> WrongField:
    """The first of pydantic's errors about a request's body, without the value that was sent."""
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    if first["type"] == "json_invalid":
        return WrongField("the body is no JSON.", None, "invalid_json")
    place = [str(part) for part in first["loc"][1:]]  # behind "body", "query" or "path"
    place = list(takewhile(lambda part: part.isidentifier() or part.isdigit(), place))  # others name a variant
    place = [part for i, part in enumerate(place) if part not in ("str", *place[max(0, i - 1) : i])]
    param, last = ".".join(place) or None, place[-1] if place else ""
    if place[:1] == ["documents"] and len(place) > 1:
        what = "give an id, an object with id, or one with text and, if wanted, title"
        return WrongField(f"documents.{place[1]}: {what}.", f"documents.{place[1]}")
    if first["type"] != "extra_forbidden":
        return WrongField(f"{param or 'the body'}: {first['msg']}.", param)
    if last in NOT_DONE:
        return WrongField(f"{param} is not supported. {NOT_DONE[last]}", param, "unsupported_parameter")
    return WrongField(f"{param} is not a field of this request; check its name.", param, "unknown_parameter")
