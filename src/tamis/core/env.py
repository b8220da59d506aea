"""The few environment switches, in one table, and the folders they choose."""

from __future__ import annotations

import os
from pathlib import Path

# name -> what it does; docs/reference/env.md is generated from this table
VARIABLES = {
    "TAMIS_CACHE": "Folder for converted models and default stores. Default: $XDG_CACHE_HOME/tamis or ~/.cache/tamis.",
    "TAMIS_LOG": "What the command line logs on stderr: debug, info, warning or error. Default: warning.",
}


def cache_dir() -> Path:
    """Where Tamis keeps what it can make again; created when first asked for."""
    root = os.environ.get("TAMIS_CACHE")
    if root is None:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        root = str(Path(base) / "tamis")
    path = Path(root).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    return path


def log_level() -> str:
    """The level asked for by TAMIS_LOG, upper-case."""
    return os.environ.get("TAMIS_LOG", "warning").upper()
