"""What the store looks like, asked every few seconds on a thread of its own: never on the scheduler's, and by one rank only."""

from __future__ import annotations

import threading

from vllm.logger import init_logger

from kvpool.engine.stats import PoolStats, labelled
from kvpool.stores.base import Store, StoreStats, Tier, TierStats

logger = init_logger("vllm.kvpool")

SECONDS = 5.0
_CLOSE_S = 0.5


class StoreGauges:
    """``tell`` adds the latest picture, once, to what goes to /metrics."""

    def __init__(self, store: Store, seconds: float = SECONDS) -> None:
        self._store = store
        self._own_tier = Tier.DRAM if store.capabilities.mapped else Tier.REMOTE
        self._seconds = seconds
        self._fresh: StoreStats | None = None
        self._last: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="kvpool-store-gauges", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while True:
            try:
                picture = self._store.stats()
                if picture.capacity_bytes or picture.tiers:  # else the store could not tell
                    self._fresh = picture
            except Exception as error:  # noqa: BLE001 - no numbers this time
                logger.debug("kvpool: the store tells no numbers: %s", error)
            if self._stop.wait(self._seconds):
                return

    def tell(self, stats: PoolStats) -> None:
        """Add the gauges and what the pool's own counters have grown by, if there is a new picture."""
        picture, self._fresh = self._fresh, None
        if picture is None:
            return
        for name, value in (("leases", picture.leases), ("pinned", picture.pinned), ("writing", picture.writing)):
            stats.gauge(f"store_{name}", value)
        for tier in picture.tiers or (self._single(picture),):
            label = tier.tier.value
            stats.gauge(labelled("store_capacity_bytes", tier=label), tier.capacity_bytes)
            stats.gauge(labelled("store_used_bytes", tier=label), tier.used_bytes)
            stats.gauge(labelled("store_objects", tier=label), tier.objects)
            stats.gauge(labelled("store_ok", tier=label), int(tier.ok))
            self._grow(stats, labelled("store_evicted_objects", tier=label), tier.evicted_objects)
            self._grow(stats, labelled("store_written_bytes", tier=label), tier.written_bytes)
            self._grow(stats, labelled("store_dropped_objects", tier=label), tier.dropped_objects)
            self._grow(stats, labelled("store_errors", tier=label), tier.errors)

    def _single(self, picture: StoreStats) -> TierStats:
        """Of a store that does not tell its tiers apart."""
        return TierStats(
            self._own_tier, picture.capacity_bytes, picture.used_bytes, picture.objects, evicted_objects=picture.evicted_objects
        )

    def _grow(self, stats: PoolStats, name: str, value: int) -> None:
        """The pool's counters are older than this engine, and begin anew when the pool does."""
        before = self._last.get(name, value)
        self._last[name] = value
        stats.add(name, value - before if value >= before else value)

    def close(self) -> None:
        """A call that hangs is left alone: the thread is a daemon."""
        self._stop.set()
        self._thread.join(_CLOSE_S)
