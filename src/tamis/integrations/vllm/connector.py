"""TamisConnector: vLLM's KV connector, whose presence in the configuration switches Tamis on.

    --kv-transfer-config '{"kv_connector": "TamisConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "tamis.integrations.vllm.connector", "kv_connector_extra_config": {…}}'

One instance beside the scheduler, one in each worker. See `config.Settings` for what the extra configuration may hold.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from tamis.core.errors import InvalidInput
from tamis.core.log import logger, show_with
from tamis.integrations.vllm import compat, fingerprint, plugin
from tamis.integrations.vllm.config import settings_of
from tamis.integrations.vllm.scheduler_side import SchedulerSide
from tamis.integrations.vllm.step import Step
from tamis.integrations.vllm.worker_side import WorkerSide

log = logger("vllm")


class TamisMetadata(KVConnectorMetadata):
    """What the scheduler's side tells the workers' of one step."""

    def __init__(self, step: Step) -> None:
        self.tamis_step = step


class TamisConnector(KVConnectorBase_V1):
    """Both sides; each method belongs to one of them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises Unavailable where Tamis cannot do what is configured, InvalidInput for settings that cannot be."""
        super().__init__(vllm_config, role, kv_cache_config)
        show_with("vllm")
        plugin.check_registered()
        version = compat.check_version()
        settings = settings_of(vllm_config)
        if settings is None:
            raise InvalidInput(
                "TamisConnector is used below another connector; give it as kv_connector itself, with "
                "kv_connector_module_path 'tamis.integrations.vllm.connector'."
            )
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        address = fingerprint.of(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(settings, vllm_config, kv_cache_config, address)
            modes = ", ".join(settings.served) or "no mode"
            log.info("Tamis is active in vLLM %s: %s, selector %s", version, modes, settings.selector)
        else:
            self._worker = WorkerSide(settings, vllm_config, kv_cache_config, address)

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler's side."""
        assert self._scheduler is not None, "called on a worker's connector"
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        """A worker's side."""
        assert self._worker is not None, "called on the scheduler's connector"
        return self._worker

    @property
    def tamis_worker(self) -> Any:
        """What the hooks of a worker need."""
        return self.worker.state

    def check_model(self, model: Any) -> None:
        """Called with the loaded model, before the first request."""
        self.worker.check_model(model)

    # -- the scheduler's side

    def on_new_request(self, request: Any) -> None:
        """Called before the request's blocks are looked for."""
        self.scheduler.came(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens behind the computed ones that lie on the shelf; they are loaded in the same step."""
        return self.scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request's blocks are there; what was matched will be loaded into them."""
        self.scheduler.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> TamisMetadata:
        """What the workers do in this step."""
        return TamisMetadata(self.scheduler.step(scheduler_output))

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once; the answer says what was reused."""
        return False, self.scheduler.finished(request)

    # -- a worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Check that the layers are Tamis's, and keep their caches."""
        self.worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load documents before the forward pass."""
        self.worker.load(self._get_connector_metadata().tamis_step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is loaded before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Documents are saved whole, after the last layer."""

    def wait_for_save(self) -> None:
        """Copy finished documents; they are written in the background."""
        self.worker.save(self._get_connector_metadata().tamis_step)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose document could not be read after all; vLLM computes them anew."""
        return self.worker.taken_errors()

    def shutdown(self) -> None:
        """Wait for what is being written."""
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()

    # -- numbers

    def get_kv_connector_stats(self) -> Any:
        """Sums since the last call; None if there are none."""
        taken = self.scheduler.counters.taken() if self._worker is None else self._worker.taken_counters()
        if not taken:
            return None
        from tamis.integrations.vllm import metrics

        return metrics.stats_of(taken)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """What workers sent, on the scheduler's side."""
        from tamis.integrations.vllm import metrics

        return metrics.TamisStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> Any:
        """Counters beside vLLM's own."""
        from tamis.integrations.vllm import metrics

        return metrics.TamisPromMetrics(*args, **kwargs)
