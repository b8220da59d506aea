from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tamis.engine.llm import LLM
from tamis.model.source import LoadedModel
from tiny_chat import tiny_tokenizer


@pytest.fixture(scope="session")
def loaded(tiny_model: Callable[..., Any]) -> Callable[..., LoadedModel]:
    """(family, chat=…, config changes) to a tiny model with its tokenizer; made once, left as it is found."""
    made: dict[str, LoadedModel] = {}

    def get(family: str = "llama", *, chat: bool = True, **changes: Any) -> LoadedModel:
        key = f"{family} {chat} {sorted(changes.items())}"
        if key not in made:
            made[key] = LoadedModel(tiny_model(family, **changes), tiny_tokenizer(chat=chat), f"tiny-{family}", "")
        return made[key]

    return get


@pytest.fixture
def open_llm(loaded: Callable[..., LoadedModel]) -> Iterator[Callable[..., LLM]]:
    """(family, model=config changes, policy choices) to an LLM that is closed after the test."""
    opened: list[LLM] = []

    def get(family: str = "llama", *, model: dict[str, Any] | None = None, **choices: Any) -> LLM:
        opened.append(LLM(loaded(family, **(model or {})), **choices))
        return opened[-1]

    yield get
    for llm in opened:
        llm.close()


@pytest.fixture
def llm(open_llm: Callable[..., LLM]) -> LLM:
    """A tiny Llama that prefills sparse at any length."""
    return open_llm(prefill="sift", min_tokens=0)


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Three texts of a few hundred tokens each."""
    return [" ".join(f"{name} {i * n} is the lamp of station {i}." for i in range(n)) for name, n in WORDS]


WORDS = (("North", 14), ("East", 11), ("South", 17))
