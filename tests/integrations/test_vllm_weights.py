"""What tells that a model's weights were changed; no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tamis.integrations.vllm import weights
from tamis.integrations.vllm.weights import Summed, Watch, summed


class Model(torch.nn.Module):
    """Parameters of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        table = torch.randn(70, 33, generator=draw)
        kept = {
            "plain": table,
            "rounded": table.bfloat16(),
            "turned": table.half().t(),
            "small": torch.randint(-128, 127, (7, 9), generator=draw, dtype=torch.int8),
            "shifted": torch.randn(66, generator=draw).bfloat16()[1:],
            "one": torch.tensor(0.5),
        }
        for name, tensor in kept.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.register_buffer("scale", torch.ones(3))


def digest(model: Model) -> Summed:
    return summed(SimpleNamespace(get_model=lambda: model))


@pytest.mark.parametrize("name", ["plain", "rounded", "turned", "small", "shifted", "one", "scale"])
@pytest.mark.parametrize("at", [0, -1])
def test_any_bit(name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "AT_ONCE", 64)
    model = Model()
    before = digest(model)
    assert before.whole and before == digest(Model())
    tensor: Any = getattr(model, name)
    if tensor.dim():
        tensor = tensor[at] if tensor.dim() == 1 else tensor[at, at]
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.data.view(whole).bitwise_xor_(1)
    assert digest(model).digest != before.digest
    tensor.data.view(whole).bitwise_xor_(1)
    assert digest(model) == before


def test_values_that_change_places() -> None:
    model = Model()
    before = digest(model)
    model.plain.data.copy_(model.plain.flip(0))
    assert digest(model).digest != before.digest


def test_weights_that_nobody_can_look_at() -> None:
    model = Model()
    model.plain = torch.nn.Parameter(torch.empty(0, dtype=torch.int32), requires_grad=False)
    assert digest(model).whole, "an order that a format does without"
    model.plain = torch.nn.Parameter(torch.empty(0))
    assert not digest(model).whole


class Core:
    """An engine's core of which only what a `Watch` needs is there."""

    def __init__(self) -> None:
        self.own: list[bool] = []
        self.found: Any = Summed(b"a", True)
        side = SimpleNamespace(reweighed=self._reweighed)
        self.vllm_config = object()
        self.scheduler = SimpleNamespace(connector=SimpleNamespace(scheduler=side), running=[], requests={})
        self.model_executor = SimpleNamespace(sleeping_tags=set(), collective_rpc=self._look)

    def _reweighed(self, *, own: bool) -> None:
        self.own.append(own)

    def _look(self, method: Any) -> list[Summed]:
        if isinstance(self.found, Exception):
            raise self.found
        return [self.found]


def test_what_is_done_about_it() -> None:
    core = Core()
    watch = Watch(core, None)

    def call(found: Any) -> list[bool]:
        core.own.clear()
        watch.before()
        core.found = found
        watch.after()
        return core.own

    same, other = Summed(b"a", True), Summed(b"b", True)
    assert call(same) == [] and call(other) == [False] and call(other) == [] and call(same) == [True]
    assert call(Summed(b"a", False)) == [False], "what cannot be seen counts as others"
    assert call(same) == [True]
    assert call(RuntimeError("a worker is gone")) == [False]
    core.model_executor.sleeping_tags.add("weights")
    assert call(same) == [False], "asleep, they are not looked at"
    core.model_executor.sleeping_tags.clear()
    assert call(same) == [True]
