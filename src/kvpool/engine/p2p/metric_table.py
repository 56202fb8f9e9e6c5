"""Every metric of MooncakeConnectorV1, in the form of engine/metric_table.py. Standard library only."""

from __future__ import annotations

from kvpool.engine.metric_table import MOVE_BUCKETS, Metric

TITLE = "Prefill to decode (MooncakeConnectorV1)"
TRANSFER_METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("offers", "counter", "Prefill: finished requests whose KV was offered to decode"),
        Metric(
            "unread_offers",
            "counter",
            "Of these, how many were not read to the end: `released` by decode or a proxy, `unpublished` (no room in the transfer "
            "buffer, or the copy failed), or `lost` (time up, reset)",
            ("reason",),
        ),
        Metric(
            "withheld_offers",
            "counter",
            "Prefill: requests not offered, so that decode computes: too much is held for decode already (`blocks`), "
            "KVPOOL_SECRET is set and the request is not signed with it (`unsigned`), or the proxy has given it up before it was "
            "computed (`released`)",
            ("reason",),
        ),
        Metric("open_offers", "gauge", "Prefill: offers that have not ended"),
        Metric("offer_pinned_blocks", "gauge", "Prefill: blocks that are kept for decode"),
        Metric(
            "releases",
            "counter",
            "Decode: offers given up, by what came of telling prefill: `told`, `restarted` (nothing is held there any more), "
            "`unreachable` (no answer until the offer's time was up), or `dropped` (too many waited)",
            ("reason",),
        ),
        Metric("pulls", "counter", "Decode: pulls that have ended on a rank, by how", ("reason",)),
        Metric("pulled_bytes", "counter", "Decode: bytes that pulls have read"),
        Metric("pull_seconds", "histogram", "Decode: from the start of a pull that went well to its end", (), MOVE_BUCKETS),
    )
}
