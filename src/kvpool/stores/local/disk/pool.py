"""The books of the disk tier: a second pool beside the first, in its directory ``disk``, whose arena is a file on the disk."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field

from kvpool.stores.local.allocator import Allocator
from kvpool.stores.local.arena import Arena
from kvpool.stores.local.disk.files import DiskFiles
from kvpool.stores.local.geometry import Geometry
from kvpool.stores.local.pool import Pool
from kvpool.stores.local.pool_dir import PoolDir
from kvpool.stores.local.records import Records
from kvpool.stores.local.writer import Again

logger = logging.getLogger(__name__)


class DiskArena(Arena):
    """A file of slabs that is not mapped: chunks get their room on the disk one by one. Closing it is the business of
    DiskFiles."""

    def __init__(self, fd: int, geometry: Geometry) -> None:
        self.geometry = geometry
        self.base = 0
        self._fd = fd
        self._allocated: set[int] = set()
        self._outcomes: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        self._warned = False

    def _warn(self, chunk: int, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            have, want = chunk * self.geometry.chunk_bytes >> 20, self.geometry.capacity >> 20
            logger.warning("the disk tier shrinks to about %d of %d MiB: no room for its arena (%s)", have, want, error)

    def populate(self, offset: int, nbytes: int) -> bool:
        return False

    def close(self) -> None:
        return


@dataclass(slots=True, kw_only=True)
class DiskAllocator(Allocator):
    """Before a slab is formed, the records of what lay there before are cleared: outside the transaction, and by the demoter only,
    so nobody else can have formed a slab there meanwhile."""

    files: DiskFiles
    _blank: set[int] = field(default_factory=set)

    def new_slab(self, records: Records, slot_bytes: int, first: int, chunks: int) -> Again:
        places = set(range(first, first + chunks))
        if not self._blank >= places:
            return Again(lambda: self._clear(first, chunks))
        again = Allocator.new_slab(self, records, slot_bytes, first, chunks)
        if again.outside is None:
            self._blank -= places
        return again

    def _clear(self, first: int, chunks: int) -> None:
        per_chunk = self.geometry.units_per_chunk
        self.files.blank(first * per_chunk, chunks * per_chunk)
        self._blank |= set(range(first, first + chunks))


class DiskPool(Pool):
    """``files`` are closed with it."""

    def __init__(self, directory: PoolDir, geometry: Geometry, files: DiskFiles) -> None:
        self.files = files
        super().__init__(directory, geometry)

    def _open_arena(self) -> Arena:
        self._opened.callback(self.files.close)
        return DiskArena(self.files.arena, self.geometry)

    def _start(self) -> None:
        super()._start()
        places = (self.geometry, self.arena, self.stamps)
        self.allocator = DiskAllocator(*places, self.evictor, lambda slab: None, lambda: self.leases.drops, files=self.files)

    def after_fork(self) -> None:
        super().after_fork()
        self.files.folder.after_fork()


def drop_books(directory: PoolDir) -> None:
    """Forget what the books say; the caller knows that nobody uses them."""
    with directory.locked(5.0):
        directory.wipe(keep_lock=True)


def without_arena(directory: PoolDir) -> None:
    """The books of a pool are made with an arena in memory, which these do not need."""
    try:
        os.unlink("arena", dir_fd=directory.fd)
    except FileNotFoundError:
        return
