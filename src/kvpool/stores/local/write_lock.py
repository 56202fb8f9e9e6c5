"""Who writes the index: one thread of one process at a time, and only when no read forbids it (readers.py)."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvpool.stores.local.fence import Fence
from kvpool.stores.local.index import LmdbEnvironment
from kvpool.stores.local.readers import Readers

READER_STOPPED = "the index is busy: a process that was stopped inside a read keeps it from being written"
_FIRST_WAIT_S, _LONGEST_WAIT_S = 20e-6, 2e-3


class Abandoned(Exception):
    """Nobody waits for the transaction any more, or none should wait that long."""


class WriteLock:
    """A lock on an open file of the index (``fd``, owned), which the kernel takes back from a process that dies. It has no timeout:
    writer threads alone take it."""

    def __init__(self, fd: int, environment: LmdbEnvironment, readers: Readers, fence: Fence) -> None:
        self._fd = fd
        self._environment = environment
        self._readers = readers
        self._fence = fence
        self._thread = threading.Lock()  # the file is locked for the process

    def acquire(self, abandoned: Callable[[float], str | None] = lambda waited: None) -> int:
        """For one write transaction: its number. While reads forbid it, ``abandoned`` is asked with the seconds waited so far; a
        text ends the wait with Abandoned."""
        self._thread.acquire()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            number = self._last() + 1
            self._wait_for_readers(number, abandoned)
        except BaseException:
            self._unlock()
            raise
        return number

    def release(self) -> None:
        """After the commit, or whatever ended the transaction."""
        try:
            self._last()
        finally:
            self._unlock()

    @contextmanager
    def held(self, abandoned: Callable[[float], str | None] = lambda waited: None) -> Iterator[int]:
        number = self.acquire(abandoned)
        try:
            yield number
        finally:
            self.release()

    def _unlock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing would not do: a child forked meanwhile has the descriptor too
        finally:
            self._thread.release()

    def _last(self) -> int:
        """The last transaction that was committed (one that changed nothing does not count). Nobody commits now: it is whole."""
        number = int(self._environment.info()["last_txnid"])
        self._readers.committed(number)
        return number

    def _wait_for_readers(self, number: int, abandoned: Callable[[float], str | None]) -> None:
        self._fence()
        began, pause = 0.0, _FIRST_WAIT_S
        while self._readers.forbid(number):
            began = began or time.monotonic()
            if text := abandoned(time.monotonic() - began):
                raise Abandoned(text)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_WAIT_S)
        self._fence()  # what the reads that have ended still load is loaded

    def close(self) -> None:
        """Also for a forked child."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
