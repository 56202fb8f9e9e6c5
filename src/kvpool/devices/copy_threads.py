"""Threads of this process that share large copies: one core alone moves half of what the memory could, or less.

Who copies takes pieces too, so no copy ever depends on a thread that is busy elsewhere.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Generic, TypeVar

from kvpool.devices.affinity import free_cpus, unbound
from kvpool.devices.process_memory import Int64, cut, parts

T = TypeVar("T")

MOST = 4  # threads that share one copy, the caller's own included
LEAST_BYTES, MOST_BYTES = 4 << 20, 64 << 20  # of a piece: worth a thread; not too long for the slowest to end


class _Shared(Generic[T]):
    """Work on some pieces by any number of threads. Each piece is taken once, in order; after an error no more are taken."""

    def __init__(self, work: Callable[[T], None], pieces: Sequence[T]) -> None:
        self._work = work
        self._pieces = pieces
        self._lock = threading.Lock()
        self._taken = self._under_way = 0
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def help(self) -> None:
        """Take pieces until none is left."""
        while (place := self._take()) is not None:
            error: BaseException | None = None
            try:
                self._work(self._pieces[place])
            except BaseException as raised:  # noqa: BLE001 - the caller of the copy gets it
                error = raised
            self._give_back(error)

    def wait(self) -> None:
        """Until no piece is under way, as long as copying takes; raises the first error. What interrupts it ends it no sooner: the
        memory is not the caller's before."""
        while not self._ended.is_set():
            try:
                self._ended.wait()
            except BaseException as interrupt:  # noqa: BLE001 - raised below
                with self._lock:
                    self._error = self._error or interrupt
        if self._error is not None:
            raise self._error

    def _take(self) -> int | None:
        with self._lock:
            if self._error is not None or self._taken == len(self._pieces):
                return None
            self._taken += 1
            self._under_way += 1
            return self._taken - 1

    def _give_back(self, error: BaseException | None) -> None:
        with self._lock:
            self._under_way -= 1
            self._error = self._error or error
            if self._under_way == 0 and (self._error is not None or self._taken == len(self._pieces)):
                self._ended.set()


class _Helpers:
    """Daemon threads that wait for copies to share."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        with unbound():
            for number in range(count):
                threading.Thread(target=self._loop, name=f"kvpool-copy-{number}", daemon=True).start()

    def ask(self, call: Callable[[], None], count: int) -> None:
        for _ in range(min(count, self.count)):
            self._calls.put(call)

    def _loop(self) -> None:
        while True:
            self._calls.get()()


@cache
def _helpers() -> _Helpers:
    return _Helpers(min(MOST, len(free_cpus())) - 1)


os.register_at_fork(after_in_child=_helpers.cache_clear)  # a child has none of the threads


def share(work: Callable[[T], None], pieces: Sequence[T]) -> None:
    """Call ``work`` once for each piece, several at a time, and return when all have returned. After an error no further piece is
    begun, and the first error is raised, when none is under way any more."""
    if len(pieces) < 2 or not _helpers().count:
        for piece in pieces:
            work(piece)
        return
    shared = _Shared(work, pieces)
    _helpers().ask(shared.help, len(pieces) - 1)
    shared.help()
    shared.wait()


def share_runs(work: Callable[[Int64, Int64, Int64], None], ones: Int64, others: Int64, sizes: Int64) -> None:
    """``work`` on byte runs (two addresses and a size each, 1-D), several pieces of them at a time; large runs are cut."""
    total = int(sizes.sum())
    if total < 2 * LEAST_BYTES or not (helpers := _helpers().count):
        work(ones, others, sizes)
        return
    nbytes = min(max(total // (2 + 2 * helpers), LEAST_BYTES), MOST_BYTES)
    ones, others, sizes = cut(ones, others, sizes, nbytes)
    share(lambda part: work(ones[part], others[part], sizes[part]), list(parts(sizes, nbytes)))
