"""How the next token is drawn, and when to stop. Filters come from transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from tamis.core.checks import check_fields
from tamis.core.errors import InvalidInput

if TYPE_CHECKING:
    from tamis.engine.grammar import Grammar

LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Sampling:
    """Greedy by default.

    max_new_tokens   tokens generated at most, 1 or more
    temperature      0 is greedy, and so is less than 1e-5; else logits are divided by it
    top_p, top_k     keep the smallest set of tokens with this probability; the k likeliest (0: all)
    min_p            keep tokens with at least this share of the likeliest one's probability
    repetition_penalty   divides the logits, where negative multiplies them, of all tokens so far, the prompt's too
    presence_penalty, frequency_penalty   taken from the logits of tokens of the answer, once and for each time
    seed             of the draw; None takes a fresh one
    stop             texts that end the answer; they are not part of it
    grammar          what the answer may be; see `engine.grammar.Grammars`
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        allowed = {
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1"),
            "top_k": (self.top_k >= 0, "0 (all) or more"),
            "min_p": (0 <= self.min_p < 1, "0 or more, below 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0; 1 changes nothing"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "-2 to 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "-2 to 2"),
            "stop": (_texts(self.stop), "a list of texts, none of them empty"),
        }
        for name, (ok, what) in allowed.items():
            if not ok:
                raise InvalidInput(f"{name} is {getattr(self, name)!r}; allowed is {what}.")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken. Logits divided by less than this would not be finite."""
        return self.temperature < LEAST_TEMPERATURE

    @property
    def penalised(self) -> bool:
        """Whether tokens that came before count."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is taken as it is."""
        return self.greedy and not self.penalised and self.grammar is None


def _texts(stop: Any) -> bool:
    listed = isinstance(stop, Sequence) and not isinstance(stop, str)
    return listed and all(isinstance(text, str) and text for text in stop)


class Sampler:
    """Draws tokens one after another under one `Sampling`. `prompt`: token ids, for `repetition_penalty`."""

    def __init__(self, sampling: Sampling, device: torch.device, prompt: Sequence[int] = ()) -> None:
        self.sampling = sampling
        self._prompt, self._device = prompt, device
        self._counts: torch.Tensor | None = None  # of each token of the answer
        self._seen: torch.Tensor | None = None  # tokens of the prompt and the answer
        self._grammar = None if sampling.grammar is None else sampling.grammar.start()

    def draw(self, logits: torch.Tensor) -> int:
        """The next token from logits [vocabulary]."""
        s = self.sampling
        scores = self._penalised(logits.float()) if s.penalised else logits
        scores = scores if self._grammar is None else self._grammar.allowed(scores)
        if s.greedy:
            token = int(scores.argmax())
        else:
            # without a token before, as the filters look at none
            scores = self._filters(torch.empty(1, 0, dtype=torch.long), scores.float()[None])
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        if self._counts is not None and self._seen is not None:
            self._counts[token] += 1
            self._seen[token] = True
        if self._grammar is not None:
            self._grammar.accept(token)
        return token

    @cached_property
    def _generator(self) -> torch.Generator:
        """Made where it is first used: whoever asks for tokens leaves the device to who computes them."""
        made = torch.Generator(device=self._device)
        if self.sampling.seed is None:
            made.seed()
        else:
            made.manual_seed(self.sampling.seed)
        return made

    @cached_property
    def _filters(self) -> Any:
        from transformers import (
            LogitsProcessorList,
            MinPLogitsWarper,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        s = self.sampling
        filters: list[Any] = [TemperatureLogitsWarper(s.temperature)]
        filters += [TopKLogitsWarper(s.top_k)] if s.top_k else []
        filters += [TopPLogitsWarper(s.top_p)] if s.top_p < 1 else []
        filters += [MinPLogitsWarper(s.min_p)] if s.min_p else []
        return LogitsProcessorList(filters)

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        s = self.sampling
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros_like(logits)
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            self._seen[torch.tensor(self._prompt, dtype=torch.long, device=logits.device)] = True
        divided = torch.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
        logits = torch.where(self._seen, divided, logits)
        return logits - s.frequency_penalty * self._counts - s.presence_penalty * (self._counts > 0)


def draw_all(samplers: Sequence[Sampler], logits: torch.Tensor) -> list[int]:
    """The next token of each row of logits [n, vocabulary]; those that take the likeliest one together."""
    likeliest: list[int] | None = None
    tokens = []
    for i, sampler in enumerate(samplers):
        if not sampler.sampling.plain:
            tokens.append(sampler.draw(logits[i]))
            continue
        if likeliest is None:
            likeliest = logits.argmax(-1).tolist()
        tokens.append(likeliest[i])
    return tokens


@dataclass(frozen=True)
class Scored:
    """A token's natural log-probability under the model, before any filter, and those of the likeliest ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, logits: torch.Tensor, token: int, n_top: int) -> Scored:
        """From logits [vocabulary], with the `n_top` likeliest tokens, best first."""
        scores = logits.float().log_softmax(-1)
        values, ids = scores.topk(min(n_top, scores.numel()))
        return cls(token, float(scores[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


class TextStream:
    """Turns tokens into text piece by piece, holding back half characters and what may become a stop text.

    White space before and after the answer is left out where `strip` says so; `text` is what all pieces so far make
    together.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], *, strip: bool = True) -> None:
        self._tokenizer, self._stop, self._strip = tokenizer, tuple(stop), strip
        self._tokens: list[int] = []
        self._given = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take a token; returns the text that is certain now."""
        self._tokens.append(token)
        return self._advance(self._tokenizer.decode(self._tokens, skip_special_tokens=True), final=False)

    def finish(self) -> str:
        """No more tokens: returns what was held back."""
        return self._advance(self._tokenizer.decode(self._tokens, skip_special_tokens=True), final=True)

    def _advance(self, whole: str, final: bool) -> str:
        if self.stopped:
            return ""
        found = [i for s in self._stop if (i := whole.find(s)) >= 0]
        if found:
            self.stopped, whole = True, whole[: min(found)]
        elif not final:
            whole = self._certain(whole)
        self.text = whole.strip() if self._strip else whole
        piece, self._given = self.text[self._given :], max(self._given, len(self.text))
        return piece

    def _certain(self, whole: str) -> str:
        """Without the last characters that may still change or be the beginning of a stop text."""
        whole = whole.rstrip("\ufffd")
        begun = [n for s in self._stop for n in range(len(s) - 1, 0, -1) if whole.endswith(s[:n])]
        return whole[: len(whole) - max(begun, default=0)]


def sampling_of(sampling: Sampling | None) -> Sampling:
    """What was given, greedy decoding for None. Raises InvalidInput for anything else."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise InvalidInput(f"sampling is {sampling!r}; give a tamis.Sampling, such as Sampling(temperature=0.7).")
    return sampling or Sampling()


def stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: of the generation config, the tokenizer, and the chat format's end of a turn."""
    ids = {tokenizer.eos_token_id, model.config.eos_token_id if isinstance(model.config.eos_token_id, int) else None}
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids.update(configured if isinstance(configured, list) else [configured])
    vocabulary = tokenizer.get_vocab()
    ids.update(vocabulary.get(t) for t in ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "</s>"))
    return frozenset(i for i in ids if i is not None)
