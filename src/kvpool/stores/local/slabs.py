"""Which chunks form slabs of which class: a process's copy of the slab table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.stores.local.geometry import Geometry


class Slab(NamedTuple):
    """``chunks`` chunks from ``chunk`` on, cut into ``slots`` slots. A retiring one gives out no slots and ends when it is
    empty."""

    chunk: int
    chunks: int
    slot_bytes: int
    slots: int
    retiring: bool


class SlabTable:
    """Valid for one layout version; an aborted transaction leaves it marked as stale."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.version = -1
        self._by_chunk: dict[int, Slab] = {}
        self._owner = np.full(geometry.chunks, -1, dtype=np.int64)  # first chunk of the slab that a chunk belongs to

    def load(self, version: int, rows: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        self._by_chunk.clear()
        self._owner[:] = -1
        for chunk, (chunks, slot_bytes, slots, _carved, retiring) in rows:
            self.insert(Slab(chunk, chunks, slot_bytes, slots, bool(retiring)), version)
        self.version = version

    def insert(self, slab: Slab, version: int) -> None:
        self._by_chunk[slab.chunk] = slab
        self._owner[slab.chunk : slab.chunk + slab.chunks] = slab.chunk
        self.version = version

    def remove(self, slab: Slab, version: int) -> None:
        del self._by_chunk[slab.chunk]
        self._owner[slab.chunk : slab.chunk + slab.chunks] = -1
        self.version = version

    def forget(self) -> None:
        """Reload before the next use."""
        self.version = -1

    def at(self, chunk: int) -> Slab | None:
        return self._by_chunk.get(chunk)

    def all(self) -> list[Slab]:
        return list(self._by_chunk.values())

    def of_class(self, slot_bytes: int) -> list[Slab]:
        return [slab for slab in self._by_chunk.values() if slab.slot_bytes == slot_bytes and not slab.retiring]

    def of_unit(self, unit: int) -> Slab:
        return self._by_chunk[int(self._owner[unit // self.geometry.units_per_chunk])]

    def first_unit(self, slab: Slab) -> int:
        return slab.chunk * self.geometry.units_per_chunk

    def units(self, slabs: Iterable[Slab]) -> NDArray[np.int64]:
        """All units of some slabs."""
        parts = [np.arange(slab.slots, dtype=np.int64) + self.first_unit(slab) for slab in slabs]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def offset(self, unit: int) -> int:
        """Where in the arena the slot of a unit begins."""
        slab = self.of_unit(unit)
        return slab.chunk * self.geometry.chunk_bytes + (unit - self.first_unit(slab)) * slab.slot_bytes

    def free_run(self, chunks: int, limit: int) -> int | None:
        """The first of ``chunks`` neighbouring chunks below ``limit`` that belong to no slab."""
        free = np.flatnonzero(self._owner[:limit] < 0)
        if len(free) < chunks:
            return None
        runs = np.flatnonzero(free[chunks - 1 :] - free[: len(free) - chunks + 1] == chunks - 1)
        return int(free[runs[0]]) if len(runs) else None

    def in_window(self, first: int, chunks: int) -> list[Slab]:
        """The slabs that overlap a window of chunks."""
        owners = {int(owner) for owner in self._owner[first : first + chunks] if owner >= 0}
        return [self._by_chunk[owner] for owner in sorted(owners)]
