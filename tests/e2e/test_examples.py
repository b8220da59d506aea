"""Every file in examples/ does what it says, on the small model."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow


def run(tmp_path: Path, *command: str) -> str:
    """What it prints; it must end well."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    made = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=280, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def test_each_is_run_here() -> None:
    ran = {"rag.py", "reuse_documents.py", "hf_generate.py", "serve.sh"}
    there = [path for path in EXAMPLES.iterdir() if path.is_file()]
    assert {path.name for path in there} == ran
    assert all(len(path.read_text(encoding="utf-8").splitlines()) < 40 for path in there), "an example is short"


def test_rag(smollm2: Any, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name in ("lamp-and-lens.md", "fog-and-radio.md"):
        shutil.copy(EXAMPLES / "documents" / name, folder)
    script = [sys.executable, str(EXAMPLES / "rag.py"), str(folder)]
    printed = run(tmp_path, *script, "Which radio channel do the keepers listen to in fog?")
    assert "fog-and-radio.md" in printed and "TTFT" in printed and (tmp_path / "rag.tamis").is_dir()


def test_reuse_documents(smollm2: Any, tmp_path: Path) -> None:
    printed = run(tmp_path, sys.executable, str(EXAMPLES / "reuse_documents.py"))
    assert "16" in printed and "900" in printed and "blend" in printed


def test_hf_generate(smollm2: Any, tmp_path: Path) -> None:
    printed = run(tmp_path, sys.executable, str(EXAMPLES / "hf_generate.py"))
    assert "drops" in printed and "sift prefill" in printed and "12 documents" in printed


def test_serve(smollm2: Any, tmp_path: Path) -> None:
    for needed in ("bash", "curl"):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} is not installed")
    pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'tamis[server]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    printed = run(tmp_path, "bash", str(EXAMPLES / "serve.sh"), str(port))
    assert '"document.hit"' in printed and "channel 16" in printed
    assert '"cached_tokens":0' not in printed and '"cached_tokens":' in printed
