"""From a request's body to what the engine is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from tamis.core.errors import InvalidInput
from tamis.engine.chat import chat_prompt, text_prompt
from tamis.engine.library import namespace_of
from tamis.engine.request import Request
from tamis.engine.sampling import Sampling
from tamis.prompt.segments import Prompt
from tamis.server.errors import WrongField
from tamis.server.runs import Serving
from tamis.server.schema import ChatRequest, Common, CompletionRequest, Document, DocumentId, DocumentText

MOST_STOPS = 16


def chat_requests(serving: Serving, owner: str, body: ChatRequest) -> list[Request]:
    """One for each choice. Raises what is told to the client."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise WrongField("max_tokens and max_completion_tokens differ; give one of them.", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise WrongField("top_logprobs needs logprobs to be true.", "top_logprobs")
    prompt = chat_prompt(
        serving.engine.llm, [m.plain for m in body.messages], documents(serving, owner, body.documents)
    )
    top = (body.top_logprobs or 0) if body.logprobs else None
    return _requests(serving, owner, body, [prompt], top, body.max_completion_tokens or body.max_tokens)


def completion_requests(serving: Serving, owner: str, body: CompletionRequest) -> list[Request]:
    """One for each prompt and choice. Raises what is told to the client."""
    given = documents(serving, owner, body.documents)
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
        policy = serving.engine.policy(body.tamis)
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


def _sampling(body: Common, max_tokens: int, choice: int) -> Sampling:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > MOST_STOPS or not all(stop):
        raise WrongField(f"stop takes up to {MOST_STOPS} texts, none of them empty.", "stop")
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
