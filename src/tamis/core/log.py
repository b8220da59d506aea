"""Standard logging under the name `tamis`; silent unless the application, or the command line, asks."""

from __future__ import annotations

import logging

from tamis.core.env import log_level
from tamis.core.errors import InvalidInput

logging.getLogger("tamis").addHandler(logging.NullHandler())


def logger(name: str) -> logging.Logger:
    """The logger `tamis.<name>`."""
    return logging.getLogger(f"tamis.{name}")


def show_with(other: str) -> None:
    """Called inside another program: show messages where its logger `other` shows its own, unless somebody has said
    already where they go."""
    ours, theirs = logging.getLogger("tamis"), logging.getLogger(other)
    if any(not isinstance(h, logging.NullHandler) for h in (*ours.handlers, *logging.getLogger().handlers)):
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    if theirs.handlers and not ours.level:
        ours.setLevel(theirs.level or logging.INFO)


def log_to_stderr() -> None:
    """Called by the command line: show messages at the level of TAMIS_LOG."""
    level = logging.getLevelNamesMapping().get(log_level())
    if level is None:
        raise InvalidInput(f"TAMIS_LOG is {log_level()!r}; allowed are debug, info, warning, error.")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("tamis")  # not the root logger: what libraries log stays their own affair
    ours.addHandler(handler)
    ours.setLevel(level)
