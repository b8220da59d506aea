"""From messages, texts or token ids to a prompt of segments, in the model's own chat format.

Knows tokenizers and text; not documents' stores or attention. A document's tokens depend on itself alone, and those
of a conversation stand before its first question: what follows later never moves them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tamis.core.errors import InvalidInput
from tamis.prompt.segments import Kind, Prompt

if TYPE_CHECKING:
    from tamis.engine.llm import LLM

PASSAGES = "Passages:\n\n"


def chat_prompt(llm: LLM, messages: Sequence[Mapping[str, str]], documents: Sequence[Sequence[int]] = ()) -> Prompt:
    """The prompt of a conversation: messages with "role" and "content", and documents (token ids) in this order.

    Documents stand at the beginning of the first user's message. Raises InvalidInput where the model has no chat
    format, or its format refuses the messages.
    """
    if not getattr(llm.tokenizer, "chat_template", None):
        raise InvalidInput(f"model {llm.name!r} has no chat format. Use completions with a text instead.")
    slot = f"\u241e{secrets.token_hex(8)}\u241e"  # no text that was sent can hold it
    made = [dict(message) for message in messages]
    if documents:
        first = next((m for m in made if m["role"] == "user"), None)
        if first is None:
            raise InvalidInput("documents were given without a user's message; add one to ask about them.")
        first["content"] = f"{PASSAGES}{slot}{first['content']}"
    before, _, after = _rendered(llm.tokenizer, made).partition(slot)
    if not documents:
        return Prompt.of([(Kind.QUESTION, llm.template.encode(before))])
    return Prompt.of(
        [
            (Kind.PREFIX, llm.template.encode(before)),
            *((Kind.DOCUMENT, tokens) for tokens in documents),
            (Kind.QUESTION, llm.template.encode(after)),
        ]
    )


def text_prompt(llm: LLM, prompt: str | Sequence[int], documents: Sequence[Sequence[int]] = ()) -> Prompt:
    """The prompt of a plain text, or of token ids; documents (token ids) stand before it.

    Raises InvalidInput if it is empty or names tokens that the model does not have.
    """
    ids: Sequence[int] = llm.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
    most = llm.runner.model.config.vocab_size
    if not ids or min(ids) < 0 or max(ids) >= most:
        what = "is empty" if not ids else f"has tokens from {min(ids)} to {max(ids)}"
        raise InvalidInput(f"the prompt {what}; give at least one token, and ids from 0 to {most - 1}.")
    return Prompt.of([*((Kind.DOCUMENT, tokens) for tokens in documents), (Kind.QUESTION, ids)])


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    from jinja2 import TemplateError

    try:
        rendered: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as e:
        raise InvalidInput(f"the model's chat format refuses these messages: {e}") from e
    return rendered
