"""What must never meet: exact and approximate blocks, adapters, salts, documents that could not be read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_vllm_active import elsewhere, made_there
from vllm_engines import BLOCK, SETTINGS, Engine, Engines

from tamis.core.errors import InvalidInput
from tamis.integrations.vllm.client import request
from tamis.integrations.vllm.step import Counters

Words = Callable[..., list[int]]


@pytest.fixture(scope="module")
def pieces(words: Words) -> dict[str, list[int]]:
    return {"p": words(61, 21), "a": words(62, 300), "b": words(63, 224), "c": words(64, 97), "q": words(65, 17)}


def asked(pieces: dict[str, list[int]], names: str, mode: str = "reuse", **choices: Any) -> dict[str, Any]:
    documents = [pieces[name] for name in names]
    return request(pieces["p"], documents, pieces["q"], mode=mode, block_size=BLOCK, **choices)


def shared(pieces: dict[str, list[int]], names: str) -> int:
    return sum(-(-len(pieces[name]) // BLOCK) * BLOCK for name in "p" + names)


def written(engine: Engine) -> None:
    """Wait for the shelf."""
    for future, _ in list(engine.worker._writing.values()):
        future.result()


def sampled(engine: Engine, body: dict[str, Any], *, salt: str | None = None, **choices: Any) -> tuple[list[int], int]:
    """Greedy tokens and how many came from the cache."""
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": body["prompt"]} | ({} if salt is None else {"cache_salt": salt})
    extra = {"kv_transfer_params": body["kv_transfer_params"]}
    params = SamplingParams(max_tokens=6, temperature=0, detokenize=False, ignore_eos=True, extra_args=extra)
    found = engine.llm.generate([prompt], [params], use_tqdm=False, **choices)[0]
    return list(found.outputs[0].token_ids), found.num_cached_tokens


def test_blocks_have_their_names_in_an_engine_of_its_own_process(tiny_path: Path, pieces: dict[str, list[int]]) -> None:
    """Plugins are loaded inside of the engine's constructor there, too late to stand in front of it."""
    reuse, sift = asked(pieces, "ab"), asked(pieces, "ca", "sift")
    requests = [reuse, asked(pieces, "ba"), reuse["prompt"], sift, sift["prompt"]]
    done = elsewhere(tiny_path, SETTINGS, requests, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    cached = [made[1] for made in made_there(done)]
    assert cached == [0, shared(pieces, "ba"), 0, 0, 0], "documents are found wherever they stand, by reuse alone"


def adapter(path: Path, seed: int) -> Path:
    """LoRA weights for the tiny llama's attention."""
    draw, made = torch.Generator().manual_seed(seed), {}
    for layer in range(2):
        for name, width in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            made[f"{place}.lora_A.weight"] = torch.randn(8, 256, generator=draw) * 0.3
            made[f"{place}.lora_B.weight"] = torch.randn(width, 8, generator=draw) * 0.3
    path.mkdir()
    save_file(made, path / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none", "task_type": "CAUSAL_LM"}
    (path / "adapter_config.json").write_text(json.dumps(said | {"target_modules": ["q_proj", "k_proj", "v_proj"]}))
    return path


def test_an_adapters_documents_are_not_the_models(
    engines: Engines, pieces: dict[str, list[int]], tmp_path: Path
) -> None:
    """Neither in blocks nor on the shelf, whoever came first."""
    from vllm.lora.request import LoRARequest

    settings = SETTINGS | {"directory": str(tmp_path / "shelf")}
    engine = engines.get(settings, fresh=True, enable_lora=True, max_loras=2, max_lora_rank=8)
    loras = [LoRARequest(str(i), i, str(adapter(tmp_path / str(i), i))) for i in (1, 2)]
    order = [loras[0], None, loras[1]]
    first = [sampled(engine, asked(pieces, "ab"), lora_request=lora) for lora in order]
    assert [cached for _, cached in first] == [0, 0, 0] and len({tuple(tokens) for tokens, _ in first}) == 3
    written(engine)
    engine.llm.reset_prefix_cache()
    again = [sampled(engine, asked(pieces, "ab"), lora_request=lora) for lora in order]
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
    assert [cached for _, cached in again] == [0, shared(pieces, "ab"), 0], "the model's own alone are kept"


def test_salts_keep_documents_apart_on_the_shelf_too(
    engines: Engines, pieces: dict[str, list[int]], tmp_path: Path
) -> None:
    engine = engines.get(SETTINGS | {"directory": str(tmp_path)}, fresh=True)
    for salt, cached in ((None, 0), ("x", 0), ("x", shared(pieces, "ab")), ("y", 0)):
        assert sampled(engine, asked(pieces, "ab"), salt=salt)[1] == cached
    written(engine)
    engine.llm.reset_prefix_cache()
    for salt, cached in (("x", shared(pieces, "ab")), ("z", 0), (None, shared(pieces, "ab"))):
        assert sampled(engine, asked(pieces, "ab"), salt=salt)[1] == cached
    assert sampled(engine, asked(pieces, "ab", namespace="other"))[1] == 0


def test_what_the_shelf_lost_is_written_again(engines: Engines, pieces: dict[str, list[int]], tmp_path: Path) -> None:
    """Deleted files, then the whole directory: the engine goes on, and keeps documents again."""
    engine = engines.get(SETTINGS | {"directory": str(tmp_path / "shelf")}, fresh=True)
    first = engine.run(asked(pieces, "ab"))[0]
    for loss in ("files", "directory"):
        written(engine)
        files = list(tmp_path.rglob("*.safetensors"))
        assert len(files) == 3
        for path in files:
            path.unlink()
        if loss == "directory":
            shutil.rmtree(tmp_path / "shelf")
        engine.llm.reset_prefix_cache()
        made = engine.run(asked(pieces, "ab"))[0]
        assert made.cached == 0 and made.tokens == first.tokens
    written(engine)
    engine.llm.reset_prefix_cache()
    assert engine.run(asked(pieces, "ab"))[0].cached == shared(pieces, "ab")


def test_what_is_found_in_blocks_alone_is_kept(
    engines: Engines, pieces: dict[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted by somebody while its blocks stay: a request that computes none of it puts it on the shelf again."""
    engine = engines.get(SETTINGS | {"directory": str(tmp_path)}, fresh=True)
    first = engine.run(asked(pieces, "ab"))[0]
    written(engine)

    def files() -> dict[str, bytes]:
        written(engine)
        return {path.name: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}

    def lost() -> None:
        for path in tmp_path.rglob("*.safetensors"):
            path.unlink()

    whole = files()
    assert len(whole) == 3
    lost()
    again = engine.run(asked(pieces, "ba"))[0]  # the prefix, then in another order: all is found
    assert again.cached == shared(pieces, "ab") and files() == whole, "the very bytes that were computed"
    lost()
    engine.run(asked(pieces, "ab"))
    assert not files(), "not for every request, where there may be no room"
    monkeypatch.setattr("tamis.integrations.vllm.scheduler_side.AGAIN_S", 0.0)
    engine.run(asked(pieces, "ab"))
    assert files() == whole
    engine.llm.reset_prefix_cache()
    loaded = engine.run(asked(pieces, "ab"))[0]
    assert (loaded.cached, loaded.tokens) == (shared(pieces, "ab"), first.tokens)
    assert engine.run(asked(pieces, "ab"))[0].tokens == first.tokens and files() == whole


def test_blocks_that_could_not_be_loaded_are_not_kept(
    engines: Engines, pieces: dict[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are damaged and go when they are read; who finds the blocks by then also finds the files gone."""
    engine = engines.get(SETTINGS | {"directory": str(tmp_path)}, fresh=True)
    orders = ("ab", "ba", "a")
    answers = [engine.run(asked(pieces, order))[0].tokens for order in orders]
    written(engine)
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-4] + b"torn")
    engine.llm.reset_prefix_cache()
    for cache in engine.worker.caches.values():
        cache.zero_()  # else they may hold what they held before
    side = engine.llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
    stock = side.step

    def step(output: Any) -> Any:
        with monkeypatch.context() as gone:
            gone.setattr(side.shelf, "has", lambda *_: False)
            return stock(output)

    with monkeypatch.context() as patched:
        patched.setattr(side, "step", step)
        assert [made.tokens for made in engine.run(*(asked(pieces, order) for order in orders))] == answers
    written(engine)
    engine.llm.reset_prefix_cache()
    for order, answer in zip(orders, answers, strict=True):
        made = engine.run(asked(pieces, order))[0]
        assert (made.cached, made.tokens) == (shared(pieces, order), answer), "what is on the shelf was computed"


@pytest.mark.parametrize("stays", [False, True], ids=["deleted", "read-only"])
def test_unread_documents_are_computed_by_all_who_share_them(
    engines: Engines, pieces: dict[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    """Every file is damaged, requests share its documents at different places, chunks are small and blocks scarce."""
    settings = SETTINGS | {"directory": str(tmp_path)}
    orders = ("ab", "bc", "ca", "ab")
    small = {"max_num_batched_tokens": 320, "num_gpu_blocks_override": 44, "max_model_len": 1024}
    engine = engines.get(settings, fresh=True, **small)
    answers = [engine.run(asked(pieces, order), n=60)[0].tokens for order in orders]
    written(engine)
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-4] + b"torn")
    if stays:
        unlink = Path.unlink

        def kept(self: Path, missing_ok: bool = False) -> None:
            if self.suffix == ".safetensors":
                raise PermissionError(13, "read-only", str(self))
            unlink(self, missing_ok)

        monkeypatch.setattr(Path, "unlink", kept)
    engine.llm.reset_prefix_cache()
    monkeypatch.setattr(Counters, "taken", lambda self: {})  # the sums stay where this test can read them
    engine.worker.counters.documents_unread = 0
    found = engine.run(*(asked(pieces, order) for order in orders), n=60)
    assert [made.tokens for made in found] == answers
    assert engine.worker.counters.documents_unread >= 4, "prefix and documents are counted"
    again = [engine.run(asked(pieces, order), n=60)[0].tokens for order in orders]
    assert again == answers, "what was computed in blocks that could not be read is not found by others"


def test_nobody_waits_for_an_aborted_request_to_compute_what_could_not_be_read(
    engines: Engines, pieces: dict[str, list[int]], tmp_path: Path
) -> None:
    from vllm import SamplingParams

    engine = engines.get(SETTINGS | {"directory": str(tmp_path)}, fresh=True)
    body = asked(pieces, "ab")
    wanted = engine.run(body)[0].tokens
    written(engine)
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-4] + b"torn")
    engine.llm.reset_prefix_cache()
    extra = {"kv_transfer_params": body["kv_transfer_params"]}
    params = SamplingParams(max_tokens=6, temperature=0, detokenize=False, ignore_eos=True, extra_args=extra)
    core, answers = engine.llm.llm_engine, dict[str, list[int]]()
    for name in ("aborted", "stays"):
        core.add_request(name, {"prompt_token_ids": body["prompt"]}, params)
    core.step()
    core.abort_request(["aborted"])
    while core.has_unfinished_requests():
        answers |= {output.request_id: list(output.outputs[0].token_ids) for output in core.step()}
    assert answers["stays"] == wanted
    assert engine.run(body)[0].tokens == wanted


