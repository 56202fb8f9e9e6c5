"""What a proxy tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool.proxy.admission import Admission
from kvpool.proxy.table import State, Table

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
LABELS = ("side", "instance")


class Metrics:
    """Counters and histograms, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "Requests by endpoint and status (499: the client went away).", "endpoint", "status"
        )
        self.retries = self._counter("retries", "Connections that failed and were tried again.", "side")
        self.restarts = self._counter("restarts", "Requests that were started again on another instance.")
        self.releases = self._counter("releases", "Offers of prefill given up, by what came of telling it.", "outcome")
        self.releases_waiting = Gauge(
            "kvpool_proxy_releases_waiting", "Offers given up of which prefill has not been told yet.", registry=self.registry
        )
        self.broken = self._counter("broken_streams", "Streams that ended with an error after the first byte.")
        self.prefill_seconds = self._histogram("prefill_seconds", "Seconds that prefill requests took.")
        self.first_byte_seconds = self._histogram("first_byte_seconds", "Seconds until the first byte of an answer.")
        self.request_seconds = self._histogram("request_seconds", "Seconds until the end of an answer.")

    def observe(self, table: Table, admission: Admission) -> None:
        self.registry.register(_Gauges(table, admission))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvpool_proxy_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"kvpool_proxy_{name}", text, buckets=SECONDS, registry=self.registry)


class _Gauges(Collector):
    """Read when somebody asks."""

    def __init__(self, table: Table, admission: Admission) -> None:
        self._table, self._admission = table, admission

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("kvpool_proxy_running", "Requests that are served now.", value=self._admission.running)
        yield GaugeMetricFamily(
            "kvpool_proxy_answers",
            "Answers (prompts times samples) of these requests.",
            value=self._admission.answers,
        )
        yield GaugeMetricFamily("kvpool_proxy_queued", "Requests that wait for a place.", value=self._admission.queued)
        up = GaugeMetricFamily("kvpool_proxy_instance_up", "1 where an instance takes requests.", labels=LABELS)
        active = GaugeMetricFamily("kvpool_proxy_instance_active_tokens", "Tokens that an instance works on.", labels=LABELS)
        held = GaugeMetricFamily("kvpool_proxy_instance_held_tokens", "Tokens whose KV waits to be fetched.", labels=LABELS)
        requests = GaugeMetricFamily("kvpool_proxy_instance_requests", "Requests of an instance.", labels=LABELS)
        for one in self._table.instances():
            labels = (str(one.side), str(one.address))
            up.add_metric(labels, float(one.state is State.READY))
            active.add_metric(labels, one.active)
            held.add_metric(labels, one.held)
            requests.add_metric(labels, one.requests)
        yield from (up, active, held, requests)
