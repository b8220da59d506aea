from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tamis.cli.main import main
from tiny_chat import tiny_tokenizer


@dataclass(frozen=True)
class Ran:
    """What one command line left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON object and nothing else."""
        lines = self.out.splitlines()
        assert len(lines) == 1, self.out
        found = json.loads(lines[0])
        assert isinstance(found, dict)
        return found


@pytest.fixture(scope="session")
def model_folder(tiny_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama with its tokenizer, as transformers saves them."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def other_model_folder(tiny_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen3, for what must not be mixed up."""
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    tiny_model("qwen3").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache and a working folder of the test's own."""
    monkeypatch.setenv("TAMIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Two files, each of a few passages for the tiny tokenizer."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for name in ("lamp", "crane"):
        body = "\n\n".join(f"The {name} of station {i} lifts {i * 7} stores." for i in range(30))
        (folder / f"{name}.md").write_text(f"# The {name}\n\n{body}\n")
    return folder


@pytest.fixture
def tamis(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `tamis ARGS…` in this process, as the console script does."""

    def run(*args: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["tamis", *map(str, args)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as e:
            main()
        out, err = capfd.readouterr()
        return Ran(int(e.value.code or 0), out, err)

    return run


@pytest.fixture
def failed(tamis: Callable[..., Ran]) -> Callable[..., str]:
    """Runs a command that must fail properly, without and with --json, and gives its message."""

    def run(*args: object, code: str | None = None) -> str:
        plain = tamis(*args)
        assert plain.code == 2 and plain.out == ""
        (line,) = [x for x in plain.err.splitlines() if x.startswith("tamis: ")]
        assert plain.err.rstrip().endswith(line) and "Traceback" not in plain.err
        told = tamis(*args, "--json")
        assert told.code == 2 and set(told.json) == {"error"}
        assert f"tamis: {told.json['error']['message']}" == line
        assert code is None or told.json["error"]["code"] == code, told.json
        return line

    return run
