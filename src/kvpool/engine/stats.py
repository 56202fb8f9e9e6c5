"""Counters of the pool and their way to vLLM's /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# name -> what it counts. A name may carry one label after a slash, e.g. "misses/reason=absent".
COUNTERS: dict[str, str] = {
    "lookups": "Lookups asked of the store",
    "lookup_seconds": "Time from asking the store to its answer",
    "queried_tokens": "Prompt tokens not held by the engine that a hit could have covered",
    "hit_tokens": "Tokens found in the pool beyond the engine's own",
    "hits": "Lookups with a usable prefix",
    "misses": "Lookups without one, by reason",
    "loads": "Load jobs that ended, by outcome",
    "loaded_blocks": "Blocks loaded",
    "loaded_bytes": "Bytes loaded",
    "load_seconds": "Time spent in loads",
    "load_failures": "Blocks that failed to load, by status",
    "saves": "Save jobs that ended",
    "saved_blocks": "Blocks stored (those somebody stored before not counted)",
    "known_blocks": "Blocks offered that the store held already",
    "saved_bytes": "Bytes stored",
    "save_seconds": "Time spent in saves",
    "save_failures": "Blocks not stored, by status",
    "dropped_blocks": "Blocks never offered because too many were pinned or the store was down",
}
GAUGES: dict[str, str] = {
    "pinned_blocks": "Device blocks pinned by jobs",
    "breaker_state": "Circuit breaker: 0 closed, 1 half open, 2 open",
    "queued_jobs": "Jobs that wait for a worker thread",
}


@dataclass
class PoolStats(KVConnectorStats):
    """``data`` maps a counter (with its label) to a number, and "gauge:<name>" to its latest value."""

    def add(self, name: str, amount: float = 1) -> None:
        self.data[name] = self.data.get(name, 0) + amount

    def gauge(self, name: str, value: float) -> None:
        self.data[f"gauge:{name}"] = value

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            if name.startswith("gauge:"):
                self.data[name] = max(self.data.get(name, 0), value)
            else:
                self.add(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name.removeprefix("gauge:"): round(value, 4) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class PoolPromMetrics(KVConnectorPromMetrics):
    """``kvpool:<counter>_total`` and ``kvpool:<gauge>`` with vLLM's engine labels, and ``reason`` where a counter has one."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        names = [*labelnames, "reason"]
        self._counters: dict[str, Counter] = {
            name: self._counter_cls(name=f"kvpool:{name}", documentation=text, labelnames=names) for name, text in COUNTERS.items()
        }
        self._gauges: dict[str, Gauge] = {
            name: self._gauge_cls(name=f"kvpool:{name}", documentation=text, labelnames=labelnames) for name, text in GAUGES.items()
        }

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name.startswith("gauge:"):
                self._gauges[name.removeprefix("gauge:")].labels(*labels).set(value)
            else:
                counter, _, label = name.partition("/")
                self._counters[counter].labels(*labels, label.removeprefix("reason=")).inc(value)
