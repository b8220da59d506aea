"""The tiny model that vLLM and Tamis share, and an engine on it. See `make test-vllm`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import Engine, Engines, Peer

from tamis.integrations.vllm import compat


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder needs vLLM."""
    missing = compat.version() is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here; make test-vllm has it"))


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """vLLM's own buffers are padded and never read there; only Tamis's tests poison memory."""


@pytest.fixture(scope="session")
def tiny_path(tiny_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama, saved."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def engines(tiny_path: Path) -> Iterator[Engines]:
    """Engines on the tiny llama, one at a time."""
    made = Engines(tiny_path)
    yield made
    made.close()


@pytest.fixture
def engine(engines: Engines) -> Engine:
    """The usual one, with Tamis."""
    return engines.get()


@pytest.fixture(scope="session")
def peer(tiny_path: Path) -> Iterator[Peer]:
    """On the tiny llama."""
    import transformers as hf

    from tamis.engine.llm import LLM
    from tamis.model.source import LoadedModel
    from tiny_chat import tiny_tokenizer

    model = hf.LlamaForCausalLM.from_pretrained(tiny_path, dtype="float32").eval()
    with LLM(LoadedModel(model, tiny_tokenizer(), "tiny", "")) as llm:
        yield Peer(llm)


@pytest.fixture(scope="session")
def words() -> Callable[..., list[int]]:
    """`words(seed, n)`: n token ids."""
    import torch

    def make(seed: int, n: int, high: int = 500) -> list[int]:
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(3, high, (n,), generator=draw).tolist()

    return make
