"""What all tests share: fixed seeds, poisoned memory, tiny random models, the real small model, a count per class."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

SEED = 20240229
GARBAGE = 0xAA  # every byte of "uninitialised" integers


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts from the same random state."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that Tamis's own code asks for uninitialised holds NaN or garbage, so that reading it cannot pass."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoning(getattr(owner, name)))


def _poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return poison(tensor) if caller.partition(".")[0] == "tamis" else tensor

    return poisoned


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, or with garbage bytes where the dtype has no NaN."""
    if tensor.is_meta or not tensor.numel():
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    garbage = bytes([GARBAGE]) * tensor.element_size()
    return tensor.fill_(int.from_bytes(garbage, "little", signed=tensor.dtype.is_signed))


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """`tiny_model(family)`: a random 2-layer transformers model of "llama", "qwen2" or "qwen3", made from a config.

    4 query heads, 2 KV heads, head_dim 64, hidden 256, vocabulary 512, 4,096 positions, float32, eval mode. Further
    keywords change the config. The projections are scaled up six times: with the initial weights attention is close
    to uniform, and a kernel that reads the wrong key would hardly be noticed.
    """
    import transformers as hf

    kinds = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
    }

    def make(family: str = "llama", *, seed: int = 1, **changes: Any) -> Any:
        values: dict[str, Any] = {
            "vocab_size": 512,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 4096,
        }
        config_class, model_class = kinds[family]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = model_class(config_class(**(values | changes))).to(torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "proj" in name:
                    weight.mul_(6)
        return model.eval()

    return make


@pytest.fixture(scope="module")
def loaded(tiny_model: Callable[..., Any]) -> Any:
    """A tiny random llama of 1,500 positions and its tokenizer, as `tamis.model.source.LoadedModel`."""
    from tamis.model.source import LoadedModel
    from tiny_chat import tiny_tokenizer

    return LoadedModel(tiny_model("llama", max_position_embeddings=1500), tiny_tokenizer(), "tiny", "")


@pytest.fixture
def llm(loaded: Any) -> Iterator[Any]:
    """An `LLM` on `loaded`, closed after the test."""
    from tamis.engine.llm import LLM

    with LLM(loaded) as llm:
        yield llm


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2 (135 M parameters) on the CPU, as `tamis.model.source.LoadedModel`. Converted once per machine."""
    from tamis.core.errors import ModelNotFound
    from tamis.model.source import load_model

    try:
        return load_model("smollm2", device="cpu")
    except ModelNotFound as e:
        pytest.skip(str(e))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the real model, and skip what needs a GPU where there is none."""
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU: torch sees none")
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Hand the marks to the report by name (its keywords also hold folders): xdist sends it between processes."""
    outcome: Any = yield
    outcome.get_result().tamis_marks = [m.name for m in item.iter_markers()]


class Classes:
    """Counts tests by class (gpu, model, slow, else cpu) and outcome."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One test is counted once: by its call, or by the set-up that kept it from being called."""
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            marks = set(getattr(report, "tamis_marks", ()))
            kind = next((k for k in ("gpu", "model", "slow") if k in marks), "cpu")
            self.seen[kind, report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """One line: how many tests of each class ran, and how many could not."""
        parts = []
        for kind in ("cpu", "model", "slow", "gpu"):
            counts = [f"{self.seen[kind, o]} {o}" for o in ("passed", "failed", "skipped") if self.seen[kind, o]]
            parts.append(f"{kind} {', '.join(counts) or '0'}")
        terminalreporter.write_line("test classes: " + " · ".join(parts))


def pytest_configure(config: pytest.Config) -> None:
    """Count classes in this run."""
    config.pluginmanager.register(Classes(), "tamis-classes")


@pytest.fixture(scope="session", autouse=True)
def threads() -> Iterator[None]:
    """Two threads, whatever the machine has: results and times stay comparable."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)
