"""Which documents are asked to be kept, and which of these a worker copies: blocks that are there already count; no
vLLM."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tamis.integrations.vllm import compat, scheduler_side
from tamis.integrations.vllm.client import request
from tamis.integrations.vllm.config import Settings
from tamis.integrations.vllm.request import parse
from tamis.integrations.vllm.rows import Worker
from tamis.integrations.vllm.scheduler_side import KEEPS, SchedulerSide
from tamis.integrations.vllm.shelf import Shelf
from tamis.integrations.vllm.step import Move, Row, Step
from tamis.integrations.vllm.worker_side import WorkerSide

BLOCK = 16
DOCUMENTS = [list(range(100, 140)), list(range(200, 230))]  # 3 blocks and 2
FOUND = 5 * BLOCK  # tokens of the prompt that are documents


class Lost:
    """A shelf that has nothing but `kept`, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked, self.kept = 0, set[str]()

    def has(self, key: str, namespace: str) -> bool:
        self.asked += 1
        return key in self.kept


@pytest.fixture
def side(tmp_path: Path) -> SchedulerSide:
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=BLOCK),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=1024),
        model_config=SimpleNamespace(is_encoder_decoder=False),
        speculative_config=None,
    )
    settings = Settings(accept_block_attention=True, directory=str(tmp_path))
    made = SchedulerSide(settings, config, SimpleNamespace(kv_cache_groups=[None]), bytes(16))
    made.shelf = Lost()  # type: ignore[assignment]
    return made


def came(side: SchedulerSide, name: str, external: int = 0, **more: Any) -> Any:
    """A request whose first `external` tokens are loaded from the shelf."""
    body = request([], DOCUMENTS, [7, 8, 9], block_size=BLOCK)
    tokens = body["prompt"]
    asked = parse(body["kv_transfer_params"]["tamis"], tokens, block_size=BLOCK)
    about = {"num_tokens": len(tokens), "block_hashes": [], "lora_request": None, "cache_salt": None}
    made = SimpleNamespace(request_id=name, _tamis_asked=asked, **about | more)
    side._matched[name] = (0, external)
    side.allocated(made, external)
    return made


def first(side: SchedulerSide, name: str, computed: int = FOUND, scheduled: int = 3) -> Step:
    new = SimpleNamespace(req_id=name, block_ids=(list(range(40, 46)),), num_computed_tokens=computed)
    return stepped(side, {name: scheduled}, new=[new])


def later(side: SchedulerSide, name: str, computed: int, scheduled: int = 1) -> Step:
    return stepped(side, {name: scheduled}, names=[name], at=[computed])


def stepped(
    side: SchedulerSide, scheduled: dict[str, int], new: Any = (), names: Any = (), at: Any = (), resumed: Any = ()
) -> Step:
    cached = SimpleNamespace(
        req_ids=list(names), new_block_ids=[None for _ in names], num_computed_tokens=list(at), resumed_req_ids=resumed
    )
    return side.step(
        SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=scheduled)
    )


def test_what_is_found_in_blocks_is_kept_once(side: SchedulerSide) -> None:
    came(side, "a")
    saves = first(side, "a").saves
    assert [(m.n_tokens, m.first, m.count, m.index, m.blocks) for m in saves] == [
        (40, 0, 40, 0, (40, 41, 42)),
        (30, 0, 30, 0, (43, 44)),
    ]
    asked = side.shelf.asked
    assert asked == len(DOCUMENTS)
    for at in range(FOUND + 3, FOUND + 6):
        assert not later(side, "a", at).saves
    assert side.shelf.asked == asked, "not in every step"


def test_what_the_shelf_has_is_not_kept_again(side: SchedulerSide) -> None:
    made = came(side, "a")
    side.shelf.kept = {made._tamis_asked.units[0].key}
    assert [m.n_tokens for m in first(side, "a").saves] == [30]


def test_what_is_computed_is_kept_as_before(side: SchedulerSide) -> None:
    came(side, "a")
    assert [m.n_tokens for m in first(side, "a", computed=3 * BLOCK, scheduled=20).saves] == [40]
    assert [m.n_tokens for m in later(side, "a", 3 * BLOCK + 20, 20).saves] == [30]


def test_what_is_loaded_now_is_not_kept_of_its_blocks(side: SchedulerSide) -> None:
    """The shelf has it; where it cannot be read after all, they hold nothing."""
    came(side, "all", external=FOUND)
    assert not first(side, "all").saves
    came(side, "one", external=3 * BLOCK)
    assert [m.n_tokens for m in first(side, "one").saves] == [30]


