"""Counters of the pool and their way to vLLM's /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpool.engine.metric_table import METRICS, MISS_REASONS, PREFIX, Metric

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GAUGE = "gauge:"
SEEN = "seen:"


def labelled(name: str, **labels: str) -> str:
    """The name of a metric with its labels, as ``PoolStats`` keeps it: ``misses/reason=absent``."""
    return name + "/" + ",".join(f"{label}={value}" for label, value in labels.items()) if labels else name


def split_name(name: str) -> tuple[str, dict[str, str]]:
    """The metric and its labels, of what ``labelled`` made."""
    base, _, labels = name.partition("/")
    return base, dict(pair.split("=", 1) for pair in labels.split(",")) if labels else {}


@dataclass
class Counts(KVConnectorStats):
    """What happened since it was last taken. ``data`` maps ``labelled`` names to an amount; after "gauge:" to the latest value,
    after "seen:" to the list of values seen, of a histogram. It travels as it is from workers to the scheduler and the API server.
    """

    def add(self, name: str, amount: float = 1) -> None:
        self.data[name] = self.data.get(name, 0) + amount

    def gauge(self, name: str, value: float) -> None:
        self.data[GAUGE + name] = value

    def observe(self, name: str, value: float) -> None:
        self.data.setdefault(SEEN + name, []).append(value)

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Counts of several ranks, or of several moments, add up; of gauges the largest counts."""
        for name, value in other.data.items():
            if name.startswith(GAUGE):
                self.data[name] = max(self.data.get(name, value), value)
            elif name.startswith(SEEN):
                self.data[name] = [*self.data.get(name, ()), *value]
            else:
                self.add(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: of a histogram the number and the mean."""
        told: dict[str, int | float] = {}
        for name, value in sorted(self.data.items()):
            if name.startswith(SEEN):
                told[f"{name.removeprefix(SEEN)} count"] = len(value)
                told[f"{name.removeprefix(SEEN)} mean"] = round(sum(value) / len(value), 6)
            else:
                told[name.removeprefix(GAUGE)] = round(value, 4)
        return told

    def is_empty(self) -> bool:
        return not self.data


@dataclass
class PoolStats(Counts):
    """Of AscendStoreConnector: see metric_table.py for the names."""


def pool_stats(stats: KVConnectorStats | None) -> PoolStats | None:
    """Ours of what vLLM has collected: under a MultiConnector they are one among those of several connectors."""
    if stats is None or isinstance(stats, PoolStats):
        return stats
    return next((one for one in stats.data.values() if isinstance(one, PoolStats)), None)


class TableMetrics(KVConnectorPromMetrics):
    """The metrics of a table with vLLM's labels of the engine, and their own."""

    table: ClassVar[Mapping[str, Metric]]

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        classes = {"counter": self._counter_cls, "gauge": self._gauge_cls, "histogram": self._histogram_cls}
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        for metric in self.table.values():
            more = {"buckets": metric.buckets} if metric.buckets else {}
            self._metrics[metric.name] = classes[metric.kind](
                name=PREFIX + metric.name, documentation=metric.text, labelnames=[*labelnames, *metric.labels], **more
            )
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """A series that appears with its first count hides that count from ``rate``; so those known from the start exist."""
        for engine in self.per_engine_labelvalues.values():
            for metric in self.table.values():
                if not metric.labels and metric.kind != "gauge":
                    self._metrics[metric.name].labels(*engine)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            base, labels = split_name(name.removeprefix(GAUGE).removeprefix(SEEN))
            if base not in self.table:
                continue  # of a worker of another version
            metric: Any = self._metrics[base].labels(*engine, *(labels.get(label, "") for label in self.table[base].labels))
            if name.startswith(GAUGE):
                metric.set(value)
            elif name.startswith(SEEN):
                for one in value:
                    metric.observe(one)
            else:
                metric.inc(value)


class PoolPromMetrics(TableMetrics):
    table = METRICS

    def _begin_at_zero(self) -> None:
        super()._begin_at_zero()
        for engine in self.per_engine_labelvalues.values():
            for base in ("misses", "missed_tokens"):
                for reason in MISS_REASONS:
                    self._metrics[base].labels(*engine, reason)
