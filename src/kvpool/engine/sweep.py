"""The sweep: do blocks that were told as stored still lie in the pool? Other processes evict too, and tell nobody.

A few are looked at every ``EVERY_S`` while the engine steps, off its thread; only in stores that are mapped, where a look costs
microseconds and leaves no trace (elsewhere it would count as a use and keep cold objects alive).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvpool.core.jobs import BlockName
from kvpool.core.keys import block_keys
from kvpool.engine.kv_events import KvEvents, Told
from kvpool.engine.threads import Ticket
from kvpool.stores.base import EVICTED, MISS, Store

BLOCKS = 1024  # looked at in one go
EVERY_S = 0.5
Look = Sequence[tuple[BlockName, Told]]


class Sweep:
    """``run`` is how a task is run off the engine's thread."""

    def __init__(self, store: Store, events: KvEvents, run: Callable[[Callable[[], Look]], Ticket[Look]]) -> None:
        self._store = store
        self._events = events
        self._run = run
        self._ticket: Ticket[Look] | None = None
        self._next = 0.0
        self._on = store.capabilities.mapped

    def step(self) -> None:
        """Take in what the last look has found, and start the next when it is due. Never waits."""
        now = time.monotonic()
        if not self._on or now < self._next:
            return
        if self._ticket is not None:
            if not self._ticket.done():
                return
            self._events.gone(self._ticket.value or ())
            self._ticket = None
        self._next = now + EVERY_S
        chosen = self._events.oldest(BLOCKS)
        if chosen:
            self._ticket = self._run(lambda: self._missed(chosen))

    def _missed(self, chosen: Look) -> Look:
        """Those of which some shard is not there; where the store cannot tell, the block counts as there."""
        keys: list[bytes] = []
        rows: list[int] = []
        for row, ((group, name), told) in enumerate(chosen):
            for shard in told.space.shards[group]:
                keys += block_keys(shard.prefix, [name])
                rows.append(row)
        answers = self._store.exists(keys)
        missing = {row for row, answer in zip(rows, answers, strict=False) if answer is MISS or answer is EVICTED}
        return [one for row, one in enumerate(chosen) if row in missing]
