"""Numbers that workers send, added up, and shown as Prometheus has them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.version")
prometheus_client = pytest.importorskip("prometheus_client")


def shown() -> tuple[object, dict[str, float]]:
    from tamis.integrations.vllm.metrics import TamisPromMetrics

    registry = prometheus_client.CollectorRegistry()
    kinds = {
        kind: lambda kind=kind, **words: kind(registry=registry, **words)
        for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    }
    transfer = SimpleNamespace(
        kv_connector="TamisConnector",
        kv_connector_module_path="tamis.integrations.vllm.connector",
        kv_connector_extra_config={"modes": "sift"},
    )
    config = SimpleNamespace(kv_transfer_config=transfer)
    metrics = TamisPromMetrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    return metrics, registry


def test_sums_of_workers_and_steps_become_counters() -> None:
    from tamis.integrations.vllm.metrics import TamisStats, stats_of

    assert stats_of({"sift_tiles": 0}) is None
    one, two = stats_of({"reused_tokens": 5, "sift_tiles": 0}), stats_of({"reused_tokens": 2, "sift_tiles": 7})
    assert one.data == {"reused_tokens": 5} and not one.is_empty()
    both = TamisStats(data=dict(one.data)).aggregate(two)
    assert both.reduce() == {"reused_tokens": 7, "sift_tiles": 7}
    metrics, registry = shown()
    metrics.observe(both.data, 1)
    metrics.observe({"reused_tokens": 1, "something_new": 3}, 1)
    label = {"model_name": "m", "engine": "1"}
    assert registry.get_sample_value("vllm:tamis_reused_tokens_total", label) == 8
    assert registry.get_sample_value("vllm:tamis_something_new_total", label) == 3
    assert registry.get_sample_value("vllm:tamis_reused_tokens_total", label | {"engine": "0"}) == 0
    both.reset()
    assert both.is_empty()


def test_the_active_flag_says_modes_and_version() -> None:
    import tamis

    _, registry = shown()
    label = {"model_name": "m", "engine": "0", "version": tamis.__version__}
    assert registry.get_sample_value("vllm:tamis_active", label | {"mode": "sift"}) == 1
    assert registry.get_sample_value("vllm:tamis_active", label | {"mode": "reuse"}) is None
