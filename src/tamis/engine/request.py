"""What an engine is asked for, and what it answers piece by piece. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tamis.attention.policy import Policy
from tamis.attention.report import PrefillReport
from tamis.core.checks import check_fields
from tamis.core.errors import InvalidInput
from tamis.engine.sampling import Sampling, Scored
from tamis.prompt.segments import Prompt

MOST_TOP = 20  # likeliest tokens that may be asked for beside each token


@dataclass(frozen=True)
class Request:
    """One prompt to be continued.

    priority    its class, 0 is served first
    top         likeliest tokens to be told with each token; None: no log-probabilities at all
    namespace   whose stored documents and prefixes are read; nothing is shared between two
    """

    prompt: Prompt
    policy: Policy = field(default_factory=Policy)
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0
    top: int | None = None
    namespace: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.priority < 0 or not 0 <= (self.top or 0) <= MOST_TOP:
            raise InvalidInput(
                f"priority is {self.priority}, top {self.top}; allowed are 0 or more, and 0 to {MOST_TOP} tokens."
            )


@dataclass(frozen=True)
class Usage:
    """Tokens. `cached`: of the prompt, read from what was stored before the request."""

    prompt: int
    cached: int
    new: int


@dataclass(frozen=True)
class Piece:
    """A new token and the text that is certain with it, which may be empty. `first` is set with the first one."""

    text: str
    token: int
    scored: Scored | None = None
    first: PrefillReport | None = None


@dataclass(frozen=True)
class End:
    """The request is done: `text` was still held back. finish: "stop" or "length". Times in seconds.

    queue_s: before its first pass; prefill_s: from there to the first token; decode_s: the rest.
    """

    text: str
    finish: str
    usage: Usage
    report: PrefillReport
    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class Failed:
    """The request ended without being done. Nothing follows."""

    error: Exception


Event = Piece | End | Failed
Listener = Callable[[Event], None]  # called by the engine's thread: it must be quick and may not raise
