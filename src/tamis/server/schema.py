"""What clients may send, field by field; anything else is refused. See docs/reference/server.md for the words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """No other fields, no numbers as texts."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class DocumentId(Strict):
    """A document that was put before."""

    id: str


class DocumentText(Strict):
    """A document that comes with the request."""

    text: str
    title: str = ""


Document = Annotated[str | DocumentId | DocumentText, Field(description="An id, or an object with id, or with text.")]


class StreamOptions(Strict):
    """Of a streamed answer."""

    include_usage: bool = False


class Common(Strict):
    """What both ways of asking share."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 and -1: all")
    min_p: float | None = Field(None, ge=0, lt=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: str | list[str] | None = None
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=0, le=9, description="0 is served first")
    documents: list[Document] = Field(default_factory=list, description="in the order of the prompt")
    tamis: dict[str, Any] = Field(default_factory=dict, description="choices of tamis.Policy for this request")


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def plain(self) -> dict[str, str]:
        """Role and text, as chat formats take them."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One for each prompt."""
        given: Any = self.prompt
        one = isinstance(given, str) or not given or isinstance(given[0], int)
        return [given] if one else list(given)


class DocumentPut(Strict):
    """POST /v1/documents and PUT /v1/documents/ID. warm: compute its keys and values now; pin: and keep them."""

    text: str
    title: str = ""
    warm: bool = False
    pin: bool = False


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or messages as a chat prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
