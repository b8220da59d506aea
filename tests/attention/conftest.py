from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tamis.attention.hook import Switch, install

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="session")
def family_model(tiny_model: Callable[..., Any]) -> Callable[[str], Any]:
    """The one tiny model of each family, as transformers runs it; tests must leave it as they find it."""
    models: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in models:
            models[family] = tiny_model(family)
        return models[family]

    return get


@pytest.fixture(params=FAMILIES)
def stock(request: pytest.FixtureRequest, family_model: Callable[[str], Any]) -> Any:
    """A model of each family in turn."""
    return family_model(request.param)


@pytest.fixture
def llama(family_model: Callable[[str], Any]) -> Any:
    """The family to use where families do not differ."""
    return family_model("llama")


@pytest.fixture
def attach() -> Iterator[Callable[[Any], Switch]]:
    """Installs Tamis in a model until the test ends."""
    undo: list[Callable[[], None]] = []

    def attach_to(model: Any) -> Switch:
        switch, uninstall = install(model)
        undo.append(uninstall)
        return switch

    yield attach_to
    for uninstall in undo:
        uninstall()


@pytest.fixture(scope="session")
def logits() -> Callable[..., torch.Tensor]:
    """(model, token ids) to the logits [T, V] of one pass."""

    def run(model: Any, ids: list[int], **options: Any) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(torch.tensor([ids]), use_cache=False, **options).logits[0]
        return found

    return run
