"""RAG and long-context inference that computes, stores and moves only the attention that matters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tamis.attention.policy import Policy
    from tamis.core.errors import TamisError
    from tamis.engine.answer import Answer, Comparison
    from tamis.engine.llm import LLM
    from tamis.engine.sampling import Sampling
    from tamis.engine.template import Turn
    from tamis.integrations.hf.attach import attach

# public name -> where it lives; looked up on first use, so that `import tamis` loads neither torch nor transformers
_PUBLIC = {
    "LLM": "tamis.engine.llm",
    "Policy": "tamis.attention.policy",
    "Sampling": "tamis.engine.sampling",
    "Turn": "tamis.engine.template",
    "Answer": "tamis.engine.answer",
    "Comparison": "tamis.engine.answer",
    "TamisError": "tamis.core.errors",
    "attach": "tamis.integrations.hf.attach",
}

__all__ = ["LLM", "Answer", "Comparison", "Policy", "Sampling", "TamisError", "Turn", "attach"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tamis' has no attribute {name!r}. Public names: {', '.join(sorted(_PUBLIC))}.")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*_PUBLIC, "__version__"])
