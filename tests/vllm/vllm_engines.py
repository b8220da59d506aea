"""Engines of vLLM on a CPU, in this process, and Tamis's own on the same model, both asked by token ids."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}
BLOCK = 32
CONNECTOR = {
    "kv_connector": "TamisConnector",
    "kv_connector_module_path": "tamis.integrations.vllm.connector",
    "kv_role": "kv_both",
}
SETTINGS: dict[str, Any] = {"min_tokens": 0, "accept_block_attention": True}


class Made(NamedTuple):
    """Greedy tokens of a request, the tokens that came from the cache, and the log probability of each new one."""

    tokens: list[int]
    cached: int
    logprobs: list[float]


class Engine:
    """A vLLM engine; `worker` is Tamis's state in it."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker

    def run(self, *requests: dict[str, Any] | list[int], n: int = 6) -> list[Made]:
        """Requests as `client.request` makes them, or plain token ids; all in one batch."""
        from vllm import SamplingParams

        prompts, params = [], []
        for request in requests:
            plain = isinstance(request, list)
            prompts.append({"prompt_token_ids": request if plain else request["prompt"]})
            extra = None if plain else {"kv_transfer_params": request["kv_transfer_params"]}
            params.append(
                SamplingParams(
                    max_tokens=n, temperature=0, detokenize=False, ignore_eos=True, logprobs=0, extra_args=extra
                )
            )
        found = self.llm.generate(prompts, params, use_tqdm=False)
        return [_made(output) for output in found]


def _made(output: Any) -> Made:
    first = output.outputs[0]
    tokens = list(first.token_ids)
    return Made(tokens, output.num_cached_tokens, [p[t].logprob for p, t in zip(first.logprobs, tokens, strict=True)])


@contextmanager
def engine_of(path: Path | str, settings: dict[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
    """An engine on the model at `path`; with `settings` Tamis is on."""
    os.environ.update(ENVIRONMENT)
    from vllm.config import KVTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory

    from vllm import LLM

    if settings is not None:
        options["kv_transfer_config"] = KVTransferConfig(**CONNECTOR, kv_connector_extra_config=settings)
    chosen: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "block_size": BLOCK,
        "seed": 0,
    } | options
    llm = None
    try:
        llm = LLM(str(path), **chosen)
        yield Engine(llm)
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


class Peer:
    """Tamis's own engine on the same model, by token ids."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def run(self, parts: list[tuple[str, list[int]]], n: int = 6, **choices: Any) -> tuple[list[int], Any]:
        """Greedy tokens and the prefill's report for (kind, token ids) parts."""
        from tamis.engine.sampling import Sampling
        from tamis.prompt.segments import Prompt

        start = self.llm.prefill(Prompt.of(parts), **choices)
        tokens = list(self.llm.runner.decode(start, Sampling(max_new_tokens=n, temperature=0), frozenset()))
        start.close()
        return tokens, start.report


class Engines:
    """One engine at a time: vLLM's state of a process is global. `get` closes the one there is if it is another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kind: Any = None
        self._open: Any = None
        self._engine: Engine | None = None

    def get(self, settings: dict[str, Any] | None = SETTINGS, *, fresh: bool = False, **options: Any) -> Engine:
        """The engine with these settings; with `fresh` a new one in any case. Earlier ones may not be used any more."""
        kind = (repr(settings), repr(options))
        if self._engine is None or fresh or kind != self._kind:
            self.close()
            self._open = engine_of(self.path, settings, **options)
            self._engine, self._kind = self._open.__enter__(), kind
        return self._engine

    def close(self) -> None:
        """Close the engine there is."""
        if self._engine is not None:
            self._engine = None
            self._open.__exit__(None, None, None)
