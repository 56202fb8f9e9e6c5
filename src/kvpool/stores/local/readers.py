"""Who reads the index: a table in shared memory that stands in for LMDB's own, which tells readers apart by process id and so
takes the processes of two PID namespaces for one another.

A client owns a row, each of its running reads a slot in it: the number of the last write transaction that may run beside the read,
0 when there is none. LMDB is opened without locks and takes it that nobody reads: its transaction T uses the pages again that are
in no snapshot from T - 2 on, and overwrites the meta page of T - 2. So a read of snapshot n

- allows n + 1 at most while it begins (it copies from the meta page of n), and n + 2 at most from then on;
- announces this *before* it begins, when it does not know n yet: an older number does, it only allows less;
- trusts a number that is new to this process once it has seen it on both sides of a fence: LMDB writes the number last.

The writer fences, looks, and waits for the reads that forbid its transaction. A read that it could not see yet begins after the
fence, and so at T - 1 or T: what T does cannot hurt it, and T + 1 sees it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpool.stores.local.fence import Fence, reader_fence
from kvpool.stores.local.index import LmdbEnvironment, LmdbTransaction

T = TypeVar("T")

SLOTS = 64  # reads of one client that run at once
ROWS = 512  # the first is the header: how many rows were ever used
ROW_BYTES = SLOTS * 8
TABLE_BYTES = ROWS * ROW_BYTES
_SLOT_S = 1.0
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid


def _lock_of(row: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, row * ROW_BYTES, 1, 0)


class Readers:
    """The table as one client sees it, and the client's row, held until ``leave`` by a lock on ``lock_fd`` (of the open file, not
    of the process). Made under the pool's lock. ``map_fd`` is another descriptor of the table: a mapping keeps the locks of its own
    in forked children. Owns both. OSError when the table is full. Thread-safe."""

    def __init__(self, lock_fd: int, map_fd: int, fence: Fence) -> None:
        self._fd = lock_fd
        self._fence = fence
        self._light = reader_fence()
        self._known = 0  # a snapshot that was whole
        try:
            self._map = mmap.mmap(map_fd, TABLE_BYTES)
        except BaseException:
            os.close(lock_fd)
            raise
        finally:
            os.close(map_fd)
        self._table: NDArray[np.int64] = np.frombuffer(self._map, dtype=np.int64).reshape(ROWS, SLOTS)
        try:
            self._row = self._claim()
        except BaseException:
            self.close()
            raise
        self._slots = self._table[self._row]
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(SLOTS):
            self._free.put(slot)

    def _claim(self) -> int:
        for row in range(1, ROWS):
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock_of(row))
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    continue
                raise
            self._table[row] = 0  # what a dead client left
            self._table[0, 0] = max(row, self._table[0, 0])
            return row
        raise OSError(errno.EUSERS, f"the pool has {ROWS - 1} clients, the most it can have")

    def read(self, environment: LmdbEnvironment, function: Callable[[LmdbTransaction], T]) -> T:
        """Run ``function`` on a snapshot of the index. It must be quick and wait for nothing: after two commits all writers wait
        for it. OSError EBUSY when too many threads of this client read already, EBADF after ``leave``."""
        if self._fd < 0:  # the row may be another client's by now
            raise OSError(errno.EBADF, "the pool is closed")
        try:
            slot = self._free.get(timeout=_SLOT_S)
        except queue.Empty:
            raise OSError(errno.EBUSY, f"{SLOTS} reads of the index run already in this process") from None
        try:
            self._slots[slot] = self._known + 1
            self._light()
            txn = self._begin(environment)
            try:
                self._slots[slot] = txn.id() + 2
                return function(txn)
            finally:
                txn.abort()
        finally:
            self._slots[slot] = 0
            self._free.put(slot)

    def _begin(self, environment: LmdbEnvironment) -> LmdbTransaction:
        """A transaction on a snapshot that is whole. Ends: the announced slot allows one more commit at most."""
        txn = environment.begin()
        number = txn.id()
        while number != self._known:
            self._fence()
            txn.abort()
            txn = environment.begin()
            again = txn.id()
            if again == number:
                self._known = number
                break
            number = again
        return txn

    def committed(self, number: int) -> None:
        """This transaction has been committed, and nobody commits just now: no need to look twice."""
        self._known = number

    def forbid(self, number: int) -> bool:
        """Does a read of a living client forbid write transaction ``number``? The caller fences before and after."""
        slots = self._table[1 : int(self._table[0, 0]) + 1]
        if not np.count_nonzero(slots):
            return False
        # Each slot is loaded once; less one and unsigned, an empty one allows everything.
        late = ((slots - 1).view(np.uint64) < np.uint64(number - 1)).any(axis=1)
        return any(self._alive(row + 1) for row in np.flatnonzero(late).tolist())

    def _alive(self, row: int) -> bool:
        if row == self._row:
            return True  # our own lock is no obstacle to us, so it would not show
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _lock_of(row))
        return int(_FLOCK.unpack(answer)[0]) != fcntl.F_UNLCK

    def leave(self) -> None:
        """Let go of the row. Also for a forked child, which would keep it for its dead parent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def close(self) -> None:
        self.leave()
        self._slots = self._table = np.zeros((1, SLOTS), dtype=np.int64)
        with suppress(BufferError):
            self._map.close()
