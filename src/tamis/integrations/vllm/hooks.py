"""Where vLLM has no door: methods that Tamis stands in front of, each of which does nothing without the connector.

A hook keeps what it replaces, `undo` puts everything back, and installing twice is harmless. Each looks at the
configuration of the very object it is called on, so that engines with and without Tamis live in one process. All names
of vLLM's that may change are in one table and are checked when they are installed.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from tamis.core.errors import InvalidInput, Unavailable
from tamis.integrations.vllm import compat, rows
from tamis.integrations.vllm.config import Settings, policy_of, settings_of
from tamis.integrations.vllm.hashing import Root, block_names
from tamis.integrations.vllm.records import recorded
from tamis.integrations.vllm.request import Asked, check_depth
from tamis.integrations.vllm.sift import borders_of, chunk_end

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Hook(NamedTuple):
    """A name in a module, "Class.method" or "function", and what is put in front of it."""

    module: str
    name: str
    wrap: Wrap


_kept: dict[tuple[str, str], Any] = {}


def install(hooks: tuple[Hook, ...]) -> None:
    """Put all in place. Raises Unavailable if this vLLM does not have one of the names; then none of them is."""
    found = []
    for hook in hooks:
        owner, attribute = _place(hook)
        found.append((hook, owner, attribute))
    for hook, owner, attribute in found:
        place = (hook.module, hook.name)
        if place not in _kept:
            _kept[place] = owner.__dict__[attribute] if isinstance(owner, type) else getattr(owner, attribute)
            setattr(owner, attribute, functools.wraps(_kept[place])(hook.wrap(_kept[place])))


def undo() -> None:
    """Take all hooks out again."""
    for (module, name), kept in _kept.items():
        owner, attribute = _place(Hook(module, name, lambda f: f))
        setattr(owner, attribute, kept)
    _kept.clear()


def installed(hooks: tuple[Hook, ...]) -> bool:
    """Whether all of them are in place."""
    return all((hook.module, hook.name) in _kept for hook in hooks)


def _place(hook: Hook) -> tuple[Any, str]:
    try:
        owner: Any = importlib.import_module(hook.module)
    except ImportError as e:
        raise Unavailable(f"vLLM {compat.version()} cannot import {hook.module} ({e}); Tamis needs it.") from e
    *path, attribute = hook.name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    if owner is None or not hasattr(owner, attribute) or (path and attribute not in owner.__dict__):
        raise Unavailable(f"vLLM {compat.version()} has no {hook.module}.{hook.name}; Tamis needs it.")
    return owner, attribute


# -- requests: refused where they come in ------------------------------------------------------------------------------


def _process_inputs(stock: Callable[..., Any]) -> Callable[..., Any]:
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = stock(self, *args, **kwargs)
        settings = settings_of(self.vllm_config)
        if settings is not None:
            try:
                checked(made, settings, self.vllm_config)
            except InvalidInput as e:
                from tamis.integrations.vllm import metrics

                metrics.count_refused(self.vllm_config)
                raise compat.refused()(str(e)) from e
        return made

    return process_inputs


def tamis_params(request: Any) -> Any:
    """`kv_transfer_params` of a request as vLLM's processes pass it on; None if it has none."""
    params = getattr(request, "kv_transfer_params", None)
    if params is None:
        sampling = getattr(request, "sampling_params", None)
        params = (getattr(sampling, "extra_args", None) or {}).get("kv_transfer_params")
    return params


def checked(request: Any, settings: Settings, vllm_config: Any) -> Asked | None:
    """What a request asks of Tamis. Raises InvalidInput for what cannot be served."""
    params = tamis_params(request)
    if not isinstance(params, dict):
        return None
    check_depth(params)
    if "tamis" not in params:
        return None
    tokens = getattr(request, "prompt_token_ids", None)
    if tokens is None or getattr(request, "prompt_embeds", None) is not None or getattr(request, "mm_features", None):
        raise InvalidInput("a request with tamis segments needs a prompt of tokens alone, no embeddings and no media.")
    sampling = getattr(request, "sampling_params", None)
    if sampling is None or getattr(sampling, "prompt_logprobs", None) is not None:
        raise InvalidInput("a request with tamis segments generates text, without prompt_logprobs; leave those out.")
    return settings.asked(
        params, tokens, block_size=vllm_config.cache_config.block_size, device_type=compat.device_type()
    )


# -- the engine's core: names of blocks, and chunks that end on borders of tiles --------------------------------------