@pytest.mark.parametrize("more", [{"tamis_mixed": True}, {"lora_request": object()}], ids=["mixed", "adapter"])
def test_what_is_not_the_models_own_is_not_kept(side: SchedulerSide, more: dict[str, Any]) -> None:
    came(side, "a", **more)
    assert not first(side, "a").saves and not side.shelf.asked


def test_nothing_is_kept_of_other_weights(side: SchedulerSide) -> None:
    came(side, "a")
    side.reweighed(own=False)
    came(side, "b")
    assert not first(side, "a").saves and not first(side, "b").saves


def test_a_shelf_without_room_is_not_asked_for_by_every_request(
    side: SchedulerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying costs more than the request itself; who wants a document kept says so."""
    now = [100.0]
    monkeypatch.setattr(scheduler_side.time, "monotonic", lambda: now[0])
    for name, wanted, more in (
        ("a", 2, {}),
        ("b", 0, {}),
        ("warm", 2, {"sampling_params": SimpleNamespace(extra_args={KEEPS: True})}),
        ("c", 0, {"cache_salt": None}),
        ("salt", 2, {"cache_salt": "another place"}),
    ):
        came(side, name, **more)
        assert len(first(side, name).saves) == wanted, name
    now[0] += scheduler_side.AGAIN_S + 1
    came(side, "d")
    assert len(first(side, "d").saves) == 2
    assert len(side._lately) == 2, "the old ones are forgotten"


def test_a_request_that_begins_anew_looks_again(side: SchedulerSide) -> None:
    made = came(side, "a")
    side.shelf.kept = {unit.key for unit in made._tamis_asked.units}
    assert not first(side, "a").saves
    side.shelf.kept = set()
    side.allocated(made, 0)
    assert len(first(side, "a").saves) == 2


def test_modes_that_are_refused_are_not_served() -> None:
    assert Settings().served == ("sift",)
    assert Settings(accept_block_attention=True).served == ("sift", "reuse")
    assert Settings(modes="reuse").served == ()


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker's side with one layer of 8 blocks, without vLLM's hooks."""
    monkeypatch.setattr(compat, "pages", lambda cache, dim: (cache[..., :dim], cache[..., dim:]))
    made = object.__new__(WorkerSide)
    made.settings, made.block = Settings(accept_block_attention=True), BLOCK
    made.state, made.shelf = Worker(made.settings, BLOCK, 2), Shelf(tmp_path, 0, bytes(16))
    made.caches = {0: torch.randn(8, 2, BLOCK, 16)}
    made._errors, made._unread, made._writing = set(), set(), {}
    made._writer = ThreadPoolExecutor(1)
    yield made
    made.close()


def kept(worker: Any, step: Step) -> bool:
    worker.save(step)
    for future, _ in worker._writing.values():
        future.result()
    return bool(worker.shelf.has(KEY))


KEY = "00" * 16
WHOLE = Move(KEY, "document", 40, 0, 40, 0, (5, 2, 3))


def test_blocks_that_could_not_be_loaded_are_not_kept(worker: Any) -> None:
    """The step behind the one that failed may be planned already: what it finds in these blocks is nothing."""
    worker.load(Step(loads=(WHOLE,)))
    assert worker.taken_errors() == {5, 2, 3} and worker.counters.documents_unread == 1
    assert not kept(worker, Step(saves=(WHOLE,)))
    body = request([], DOCUMENTS, [7], block_size=BLOCK)
    asked = parse(body["kv_transfer_params"]["tamis"], body["prompt"])
    part = Row("a", asked, BLOCK, 2 * BLOCK, (5, 2, 3))
    assert not kept(worker, Step(rows=(part,), saves=(WHOLE,))), "block 5 is still nobody's"
    assert kept(worker, Step(rows=(Row("a", asked, 0, BLOCK, (5, 2, 3)),), saves=(WHOLE,)))
    assert worker.counters.documents_saved == 1
    layers = worker.shelf.load(KEY)
    assert torch.equal(layers[0][0], worker.caches[0][[5, 2, 3], ..., :8].transpose(0, 1).reshape(2, 48, 8)[:, :40])


def test_what_was_written_meanwhile_is_not_counted_again(worker: Any) -> None:
    assert kept(worker, Step(saves=(WHOLE,))) and kept(worker, Step(saves=(WHOLE,)))
    assert worker.counters.documents_saved == 1
