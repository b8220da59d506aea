"""What clients may send, field by field; anything else is refused. See docs/reference/server.md for the words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tamis.engine.finding import MOST_HITS

MOST_STOPS = 16


def _whole(text: str) -> str:
    """JSON can hold halves of surrogate pairs, which no tokenizer takes."""
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError("half of a surrogate pair is no character")
    return text


Text = Annotated[str, AfterValidator(_whole)]
Said = Annotated[Text, Field(min_length=1)]
Token = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[Token], Field(min_length=1)]


class Strict(BaseModel):
    """No other fields, no numbers as texts."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, allow_inf_nan=False)


class DocumentId(Strict):
    """A document that was put before."""

    id: Text


class DocumentText(Strict):
    """A document that comes with the request."""

    text: Said
    title: Text = ""


Document = Annotated[Text | DocumentId | DocumentText, Field(description="An id, or an object with id, or with text.")]


class SearchOptions(Strict):
    """Documents that are looked for, by wording. within: those that were put, or the index; null: both."""

    query: Said | None = Field(None, description="null: the last user's message, or the prompt")
    top_k: int = Field(8, ge=1, le=MOST_HITS)
    within: Literal["documents", "index"] | None = None


class SearchRequest(SearchOptions):
    """POST /v1/documents/search."""

    query: Said


class Choices(Strict):
    """Choices of tamis.Policy for this request, and documents to look for."""

    model_config = ConfigDict(extra="allow")

    search: SearchOptions | None = None


class StreamOptions(Strict):
    """Of a streamed answer."""

    include_usage: bool = False


class Common(Strict):
    """What both ways of asking share."""

    model: Text
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 and -1: all")
    min_p: float | None = Field(None, ge=0, lt=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: Said | Annotated[list[Said], Field(max_length=MOST_STOPS)] | None = None
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=0, le=9, description="0 is served first")
    documents: list[Document] = Field(default_factory=list, description="in the order of the prompt")
    tamis: Choices = Field(default_factory=Choices)


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]

    @property
    def plain(self) -> dict[str, str]:
        """Role and text, as chat formats take them."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class PlainText(Strict):
    """An answer of any form."""

    type: Literal["text"]


class JsonObject(Strict):
    """An answer that is a JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema. strict: it is kept to the letter in any case."""

    name: Text
    description: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchema(Strict):
    """An answer that is JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")] | None = None


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: Said | Tokens | Annotated[list[Said], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One for each prompt."""
        given: Any = self.prompt
        one = isinstance(given, str) or isinstance(given[0], int)
        return [given] if one else list(given)


class DocumentPut(Strict):
    """POST /v1/documents and PUT /v1/documents/ID. warm: compute its keys and values now; pin: and keep them."""

    text: Said
    title: Text = ""
    warm: bool = False
    pin: bool = False


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or messages as a chat prompt."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: Text | None = None
    tokens: list[Token]
