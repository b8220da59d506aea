"""From a question and documents to a prompt of token segments, in the model's own chat format.

Knows tokenizers and text; not files, retrieval or attention. A document's tokens never depend on what stands around
it, so that its index made once fits every prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tamis.core.errors import InvalidInput
from tamis.prompt.segments import Kind, Prompt
from tamis.prompt.texts import document_text

SYSTEM = (
    "You answer questions from the passages that the user gives. Use only what they say, "
    "answer in one or two short sentences, and say so if they do not hold the answer."
)
PLAIN_PREFIX = f"{SYSTEM}\n\nPassages:\n\n"
_SLOT = "\u241e"  # a character that no chat template produces: marks where the documents go


@dataclass(frozen=True)
class Turn:
    """One earlier question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Template:
    """Builds prompts for one tokenizer. `system` replaces the standing instruction."""

    tokenizer: Any
    system: str = SYSTEM

    @cached_property
    def prefix_tokens(self) -> tuple[int, ...]:
        """What stands before the first document; documents are observed behind exactly this."""
        before, _ = self._frame("")
        return tuple(self.encode(before, first=True))

    def document_tokens(self, title: str, text: str) -> tuple[int, ...]:
        """The tokens of one document: its title as a line of its own, its text, an empty line. Empty for no text."""
        said = document_text(title, text)
        return tuple(self.encode(said)) if said else ()

    def question_tokens(self, question: str, history: Sequence[Turn] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(history tokens, question tokens). The question's go on until the model is to answer.

        Raises InvalidInput for a question that is no text.
        """
        if not isinstance(question, str):
            raise InvalidInput(f"question is {question!r}; give a text.")
        earlier = "".join(f"Question: {t.question}\nAnswer: {t.answer}\n\n" for t in history)
        _, after = self._frame(f"Question: {question.strip()}")
        return tuple(self.encode(earlier)), tuple(self.encode(after))

    def prompt(self, question: str, documents: Sequence[Sequence[int]], history: Sequence[Turn] = ()) -> Prompt:
        """The whole prompt. Documents are token ids as `document_tokens` gives them; empty ones are left out."""
        earlier, last = self.question_tokens(question, history)
        return Prompt.of(
            [
                (Kind.PREFIX, self.prefix_tokens),
                *((Kind.DOCUMENT, d) for d in documents),
                (Kind.HISTORY, earlier),
                (Kind.QUESTION, last),
            ]
        )

    def count(self, text: str) -> int:
        """Tokens of a text on its own."""
        return len(self.encode(text)) if text else 0

    def encode(self, text: str, first: bool = False) -> list[int]:
        """The tokens of a text as it stands inside a prompt, or as the `first` of it."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        bos = self.tokenizer.bos_token_id
        chat = bool(getattr(self.tokenizer, "chat_template", None))  # chat templates write their own
        adds_bos = first and not chat and bos is not None and self.tokenizer("a").input_ids[:1] == [bos]
        return [bos, *ids] if adds_bos else ids

    def _frame(self, question: str) -> tuple[str, str]:
        """The rendered text before and after the place of the documents."""
        if not getattr(self.tokenizer, "chat_template", None):
            return PLAIN_PREFIX, f"{question}\nAnswer:"
        messages = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": f"Passages:\n\n{_SLOT}{question}"},
        ]
        rendered: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, _, after = rendered.partition(_SLOT)
        return before, after
