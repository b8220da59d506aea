from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "openai", "httpx"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: pip install 'tamis[server,dev]'")


@pytest.fixture
def serve(loaded: Any) -> Iterator[Callable[..., Any]]:
    """(LLM choices as llm={…}, its stop tokens, and what `live` takes) to a server on the tiny model."""
    from live_server import live

    from tamis.engine.llm import LLM

    with ExitStack() as stack:

        def get(llm: dict[str, Any] | None = None, stop_tokens: frozenset[int] = frozenset(), **options: Any) -> Any:
            made = stack.enter_context(LLM(loaded, **({"prefill": "prefix", "cache_bytes": 64 << 20} | (llm or {}))))
            made.stop_tokens = stop_tokens
            return stack.enter_context(live(made, **options))

        yield get