class Hasher:
    """vLLM's hasher of a request's blocks; requests of Tamis get names of their own once `serve` was called.

    coming: what the engine serves whose scheduler was made last; its hasher is the next one. The engine's own
    constructor cannot tell: in a process of its own, plugins are loaded inside of it. named: engines, by configuration.
    """

    coming: tuple[Settings, Any] | None = None
    named: ClassVar[weakref.WeakValueDictionary[int, Hasher]] = weakref.WeakValueDictionary()

    def __init__(self, stock: Callable[..., Any], block: int, digest: Any) -> None:
        self.stock, self.block, self.digest = stock, block, digest
        self.serving: tuple[Settings, Any, str] | None = None

    def serve(self, settings: Settings, vllm_config: Any) -> None:
        """Name blocks for this engine."""
        from tamis.integrations.vllm import fingerprint

        self.serving = (settings, vllm_config, fingerprint.of(vllm_config).hex())
        Hasher.named[id(vllm_config)] = self

    def __call__(self, request: Any) -> Any:
        asked = None if self.serving is None else asked_of(request, self.serving[0], self.serving[1])
        if asked is None or self.serving is None:
            return self.stock(request)
        if request.num_tokens // self.block <= len(request.block_hashes):
            return []  # of every token that is generated: no block is full
        from vllm.v1.core.kv_cache_utils import hash_block_tokens

        settings, _, fingerprint = self.serving
        lora = getattr(request.lora_request, "lora_name", "") if request.lora_request else ""
        own = (str(lora), str(request.cache_salt or ""))
        root = Root(fingerprint, f"{settings.selector}/{settings.tile}/{settings.namespace}", own)
        return block_names(
            asked,
            list(request.all_token_ids),
            request.block_hashes,
            block=self.block,
            root=root,
            make=lambda parent, tokens, extra: hash_block_tokens(self.digest, parent, tokens, extra or None),
        )


def asked_of(request: Any, settings: Settings, vllm_config: Any) -> Asked | None:
    """The same as `checked`, worked out once for a request of the engine's core."""
    if not hasattr(request, "_tamis_asked"):
        asked = checked(request, settings, vllm_config)
        request._tamis_asked = recorded(asked, request.prompt_token_ids, settings)
    found: Asked | None = request._tamis_asked
    return found


def _get_hasher(stock: Callable[..., Any]) -> Callable[..., Any]:
    def get_request_block_hasher(hash_block_size: int, caching_hash_fn: Any, *args: Any, **kwargs: Any) -> Any:
        made = stock(hash_block_size, caching_hash_fn, *args, **kwargs)
        hasher, coming = Hasher(made, hash_block_size, caching_hash_fn), Hasher.coming
        Hasher.coming = None
        if coming is not None:
            hasher.serve(*coming)
        return hasher

    return get_request_block_hasher


def check_named(request: Any, vllm_config: Any) -> None:
    """Raises Unavailable if a request's blocks have vLLM's names, by which exact requests would find them."""
    if len(request.block_hashes) and id(vllm_config) not in Hasher.named:
        raise Unavailable(
            "the engine's blocks are not named by Tamis; vLLM is not as expected, or TamisConnector twice."
        )


def _scheduler_init(stock: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = settings_of(vllm_config)
        if settings is not None:
            # a document that cannot be read after all is computed; vLLM's default would fail its request
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        stock(self, vllm_config, *args, **kwargs)
        Hasher.coming = None if settings is None else (settings, vllm_config)
        if settings is not None:
            if self.need_mamba_block_aligned_split:
                raise Unavailable("the model has Mamba layers, which Tamis does not serve.")
            self.tamis_settings = settings
            self.need_mamba_block_aligned_split = True  # asks `_mamba_block_aligned_split` how long a chunk may be

    return init


def _aligned_split(stock: Callable[..., Any]) -> Callable[..., Any]:
    def split(
        self: Any, request: Any, num_new_tokens: int, local: int = 0, external: int = 0, *args: Any, **kwargs: Any
    ) -> int:
        settings = getattr(self, "tamis_settings", None)
        if settings is None:
            made: int = stock(self, request, num_new_tokens, local, external, *args, **kwargs)
            return made
        asked = asked_of(request, settings, self.vllm_config)
        if asked is None or asked.mode != "sift":
            return num_new_tokens
        start: int = request.num_computed_tokens + local + external
        borders = borders_of(asked, policy_of(asked.selector or settings.selector, settings))
        return chunk_end(borders, start, start + num_new_tokens) - start

    return split


def _invalid_blocks(stock: Callable[..., Any]) -> Callable[..., Any]:
    def handle(self: Any, invalid_block_ids: set[int], *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "tamis_settings", None) is None:
            return stock(self, invalid_block_ids, *args, **kwargs)
        requests, skipped = compat.put_off(self, set(invalid_block_ids))
        for request in requests:
            request.tamis_computes = True
        return skipped

    return handle


CORE = (
    Hook("vllm.v1.engine.input_processor", "InputProcessor.process_inputs", _process_inputs),
    Hook("vllm.v1.engine.core", "get_request_block_hasher", _get_hasher),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler.__init__", _scheduler_init),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler._mamba_block_aligned_split", _aligned_split),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler._handle_invalid_blocks", _invalid_blocks),
)


