"""Whether Tamis is in place: stock requests stay stock, what cannot be served is refused, nothing fails in silence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_engines import BLOCK, ENVIRONMENT, SETTINGS, Engines

from tamis.core.errors import InvalidInput, TamisError, Unavailable
from tamis.integrations.vllm import compat, plugin
from tamis.integrations.vllm.client import request

Words = Callable[..., list[int]]
STOCK = """
import json, sys
from vllm_engines import engine_of
with engine_of(sys.argv[1], json.loads(sys.argv[2])) as engine:
    made = engine.run(*json.loads(sys.argv[3]), n=8)
    print("MADE", json.dumps([[m.tokens, m.cached, m.logprobs] for m in made]))
"""


def elsewhere(path: Path, settings: Any, requests: list[Any], **env: str) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", STOCK, str(path), json.dumps(settings), json.dumps(requests)],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(folders)} | env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def made_there(done: subprocess.CompletedProcess[str]) -> list[Any]:
    line = next((x for x in done.stdout.splitlines() if x.startswith("MADE")), None)
    assert line is not None, done.stdout[-2000:] + done.stderr[-2000:]
    found: list[Any] = json.loads(line[5:])
    return found


def test_stock_requests_are_token_identical(engines: Engines, tiny_path: Path, words: Words) -> None:
    """Without the plugin, with it unconfigured, and configured: the same bits for requests that ask for nothing."""
    prompts = [words(31, 700), words(32, 45), words(33, 260)]
    stock = made_there(elsewhere(tiny_path, None, prompts, VLLM_PLUGINS="none"))
    for settings in (None, SETTINGS):
        made = engines.get(settings, fresh=True).run(*prompts, n=8)
        assert [[m.tokens, m.cached, m.logprobs] for m in made] == stock


def test_a_server_that_lacks_the_plugin_does_not_start(tiny_path: Path) -> None:
    """VLLM_PLUGINS that leaves Tamis out would else serve stock attention under its name."""
    done = elsewhere(tiny_path, SETTINGS, [[5, 6, 7]], VLLM_PLUGINS="none")
    assert done.returncode != 0 and "MADE" not in done.stdout
    assert "VLLM_PLUGINS does not name it" in done.stdout + done.stderr


def test_processes_of_their_own(tiny_path: Path, engines: Engines, words: Words) -> None:
    """The engine's core in another process: same answers as in this one."""
    asked = request(words(1, 21), [words(2, 300), words(3, 390)], words(5, 17), mode="reuse", block_size=BLOCK)
    sparse = request(words(1, 21), [words(2, 300), words(3, 390)], words(5, 17), mode="sift")
    engine = engines.get(fresh=True)
    here = [engine.run(r, n=8)[0].tokens for r in (asked, sparse, words(9, 100))]
    engines.close()
    done = elsewhere(tiny_path, SETTINGS, [asked, sparse, words(9, 100)], VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert [tokens for tokens, *_ in made_there(done)] == here


@pytest.mark.slow
def test_compiled_models_answer_alike(engines: Engines, words: Words) -> None:
    """With torch.compile positions and rows of Tamis reach the model as they do without."""
    parts = (words(1, 21), [words(2, 300), words(3, 390)], words(5, 17))
    asked = [request(*parts, mode=mode, block_size=BLOCK) for mode in ("reuse", "sift")]
    eager = [made.tokens for made in engines.get(fresh=True).run(*asked, words(9, 100), n=8)]
    compiled = engines.get(enforce_eager=False).run(*asked, words(9, 100), n=8)
    assert [made.tokens for made in compiled] == eager


def spoiled(words: Words, change: Callable[[dict[str, Any]], None], mode: str = "sift") -> dict[str, Any]:
    made = request(words(1, 21), [words(2, 300), words(3, 90)], words(5, 17), mode=mode, block_size=BLOCK)
    change(made["kv_transfer_params"]["tamis"])
    return made


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t["segments"][1].__setitem__(3, "00" * 16), "has the key"),
        (lambda t: t["segments"][1].__setitem__(0, 20), "without gap or overlap"),
        (lambda t: t["segments"].__setitem__(1, [21, 330, "document", None]), "without gap or overlap"),
        (lambda t: t["segments"].pop(), "must cover it"),
        (lambda t: t["segments"][1].__setitem__(2, "documnet"), "Did you mean 'document'"),
        (lambda t: t.__setitem__("budget", 3), "unknown field of tamis"),
        (lambda t: t.__setitem__("mode", "sfit"), "Did you mean 'sift'"),
        (lambda t: t.__setitem__("v", 2), "understands 1"),
        (lambda t: t.__setitem__("selector", "sampled"), "stored bits"),
        (lambda t: t.__setitem__("selector", "threshold:tetha=1"), "Did you mean 'theta'"),
        (lambda t: t.__setitem__("mode", "reuse"), "must begin at a multiple"),
    ],
    ids=["key", "overlap", "overlap-next", "short", "kind", "field", "mode", "version", "records", "option", "borders"],
)
def test_wrong_requests_are_refused(engines: Engines, words: Words, change: Any, says: str) -> None:
    """With a sentence, and the engine goes on."""
    engine = engines.get()
    with pytest.raises(InvalidInput, match=says):
        engine.run(spoiled(words, change))
    assert engine.run(words(40, 20))[0].tokens


def test_reuse_has_to_be_allowed(engines: Engines, words: Words) -> None:
    engine = engines.get({"min_tokens": 0})
    with pytest.raises(InvalidInput, match="not trained for it"):
        engine.run(spoiled(words, lambda t: None, mode="reuse"))
    assert engine.run(spoiled(words, lambda t: None))[0].tokens


@pytest.mark.parametrize(
    ("settings", "options", "says"),
    [
        ({"selektor": "all"}, {}, "Did you mean 'selector'"),
        ({"modes": "sift,blend"}, {}, "unknown mode 'blend'"),
        ({}, {"max_num_batched_tokens": 128}, "two tiles"),
    ],
    ids=["name", "mode", "budget"],
)
def test_wrong_settings_do_not_start(engines: Engines, settings: Any, options: Any, says: str) -> None:
    with pytest.raises((TamisError, RuntimeError), match=says):
        engines.get(settings, fresh=True, **options)
    engines.close()


def test_unknown_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"vLLM 0\.19\.1 is not supported"):
        compat.check_version("0.19.1")
    monkeypatch.setattr(plugin, "_state", {"failed": "Unavailable: no such method"})
    with pytest.raises(Unavailable, match="no such method"):
        plugin.check_registered()


@pytest.mark.parametrize(("newer", "stages", "fine"), [("1", 2, True), ("0", 1, True), ("0", 2, False)])
def test_no_pipelines_where_first_stages_are_not_heard(
    monkeypatch: pytest.MonkeyPatch, newer: str, stages: int, fine: bool
) -> None:
    """vLLM's older Ray executor drops what they say of blocks that could not be loaded: answers were wrong."""
    from tamis.integrations.vllm.config import Settings
    from tamis.integrations.vllm.scheduler_side import check_config

    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", newer)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=stages, decode_context_parallel_size=1, distributed_executor_backend="ray"
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=1024),
        model_config=SimpleNamespace(is_encoder_decoder=False),
        speculative_config=None,
    )
    caches = SimpleNamespace(kv_cache_groups=[None])
    if fine:
        check_config(Settings(), config, caches)
    else:
        with pytest.raises(Unavailable, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1"):
            check_config(Settings(), config, caches)
