"""The threads that read and write the disk, and calls on their way through them. Two to four saturate an SSD."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

THREADS = 4
_MAX_QUEUED = 8192


class Busy(Exception):
    """Too many calls wait for the disk, or the tier is closed."""

    def __init__(self) -> None:
        super().__init__("too many calls wait for the disk")


class IoCall:
    """``work`` runs once on an I/O thread, or never. What it raised is ``error``. ``orphaned`` runs only if the call was given up,
    and then once, as soon as the work can no longer touch its memory: it cleans up in place of the caller."""

    def __init__(self, work: Callable[[], None], orphaned: Callable[[], None]) -> None:
        self._work = work
        self._orphaned = orphaned
        self._lock = threading.Lock()
        self._started = False
        self._ended = threading.Event()
        self._given_up = False
        self.error: BaseException | None = None

    def run(self) -> None:
        with self._lock:
            if self._given_up:
                return
            self._started = True
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self.error = error
        with self._lock:
            self._ended.set()
            late = self._given_up
        if late:
            self._clean_up()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(max(0.0, timeout_s))

    def give_up(self) -> bool:
        """True when the work has ended: ``error`` says how, the caller cleans up. False: its result is not wanted any more. The
        caller may call it once only."""
        with self._lock:
            if self._ended.is_set():
                return True
            self._given_up = True
            started = self._started
        if not started:
            self._clean_up()
        return False

    def refuse(self, error: BaseException) -> None:
        """It will not run; the caller finds it ended."""
        with self._lock:
            if not self._given_up:
                self.error = error
                self._started = True
                self._ended.set()

    def _clean_up(self) -> None:
        with suppress(Exception):  # the store may be closed by then: nothing is left to clean up
            self._orphaned()


class IoPool:
    """Threads start with the first call. ``oldest_s`` tells how long the disk has not answered."""

    def __init__(self, threads: int = THREADS) -> None:
        self._count = threads
        self._queue: queue.Queue[IoCall | None] = queue.Queue(_MAX_QUEUED)
        self._threads: list[threading.Thread] = []
        self._since: dict[int, float] = {}
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, calls: Sequence[IoCall]) -> None:
        """What finds no room in the queue, or comes after ``close``, ends with an error at once."""
        with self._lock:
            if not self._threads and not self._closed:
                for number in range(self._count):
                    thread = threading.Thread(target=self._run, args=(number,), name=f"kvpool-disk-io-{number}", daemon=True)
                    self._threads.append(thread)
                    thread.start()
        for call in calls:
            try:
                if self._closed:
                    raise queue.Full
                self._queue.put_nowait(call)
            except queue.Full:
                call.refuse(Busy())

    def _run(self, number: int) -> None:
        while (call := self._queue.get()) is not None:
            self._since[number] = time.monotonic()
            call.run()
            self._since.pop(number, None)

    def oldest_s(self) -> float:
        """How long the call that has run longest has been running; 0 when none runs."""
        now = time.monotonic()
        return max((now - since for since in list(self._since.values())), default=0.0)

    def close(self, timeout_s: float) -> bool:
        """End what is queued, wait for what runs; False when something still runs after ``timeout_s``."""
        self._closed = True
        with suppress(queue.Empty):
            while True:
                call = self._queue.get_nowait()
                if call is not None:
                    call.refuse(Busy())
        for _ in self._threads:
            with suppress(queue.Full):
                self._queue.put_nowait(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
