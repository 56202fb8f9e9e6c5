"""get and pin of objects that only the disk has."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvpool.devices import CopyEngine
from kvpool.stores.base import Batch, Result, Status, Tier
from kvpool.stores.local.disk.promote import AGAIN, OVERDUE, Landing
from kvpool.stores.local.geometry import slot_bytes_for
from kvpool.stores.local.index import ENTRY
from kvpool.stores.local.jobs import MISSING
from kvpool.stores.local.transfer import copy_rows, other_length, parts, read_memory

if TYPE_CHECKING:
    from kvpool.stores.local.disk.tier import DiskTier

_TRIES = 3
_PROMOTE_KEYS = 256
_NO_PROGRESS_S = 0.5
NO_MEMORY = Result(Status.NO_SPACE, text="no memory to read it into: everything is leased, or it is larger than the buffers")


class Fetch:
    """Fill in the rows of ``results`` that memory lacks."""

    def __init__(self, tier: DiskTier, engine: CopyEngine, batch: Batch, results: list[Result], deadline: float) -> None:
        self._tier = tier
        self._engine = engine
        self._batch = batch
        self._results = results
        self._deadline = deadline
        self._tries: dict[int, int] = {}

    def run(self) -> None:
        pending = [row for row, result in enumerate(self._results) if result is MISSING]
        there = self._tier.entries([self._batch.keys[row] for row in pending])
        nbytes, capacity = self._batch.object_nbytes, self._tier.pool.geometry.capacity
        lengths = {row: ENTRY.unpack(raw)[2] for row, raw in zip(pending, there, strict=True) if raw is not None}
        for row, length in lengths.items():
            if length != nbytes:
                self._results[row] = other_length(length, nbytes)
        pending = [row for row, length in lengths.items() if length == nbytes]
        while pending:
            if time.monotonic() >= self._deadline:
                for row in pending:
                    self._results[row] = OVERDUE
                return
            step = next(parts(len(pending), nbytes, capacity))
            part = list({self._batch.keys[row]: row for row in reversed(pending[step])}.values())[::-1]
            again = self._part(part)
            chosen = set(part)
            pending = again + [row for row in pending if row not in chosen]

    def _part(self, rows: list[int], *, buffers: bool = True) -> list[int]:
        """One landing; the rows that are to be tried once more."""
        landing = Landing(self._tier, [self._batch.keys[row] for row in rows], self._deadline, buffers=buffers)
        try:
            progress = bool(landing.places)
            self._copy(rows, landing.places)
        finally:
            landing.end()
        again = [rows[place] for place in landing.left]
        for place, result in landing.results.items():
            row = rows[place]
            if result is AGAIN:
                self._results[row] = MISSING
                read_memory(self._tier.pool, self._engine, self._batch, [row], self._results, self._deadline)
                if self._results[row] is MISSING and self._try_again(row):
                    again.append(row)
            else:
                self._results[row] = result
        stuck = bool(landing.left) and not progress
        if stuck and not buffers:
            for place in landing.left:
                self._results[rows[place]] = NO_MEMORY
            return [row for row in again if self._results[row] is not NO_MEMORY]
        if stuck and not self._tier.bounce.wait(slot_bytes_for(self._batch.object_nbytes), self._deadline):
            return self._part(again, buffers=False)  # too large for the buffers: a slot at any price
        return again

    def _try_again(self, row: int) -> bool:
        self._tries[row] = self._tries.get(row, 0) + 1
        return self._tries[row] < _TRIES

    def _copy(self, rows: list[int], places: dict[int, tuple[int, int]]) -> None:
        wanted = self._batch.object_nbytes
        for place, (_, nbytes) in places.items():
            if nbytes != wanted:
                self._results[rows[place]] = other_length(nbytes, wanted)
        right = [place for place, (_, nbytes) in places.items() if nbytes == wanted]
        if not right:
            return
        chosen = np.array([rows[place] for place in right], dtype=np.int64)
        bases = np.array([places[place][0] for place in right], dtype=np.int64)
        outcome = OVERDUE  # nobody may write into the caller's memory by then
        if time.monotonic() < self._deadline:
            outcome = copy_rows(self._engine, self._batch, chosen, bases, Result(Status.OK, wanted, tier=Tier.DISK))
        for row in chosen.tolist():
            self._results[row] = outcome


@contextmanager
def promoted(tier: DiskTier, keys: Sequence[bytes], deadline: float) -> Iterator[dict[int, Result]]:
    """Around a pin: what only the disk has is in memory meanwhile. Says by row what became of those objects; OK: promoted."""
    outcome: dict[int, Result] = {}
    with ExitStack() as held:
        in_memory = tier.pool.entries(keys)
        below = tier.entries(keys)
        first = {key: row for row, key in reversed(list(enumerate(keys)))}
        pending = [row for row in first.values() if in_memory[row] is None and below[row] is not None]
        stuck_at = time.monotonic() + _NO_PROGRESS_S
        while pending:
            part = pending[:_PROMOTE_KEYS]
            landing = Landing(tier, [keys[row] for row in part], deadline, buffers=False)
            held.callback(landing.end)
            for place in landing.places:
                outcome[part[place]] = Result(Status.OK, tier=Tier.DISK)
            for place, result in landing.results.items():
                outcome[part[place]] = Result(Status.OK, tier=Tier.DRAM) if result is AGAIN else result
            pending = [part[place] for place in landing.left] + pending[_PROMOTE_KEYS:]
            now = time.monotonic()
            if landing.places:
                stuck_at = now + _NO_PROGRESS_S
            elif now >= min(stuck_at, deadline):
                outcome.update(dict.fromkeys(pending, NO_MEMORY))
                break
            elif pending:
                time.sleep(0.005)
        yield outcome
