"""A small collection on disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files about different things, old enough that their times are trusted."""
    top = tmp_path / "docs"
    (top / "deep").mkdir(parents=True)
    (top / "lamp.md").write_text("# Lamp\n\nThe lens is cleaned with vinegar every fortnight.\n", encoding="utf-8")
    (top / "boat.txt").write_text("The ferry Marit sails on Tuesdays.\n", encoding="utf-8")
    (top / "deep" / "bird.md").write_text("# Birds\n\nPuffins nest in burrows.\n", encoding="utf-8")
    then = time.time() - 60
    for path in top.rglob("*.*"):
        os.utime(path, (then, then))
    return top
