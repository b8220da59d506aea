"""Inside another program messages go where that one's go, unless somebody has said where."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tamis.core.log import logger, show_with


class Heard(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A program's logger with a handler; nobody else listens."""
    ours, made = logging.getLogger("tamis"), logging.getLogger("some_host")
    monkeypatch.setattr(ours, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(made, "handlers", [Heard()])
    level = ours.level
    ours.setLevel(logging.NOTSET)
    made.setLevel(logging.INFO)
    yield made
    ours.setLevel(level)


def test_the_hosts_handlers_hear_of_it_once(host: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest listens there
    show_with("some_host")
    show_with("some_host")
    logger("vllm").info("here")
    logger("vllm").debug("not here")
    assert host.handlers[0].said == ["here"]  # type: ignore[attr-defined]


def test_who_has_said_where_they_go_is_heard(host: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest listens there
    own = Heard()
    logging.getLogger("tamis").addHandler(own)
    show_with("some_host")
    logger("vllm").warning("here")
    assert own.said == ["here"] and not host.handlers[0].said  # type: ignore[attr-defined]


def test_a_host_that_shows_nothing_changes_nothing(host: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest listens there
    host.handlers = []
    show_with("some_host")
    assert all(isinstance(h, logging.NullHandler) for h in logging.getLogger("tamis").handlers)
