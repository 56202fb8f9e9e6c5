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
_AHEAD_BYTES = 16 << 20  # of one part: small enough that copying and reading overlap, large enough for several reads at once
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
        nbytes = self._batch.object_nbytes
        lengths = {row: ENTRY.unpack(raw)[2] for row, raw in zip(pending, there, strict=True) if raw is not None}
        for row, length in lengths.items():
            if length != nbytes:
                self._results[row] = other_length(length, nbytes)
        pending = [row for row, length in lengths.items() if length == nbytes]
        self._in_turns(pending)

    def _in_turns(self, pending: list[int]) -> None:
        """Part by part: while one is copied to the caller, the next is read from the disk."""
        ahead: tuple[Landing, list[int]] | None = None
        try:
            while pending or ahead is not None:
                if ahead is None and self._overdue(pending):
                    return
                landing, rows = ahead or self._begin(pending)
                pending = [row for row in pending if row not in set(rows)]
                # Where memory is short, one part at a time: nobody waits for buffers that he has himself.
                more = pending and not landing.left and time.monotonic() < self._deadline
                ahead = self._begin(pending) if more else None
                pending = self._end(landing, rows) + pending
        finally:
            if ahead is not None:
                ahead[0].end()

    def _begin(self, pending: list[int]) -> tuple[Landing, list[int]]:
        """The reads of the next part run."""
        step = next(parts(len(pending), self._batch.object_nbytes, min(_AHEAD_BYTES, self._tier.pool.geometry.capacity // 8)))
        rows = list({self._batch.keys[row]: row for row in reversed(pending[step])}.values())[::-1]
        return self._land(rows, buffers=True), rows

    def _land(self, rows: list[int], *, buffers: bool) -> Landing:
        return Landing(self._tier, [self._batch.keys[row] for row in rows], self._deadline, buffers=buffers)

    def _end(self, landing: Landing, rows: list[int], *, buffers: bool = True) -> list[int]:
        """Copy what has come; the rows that are to be tried once more."""
        try:
            landing.finish()
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
            return self._end(self._land(again, buffers=False), again, buffers=False)  # too large for them: a slot at any price
        return again

    def _overdue(self, rows: list[int]) -> bool:
        """Whether it is too late for these, and then their result."""
        late = time.monotonic() >= self._deadline
        if late:
            for row in rows:
                self._results[row] = OVERDUE
        return late

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
            landing = Landing(tier, [keys[row] for row in part], deadline, buffers=False).finish()
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
