"""What `tamis doctor` says of vLLM, whichever is installed."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest

from tamis.cli.doctor_vllm import vllm_section
from tamis.integrations.vllm import compat


@pytest.mark.parametrize(
    ("version", "says"),
    [("0.32.0", "yes, tried"), ("0.29.1", "expected to work"), ("0.1.0", "no: vLLM 0.1.0 is not supported")],
)
def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, version: str, says: str) -> None:
    monkeypatch.setattr(compat, "version", lambda: version)
    found = vllm_section()
    assert found["installed"] == version and (found["supported"] or "").startswith(says)


def test_without_vllm_nothing_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda: None)
    assert vllm_section() == {"installed": None}


@pytest.mark.parametrize("there", [True, False])
def test_entry_points_are_looked_for(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    point = SimpleNamespace(name="tamis", value="tamis.x:y")
    monkeypatch.setattr(compat, "version", lambda: "0.32.0")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] if there else [])
    found = vllm_section()
    for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
        assert (found[group] == "tamis.x:y") if there else (found[group] or "").startswith("missing")
