"""From the engine's events to answers as OpenAI's clients read them, whole or in chunks. Data in, data out."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tamis.engine.request import End, Piece
from tamis.engine.sampling import Scored


@dataclass
class Answered:
    """The choices of one answer so far. `tokenizer` gives tokens their texts; `found`: ids of documents looked for."""

    model: str
    tokenizer: Any
    prompts: int = 1
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    texts: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    scored: dict[int, list[Scored]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, End] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)

    kind, chunk_kind, prefix = "", "", ""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"

    def add(self, i: int, event: Piece | End) -> None:
        """Another event of choice i."""
        self.texts[i].append(event.text)
        if isinstance(event, End):
            self.ends[i] = event
        elif event.scored is not None:
            self.scored[i].append(event.scored)

    def whole(self) -> dict[str, Any]:
        """The answer, when all choices have ended."""
        return self._head(self.kind) | {
            "choices": [self._choice(i) for i in sorted(self.ends)],
            "usage": self.usage(),
            "tamis": self._told(),
        }

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first event."""
        return []

    def chunk(self, i: int, event: Piece | End) -> dict[str, Any] | None:
        """What is sent of an event; None if it holds nothing that can be seen."""
        scored = event.scored if isinstance(event, Piece) else None
        finish = event.finish if isinstance(event, End) else None
        if not event.text and scored is None and finish is None:
            return None
        made = self._head(self.chunk_kind) | {"choices": [self._delta(i, event.text, scored, finish)]}
        return made if finish is None else made | {"tamis": self._told([i])}

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk, where usage was asked for."""
        return self._head(self.chunk_kind) | {"choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens of all choices; those of a prompt count once."""
        ends = [self.ends[i] for i in sorted(self.ends)]
        firsts = ends[:: max(1, len(ends) // self.prompts)]
        prompt, new = sum(e.usage.prompt for e in firsts), sum(e.usage.new for e in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(e.usage.cached for e in firsts)},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _told(self, choices: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """The reports of choices: what was done for each, and how long it took."""
        made = []
        for i in sorted(self.ends) if choices is None else choices:
            end = self.ends[i]
            timing = {"queue_s": end.queue_s, "prefill_s": end.prefill_s, "decode_s": end.decode_s}
            found = {"documents_found": self.found} if self.found else {}
            made.append({"index": i, "report": asdict(end.report), "timing": timing} | found)
        return made

    def _choice(self, i: int) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, i: int, text: str, scored: Scored | None, finish: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def _text(self, token: int) -> str:
        text: str = self.tokenizer.decode([token])
        return text


class ChatAnswered(Answered):
    """Of POST /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    choices = 1

    def opening(self) -> list[dict[str, Any]]:
        """The role of every choice."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._head(self.chunk_kind)
            | {"choices": [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}]}
            for i in range(self.choices)
        ]

    def _choice(self, i: int) -> dict[str, Any]:
        return {
            "index": i,
            "message": {"role": "assistant", "content": "".join(self.texts[i]), "refusal": None},
            "logprobs": self._logprobs(self.scored[i]) if i in self.scored else None,
            "finish_reason": self.ends[i].finish,
        }

    def _delta(self, i: int, text: str, scored: Scored | None, finish: str | None) -> dict[str, Any]:
        logprobs = None if scored is None else self._logprobs([scored])
        delta = {"content": text} if text else {}
        return {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any]:
        return {"content": [self._one(s.token, s.logprob) | {"top_logprobs": self._top(s)} for s in scored]}

    def _top(self, scored: Scored) -> list[dict[str, Any]]:
        return [self._one(token, value) for token, value in scored.top]

    def _one(self, token: int, value: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


class CompletionAnswered(Answered):
    """Of POST /v1/completions."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def _choice(self, i: int) -> dict[str, Any]:
        logprobs = self._logprobs(self.scored[i], 0) if i in self.scored else None
        text, finish = "".join(self.texts[i]), self.ends[i].finish
        return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _delta(self, i: int, text: str, scored: Scored | None, finish: str | None) -> dict[str, Any]:
        offset = sum(len(self._text(s.token)) for s in self.scored[i]) if scored is not None else 0
        logprobs = None if scored is None else self._logprobs([scored], offset - len(self._text(scored.token)))
        return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, scored: Sequence[Scored], offset: int) -> Mapping[str, Any]:
        texts = [self._text(s.token) for s in scored]
        offsets = [offset + sum(map(len, texts[:k])) for k in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [s.logprob for s in scored],
            "top_logprobs": [{self._text(t): value for t, value in s.top} for s in scored],
            "text_offset": offsets,
        }