# -- workers: the step under way; where rows of Tamis are in it, no CUDA graph holds attention -------------------------


def _tamis_step(scheduler_output: Any) -> tuple[Any, Any] | None:
    """(worker, step) if the scheduler's output has rows of Tamis."""
    metadata = getattr(scheduler_output, "kv_connector_metadata", None)
    step = getattr(metadata, "tamis_step", None)
    if step is None:
        return None
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().tamis_worker, step


def _execute(order: Callable[[Any], Callable[[], Any]]) -> Wrap:
    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            found = _tamis_step(scheduler_output)
            if found is None:
                return stock(self, scheduler_output, *args, **kwargs)
            rows.begin(*found, order(self))
            try:
                return stock(self, scheduler_output, *args, **kwargs)
            finally:
                rows.end()

        return execute_model

    return wrap


def _order_v1(runner: Any) -> Callable[[], Any]:
    return lambda: runner.input_batch.req_ids


def _order_v2(runner: Any) -> Callable[[], Any]:
    return lambda: runner.tamis_order


def _no_full_graph_v1(stock: Callable[..., Any]) -> Callable[..., Any]:
    def determine(self: Any, *args: Any, **kwargs: Any) -> Any:
        if rows.running is not None:
            kwargs["use_cascade_attn"] = True  # what rules out a graph of the whole model there
        return stock(self, *args, **kwargs)

    return determine


def _graph_v2(stock: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(
        manager: Any, n_requests: int, n_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any
    ) -> Any:
        if rows.running is not None:
            loras = kwargs.get("num_active_loras", 0)
            own = rows.running.replays(n_requests, n_tokens, loras) if uniform_token_count == 1 else None
            if own is not None:
                return own, None
            uniform_token_count = None  # a graph of the whole model is one of requests with so many tokens each
            kwargs |= {"uniform_decode": False} if "uniform_decode" in kwargs else {}
            if not compat.splits_at_attention(manager):
                kwargs["need_eager"] = True
        return stock(manager, n_requests, n_tokens, uniform_token_count, *args, **kwargs)

    return dispatch


def _capture_v2(stock: Callable[..., Any]) -> Callable[..., Any]:
    def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken = stock(self, *args, **kwargs)
        if settings_of(self.vllm_config) is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            taken += rows.capture(get_kv_transfer_group().tamis_worker, self)
        return taken

    return capture_model


def _replay_v2(stock: Callable[..., Any]) -> Callable[..., Any]:
    def run_fullgraph(self: Any, *args: Any, **kwargs: Any) -> Any:
        replayed = None if rows.running is None else rows.running.replayed
        return stock(self if replayed is None else replayed.manager, *args, **kwargs)

    return run_fullgraph


def _prepare_v2(stock: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = stock(self, *args, **kwargs)
        self.tamis_order = batch.req_ids
        return batch

    return prepare_inputs


def _check_model(stock: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = stock(self, *args, **kwargs)
        if settings_of(self.vllm_config) is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            get_kv_transfer_group().check_model(self.get_model())
        return made

    return initialize_kv_cache


def _warm_up(stock: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        # not where caches are made: what is kept from there, as lists for lengths that come again, is lost in a sleep
        if settings_of(self.vllm_config) is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            get_kv_transfer_group().worker.warm_up()
        return stock(self, *args, **kwargs)

    return compile_or_warm_up_model


V1 = "vllm.v1.worker.gpu_model_runner"
V2 = "vllm.v1.worker.gpu.model_runner"
WORKER = (
    Hook(V1, "GPUModelRunner.execute_model", _execute(_order_v1)),
    Hook(V1, "GPUModelRunner._determine_batch_execution_and_padding", _no_full_graph_v1),
    Hook(V1, "GPUModelRunner.initialize_kv_cache", _check_model),
    Hook("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", _warm_up),
)
WORKER_V2 = (
    Hook(V2, "GPUModelRunner.execute_model", _execute(_order_v2)),
    Hook(V2, "GPUModelRunner.prepare_inputs", _prepare_v2),
    Hook(V2, "GPUModelRunner.initialize_kv_cache", _check_model),
    Hook(V2, "GPUModelRunner.capture_model", _capture_v2),
    Hook(V2, "dispatch_cg_and_sync_dp", _graph_v2),
    Hook("vllm.v1.worker.gpu.cudagraph_utils", "ModelCudaGraphManager.run_fullgraph", _replay_v2),
)
