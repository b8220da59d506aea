"""Tamis's numbers beside vLLM's own at /metrics: counters that workers and scheduler send as sums since the last step.

A flat dictionary {name: number} goes from the connector to the front end; what is known has words of its own, what is
not becomes a counter all the same. Needs vLLM.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from tamis.integrations.vllm.config import settings_of

PREFIX = "vllm:tamis_"
WORDS = {
    "reused_tokens": "Tokens of documents whose keys and values were there, in the cache's blocks or on the shelf.",
    "documents_loaded": "Documents that came from the shelf; every worker counts its share of one.",
    "documents_unread": "Documents on the shelf that could not be read after all, and were computed again.",
    "documents_saved": "Documents that the shelf took; every worker counts its share of one.",
    "sift_tokens": "Tokens of prompts that were computed sparsely.",
    "sift_unrecorded": "Documents of these without stored bits, where the selector works from such.",
    "sift_tiles": "Tiles of attention that these would have had computed densely.",
    "sift_tiles_computed": "Of these, the tiles that were computed.",
}
REFUSED = "Requests that were refused for what they said of their documents."
ACTIVE = "1 where Tamis's attention and connector run in every worker, for each mode that is served."
_shown: weakref.WeakValueDictionary[int, TamisPromMetrics] = weakref.WeakValueDictionary()  # by configuration


@dataclass
class TamisStats(KVConnectorStats):
    """Sums of one step or one interval."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Back to nothing."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another worker's or step's."""
        for name, number in other.data.items():
            self.data[name] = self.data.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not any(self.data.values())


def stats_of(sums: Mapping[str, int | float]) -> TamisStats | None:
    """What a connector's `get_kv_connector_stats` returns for sums since it was last asked; None for nothing."""
    told = {name: number for name, number in sums.items() if number}
    return TamisStats(data=told) if told else None


class TamisPromMetrics(KVConnectorPromMetrics):
    """The counters, one for each engine, `vllm:tamis_active{mode,version}`, and `vllm:tamis_refused` of the process: it
    takes the requests in, and what it refuses reaches no engine. Several such processes are summed by vLLM."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._make, self._made = metric_types[Counter], dict[str, Any]()
        for name in WORDS:
            self._counter(name)
        import tamis

        settings, names = settings_of(vllm_config), [*labelnames, "mode", "version"]
        active = metric_types[Gauge](
            name=f"{PREFIX}active", documentation=ACTIVE, labelnames=names, multiprocess_mode="mostrecent"
        )
        for values in per_engine_labelvalues.values():
            for mode in () if settings is None else settings.served:
                active.labels(*values, mode, tamis.__version__).set(1)
        first = dict(zip(labelnames, next(iter(per_engine_labelvalues.values())), strict=True))
        common = {name: value for name, value in first.items() if name != "engine"}
        refusals = self._make(name=f"{PREFIX}refused", documentation=REFUSED, labelnames=list(common))
        self.refusals = refusals.labels(*common.values())
        self._config = vllm_config  # its address stays its own as long as this does
        _shown[id(vllm_config)] = self

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's sums."""
        for name, number in transfer_stats_data.items():
            if isinstance(number, int | float) and number > 0:
                self._counter(name).labels(*self.per_engine_labelvalues[engine_idx]).inc(number)

    def _counter(self, name: str) -> Any:
        if name not in self._made:
            words = WORDS.get(name, name.replace("_", " "))
            self._made[name] = self._make(name=f"{PREFIX}{name}", documentation=words, labelnames=self._labelnames)
            for values in self.per_engine_labelvalues.values():
                self._made[name].labels(*values)  # shown as 0 before the first
        return self._made[name]


def count_refused(vllm_config: Any) -> None:
    """A request to this process was refused; where vLLM shows no numbers (--disable-log-stats) nothing is counted."""
    metrics = _shown.get(id(vllm_config))
    if metrics is not None:
        metrics.refusals.inc()
