from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tamis.index.encode import Bits
from tamis.index.record import Record, document_id
from tamis.index.spec import Fingerprint, IndexSpec, n_pages


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., IndexSpec]:
    """A small spec with the given fields changed."""

    def make(**changes: object) -> IndexSpec:
        values: dict[str, object] = {
            "fingerprint": Fingerprint("llama", "w" * 8, "t" * 8, "theta=10000", "float32"),
            "n_layers": 2,
            "n_heads": 3,
            "prefix": "none",
            "tile": 8,
        }
        return IndexSpec(**(values | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def spec(make_spec: Callable[..., IndexSpec]) -> IndexSpec:
    return make_spec()


@pytest.fixture(scope="session")
def random_bits() -> Callable[..., Bits]:
    """(layers, heads, pages, seed) to bits that are half set."""

    def make(n_layers: int, n_heads: int, pages: int, seed: int = 0) -> Bits:
        draw = torch.Generator().manual_seed(seed)
        la = (torch.rand(n_layers, n_heads, pages, pages, generator=draw) < 0.5).tril()
        return Bits(la, torch.rand(n_layers, n_heads, pages, generator=draw) < 0.5)

    return make


@pytest.fixture(scope="session")
def make_record(random_bits: Callable[..., Bits]) -> Callable[..., Record]:
    """(number, spec) to a record that depends on these alone."""

    def make(number: int, spec: IndexSpec, n_tokens: int = 40) -> Record:
        bits = random_bits(spec.n_layers, spec.n_heads, n_pages(n_tokens, spec.tile), seed=number)
        return Record.of(bits, document_id=document_id([number, *range(n_tokens)]), spec=spec, n_tokens=n_tokens)

    return make
