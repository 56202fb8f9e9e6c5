"""Counters of MooncakeConnectorV1 and their way to vLLM's /metrics."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.engine.p2p.metric_table import TRANSFER_METRICS
from kvpool.engine.stats import Counts, TableMetrics


@dataclass
class TransferStats(Counts):
    """See engine/p2p/metric_table.py for the names."""


class TransferPromMetrics(TableMetrics):
    table = TRANSFER_METRICS
