"""A simulator needs no torch: bookkeeping, policies and addresses come without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LIGHT = (
    "allocator",
    "keys",
    "spec",
    "evict",
    "document",
    "shelves",
    "flight",
    "store",
    "tiers.accounting",
    "tiers.disk",
)
CODE = """
import sys
from tamis.cache.document import Payload, Wanted
from tamis.cache.store import DocumentCache
from tamis.cache.tiers.accounting import accounting_tier
cache = DocumentCache([accounting_tier("device", 10, lambda n: n)])
cache.get([Wanted("a", 3)], lambda row: Payload(row.n_tokens)).close()
cache.check()
"""


def test_no_torch_is_loaded() -> None:
    source = Path(__file__).resolve().parents[2] / "src"
    imports = "".join(f"import tamis.cache.{module}\n" for module in LIGHT)
    code = CODE + imports + "print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(source)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
