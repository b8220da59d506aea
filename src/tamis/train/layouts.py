"""What one training step reads: a question among documents drawn for this step, its answer, and who sees whom.

Knows text, tokens and masks; not models or optimisers. Everything drawn depends on the seed and the step alone, so
that a run that is resumed draws what an uninterrupted one does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tamis.core.errors import InvalidInput
from tamis.engine.template import Template
from tamis.prompt.segments import Kind, Prompt

LEAST_TOKENS = 32  # a document cut shorter than this teaches nothing
OWN = 0.5  # share of the passages not needed for the answer that the question brings along


@dataclass(frozen=True)
class Example:
    """A question as it is asked, its accepted answers, its (title, text) passages, and which of them answer it."""

    question: str
    answers: tuple[str, ...]
    documents: tuple[tuple[str, str], ...]
    gold: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """One prompt and the answer that is forced behind it.

    prompt   prefix, documents, question
    answer   its token ids; the last one is only predicted, never read
    """

    prompt: Prompt
    answer: tuple[int, ...]

    @cached_property
    def tokens(self) -> list[int]:
        """All token ids that the model reads: the prompt and the answer without its last token."""
        return [*self.prompt.tokens, *self.answer[:-1]]

    @property
    def question_rows(self) -> int:
        """Rows before the first one that predicts the answer, from the question's first on."""
        return self.prompt.lengths[-1] - 1

    @property
    def rows(self) -> int:
        """Rows at the end whose predictions are compared: the question's and the answer's."""
        return self.question_rows + len(self.answer)

    def mask(self, device: torch.device) -> torch.Tensor:
        """`block_mask` of the documents, [1, 1, T, T]."""
        spans = zip(self.prompt.segments, self.prompt.spans, strict=True)
        return block_mask(len(self.tokens), [span for s, span in spans if s.kind is Kind.DOCUMENT], device)


def block_mask(n_tokens: int, documents: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Who sees whom where every document was encoded alone: bool [1, 1, n_tokens, n_tokens], true where row i sees j.

    documents: half-open token ranges. A document's rows see its own tokens up to themselves; all other rows see
    everything before. Rotary scores depend on differences of positions alone, so a document may stand at any position.
    """
    position = torch.arange(n_tokens, device=device)
    first = torch.zeros(n_tokens, dtype=torch.long, device=device)
    for begin, end in documents:
        first[begin:end] = begin
    seen = (position[None] <= position[:, None]) & (position[None] >= first[:, None])
    return seen[None, None]


class Layouts:
    """Draws layouts of at most `tokens` tokens with `documents` (fewest, most) documents from `examples`.

    The passages that answer a question come first, then some of its own others and of other questions'; a document
    longer than its share of the room is cut. Raises InvalidInput if the room is too small for that.
    """

    def __init__(
        self,
        template: Template,
        examples: Sequence[Example],
        *,
        tokens: int,
        documents: tuple[int, int] = (4, 20),
        seed: int = 0,
    ) -> None:
        if not examples:
            raise InvalidInput("there is no question to train on; give more questions or hold fewer out.")
        fewest, most = documents
        if not 1 <= fewest <= most:
            raise InvalidInput(f"documents is {documents}; give the fewest and the most, 1 or more each.")
        self.template, self.examples, self.tokens, self.seed = template, list(examples), tokens, seed
        self.documents = documents
        self._passages = [d for e in self.examples for d in e.documents]
        self._known: dict[tuple[str, str], tuple[int, ...]] = {}

    def draw(self, step: int) -> tuple[int, random.Random]:
        """The number of the example of a step, and the source of chance for its layout. Every epoch asks each once."""
        epoch, place = divmod(step, len(self.examples))
        order = list(range(len(self.examples)))
        random.Random(f"{self.seed}:epoch:{epoch}").shuffle(order)
        return order[place], random.Random(f"{self.seed}:step:{step}")

    def make(self, number: int, chance: random.Random, answer: str) -> Layout:
        """A layout that asks example `number` and forces `answer`."""
        example = self.examples[number]
        eos = self.template.tokenizer.eos_token_id
        lead = "" if getattr(self.template.tokenizer, "chat_template", None) else " "
        words = self.template.tokenizer(lead + answer.strip(), add_special_tokens=False).input_ids
        forced = (*words, *(() if eos is None else (eos,)))
        fixed = len(self.template.prompt(example.question, []).tokens) + len(forced)
        fewest, most = self.documents
        room = self.tokens - fixed
        longest = room // fewest
        if longest < LEAST_TOKENS:
            raise InvalidInput(
                f"{self.tokens} tokens leave {room} for {fewest} documents beside the question; "
                f"give {fixed + fewest * LEAST_TOKENS} or more."
            )
        chosen: list[tuple[int, ...]] = []
        for passage in self._candidates(example, chance, chance.randint(fewest, most)):
            found = self._encoded(passage)[: min(longest, room)]
            if len(found) >= min(LEAST_TOKENS, longest):
                chosen.append(found)
                room -= len(found)
        chance.shuffle(chosen)
        return Layout(self.template.prompt(example.question, chosen), forced)

    def _candidates(self, example: Example, chance: random.Random, most: int) -> list[tuple[str, str]]:
        """Passages in the order in which they get room: what answers, then own and foreign ones mixed."""
        gold = [example.documents[g] for g in example.gold]
        own = [d for i, d in enumerate(example.documents) if i not in example.gold]
        chance.shuffle(own)
        if not gold and own:  # a set that does not say which passage answers: all of its own matter
            gold, own = own, []
        others = own[: round(OWN * len(own))] + chance.sample(self._passages, min(most, len(self._passages)))
        chance.shuffle(others)
        return list(dict.fromkeys([*gold, *others]))[:most]

    def _encoded(self, passage: tuple[str, str]) -> tuple[int, ...]:
        if passage not in self._known:
            self._known[passage] = self.template.document_tokens(*passage)
        return self._known[passage]
