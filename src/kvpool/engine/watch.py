"""What the operator reads in the log: a summary a minute, and one line when nothing ever hits."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from vllm.logger import init_logger

from kvpool.core.diagnosis import Diagnosis
from kvpool.engine.stats import GAUGE, SEEN, split_name

logger = init_logger("vllm.kvpool")

SUMMARY_SECONDS = 60.0
LINE = "kvpool: no hit in %d lookups: %s"


class Watch:
    """Collects counters; ``alarm_after`` lookups without a single hit raise the zero-hit alarm (0: never).

    ``explain(lookups, unknown)`` finds the likely cause; it may ask the store, so ``start`` runs it off the engine's thread. What
    alarms is one warning, and the end of it. Anything else is told once, at level INFO, and asked for again after as many lookups
    more: others may have come.
    """

    def __init__(
        self,
        alarm_after: int,
        explain: Callable[[int, int], Diagnosis],
        start: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._alarm_after = alarm_after
        self._explain = explain
        self._start = start
        self._clock = clock
        self._since = clock()
        self._window: dict[str, float] = {}
        self._lookups = 0
        self._unknown = 0
        self._next = alarm_after
        self._asking = False
        self._told = False
        self._settled = alarm_after <= 0

    def add(self, counters: Mapping[str, Any]) -> None:
        """Add what a side has counted since it last told."""
        for name, amount in counters.items():
            if not name.startswith((GAUGE, SEEN)):
                self._window[name] = self._window.get(name, 0) + amount
        self._lookups += int(counters.get("lookups", 0))
        self._unknown += int(counters.get("misses/reason=unknown", 0) + counters.get("misses/reason=timeout", 0))
        if counters.get("hits"):
            self._settled = True  # it works: never alarm
        if not (self._settled or self._asking) and self._lookups >= self._next:
            self._next = self._lookups + self._alarm_after
            self._asking = True
            lookups, unknown = self._lookups, self._unknown
            self._start(lambda: self._look(lookups, unknown))
        self._summarise()

    def _look(self, lookups: int, unknown: int) -> None:
        """One at a time, on a thread of the store's."""
        try:
            found = self._explain(lookups, unknown)
            if found.alarming:
                self._settled = True
                logger.warning(LINE, lookups, found.cause)
            elif not self._told:
                self._told = True
                logger.info(LINE, lookups, found.cause)
        finally:
            self._asking = False

    def _summarise(self) -> None:
        now = self._clock()
        if now - self._since < SUMMARY_SECONDS:
            return
        window, seconds = self._window, now - self._since
        self._window, self._since = {}, now
        if window:
            logger.info("kvpool: last %.0f s: %s", seconds, summary(window))


def summary(window: Mapping[str, float]) -> str:
    """One line, however much has happened: hits, the reasons of misses, what moved by tier, and what went wrong."""
    totals: dict[str, float] = defaultdict(float)
    by_label: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, amount in window.items():
        base, labels = split_name(name)
        totals[base] += amount
        for value in labels.values():
            by_label[base][value] += amount
    queried = totals["queried_tokens"]

    def shares(base: str, unit: float = 1.0) -> str:
        parts = [f"{value} {amount / unit:.{1 if unit > 1 else 0}f}" for value, amount in _largest(by_label[base]) if amount]
        return f" ({', '.join(parts)})" if parts else ""

    return (
        f"{totals['lookups']:.0f} lookups, {totals['hits']:.0f} with a hit, {totals['misses']:.0f} without{shares('misses')}; "
        f"{100 * totals['hit_tokens'] / queried if queried else 0.0:.1f} % of {queried:.0f} tokens asked for were there; loaded "
        f"{totals['loaded_tokens']:.0f} tokens{shares('loaded_tokens')}, {totals['loaded_bytes'] / 1e6:.1f} MB"
        f"{shares('loaded_bytes', 1e6)}; saved {totals['saved_bytes'] / 1e6:.1f} MB ({totals['saved_blocks']:.0f} blocks, "
        f"{totals['known_blocks']:.0f} known already); failed blocks: {totals['load_failures']:.0f} loads"
        f"{shares('load_failures')}, {totals['save_failures']:.0f} saves{shares('save_failures')}; "
        f"dropped {totals['dropped_blocks']:.0f}{shares('dropped_blocks')}; "
        f"evicted {totals['store_evicted_objects']:.0f}{shares('store_evicted_objects')}"
    )


def _largest(amounts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(amounts.items(), key=lambda item: -item[1])
