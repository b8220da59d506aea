"""What is run before a server is ready: one row of every kind that kernels are built for, and no trace of it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tamis.integrations.vllm import compat, hooks, warm_up
from tamis.integrations.vllm.config import CONNECTOR, MODULE, Settings
from tamis.integrations.vllm.reuse import plan_rows
from tamis.integrations.vllm.rows import Worker
from tamis.model.rope import Rotary

PAGE, HEADS, KV, DIM = 16, 4, 2, 32
ROTARY = Rotary(1.0 / 10_000 ** (torch.arange(0, DIM, 2, dtype=torch.float64) / DIM), DIM)


def test_prompts_and_steps_with_and_without_turns_and_holes() -> None:
    prompts, steps = set(), set()
    for row in warm_up.rows_of_kinds(PAGE, 100):
        made = plan_rows([(0, row)], ROTARY.angles, page=PAGE, kv_heads=KV, device=torch.device("cpu"))
        tiles, into = (made.tiles, prompts) if made.plan is None else (made.plan.tiles, steps)
        assert tiles is not None
        into.add((tiles.cos is not None, tiles.holes is not None))
    every = {(turned, holes) for turned in (False, True) for holes in (False, True)}
    assert prompts == steps == every


def test_only_what_the_cache_holds() -> None:
    assert all(len(row.blocks) <= 9 for row in warm_up.rows_of_kinds(PAGE, 9))
    assert not list(warm_up.rows_of_kinds(PAGE, 5))


@pytest.mark.parametrize("what", ["_reuse", "_sift"])
def test_the_cache_is_as_before(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # as it lies on a GPU
    monkeypatch.setattr(compat, "pages", lambda cache, dim: (cache[..., :dim], cache[..., dim:]))
    worker = Worker(Settings.of({"accept_block_attention": True}), PAGE, KV, ROTARY)
    impl = SimpleNamespace(num_heads=HEADS, head_size=DIM, scale=DIM**-0.5)
    cache = torch.randn(20, KV, PAGE, 2 * DIM)
    before = cache.clone()
    getattr(warm_up, what)(worker, impl, cache)
    assert torch.equal(cache, before) and not worker.jobs and not worker.reports
    assert warm_up.build_kernels(worker, impl, cache) == 0, "a CPU has nothing to build"


def test_not_where_caches_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM's sleep mode, what is made there loses what it holds when the engine sleeps."""
    done: list[str] = []
    group = SimpleNamespace(
        check_model=lambda model: done.append("checked"), worker=SimpleNamespace(warm_up=lambda: done.append("built"))
    )
    module = ModuleType("vllm.distributed.kv_transfer")
    monkeypatch.setattr(module, "get_kv_transfer_group", lambda: group, raising=False)
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    transfer = SimpleNamespace(kv_connector=CONNECTOR, kv_connector_module_path=MODULE, kv_connector_extra_config={})
    owner = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer), get_model=lambda: None)
    wraps = {hook.name.rpartition(".")[2]: hook.wrap for hook in hooks.WORKER}
    caches, warmed = wraps["initialize_kv_cache"], wraps["compile_or_warm_up_model"]
    caches(lambda self: done.append("caches"))(owner)
    warmed(lambda self: done.append("ready"))(owner)
    assert done == ["caches", "checked", "built", "ready"]
    warmed(lambda self: done.append("stock"))(SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=None)))
    assert done[4:] == ["stock"]
