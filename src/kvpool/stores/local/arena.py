"""The arena: one sparse file, mapped whole, given memory chunk by chunk; and the shared array of last uses."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading

import numpy as np
from numpy.typing import NDArray

from kvpool.stores.local.geometry import Geometry

logger = logging.getLogger(__name__)

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_HEADROOM = 64 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

FREE_STAMP = np.iinfo(np.int64).max  # of slots that hold no object: never the least recently used
MARKS = 4  # the lowest bits of a stamp are marks, not time
SEEN = 1  # looked up, read or stored again since it was stored
COPIED = 2  # there is a copy of it on the tier below


def allocate(fd: int, offset: int, nbytes: int) -> None:
    """Give a file range its memory now. OSError ENOSPC instead of a SIGBUS at the first touch."""
    os.posix_fallocate(fd, offset, nbytes)


def room_left(fd: int, wanted: int) -> bool:
    """Leave the filesystem some room for the index and the leases, or a full arena could not even be emptied."""
    info = os.fstatvfs(fd)
    total = info.f_blocks * info.f_frsize
    return total == 0 or info.f_bavail * info.f_frsize - wanted >= min(_HEADROOM, total // 8)


class Arena:
    """``base`` is where the arena begins in this process."""

    def __init__(self, fd: int, geometry: Geometry) -> None:
        self.geometry = geometry
        self._fd = fd
        self._map = mmap.mmap(fd, geometry.capacity)
        self._view: NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)
        self.base = int(self._view.ctypes.data)
        self._allocated: set[int] = set()
        self._outcomes: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        self._warned = False
        _madvise(self.base, geometry.capacity, _MADV_HUGEPAGE)

    def ensured(self, first: int, count: int) -> int | None:
        """How many of these chunks got memory when ``ensure`` was called for them; None when it was not."""
        with self._lock:
            if self._allocated.issuperset(range(first, first + count)):
                return count
            return self._outcomes.pop((first, count), None)

    def ensure(self, first: int, count: int, *, quiet: bool = False) -> int:
        """Give chunks ``first .. first + count`` their memory; how many have it now. Warns once when there is no more."""
        size = self.geometry.chunk_bytes
        for chunk in range(first, first + count):
            with self._lock:
                if chunk in self._allocated:
                    continue
            try:
                if not room_left(self._fd, size):
                    raise OSError(errno.ENOSPC, "the filesystem is nearly full")
                allocate(self._fd, chunk * size, size)
            except OSError as error:
                if not quiet:
                    self._warn(chunk, error)
                    with self._lock:
                        self._outcomes[first, count] = chunk - first
                return chunk - first
            with self._lock:
                self._allocated.add(chunk)
        return count

    def _warn(self, chunk: int, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        have = chunk * self.geometry.chunk_bytes >> 20
        want = self.geometry.capacity >> 20
        logger.warning("the pool shrinks to about %d of %d MiB: no memory for its arena (%s)", have, want, error)

    def populate(self, offset: int, nbytes: int) -> bool:
        """Map pages that have memory into this process, so that no copy stops for page faults; False where unsupported."""
        return bool(_madvise(self.base + offset, nbytes, _MADV_POPULATE_WRITE) == 0)

    def close(self) -> None:
        self._view = None
        self.base = 0
        try:
            self._map.close()
        except BufferError:
            logger.warning("the arena stays mapped: somebody still holds a view of it")
        os.close(self._fd)


class Stamps:
    """When each slot was last used: int64 CLOCK_MONOTONIC ns per unit, shared, written without a lock (a lost update only makes an
    eviction a little less fair). ``values`` may be touched only where a slab lies: those pages have memory."""

    def __init__(self, fd: int, geometry: Geometry) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, geometry.units * 8)
        self.values: NDArray[np.int64] = np.frombuffer(self._map, dtype=np.int64)

    def prepare(self, first: int, count: int) -> None:
        """Make room for the units of a new slab. OSError ENOSPC."""
        allocate(self._fd, first * 8, count * 8)
        self.values[first : first + count] = FREE_STAMP

    def touch(
        self, units: NDArray[np.int64], now_ns: int, places: NDArray[np.int64] | None = None, *, stored: bool = False
    ) -> None:
        """Mark slots as used, earlier ones of a chain as used later (``places`` in the chain): tails are evicted before heads.

        ``stored``: they have just become objects, which nobody asked for yet and of which there is no copy."""
        marks = 0 if stored else self.values[units] & COPIED | SEEN
        self.values[units] = (now_ns - MARKS * (np.arange(len(units)) if places is None else places)) & -MARKS | marks

    def mark(self, units: NDArray[np.int64], mark: int, on: bool) -> None:
        """Set or clear a mark of slots that hold objects."""
        values = self.values[units]
        there = values != FREE_STAMP
        self.values[units[there]] = values[there] | mark if on else values[there] & ~mark

    def close(self) -> None:
        self.values = np.zeros(0, dtype=np.int64)
        try:
            self._map.close()
        except BufferError:
            logger.warning("the stamps stay mapped: somebody still holds a view of them")
        os.close(self._fd)