@pytest.mark.parametrize("namespace", ["é", "\ud800", "prefix", "prefix/mine", "x" * 101, 5, False, []], ids=ascii)
def test_a_namespace_that_cannot_be_stops_nobody(
    engines: Engines, pieces: dict[str, list[int]], tmp_path: Path, namespace: Any
) -> None:
    engine = engines.get(SETTINGS | {"directory": str(tmp_path.parent / "names")})
    with pytest.raises(InvalidInput, match="namespace"):
        engine.run(asked(pieces, "c", namespace=namespace))
    assert engine.run(asked(pieces, "c"))[0].tokens


def test_aborted_requests_leave_nothing(engine: Engine, pieces: dict[str, list[int]]) -> None:
    core = engine.llm.llm_engine.engine_core.engine_core
    side = core.scheduler.connector.scheduler
    wanted = engine.run(asked(pieces, "ab", namespace="whole"))[0].tokens
    from vllm import SamplingParams

    for mode in ("reuse", "sift"):
        body = asked(pieces, "abc", mode, namespace="aborted")
        extra = {"kv_transfer_params": body["kv_transfer_params"]}
        params = SamplingParams(max_tokens=50, temperature=0, detokenize=False, ignore_eos=True, extra_args=extra)
        engine.llm.llm_engine.add_request(mode, {"prompt_token_ids": body["prompt"]}, params)
        engine.llm.llm_engine.step()
        engine.llm.llm_engine.abort_request([mode])
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.llm.llm_engine.step()
    assert engine.run(asked(pieces, "ab", namespace="aborted"))[0].tokens == wanted
    assert not side._known and not side._matched and not engine.worker.state.jobs
