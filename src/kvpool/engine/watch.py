"""What the operator reads in the log: a summary a minute, and one warning when nothing ever hits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from vllm.logger import init_logger

logger = init_logger("vllm.kvpool")

SUMMARY_SECONDS = 60.0


class Watch:
    """Collects counters; ``alarm_after`` lookups without a single hit raise the zero-hit alarm, once (0: never).

    ``explain`` finds the likely cause; it may ask the store, so it is run by ``start`` off the engine's thread.
    """

    def __init__(
        self,
        alarm_after: int,
        explain: Callable[[int], str],
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
        self._alarmed = alarm_after <= 0

    def add(self, counters: Mapping[str, float]) -> None:
        """Add what a side has counted since it last told."""
        for name, amount in counters.items():
            if not name.startswith("gauge:"):
                self._window[name] = self._window.get(name, 0) + amount
        self._lookups += int(counters.get("lookups", 0))
        self._unknown += int(counters.get("misses/reason=unknown", 0) + counters.get("misses/reason=timeout", 0))
        if counters.get("hits"):
            self._alarmed = True  # it works: never alarm
        if not self._alarmed and self._lookups >= self._alarm_after:
            self._alarmed = True
            lookups, unknown = self._lookups, self._unknown
            self._start(lambda: logger.warning("kvpool: no hit in %d lookups: %s", lookups, self._explain(unknown)))
        self._summarise()

    def _summarise(self) -> None:
        now = self._clock()
        if now - self._since < SUMMARY_SECONDS:
            return
        window, seconds = self._window, now - self._since
        self._window, self._since = {}, now
        if not window:
            return
        get = window.get
        queried = get("queried_tokens", 0)
        logger.info(
            "kvpool: last %.0f s: %d lookups, %d with a hit, %.1f %% of %d tokens asked for; loaded %.1f MB, saved %.1f MB "
            "(%d blocks, %d known already), failed blocks: %d loads, %d saves, dropped %d",
            seconds,
            get("lookups", 0),
            get("hits", 0),
            100 * get("hit_tokens", 0) / queried if queried else 0.0,
            queried,
            get("loaded_bytes", 0) / 1e6,
            get("saved_bytes", 0) / 1e6,
            get("saved_blocks", 0),
            get("known_blocks", 0),
            sum(v for k, v in window.items() if k.startswith("load_failures")),
            sum(v for k, v in window.items() if k.startswith("save_failures")),
            get("dropped_blocks", 0),
        )
