"""Weights that are changed while vLLM runs: nothing computed with the ones is found by requests of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import BLOCK, SETTINGS, Engine, Engines

from tamis.integrations.vllm import weights
from tamis.integrations.vllm.client import request

Words = Callable[..., list[int]]


@pytest.fixture(scope="module")
def other_path(tiny_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with other weights, saved."""
    path = tmp_path_factory.mktemp("other")
    tiny_model("llama", seed=2).save_pretrained(path)
    return path


@pytest.fixture
def asked(words: Words) -> Callable[..., dict[str, Any]]:
    """(seeds of documents, mode) to a request over them."""

    def make(*seeds: int, mode: str = "reuse") -> dict[str, Any]:
        documents = [words(seed, 200) for seed in seeds]
        return request(words(1, 21), documents, words(2, 17), mode=mode, block_size=BLOCK)

    return make


def written(engine: Engine) -> int:
    """Documents on the shelf, when all is written that is to be."""
    side = engine.worker
    for future, _ in list(side._writing.values()):
        future.result(60)
    return len(side.shelf.documents())


def load(engine: Engine, path: Path) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})


def test_neither_blocks_nor_the_shelf(
    engines: Engines, tmp_path: Path, other_path: Path, asked: Callable[..., dict[str, Any]]
) -> None:
    wanted = [engines.get(fresh=True)]
    load(wanted[0], other_path)
    others = [wanted[0].run(asked(5))[0].tokens, wanted[0].run(asked(5, mode="sift"))[0].tokens]
    engine = engines.get(SETTINGS | {"directory": str(tmp_path / "shelf")}, fresh=True)
    first, sparse = engine.run(asked(5))[0], engine.run(asked(5, mode="sift"))[0]
    assert written(engine) == 2
    again = engine.run(asked(5))[0]
    assert again.cached > 200 and [first.tokens, sparse.tokens] != others
    assert engine.llm.reset_prefix_cache() and engine.run(asked(5))[0].cached == again.cached, "from the shelf"

    load(engine, other_path)
    made, found = engine.run(asked(5))[0], engine.run(asked(5))[0]
    assert (made.cached, found.cached) == (0, again.cached), "blocks of the new weights are found"
    assert made.tokens == found.tokens == others[0]
    made = engine.run(asked(5, mode="sift"))[0]
    assert made.cached == 0 and made.tokens == others[1]
    assert engine.llm.reset_prefix_cache()
    assert engine.run(asked(5))[0].cached == 0, "the shelf is of the old ones"
    engine.run(asked(6))
    assert written(engine) == 2, "the shelf takes none of the new ones"


@pytest.fixture
def all_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM packs most weights where nobody can look; here those that are left count as all."""
    look = weights.summed
    monkeypatch.setattr(weights, "summed", lambda worker: look(worker)._replace(whole=True))


def change(worker: Any, factor: float) -> None:
    worker.get_model().lm_head.weight.data.mul_(factor)


@pytest.mark.usefixtures("all_seen")
def test_a_call_that_changes_nothing(engines: Engines, tmp_path: Path, asked: Callable[..., dict[str, Any]]) -> None:
    engine = engines.get(SETTINGS | {"directory": str(tmp_path / "shelf")}, fresh=True)
    engine.run(asked(5))
    known = engine.run(asked(5))[0].cached
    assert known > 200 and written(engine) == 2
    engine.llm.collective_rpc("reload_weights")
    assert engine.run(asked(5))[0].cached == known, "the same weights again"
    engine.llm.collective_rpc(change, args=(2.0,))
    assert engine.run(asked(5))[0].cached == 0
    engine.llm.collective_rpc(change, args=(0.5,))
    assert engine.run(asked(5))[0].cached == known, "as they were"
    assert engine.llm.reset_prefix_cache() and engine.run(asked(5))[0].cached == known, "and from the shelf"


@pytest.mark.usefixtures("all_seen")
def test_requests_that_are_there_when_it_happens(
    engines: Engines, tmp_path: Path, asked: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was begun, one that waits, and one that is named and on its way to the scheduler."""
    from vllm import SamplingParams

    settings = SETTINGS | {"directory": str(tmp_path / "shelf")}
    engine = engines.get(settings, fresh=True, max_num_seqs=1, max_num_batched_tokens=288)
    inner = engine.llm.llm_engine
    core = inner.engine_core.engine_core
    engine.run(asked(5, 8))
    assert written(engine) == 3  # the prefix and the documents

    def add(name: str, one: dict[str, Any]) -> None:
        extra = {"kv_transfer_params": one["kv_transfer_params"]}
        params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra)
        inner.add_request(name, {"prompt_token_ids": one["prompt"]}, params)

    add("begun", asked(6, 7))
    inner.step()  # the 288 tokens behind the prefix: document 6 and two blocks of 7
    add("waits", asked(5))
    held: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(core, "add_request", lambda *args: held.append(args))
        add("comes", asked(5, 8))
    engine.llm.collective_rpc(change, args=(2.0,))
    core.add_request(*held[0])
    cached = {}
    while inner.has_unfinished_requests():
        cached |= {output.request_id.split("-")[0]: output.num_cached_tokens for output in inner.step()}
    prefix, document = 32, 224
    assert cached == {"begun": prefix, "waits": 0, "comes": prefix + document}, "the last one finds the second one's"
    assert engine.run(asked(6, 7))[0].cached == prefix
    assert written(engine) == 4, "document 6, from before it"
    engine.llm.collective_rpc(change, args=(0.5,))
    assert engine.run(asked(6, 7))[0].cached == prefix + 288, "what was computed behind it is nobody's"
