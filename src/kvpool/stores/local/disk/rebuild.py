"""The books made anew from the records on the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import numpy as np

from kvpool.stores.local.disk.pool import DiskPool
from kvpool.stores.local.disk.record import Record, Scan
from kvpool.stores.local.geometry import Geometry
from kvpool.stores.local.records import Records
from kvpool.stores.local.slabs import Slab

logger = logging.getLogger(__name__)

_BATCH = 20_000
_STEP_S = 60.0


def consistent(found: Iterable[Record], geometry: Geometry) -> dict[Slab, list[Record]]:
    """The records that can be true together, by slab: of two slabs that overlap the one with the newest object holds, of two
    objects under one key the newer. What does not fit the geometry is dropped."""
    by_slab: dict[tuple[int, int, int], list[Record]] = {}
    for record in found:
        by_slab.setdefault((record.chunk, record.chunks, record.slot_bytes), []).append(record)
    owned: set[int] = set()
    slabs: dict[Slab, list[Record]] = {}
    for (chunk, chunks, slot_bytes), records in sorted(by_slab.items(), key=lambda item: -max(r.generation for r in item[1])):
        places = range(chunk, chunk + chunks)
        if not _fits(geometry, chunk, chunks, slot_bytes) or not owned.isdisjoint(places):
            continue
        slab = Slab(chunk, chunks, slot_bytes, geometry.slots_per_slab(slot_bytes), False)
        first = chunk * geometry.units_per_chunk
        sound = [r for r in records if first <= r.unit < first + slab.slots and 0 < r.nbytes <= slot_bytes]
        if sound:
            owned.update(places)
            slabs[slab] = sound
    newest: dict[bytes, int] = {}
    for record in (record for records in slabs.values() for record in records):
        newest[record.key] = max(record.generation, newest.get(record.key, 0))
    return {slab: [r for r in records if r.generation == newest[r.key]] for slab, records in slabs.items()}


def _fits(geometry: Geometry, chunk: int, chunks: int, slot_bytes: int) -> bool:
    right = slot_bytes > 0 and slot_bytes % 4096 == 0 and geometry.slab_chunks(slot_bytes) == chunks
    return right and 0 <= chunk <= geometry.chunks - chunks


def rebuild(pool: DiskPool, scan: Scan, written_bytes: int) -> int:
    """Fill the empty books of ``pool``; how many objects it holds now. The last uses keep their order."""
    slabs = consistent(scan.records, pool.geometry)
    kept = [record for records in slabs.values() for record in records]
    deadline = time.monotonic() + _STEP_S

    def prepare(records: Records) -> None:
        records.set_counter(b"written", written_bytes)
        records.set_counter(b"generation", max((record.generation for record in scan.records), default=0))
        for slab, held in slabs.items():
            first = records.slabs.geometry.units_per_chunk * slab.chunk
            pool.stamps.prepare(first, slab.slots)
            used = {record.unit for record in held}
            carved = max(used) - first + 1 if used else 0
            records.restore_slab(slab, carved, (unit for unit in range(first, first + carved) if unit not in used))

    pool.writer.call(prepare, deadline)
    kept.sort(key=lambda record: record.last_use)
    for start in range(0, len(kept), _BATCH):
        pool.writer.call(_Restore(kept[start : start + _BATCH]), deadline)
    units = np.array([record.unit for record in kept], dtype=np.int64)
    pool.stamps.touch(units, time.monotonic_ns(), np.arange(len(kept), 0, -1), stored=True)
    dropped = len(scan.records) - len(kept)
    logger.info(
        "%s: %d objects found on the disk; dropped: %d torn, %d of other files, %d superseded",
        pool.files.folder.path,
        len(kept),
        scan.torn,
        scan.foreign,
        dropped,
    )
    return len(kept)


class _Restore:
    def __init__(self, part: list[Record]) -> None:
        self._part = part

    def __call__(self, records: Records) -> None:
        for record in self._part:
            records.restore(record.unit, record.key, record.nbytes, record.generation)
