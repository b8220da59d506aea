"""Importing Tamis is cheap: the heavy packages come with the first call that needs them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from source_tree import ROOT

HEAVY = ("torch", "transformers", "triton", "accelerate", "gguf", "matplotlib", "sentence_transformers")


def loaded_by(statement: str) -> set[str]:
    """Which of HEAVY a fresh interpreter holds after `statement`."""
    code = f"{statement}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["tamis", "tamis.cli.main", "tamis.corpus", "tamis.prompt.segments", "tamis.index.spec"]
)
def test_import_stays_light(module: str) -> None:
    assert not loaded_by(f"import {module}"), f"move these imports of {module} into the functions that need them"


def test_a_heavy_import_is_seen() -> None:
    assert loaded_by("import tamis.kernels.lists") == {"torch"}
