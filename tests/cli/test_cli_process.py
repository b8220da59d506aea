"""The command line as a process: quick help without torch, and `kill -9` at any instant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tamis as package

SRC = str(Path(package.__file__).parents[1])
HELP = [[], ["ask"], ["index"], ["inspect"], ["doctor"], ["bench"], ["bench", "prefill"], ["eval", "selectors"]]


def python(code: str, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
        **options,
    )


def test_help_is_quick_and_needs_no_torch() -> None:
    code = (
        "import sys, json\n"
        "from tamis.cli.main import main\n"
        f"for words in {HELP!r}:\n"
        "    sys.argv = ['tamis', *words, '--help']\n"
        "    try: main()\n"
        "    except SystemExit as e: assert not e.code, (words, e.code)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'lmdb'} & set(sys.modules)\n"
        "print(json.dumps(sorted(heavy)))\n"
    )
    begin = time.perf_counter()
    ran = python(code)
    took_s = time.perf_counter() - begin
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("Usage: tamis") == len(HELP)
    assert json.loads(ran.stdout.splitlines()[-1]) == []
    assert took_s < 10  # alone: half a second


def test_version() -> None:
    ran = python("import sys\nfrom tamis.cli.main import main\nsys.argv = ['tamis', '--version']\nmain()")
    assert (ran.returncode, ran.stdout) == (0, package.__version__ + "\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    run = f"{sys.executable} -m tamis.cli.main --help | true"
    environment = {**os.environ, "PYTHONPATH": SRC}
    ran = subprocess.run(run, shell=True, capture_output=True, text=True, env=environment, check=False)
    assert "Traceback" not in ran.stderr and "Broken" not in ran.stderr


# One process imports everything and then forks: each child runs the command and is killed at its instant.
KILLER = """
import os, random, signal, sys, time
import torch, transformers, tamis.engine.llm
from tamis.cli.main import main
model, docs, store, times = sys.argv[1], sys.argv[2], sys.argv[3], [float(t) for t in sys.argv[4].split(",")]
torch.set_num_threads(1)
for seconds in times:
    child = os.fork()
    if not child:
        sys.argv = ["tamis", "index", docs, "--model", model, "--store", store, "--json"]
        main()
        os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_killed_while_indexing(tamis: Callable[..., Any], model_folder: str, tmp_path: Path) -> None:
    folder, store = tmp_path / "forty", tmp_path / "kb"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.md").write_text(f"# Lamp {i}\n\n" + f"The lamp {i} of the station burns. " * 20)
    common = ["--model", model_folder, "--store", store]
    seen = []
    for times in ("0.3,0.5,0.7", "0.9,1.2"):
        ran = python(KILLER, model_folder, folder, store, times)
        assert ran.returncode == 0, ran.stderr
        found = tamis("index", "--verify", "--list", *common, "--json").json
        assert found["problems"] == [] and found["verified"] <= 40
        seen.append(found["verified"])
    assert seen == sorted(seen)
    found = tamis("index", folder, "--verify", *common, "--json").json
    assert found["problems"] == [] and found["files"] == 40
    assert found["verified"] == len(tamis("index", "--list", *common, "--json").json["passages"])
    assert found["indexed"] <= found["verified"] - seen[-1]
    ran = tamis("ask", "lamp 7 station?", "--docs", folder, "--max-tokens", 2, "--min-tokens", 0, *common, "--json")
    assert ran.json["report"]["prefill"]["indexed"] == 0
