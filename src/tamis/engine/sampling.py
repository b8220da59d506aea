"""How the next token is drawn, and when to stop. Filters come from transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tamis.core.errors import InvalidInput


@dataclass(frozen=True)
class Sampling:
    """Greedy by default.

    max_new_tokens   tokens generated at most, 1 or more
    temperature      0 is greedy; else logits are divided by it
    top_p, top_k     keep the smallest set of tokens with this probability; the k likeliest (0: all)
    seed             of the draw; None takes a fresh one
    stop             texts that end the answer; they are not part of it
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        allowed = {
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1"),
            "top_k": (self.top_k >= 0, "0 (all) or more"),
            "stop": (not isinstance(self.stop, str) and all(self.stop), "a list of texts, none of them empty"),
        }
        for name, (ok, what) in allowed.items():
            if not ok:
                raise InvalidInput(f"{name} is {getattr(self, name)!r}; allowed is {what}.")


class Sampler:
    """Draws tokens one after another under one `Sampling`."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self._generator = torch.Generator(device=device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def draw(self, logits: torch.Tensor) -> int:
        """The next token from logits [vocabulary]."""
        from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        s = self.sampling
        if s.temperature == 0:
            return int(logits.argmax())
        filters: list[Any] = [TemperatureLogitsWarper(s.temperature)]
        filters += [TopKLogitsWarper(min(s.top_k, logits.numel()))] if s.top_k else []
        filters += [TopPLogitsWarper(s.top_p)] if s.top_p < 1 else []
        scores = LogitsProcessorList(filters)(torch.empty(1, 0, dtype=torch.long), logits.float()[None])
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))


class TextStream:
    """Turns tokens into text piece by piece, holding back half characters and what may become a stop text.

    White space before and after the answer is left out; `text` is what all pieces so far make together.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
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
        self.text = whole.strip()
        piece, self._given = self.text[self._given :], max(self._given, len(self.text))
        return piece

    def _certain(self, whole: str) -> str:
        """Without the last characters that may still change or be the beginning of a stop text."""
        whole = whole.rstrip("\ufffd")
        begun = [n for s in self._stop for n in range(len(s) - 1, 0, -1) if whole.endswith(s[:n])]
        return whole[: len(whole) - max(begun, default=0)]


def stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: of the generation config, the tokenizer, and the chat format's end of a turn."""
    ids = {tokenizer.eos_token_id, model.config.eos_token_id if isinstance(model.config.eos_token_id, int) else None}
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids.update(configured if isinstance(configured, list) else [configured])
    vocabulary = tokenizer.get_vocab()
    ids.update(vocabulary.get(t) for t in ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "</s>"))
    return frozenset(i for i in ids if i is not None)
