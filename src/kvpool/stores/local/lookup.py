"""Lookups over all tiers: memory first, then, of what it lacks, the disk. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Sequence

import lmdb

from kvpool.stores.base import EVICTED, MISS, UNKNOWN, Answer, Hit, Tier
from kvpool.stores.local.pool import Pool
from kvpool.stores.local.transfer import Pinned, pin

_FAULTS = (OSError, lmdb.Error)

Token = list[tuple[Pool, list[int], int]]  # what is held, and until when


class Hits:
    """Answers by tier and length as it stands in an index entry: made once, for there are few."""

    def __init__(self) -> None:
        self._made: dict[tuple[Tier, bytes], Hit] = {}

    def of(self, tier: Tier, raw: bytes) -> Hit:
        hit = self._made.get((tier, raw))
        if hit is None:
            hit = self._made[tier, raw] = Hit(tier, int.from_bytes(raw, "little"))
        return hit


def look_up(pool: Pool, keys: Sequence[bytes], hits: Hits) -> list[Answer]:
    """Raises what the index raises."""
    of, dram = hits.of, Tier.DRAM
    raws = pool.entries(keys)
    answers: list[Answer] = [MISS if raw is None else of(dram, raw[16:24]) for raw in raws]
    if None not in raws:
        return answers
    if pool.disk is not None:
        missing = [row for row, raw in enumerate(raws) if raw is None]
        try:
            found = pool.disk.entries([keys[row] for row in missing])
        except _FAULTS:
            return _unknown(answers, missing)
        for row, raw in zip(missing, found, strict=True):
            if raw is not None:
                answers[row] = of(Tier.DISK, raw[16:24])
    _tell_evicted(pool, keys, answers)
    return answers


def lease(pool: Pool, keys: Sequence[bytes], until: int, hits: Hits, held: Token) -> list[Answer]:
    """Hold what is there until then; ``held`` is told what to let go of, also when this raises."""
    answers: list[Answer] = [MISS] * len(keys)
    pinned = pin(pool, keys, until)
    held.append((pool, pinned.units, until))
    _fill(answers, Tier.DRAM, pinned, range(len(keys)), hits)
    if len(pinned.rows) == len(keys):
        return answers
    if pool.disk is not None:
        missing = [row for row, answer in enumerate(answers) if answer is MISS]
        try:
            below = pool.disk.hold([keys[row] for row in missing], until)
        except _FAULTS:
            return _unknown(answers, missing)
        held.append((pool.disk.books, below.units, until))
        _fill(answers, Tier.DISK, below, missing, hits)
    _tell_evicted(pool, keys, answers)
    return answers


def _unknown(answers: list[Answer], rows: Sequence[int]) -> list[Answer]:
    """What memory has is there, whatever is wrong with the tier below."""
    for row in rows:
        answers[row] = UNKNOWN
    return answers


def _fill(answers: list[Answer], tier: Tier, pinned: Pinned, rows: Sequence[int], hits: Hits) -> None:
    for row, nbytes in zip(pinned.rows, pinned.nbytes.tolist(), strict=True):
        answers[rows[row]] = hits.of(tier, nbytes.to_bytes(8, "little"))


def _tell_evicted(pool: Pool, keys: Sequence[bytes], answers: list[Answer]) -> None:
    """Of the first missing key only: keys come in chain order, and nobody can use what follows a gap."""
    first = next((row for row, answer in enumerate(answers) if answer is MISS), -1)
    if first >= 0 and keys[first] in pool.ghosts and (pool.disk is None or pool.disk.usable):  # off: nobody knows what it has
        answers[first] = EVICTED
