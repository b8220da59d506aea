"""What a server is told when it starts. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from tamis.core.checks import check_fields
from tamis.core.errors import InvalidInput


@dataclass(frozen=True)
class ServerSettings:
    """name         of the model, as clients call it
    max_tokens     new tokens where a request does not say how many
    most_choices   prompts times `n` of one request
    most_documents of one request
    body_bytes     of one request
    timeout_s      seconds from a request's arrival to its end; what is not done by then is ended
    grace_s        seconds that requests get to finish when the server is asked to stop; the rest is handed back
    """

    name: str
    max_tokens: int = 512
    most_choices: int = 16
    most_documents: int = 256
    body_bytes: int = 16 << 20
    timeout_s: float = 600.0
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("max_tokens", "most_choices", "most_documents", "body_bytes", "timeout_s"):
            if getattr(self, name) <= 0:
                raise InvalidInput(f"{name} is {getattr(self, name)}; give more than 0.")
        if self.grace_s < 0:
            raise InvalidInput(f"grace_s is {self.grace_s}; give 0 or more seconds.")
