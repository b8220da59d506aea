"""From a request's body to what the engine is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tamis.core.errors import InvalidInput, Unavailable
from tamis.engine.chat import chat_prompt, text_prompt
from tamis.engine.grammar import Grammar
from tamis.engine.library import namespace_of
from tamis.engine.request import Request
from tamis.engine.sampling import Sampling
from tamis.prompt.segments import Prompt
from tamis.server.errors import WrongField
from tamis.server.runs import Serving
from tamis.server.schema import (
    ChatRequest,
    Common,
    CompletionRequest,
    Document,
    DocumentId,
    DocumentText,
    JsonObject,
    JsonSchema,
)


def chat_requests(serving: Serving, owner: str, body: ChatRequest, found: list[str]) -> list[Request]:
    """One for each choice. Raises what is told to the client. `found` gets ids of documents that were looked for."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise WrongField("max_tokens and max_completion_tokens differ; give one of them.", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise WrongField("top_logprobs needs logprobs to be true.", "top_logprobs")
    messages = [m.plain for m in body.messages]
    asked = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
    given = documents(serving, owner, [*body.documents, *_looked_for(serving, owner, body, asked, found)])
    prompt = chat_prompt(serving.engine.llm, messages, given)
    top = (body.top_logprobs or 0) if body.logprobs else None
    made = _requests(serving, owner, body, [prompt], top, body.max_completion_tokens or body.max_tokens)
    if (grammar := _grammar(serving, body)) is None:
        return made
    return [replace(request, sampling=replace(request.sampling, grammar=grammar)) for request in made]


def completion_requests(serving: Serving, owner: str, body: CompletionRequest, found: list[str]) -> list[Request]:
    """One for each prompt and choice; see `chat_requests`."""
    asked = body.prompts[0] if len(body.prompts) == 1 else ""
    given = documents(serving, owner, [*body.documents, *_looked_for(serving, owner, body, asked, found)])
    prompts = [text_prompt(serving.engine.llm, one, given) for one in body.prompts]
    return _requests(serving, owner, body, prompts, body.logprobs, body.max_tokens)


def documents(serving: Serving, owner: str, given: Sequence[Document]) -> list[tuple[int, ...]]:
    """The tokens of documents that a request names or brings, in its order."""
    if len(given) > serving.settings.most_documents:
        most = serving.settings.most_documents
        raise WrongField(f"{len(given)} documents; this server takes {most} a request.", "documents")
    library, made = serving.library, []
    for i, one in enumerate(given):
        if isinstance(one, DocumentText):
            tokens = serving.engine.llm.template.document_tokens(one.title, one.text)
        else:
            name = one.id if isinstance(one, DocumentId) else one
            tokens = library.tokens(library.get(owner, name))
        if not tokens:
            raise WrongField(f"documents.{i} has no text.", f"documents.{i}")
        made.append(tokens)
    return made


def _looked_for(
    serving: Serving, owner: str, body: Common, asked: str | Sequence[int], found: list[str]
) -> Sequence[str]:
    """Ids of the documents that `tamis.search` finds, the best last: next to the question, where it is read best."""
    search = body.tamis.search
    if search is None:
        return ()
    query = search.query or asked
    if not query or not isinstance(query, str):
        raise WrongField("tamis.search needs a query, or one text to take for it.", "tamis.search.query")
    hits = serving.library.search(owner, query, search.top_k, within=search.within)
    found += [hit.id for hit in reversed(hits)]
    return found


def check_model(serving: Serving, name: str | None) -> None:
    """Raises WrongField for another model than the one that is served."""
    if name is not None and name != serving.settings.name:
        raise WrongField(
            f"model {name!r} is not served here; {serving.settings.name!r} is.", "model", "model_not_found"
        )


def _requests(
    serving: Serving, owner: str, body: Common, prompts: Sequence[Prompt], top: int | None, max_tokens: int | None
) -> list[Request]:
    check_model(serving, body.model)
    if body.stream_options is not None and not body.stream:
        raise WrongField("stream_options needs stream to be true.", "stream_options")
    n = body.n or 1
    if n * len(prompts) > serving.settings.most_choices:
        most = serving.settings.most_choices
        raise WrongField(f"{len(prompts)} prompts with n={n}; this server gives {most} choices a request.", "n")
    try:
        policy = serving.engine.policy(body.tamis.model_extra or {})
    except (InvalidInput, TypeError) as e:
        raise WrongField(f"tamis: {e}", "tamis") from e
    namespace, made = namespace_of(owner), []
    for prompt in prompts:
        room = serving.engine.llm.runner.geometry.context_tokens - len(prompt.tokens)
        most = max_tokens or max(1, min(serving.settings.max_tokens, room))
        for i in range(n):
            sampling = _sampling(body, most, i)
            made.append(Request(prompt, policy, sampling, body.priority, top, namespace))
    return made


def _grammar(serving: Serving, body: ChatRequest) -> Grammar | None:
    """What `response_format` lets the answer be."""
    asked = body.response_format
    try:
        if isinstance(asked, JsonSchema):
            return serving.engine.grammars.json_schema(asked.json_schema.schema_)
        return serving.engine.grammars.json_object() if isinstance(asked, JsonObject) else None
    except Unavailable as e:
        raise WrongField(str(e), "response_format", "unsupported_parameter") from e
    except InvalidInput as e:
        raise WrongField(str(e), "response_format") from e


def _sampling(body: Common, max_tokens: int, choice: int) -> Sampling:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Sampling(
        max_new_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=None if body.seed is None else body.seed + choice,
        stop=tuple(stop),
    )
