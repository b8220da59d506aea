"""Numbers that workers send, added up, and shown as Prometheus has them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.version")
prometheus_client = pytest.importorskip("prometheus_client")


def shown(**settings: object) -> tuple[object, prometheus_client.CollectorRegistry]:
    from tamis.integrations.vllm.metrics import TamisPromMetrics

    registry = prometheus_client.CollectorRegistry()
    kinds = {
        kind: lambda kind=kind, **words: kind(registry=registry, **words)
        for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    }
    transfer = SimpleNamespace(
        kv_connector="TamisConnector",
        kv_connector_module_path="tamis.integrations.vllm.connector",
        kv_connector_extra_config=settings,
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


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        ({"modes": "sift"}, ["sift"]),
        ({}, ["sift"]),
        ({"modes": "reuse"}, []),
        ({"accept_block_attention": True}, ["sift", "reuse"]),
    ],
    ids=["sift", "not accepted", "nothing", "both"],
)
def test_the_active_flag_says_version_and_modes_that_are_served(settings: dict[str, object], modes: list[str]) -> None:
    import tamis

    metrics, registry = shown(**settings)
    for engine in "01":
        label = {"model_name": "m", "engine": engine, "version": tamis.__version__}
        for mode in ("sift", "reuse"):
            value = registry.get_sample_value("vllm:tamis_active", label | {"mode": mode})
            assert value == (1 if mode in modes else None)
    del metrics


def test_refusals_are_of_the_process_that_takes_requests_in() -> None:
    from tamis.integrations.vllm.metrics import count_refused

    metrics, registry = shown()
    assert registry.get_sample_value("vllm:tamis_refused_total", {"model_name": "m"}) == 0
    count_refused(metrics._config)
    count_refused(SimpleNamespace())  # an engine whose numbers are not shown
    assert registry.get_sample_value("vllm:tamis_refused_total", {"model_name": "m"}) == 1
