"""Removing objects from every tier, while others may be copying them between tiers.

Whoever copies an object up or down looks, in the transaction that publishes the copy, whether the original is still there. So what
is removed from memory, then from the disk, then from memory again is gone, unless that last turn found something: then once more.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.stores.base import Result, Status
from kvpool.stores.local.jobs import MISSING, RemoveStep
from kvpool.stores.local.pool import Pool

_TURNS = 4


def remove(pool: Pool, keys: Sequence[bytes], deadline: float) -> list[Result]:
    """OK or MISSING per key; BUSY where it is still being read in some tier. Raises what the writer raises."""
    results = pool.writer.call(RemoveStep(pool, keys), deadline)
    if pool.disk is None:
        return results
    for _ in range(_TURNS):
        below = pool.disk.remove(keys)
        above = pool.writer.call(RemoveStep(pool, keys), deadline)
        results = [_worst(pair) for pair in zip(results, below, strict=True)]
        if not _any(above):
            break
        results = [_worst(pair) for pair in zip(results, above, strict=True)]
    return results


def _any(results: Sequence[Result]) -> bool:
    return any(result.status is not Status.MISSING for result in results)


def _worst(pair: tuple[Result, Result]) -> Result:
    """Of two tiers: what went wrong, else BUSY, else OK, else MISSING."""
    for status in (Status.BUSY, Status.OK, Status.MISSING):
        if all(result.status in (status, Status.OK, Status.MISSING) for result in pair) and status in {r.status for r in pair}:
            return next(result for result in pair if result.status is status)
    return next((result for result in pair if result.status not in (Status.BUSY, Status.OK, Status.MISSING)), MISSING)
