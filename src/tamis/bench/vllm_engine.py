"""One vLLM engine in a process of its own: jobs come as JSON lines on stdin, results go as marked lines to stdout.

Run as `python -m tamis.bench.vllm_engine SETUP`. Whoever starts it (`bench.vllm`) sends the next job when the last is
answered, and kills it at a deadline. The engine steps in this very process, so that times are those of its own work.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MARK = "TAMIS-RESULT "
CONNECTOR = {
    "kv_connector": "TamisConnector",
    "kv_connector_module_path": "tamis.integrations.vllm.connector",
    "kv_role": "kv_both",
}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass
class Asked:
    """A request on its way: when it arrived, what its first token showed, and when its last one came."""

    arrived_s: float
    body: Mapping[str, Any]
    first_s: float = 0.0
    done_s: float = 0.0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)


class Runner:
    """An open engine. setup: `model`, `engine` (arguments of vllm.LLM), `tamis` (settings of the connector, or null),
    and `replay` (see `bench.vllm_replay`, or null)."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        from vllm import LLM

        begin = time.perf_counter()
        arguments = dict(setup["engine"])
        if setup["tamis"] is not None:
            from vllm.config import KVTransferConfig

            chosen = CONNECTOR | {"kv_connector_extra_config": setup["tamis"]}
            arguments["kv_transfer_config"] = KVTransferConfig(**chosen)
        self.llm = LLM(model=setup["model"], skip_tokenizer_init=True, **arguments)
        self.engine = self.llm.llm_engine
        self.start_s = time.perf_counter() - begin
        self._number = 0
        if setup.get("replay"):
            from tamis.bench.vllm_replay import replay_densities

            replay_densities(**setup["replay"])

    def about(self) -> dict[str, Any]:
        """What runs here."""
        import torch

        import vllm

        layers = self.engine.vllm_config.compilation_config.static_forward_context.values()
        kinds = {f"{type(x.impl).__module__}.{type(x.impl).__name__}" for x in layers if hasattr(x, "impl")}
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        config = self.engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "gpu": gpu,
            "attention": sorted(kinds),
            "block_size": config.cache_config.block_size,
            "batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "start_s": self.start_s,
        }

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """`requests`: bodies as `integrations.vllm.client.request` makes them, each with `at_s` (arrival), in that
        order; `max_tokens` of a body goes before the job's. They are sent when they arrive; `alone`: one after the
        other; `forget`: into an empty cache. Answers a row for each: ttft_s, done_s (of the last token), cached,
        tokens."""
        if job.get("forget") and not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its cache: requests are still under way")
        asked = [Asked(0.0, body) for body in job["requests"]]
        for some in [[one] for one in asked] if job["alone"] else [asked]:
            self._loop(some, job["max_tokens"])
        rows = [
            {
                "ttft_s": a.first_s - a.arrived_s,
                "done_s": a.done_s - a.arrived_s,
                "cached": a.cached,
                "tokens": a.tokens,
            }
            for a in asked
        ]
        return {"rows": rows}

    def _loop(self, asked: Sequence[Asked], max_tokens: int) -> None:
        begin = time.perf_counter()
        running: dict[str, Asked] = {}
        todo = deque(asked)
        while todo or running:
            now = time.perf_counter() - begin
            while todo and todo[0].body.get("at_s", 0.0) <= now:
                one = todo.popleft()
                one.arrived_s = begin + one.body.get("at_s", 0.0)
                running[self._add(one.body, max_tokens)] = one
            if not running:
                time.sleep(max(0.0, todo[0].body["at_s"] - (time.perf_counter() - begin)))
                continue
            for output in self.engine.step():
                one = running[output.request_id]
                tokens = list(output.outputs[0].token_ids)
                if tokens and not one.first_s:
                    one.first_s, one.cached = time.perf_counter(), output.num_cached_tokens or 0
                if output.finished:
                    one.tokens, one.done_s = tokens, time.perf_counter()
                    del running[output.request_id]

    def _add(self, body: Mapping[str, Any], max_tokens: int) -> str:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": body["kv_transfer_params"]} if "kv_transfer_params" in body else None
        sampling = SamplingParams(
            max_tokens=body.get("max_tokens", max_tokens),
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args=extra,
        )
        self._number += 1
        name = str(self._number)
        self.engine.add_request(name, {"prompt_token_ids": list(body["prompt"])}, sampling)
        return name


def tell(what: Mapping[str, Any]) -> None:
    """One marked line: vLLM logs to stdout, too."""
    sys.stdout.write(MARK + json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Open the engine that the argument (JSON) describes, and do jobs until stdin ends."""
    setup = json.loads(sys.argv[1])
    for name, value in (QUIET | setup.get("environment", {})).items():
        os.environ.setdefault(name, value)
    from tamis.bench.machine import why_of

    try:
        runner = Runner(setup)
        tell({"started": runner.about()})
    except Exception as e:
        tell({"error": why_of(e)})
        raise
    for line in sys.stdin:
        try:
            tell(runner.run(json.loads(line)))
        except Exception as e:
            tell({"error": why_of(e)})
    sys.stdout.flush()
    os._exit(0)  # vLLM's own way down takes seconds, and nothing is kept


if __name__ == "__main__":
    main()
