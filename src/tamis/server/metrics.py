"""What dashboards read, under the names that vLLM's have, with `tamis:` before them. Numbers only, no texts."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tamis.engine.request import End
from tamis.engine.service import Engine

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


class EngineCollector(Collector):
    """The engine's and its cache's own counts, read when they are asked for."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._labels = engine, {"model_name": model}

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client`."""
        now, cache = self._engine.statistics(), self._engine.reuse.store.cache.statistics()
        names, values = tuple(self._labels), tuple(self._labels.values())
        gauges = {
            "num_requests_running": ("Requests that are computed.", now.running),
            "num_requests_waiting": ("Requests that wait.", now.waiting),
            "kv_cache_usage_perc": (
                "Pages in use, as a share, stored documents among them.",
                now.pages_used / now.pages,
            ),
        }
        for name, (what, value) in gauges.items():
            gauge = GaugeMetricFamily(f"tamis:{name}", what, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        counters = {
            "num_preemptions": ("Requests that had to wait again.", now.preemptions),
            "segment_cache_misses": ("Stored documents that had to be computed.", cache.computed),
            "dropped_documents": ("Documents that found no room.", cache.refusals),
        }
        for name, (what, value) in counters.items():
            counter = CounterMetricFamily(f"tamis:{name}", what, labels=names)
            counter.add_metric(values, value)
            yield counter
        held = GaugeMetricFamily("tamis:kv_bytes", "Bytes held in each tier.", labels=(*names, "tier"))
        hits = CounterMetricFamily("tamis:segment_cache_hits", "Documents found in each tier.", labels=(*names, "tier"))
        for tier, numbers in cache.tiers.items():
            held.add_metric((*values, tier), numbers.used_bytes)
            hits.add_metric((*values, tier), numbers.hits)
        yield held
        yield hits


class Metrics:
    """One server's numbers, in a registry of their own."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, model))
        self._model = model
        self._ttft = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens.", TOKEN_SECONDS)
        self._each = self._histogram("request_time_per_output_token_seconds", "Mean of a request.", TOKEN_SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "From a request's arrival to its end.")
        self._queue = self._histogram("request_queue_time_seconds", "Before a request's first pass.")
        self._prefill = self._histogram("request_prefill_time_seconds", "From there to the first token.")
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached = self._counter("prompt_tokens_cached", "Of these, read from what was stored.")
        self._new = self._counter("generation_tokens", "New tokens.")
        self._ended = self._counter("request_success", "Requests that were finished.", "finished_reason")
        self._refused = self._counter("request_errors", "Requests that were not.", "code")

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self.registry)

    def first_token(self, seconds: float) -> None:
        """A request's first token came."""
        self._ttft.labels(self._model).observe(seconds)

    def next_token(self, seconds: float) -> None:
        """Another one came so long after the one before."""
        self._between.labels(self._model).observe(seconds)

    def ended(self, end: End, seconds: float) -> None:
        """A request is done, so long after its arrival."""
        observed = {self._whole: seconds, self._queue: end.queue_s, self._prefill: end.prefill_s}
        observed[self._decode] = end.decode_s
        if end.usage.new > 1:
            observed[self._each] = end.decode_s / (end.usage.new - 1)
        for histogram, value in observed.items():
            histogram.labels(self._model).observe(value)
        counted = {self._prompt: end.usage.prompt, self._cached: end.usage.cached, self._new: end.usage.new}
        for counter, tokens in counted.items():
            counter.labels(self._model).inc(tokens)
        self._ended.labels(self._model, end.finish).inc()

    def failed(self, code: str) -> None:
        """A request ended with an error."""
        self._refused.labels(self._model, code).inc()

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"tamis:{name}", what, ("model_name",), registry=self.registry, buckets=buckets)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"tamis:{name}", what, ("model_name", *labels), registry=self.registry)
